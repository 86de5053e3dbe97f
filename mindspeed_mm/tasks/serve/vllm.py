"""vLLM behind the server: prepared, started on this machine alone with a key of its own, and ended with it.

vLLM leaves routes open that change what it serves, and fetches whatever a request names. So it hears nobody but this
server, which passes the allowed routes on, with the fields that it knows and with media that have passed the gate.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView

LONGEST_START_S = 1800.0
LONGEST_END_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Backend:
    """A server on this machine that answers nobody else."""

    port: int
    key: str

    def ask(self, path: str, body: bytes, content_type: str, timeout_s: float) -> http.client.HTTPResponse:
        """Its answer, of which the head has arrived; closing it ends the request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Content-Type": content_type, "Authorization": f"Bearer {self.key}"}
        connection.request("POST", path, body, headers)
        return connection.getresponse()

    def is_ready(self) -> bool:
        """Whether it has loaded its model."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def command_of(folder: Path, name: str, port: int, view: RowsView, lora: Path | None) -> list[str]:
    """How vLLM is started for a model, so that it shows media as training did. It takes the folder's generation
    configuration by itself.

    Raises:
        MachineError: vLLM is not installed.
    """
    executable = shutil.which("vllm")
    if executable is None:
        raise MachineError("vLLM is not installed", key="--engine", way_out="Install vllm, or leave --engine out.")
    words = [executable, "serve", str(folder.resolve()), "--host", "127.0.0.1", "--port", str(port)]
    preprocess = view.param.preprocess_parameters
    bounds = {"min_pixels": preprocess.image_min_pixels, "max_pixels": preprocess.image_max_pixels}
    if given := {key: value for key, value in bounds.items() if value is not None}:
        words += ["--mm-processor-kwargs", json.dumps(given)]
    if lora is None:
        return [*words, "--served-model-name", name]
    # Adapters have a name of their own, and requests ask for that one.
    words += ["--served-model-name", f"{name}-base", "--enable-lora"]
    return [*words, "--lora-modules", f"{name}={lora.resolve()}"]


@contextmanager
def running(command: Sequence[str], port: int, start_s: float = LONGEST_START_S) -> Iterator[Backend]:
    """A backend that is ready; it is ended afterwards.

    Args:
        command: Starts it.
        port: That it listens at.
        start_s: How long it may load.

    Raises:
        MachineError: It ended, or was not ready in time.
    """
    backend = Backend(port, secrets.token_hex(32))
    environment = {**os.environ, "VLLM_API_KEY": backend.key}  # other users see the words of a command, not this
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        _wait_until_ready(backend, process, start_s)
        yield backend
    finally:
        _end(process)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _wait_until_ready(backend: Backend, process: subprocess.Popen[bytes], start_s: float) -> None:
    deadline_s = time.monotonic() + start_s
    while not backend.is_ready():
        if (code := process.poll()) is not None:
            way_out = "What it printed above says why."
            raise MachineError(f"vLLM ended with exit code {code}", key="--engine", way_out=way_out)
        if time.monotonic() > deadline_s:
            raise MachineError(f"vLLM was not ready after {start_s:.0f} s", key="--engine")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it has started."""
    for number, wait_s in ((signal.SIGTERM, LONGEST_END_S), (signal.SIGKILL, LONGEST_END_S)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def as_fields(value: Any) -> dict[str, Any]:
    """The fields of a request that were given."""
    return {name: part for name, part in value.model_dump().items() if part is not None}
