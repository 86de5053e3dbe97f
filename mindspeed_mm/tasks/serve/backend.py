"""Another server behind ours, vLLM or SGLang: prepared, started on this machine alone with a key of its own, and ended.

Such servers leave routes open that change what they serve, and fetch whatever a request names. So they hear nobody but
this server, which passes the allowed routes on, with the fields that it knows and with media that have passed the gate.
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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.started_python import safe_environment
from mindspeed_mm.fsdp.models.lora.files import AdapterFile
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView

LONGEST_START_S = 1800.0
LONGEST_END_S = 30.0
_POLL_S = 0.2
_ADAPTER = "adapters"
"""What SGLang calls them; requests name a model with adapters as `model:adapters`."""


@dataclass(frozen=True)
class Backend:
    """A server on this machine that answers nobody else."""

    port: int
    key: str
    model: str
    """What it calls the model."""

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


@dataclass(frozen=True)
class Served:
    """The model that is to be served."""

    folder: Path
    name: str
    view: RowsView
    lora: Path | None = None

    def pixel_bounds(self) -> dict[str, int]:
        """Those of training, where it had some."""
        preprocess = self.view.param.preprocess_parameters
        bounds = {"min_pixels": preprocess.image_min_pixels, "max_pixels": preprocess.image_max_pixels}
        return {key: value for key, value in bounds.items() if value is not None}


@dataclass(frozen=True)
class Start:
    """How a server is started."""

    title: str
    words: Sequence[str]
    """The command, of which other users of the machine can see every word."""
    model: str
    """What it will call the model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Options that it reads from a file."""


def start_vllm(served: Served, key: str, port: int) -> Start:
    """vLLM for a model. It takes the folder's generation configuration by itself.

    Raises:
        MachineError: It is not installed.
    """
    words = [_found("vLLM", "vllm"), "serve", str(served.folder.resolve()), "--host", "127.0.0.1", "--port", str(port)]
    if bounds := served.pixel_bounds():
        words += ["--mm-processor-kwargs", json.dumps(bounds)]
    if served.lora is None:
        words += ["--served-model-name", served.name]
    else:  # adapters have a name of their own, and requests ask for that one
        words += ["--served-model-name", f"{served.name}-base", "--enable-lora"]
        words += ["--lora-modules", f"{served.name}={served.lora.resolve()}"]
    return Start("vLLM", words, served.name, environment={"VLLM_API_KEY": key})


def start_sglang(served: Served, key: str, port: int) -> Start:
    """SGLang for a model. It takes the folder's generation configuration by itself, and its key from a file.

    Raises:
        MachineError: It is not installed.
    """
    words = [_found("SGLang", "sglang"), "serve", "--model-path", str(served.folder.resolve())]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", served.name]
    if bounds := served.pixel_bounds():
        words += ["--mm-process-config", json.dumps({"image": bounds})]
    if served.lora is not None:
        words += ["--enable-lora", "--lora-paths", f"{_ADAPTER}={served.lora.resolve()}"]
    name = served.name if served.lora is None else f"{served.name}:{_ADAPTER}"
    return Start("SGLang", words, name, settings={"api-key": key})


def _check_lora(lora: Path | None) -> None:
    """Raise `UsageError` for adapters with rows of added tokens: vLLM's loader (`parse_fine_tuned_lora_name`) takes no
    key of them, and neither server adds rows to its base."""
    if lora is not None and AdapterFile.find(lora, "--lora").adapter().tokens:
        raise UsageError(
            "the adapters hold rows of added tokens, which only the package's own engine loads",
            where=str(lora),
            key="--lora",
            way_out="Merge them first (mm merge), or leave --engine out.",
        )


ENGINES = {"vllm": start_vllm, "sglang": start_sglang}


@contextmanager
def running(engine: str, served: Served, start_s: float = LONGEST_START_S) -> Iterator[Backend]:
    """A backend that is ready; it is ended afterwards.

    Args:
        engine: One of `ENGINES`.
        served: The model.
        start_s: How long it may load.

    Raises:
        MachineError: It is not installed, ended, or was not ready in time.
        UsageError: It does not load such adapters.
    """
    _check_lora(served.lora)
    key, port = secrets.token_hex(32), free_port()
    start = ENGINES[engine](served, key, port)
    backend = Backend(port, key, start.model)
    with tempfile.TemporaryDirectory() as folder:  # which only we may enter
        words = list(start.words)
        if start.settings:
            settings = Path(folder) / "settings.yaml"
            settings.write_text(json.dumps(dict(start.settings)), encoding="utf-8")  # JSON is YAML
            words += ["--config", str(settings)]
        # a session of its own: `end_process` signals the whole group, workers of the engine too
        process = subprocess.Popen(words, env=safe_environment(start.environment), start_new_session=True)
        try:
            _wait_until_ready(start.title, backend, process, start_s)
            yield backend
        finally:
            end_process(process)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    # free when it is looked for: another process may still take it before the server does
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _found(title: str, program: str) -> str:
    path = shutil.which(program)
    if path is None:
        way_out = f"Install {program}, or leave --engine out."
        raise MachineError(f"{title} is not installed", key="--engine", way_out=way_out)
    return path


def _wait_until_ready(title: str, backend: Backend, process: subprocess.Popen[bytes], start_s: float) -> None:
    deadline_s = time.monotonic() + start_s
    while not backend.is_ready():
        if (code := process.poll()) is not None:
            way_out = "What it printed above says why."
            raise MachineError(f"{title} ended with exit code {code}", key="--engine", way_out=way_out)
        if time.monotonic() > deadline_s:
            way_out = "See what it printed above, or leave --engine out."
            raise MachineError(f"{title} was not ready after {start_s:.0f} s", key="--engine", way_out=way_out)
        time.sleep(_POLL_S)


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a process that has a group of its own, and what it has started."""
    for number, wait_s in ((signal.SIGTERM, LONGEST_END_S), (signal.SIGKILL, LONGEST_END_S)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def as_fields(value: Any) -> JsonObject:
    """The fields of a request that were given."""
    return {name: part for name, part in value.model_dump(by_alias=True).items() if part is not None}
