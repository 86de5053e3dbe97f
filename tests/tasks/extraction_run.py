"""A small extraction for tests: pictures of two sizes, and what a feature set holds."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from mindspeed_mm.tasks.extract import extract
from mindspeed_mm.tasks.extract.feature_set import ExtractOutcome
from tests.helpers.tiny_generator_run import generator_config, make_pictures
from tests.helpers.tiny_generators import make_tiny_flux

SIZES = ((16, 16), (16, 24))
SMALL: dict[str, Any] = {"batch_size": 2, "shard_bytes": 25_000}
"""Several batches, and several of them in a shard."""


def make_run(folder: Path, count: int = 12) -> Path:
    """Model, pictures and `run.yaml` with `features_dir`; returns the YAML."""
    make_tiny_flux(folder / "model")
    make_pictures(folder, count, SIZES)
    config = generator_config(folder, {"buckets": [f"{height}x{width}" for height, width in SIZES]})
    config["data"]["dataset_param"]["basic_parameters"]["features_dir"] = str(folder / "features")
    return write_yaml(folder / "run.yaml", config)


def write_yaml(path: Path, config: dict[str, Any]) -> Path:
    """A configuration as a file."""
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return path


def run(yaml: Path, *overrides: str, out: Path | None = None, **options: Any) -> ExtractOutcome:
    """`mm extract` of one set, in this process."""
    (outcome,) = extract.run(yaml, overrides, out=out, **{**SMALL, **options})
    return outcome


def forked(work: Callable[[], None]) -> int:
    """Do work in a copy of this process, which has imported everything; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    torch.set_num_threads(1)  # threads of the original are not there
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 (the border of a process)
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(pid: int, limit_s: float = 60.0) -> int:
    """The exit code of a copy, negative when a signal ended it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"still running after {limit_s} s")


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a feature set, but for the empty files by which a folder is tried out: a kill may leave them."""
    found = {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith((".probe-", ".clock-"))}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}
