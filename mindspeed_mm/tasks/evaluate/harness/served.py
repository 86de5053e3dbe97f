"""The model that a harness asks: one that a server answers for already, or a folder that `mm serve` is started for.

So the harness asks what training has made, shown as in training: with its pixel bounds and its chat template, of
whichever family. A harness's own loaders have other pixel bounds and system prompts.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.started_python import own_python, safe_environment
from mindspeed_mm.tasks.launch import rank_start
from mindspeed_mm.tasks.serve.backend import end_process

NAME = "model"
"""What requests call a folder's model: harnesses treat some families by their names in another way."""
BATCH_SIZE = 32
_LIMITS = {
    "max-seconds": 3600,
    "max-body-mib": 1024,
    "max-body-seconds": 600,
    "max-media": 1024,
    "max-media-mib": 1024,
    "max-pixels": 178_000_000,
    "max-prompt-tokens": 1_000_000,
    "max-new-tokens": 32_768,
}
"""Nobody but the harness asks, and its questions are as large as its sets have them."""


@dataclass(frozen=True)
class ServedModel:
    """A model behind a server of OpenAI's interface."""

    address: str
    """With `/v1`."""
    name: str
    key: str | None = None


@dataclass(frozen=True)
class Folder:
    """A model that is served for the harness.

    Args:
        model: A Hugging Face folder or a run.
        batch_size: Answers at a time.
        lora: Adapters to put beside the weights.
        config: Says how rows are shown, instead of the run's own.
        plan: A YAML whose section `parallel` spreads the model over processes.
        nproc: How many.
        plugins: Packages to import first.
    """

    model: Path
    batch_size: int = BATCH_SIZE
    lora: Path | None = None
    config: Path | None = None
    plan: Path | None = None
    nproc: int = 1
    plugins: tuple[str, ...] = ()

    def words(self, key_file: Path) -> list[str]:
        """Of the command that serves it."""
        # port 0: the system chooses, and --json tells which
        words = ["serve", str(self.model), "--port", "0", "--name", NAME, "--json"]
        words += ["--key-file", str(key_file), "--batch-size", str(self.batch_size), "--nproc", str(self.nproc)]
        for option, value in (("--lora", self.lora), ("--config", self.config), ("--plan", self.plan)):
            if value is not None:
                words += [option, str(value)]
        for plugin in self.plugins:
            words += ["--plugin", plugin]
        for name, limit in _LIMITS.items():
            words += [f"--{name}", str(limit)]
        return words


@contextmanager
def served(folder: Folder) -> Iterator[ServedModel]:
    """The model behind a server of this machine, with a key that nobody else has. The server is ended afterwards.

    Raises:
        MachineError: It ended before it served.
    """
    key = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as private:  # which only we may enter
        key_file = Path(private) / "key"
        key_file.write_text(key, encoding="utf-8")
        words = own_python([rank_start.__file__, *folder.words(key_file)])
        environment = safe_environment(rank_start.imports_of_this_process(os.environ))
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, start_new_session=True, text=True)
        try:
            yield ServedModel(_server_address(process), NAME, key)
        finally:
            end_process(process)


def _server_address(process: subprocess.Popen[str]) -> str:
    """What the server says once it has loaded its model."""
    said: Iterable[str] = process.stdout or ()
    for line in said:
        try:
            return str(parse_json(line)["address"])
        except (ValueError, KeyError, TypeError):
            sys.stderr.write(line)
    code = process.wait()
    what = f"the server of the model ended with exit code {code}"
    raise MachineError(what, way_out="What it printed above says why.")
