"""What is asked of `mm serve` and `mm ui`, who may ask a server of ours, and which options do not go together: known
before torch or the web server is imported."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.core.request import Request, argument, group, option
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.requests.shared import adapters_of, checkpoint_option, plugin_option, read_key
from mindspeed_mm.tasks.serve.limits import Limits, WireLimits

# --- who may ask ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """Who may ask, and what they may name."""

    key: str | None = None
    """Asked of everybody; None: of nobody."""
    hosts: frozenset[str] | None = None
    """Names that the server answers to; None: any."""
    origins: frozenset[str] = frozenset()
    """Addresses of pages that may ask, beside this server's own: `https://models.example.org`."""
    media_folder: Path | None = None
    """Requests may name files below it."""
    remote_hosts: frozenset[str] = frozenset()
    """Requests may name addresses on these."""


def _access_of(host: str, key_file: Path | None, origins: Collection[str]) -> Access:
    """Who may ask a server that listens at an address.

    Args:
        host: The address.
        key_file: File with the key that requests must send; None: none is asked for.
        origins: Addresses of pages that may ask, beside the server's own.

    Raises:
        UsageError: Other machines could ask without a key; the file holds none; or an origin is not one.
    """
    key = read_key(key_file)
    if not is_loopback(host) and not key:
        raise UsageError(
            f"{host} can be reached from other machines, and there is no key",
            key="--host",
            way_out="Give --key-file FILE, or leave --host out.",
        )
    own_names = frozenset({"127.0.0.1", "localhost", "::1", host.lower()})
    pages = frozenset(origin.lower().rstrip("/") for origin in origins)
    _check_origins(pages)
    return Access(key, own_names if is_loopback(host) else None, pages)


def _check_origins(origins: Collection[str]) -> None:
    """Raise `UsageError` for what no browser names as an origin."""
    for origin in origins:
        scheme, separator, host = origin.partition("://")
        if scheme not in ("http", "https") or not separator or not host or set(host) & set("/?#@ "):
            way_out = "Give scheme, host and port as a browser shows them: https://models.example.org"
            raise UsageError(f"'{origin}' is not the address of pages", key="--allow-origin", way_out=way_out)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- mm serve ---------------------------------------------------------------------------------------------------------


OWN, BATCHES, CONTINUOUS = "own", "batches", "continuous"


@dataclass(frozen=True)
class ServeRequest(Request):
    """What is to be served, and how."""

    model: Path = argument()
    host: str = option("Address to listen on.", "127.0.0.1")
    port: int = option("Port to listen on; 0: any free one.", 8000, least=0, most=65535)
    name: str = option("Model name that requests use; default: the name of its folder.", "")
    key_file: Path | None = option("File with the API key that requests must send.")
    media_folder: Path | None = option("Folder from which requests may read media files.")
    remote_hosts: tuple[str, ...] = option(
        "Host from which requests may fetch media; may be repeated.", (), flag="--allow-remote-media", metavar="HOST"
    )
    origins: tuple[str, ...] = option(
        "Address of web pages that may use the server, besides its own page, such as https://models.example.org if a "
        "proxy stands before it; may be repeated.",
        (),
        flag="--allow-origin",
        metavar="ADDRESS",
    )
    batch_size: int = option("Number of answers generated at a time.", 32, least=1)
    lora: Path | None = option("Folder of adapters to apply to the weights.")
    adapters: tuple[str, ...] = option(
        "Adapters that requests select by their model name.", (), flag="--adapter", metavar="NAME=FOLDER"
    )
    config: Path | None = option("YAML whose data section sets the chat template and media sizes; default: the run's.")
    engine: Literal["own", "batches", "continuous", "vllm", "sglang"] = option(
        "Engine that answers. own: this package, by continuous batching where a text-only model runs on an "
        "accelerator, else by batches, which take every model and are faster on a CPU; batches, continuous: always "
        "this way; vllm and sglang must be installed.",
        OWN,
    )
    plan: Path | None = option(
        "YAML whose 'parallel' section spreads a model that is too large for one device over the processes."
    )
    nproc: int = option("Number of processes on this host that the model is spread over.", 1, least=1)
    as_json: bool = option("Print the address as JSON.", False, flag="--json")
    limits: Limits = group(Limits)
    plugins: tuple[str, ...] = plugin_option()
    checkpoint: str | None = checkpoint_option()

    @property
    def shown_name(self) -> str:
        """What requests call the model."""
        return self.name or self.model.resolve().name

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """Folders of adapters by the names that requests call them by, each as a model of its own."""
        return adapters_of(self.adapters)

    @property
    def is_own(self) -> bool:
        """Whether this package answers itself, instead of an engine such as vLLM."""
        return self.engine in (OWN, BATCHES, CONTINUOUS)


def check_request(request: ServeRequest) -> Access:
    """Who may ask.

    Raises:
        UsageError: Other machines could ask without a key; the folder of media is none; or options do not go together.
    """
    access = _access_of(request.host, request.key_file, request.origins)
    if request.nproc > 1 and request.plan is None:
        way_out = "Add --plan CONFIG, whose section 'parallel' spreads the model."
        raise UsageError("one process serves a model that is not spread", key="--nproc", way_out=way_out)
    _check_engine(request, kind_of_path(request.model) is GENERATOR)
    _check_adapters(request, kind_of_path(request.model) is GENERATOR)
    if request.media_folder is not None and not request.media_folder.is_dir():
        way_out = f"Relative paths start at '{Path.cwd()}'."
        raise UsageError(
            "there is no such folder", where=str(request.media_folder), key="--media-folder", way_out=way_out
        )
    remote_hosts = frozenset(host.lower() for host in request.remote_hosts)
    return replace(access, media_folder=request.media_folder, remote_hosts=remote_hosts)


def _check_engine(request: ServeRequest, is_generator: bool) -> None:
    """Raise `UsageError` where what is served is not answered so, or not by several processes."""
    if is_generator and request.plan is not None:
        raise UsageError("pictures and clips are made by one process", key="--plan", way_out="Leave it out.")
    if is_generator and request.engine != OWN:
        raise UsageError("pictures and clips are made here alone", key="--engine", way_out="Leave it out.")
    if request.plan is not None and not request.is_own:
        way_out = f"Leave it out: {request.engine} has its own settings for spreading a model."
        raise UsageError("is for the package's own engine", key="--plan", way_out=way_out)
    if request.engine != CONTINUOUS:
        return
    if request.plan is not None:
        what = "a model that is spread over ranks is answered in batches"
        raise UsageError(what, key="--engine", way_out="Leave it out, or choose batches.")
    if request.adapters:
        what = "adapters that requests choose are asked for in batches"
        raise UsageError(what, key="--engine", way_out="Leave it out, or give one folder of adapters: --lora.")


def _check_adapters(request: ServeRequest, is_generator: bool) -> None:
    """Raise `UsageError` where requests could not choose adapters."""
    folders = request.adapter_folders
    if not folders:
        return
    if request.plan is not None:
        raise UsageError("adapters are not spread over ranks", key="--adapter", way_out="Merge them first: mm merge.")
    if is_generator or not request.is_own:
        raise UsageError("only the package's own engine chooses adapters", key="--adapter", way_out="Use --lora.")
    if request.lora is not None:
        raise UsageError("there are adapters for all requests as well", key="--lora", way_out="Name them: --adapter.")
    if request.shown_name in folders:
        what = f"the model itself is called '{request.shown_name}', and these adapters could not be asked for"
        way_out = "Call the adapters otherwise, or the model: --name NAME."
        raise UsageError(what, key="--adapter", way_out=way_out)


# --- mm ui ------------------------------------------------------------------------------------------------------------


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


def check_ui_request(request: UiRequest) -> Access:
    """Who may look.

    Raises:
        UsageError: A folder is none, or other machines could look without a key.
    """
    for folder, key in ((request.folder, "FOLDER"), *((each, "--also") for each in request.also)):
        if not folder.is_dir():
            way_out = f"Relative paths start at '{Path.cwd()}'."
            raise UsageError("there is no such folder", where=str(folder), key=key, way_out=way_out)
    return _access_of(request.host, request.key_file, request.origins)
