"""What is asked of `mm ui`: known before the web server or torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.request import Request, argument, group, option
from mindspeed_mm.tasks.requests.access import Access, access_of
from mindspeed_mm.tasks.serve.limits import WireLimits


@dataclass(frozen=True)
class UiRequest(Request):
    """A folder whose runs are shown, and who may look."""

    folder: Path = argument(default=Path())
    host: str = option("Address to listen on.", "127.0.0.1")
    port: int = option("Port to listen on; 0: any free one.", 8010, least=0, most=65535)
    key_file: Path | None = option("File with the key that browsers must send.")
    also: tuple[Path, ...] = option(
        "Folder outside of FOLDER whose rows and media a data preview may show; may be repeated.",
        (),
        metavar="FOLDER",
    )
    read_only: bool = option("Show runs only; configurations, previews, starting and stopping are refused.", False)
    origins: tuple[str, ...] = option(
        "Address of web pages that may use the board, besides its own page, such as https://board.example.org if a "
        "proxy stands before it; may be repeated.",
        (),
        flag="--allow-origin",
        metavar="ADDRESS",
    )
    as_json: bool = option("Print the address as JSON.", False, flag="--json")
    limits: WireLimits = group(WireLimits)


def check_request(request: UiRequest) -> Access:
    """Who may look.

    Raises:
        UsageError: A folder is none, or other machines could look without a key.
    """
    for folder, key in ((request.folder, "FOLDER"), *((each, "--also") for each in request.also)):
        if not folder.is_dir():
            way_out = f"Relative paths start at '{Path.cwd()}'."
            raise UsageError("there is no such folder", where=str(folder), key=key, way_out=way_out)
    return access_of(request.host, request.key_file, request.origins)
