"""`mm download`: runs the hub client that is installed, because somebody asked for it; nothing else here downloads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm.core.errors import DataError, MachineError, UsageError
from mindspeed_mm.core.started_python import safe_environment
from mindspeed_mm.tasks.requests.measure import DownloadRequest


class Client(NamedTuple):
    """The command line of a hub, and how it is asked for a model."""

    programs: tuple[str, ...]
    """Names of its program, the newest first."""
    words: tuple[str, ...]
    """Before the name of the model."""
    folder: str
    """The option that names the folder."""
    package: str


CLIENTS = {
    "hf": Client(("hf", "huggingface-cli"), ("download",), "--local-dir", "huggingface_hub"),
    "modelscope": Client(("modelscope",), ("download", "--model"), "--local_dir", "modelscope"),
}
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def run(request: DownloadRequest) -> Path:
    """Download a model into a folder; a download that was cut goes on where it stopped, as the client has it.

    Returns:
        The folder.

    Raises:
        UsageError: The name is not OWNER/MODEL.
        MachineError: No client is installed, or it failed; it has printed why.
        DataError: The folder is there, and holds something else.
    """
    if _NAME.fullmatch(request.name) is None:
        way_out = "Write it as the hub has it: Qwen/Qwen3-VL-2B-Instruct."
        raise UsageError(f"'{request.name}' is not OWNER/MODEL", key="NAME", way_out=way_out)
    folder = request.out or Path("models") / request.name.rpartition("/")[2]
    if folder.exists() and not folder.is_dir():
        raise DataError("is a file", where=str(folder), key="--out", way_out="Name another folder.")
    client = CLIENTS[request.hub]
    program = next(filter(None, map(shutil.which, client.programs)), None)
    if program is None:
        way_out = f"Install it: pip install {client.package}."
        raise MachineError(f"{client.programs[0]} is not installed", way_out=way_out)
    # who asks for a download is not offline, whatever is set for training
    environment = {name: value for name, value in safe_environment().items() if name not in _OFFLINE}
    words = [program, *client.words, request.name, client.folder, str(folder)]
    code = subprocess.run(words, env=environment, check=False).returncode
    if code:
        raise MachineError(
            f"{' '.join(words[1:])} ended with exit code {code}",
            where=request.name,
            way_out="What it printed above says why; run the same command again to go on.",
        )
    return folder
