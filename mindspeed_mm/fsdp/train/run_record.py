"""What a run leaves in its folder beside checkpoints: configuration, environment, metrics, events, log."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm import __version__
from mindspeed_mm.core.artifacts import RunFolder, append_jsonl, atomic_write_text
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, dump_resolved
from mindspeed_mm.fsdp.utils.device import get_device_type

RECORDED_PACKAGES = ("torch", "torchvision", "transformers", "peft", "safetensors", "datasets", "numpy", "pillow")


class RunRecord:
    """Writes the records of one run; on ranks other than 0 every method does nothing.

    Args:
        folder: The run folder, or None when nothing is saved.
        rank: Global rank.
    """

    def __init__(self, folder: RunFolder | None, rank: int) -> None:
        self.folder = folder if rank == 0 else None

    def begin(self, config: ResolvedConfig, facts: dict[str, Any]) -> None:
        """Write the configuration as given and as resolved, and `run.json`."""
        if self.folder is None:
            return
        atomic_write_text(self.folder.config, config.text)
        atomic_write_text(self.folder.resolved, dump_resolved(config))
        self._run = {
            "status": "running",
            "exit_code": None,
            "started": time.time(),
            "command": sys.argv,
            **environment(),
            **facts,
        }
        self._write_run()

    def end(self, status: str, exit_code: int) -> None:
        """Write how the run ended."""
        if self.folder is None or not hasattr(self, "_run"):
            return
        self._run |= {"status": status, "exit_code": exit_code, "ended": time.time()}
        self._write_run()

    def _write_run(self) -> None:
        if self.folder is not None:
            atomic_write_text(
                self.folder.run_json, json.dumps(self._run, indent=2, ensure_ascii=False, default=str) + "\n"
            )

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Append to `events.jsonl`."""
        if self.folder is not None:
            append_jsonl(self.folder.events, {"time": time.time(), "kind": kind, "step": step, **details})

    def metrics(self, record: dict[str, Any]) -> None:
        """Append to `metrics.jsonl`."""
        if self.folder is not None:
            append_jsonl(self.folder.metrics, {**record, "time": time.time()})


def environment() -> dict[str, Any]:
    """Versions, machine and commit: what somebody needs to run it again."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": get_device_type(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "git": _git_commit(Path.cwd()),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
