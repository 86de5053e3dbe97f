"""What a run tells people, and leaves in its folder beside checkpoints: configuration, environment, metrics, events,
log."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch

from mindspeed_mm.core.artifacts import RunFolder, append_jsonl, atomic_write_text
from mindspeed_mm.core.errors import ExitCode, MMError
from mindspeed_mm.core.redaction import redact
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.models.loading.folder import code_hash
from mindspeed_mm.fsdp.params.argument import DataArguments, ModelArguments, TrainingArguments
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, dump_resolved, resolved_dict
from mindspeed_mm.fsdp.params.yaml.hidden_text import words_without_secrets, yaml_without_secrets
from mindspeed_mm.fsdp.params.yaml.origins import leaves
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder
from mindspeed_mm.fsdp.train.run.progress import Progress
from mindspeed_mm.fsdp.train.run.trackers import TrackedRun, Tracker, Trackers
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.plugins import plugin_hashes

RECORDED_PACKAGES = ("torch", "torchvision", "transformers", "peft", "safetensors", "datasets", "numpy", "pillow")


_PACKAGE = Path(__file__).parents[3]
WARNING = "warning: "
"""How a line begins that people should not miss."""


class RunRecord:
    """Tells people of one run and writes its records; on ranks other than 0 every method does nothing.

    A record that cannot be written, on a full disk for one, never ends the training: it is said once.

    Args:
        folder: The run folder, or None when nothing is to be written.
        rank: Global rank.
        progress: What people see, and the log file.
        trackers: Follow the numbers too.
    """

    def __init__(
        self, folder: RunFolder | None, rank: int, progress: Progress, trackers: Trackers | None = None
    ) -> None:
        self.folder = folder if rank == 0 else None
        self.progress = progress
        self.step = 0
        """The step that was done last, as far as the record was told."""
        self._trackers = trackers if rank == 0 else None
        self._failing = False
        self._run: dict[str, object] = {}

    @classmethod
    @contextmanager
    def opened(
        cls,
        save: str | None,
        rank: int,
        run_id: str,
        stream: TextIO,
        report_to: Sequence[str] = (),
        trackers: Sequence[Tracker] = (),
        *,
        plain_lines: bool = False,
    ) -> Iterator[RunRecord]:
        """The record of a run whose folder no other run writes meanwhile.

        Args:
            save: The run folder; None keeps nothing.
            rank: Global rank.
            run_id: Names the run in the folder's lock.
            stream: Where people look.
            report_to: Trackers by the names of `training.report_to`.
            trackers: Further ones.
            plain_lines: Show steps as lines for scripts instead of a table.
        """
        folder = RunFolder(save) if save else None
        with ExitStack() as held:
            if folder is not None and rank == 0:
                held.enter_context(folder.lock(run_id))
            log_file = folder.log / "train.log" if folder is not None else None
            progress = Progress(rank, log_file=log_file, stream=stream, plain_lines=plain_lines)
            held.callback(progress.close)
            following = Trackers.of(report_to if rank == 0 else (), trackers, progress.note)
            yield cls(folder, rank, progress, following)

    def begin(self, config: ResolvedConfig, facts: Mapping[str, object], first_step: int = 1) -> None:
        """Write the configuration as given and as resolved, and `run.json`, all without secrets; tell the trackers."""
        if self._trackers is not None:
            self._trackers.begin(self._tracked(config, first_step))
        if self.folder is None:
            return
        self._run = {
            "status": "running",
            "exit_code": None,
            "started": time.time(),
            "command": words_without_secrets(sys.argv),
            **environment(),
            **facts,
        }
        if config.path.resolve() != self.folder.config.resolve():  # who trains the file that lies there keeps it
            self._try(self.folder.config, lambda path: atomic_write_text(path, yaml_without_secrets(config.text)))
        self._try(self.folder.resolved, lambda path: atomic_write_text(path, dump_resolved(config)))
        self._write_run()
        launcher = LaunchFolder.of_this_rank()
        if launcher is not None:
            launcher.note_record(self.folder.run_json)

    def end(self, status: str, exit_code: int) -> None:
        """Write how the run ended, if it began."""
        if self._trackers is not None:
            self._trackers.end(exit_code)
        self.break_off(status, exit_code)

    def break_off(self, status: str, exit_code: int) -> None:
        """`end` of a process that has no time left: trackers, which may wait for a network, are not told."""
        if self._run:
            self._run |= {"status": status, "exit_code": exit_code, "ended": time.time()}
            self._write_run()

    def keep_traceback(self, error: BaseException) -> None:
        """Write the traceback of an error that a person cannot act on alone into the log file, not to the screen."""
        if isinstance(error, MMError) and error.exit_code != ExitCode.BUG:
            return
        if isinstance(error, Exception):
            self.progress.keep("".join(traceback.format_exception(error)).rstrip())

    def note(self, text: str, step: int | None = None) -> None:
        """Tell people one thing: a line on the screen and in the log, and an event (`warning` where the line begins
        with "warning: ", else `note`) in `events.jsonl`.

        Args:
            text: The line.
            step: The step that it is about; None: the one that was done last.
        """
        kind = "warning" if text.startswith(WARNING) else "note"
        self.event(kind, self.step if step is None else step, text, message=text.removeprefix(WARNING))

    @contextmanager
    def noting_warnings(self) -> Iterator[None]:
        """Inside, what code that knows of no run warns of by `warnings.warn` (rows, media, caches, also in worker
        processes) is noted. Warnings of libraries go on as before."""
        before = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category is UserWarning and Path(filename).is_relative_to(_PACKAGE):
                self.note(f"{WARNING}{message}")
            else:
                before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        try:
            yield
        finally:
            warnings.showwarning = before

    def event(self, kind: str, step: int, line: str = "", /, **details: object) -> None:
        """Append to `events.jsonl`, and tell people by a line when one is given."""
        self.step = step
        if line:
            self.progress.note(line)
        if self.folder is not None:
            record = {"time": time.time(), "kind": kind, "step": step, **redact(details)}
            self._try(self.folder.events, lambda path: append_jsonl(path, record))

    def show(self, media: Mapping[str, Path], step: int) -> None:
        """Hand pictures and clips of a step to the trackers."""
        if self._trackers is not None:
            self._trackers.show(media, step)

    def metrics(self, record: Mapping[str, float]) -> None:
        """Append to `metrics.jsonl`, and tell the trackers."""
        self.step = int(record["step"])
        if self._trackers is not None:
            self._trackers.log(record)
        if self.folder is not None:
            self._try(self.folder.metrics, lambda path: append_jsonl(path, {**record, "time": time.time()}))

    def _tracked(self, config: ResolvedConfig, first_step: int) -> TrackedRun:
        values = dict(leaves(resolved_dict(config)))
        settings = {key: value for key, value in values.items() if config.origins[key].kind not in ("default", "run")}
        if self.folder is None:
            return TrackedRun(config.path.stem, settings, None, first_step)
        return TrackedRun(self.folder.path.resolve().name, settings, self.folder.path, first_step)

    def _write_run(self) -> None:
        if self.folder is not None:
            text = json.dumps(redact(self._run), indent=2, ensure_ascii=False, default=str) + "\n"
            self._try(self.folder.run_json, lambda path: atomic_write_text(path, text))

    def _try(self, path: Path, write: Callable[[Path], None]) -> None:
        try:
            write(path)
            self._failing = False
        except OSError as error:
            if not self._failing:
                self.progress.note(f"warning: {path} could not be written ({error.strerror}); training goes on")
            self._failing = True


def trusted_code(model: ModelArguments, data: DataArguments, training: TrainingArguments) -> dict[str, str]:
    """SHA-256 of the foreign code that the run executes: plugins, and Python files of folders that it trusts."""
    hashes = plugin_hashes(training.plugin)
    for section in (model, data.dataset_param.preprocess_parameters):
        folder = section.get("model_name_or_path")
        if folder and section.get("trust_remote_code"):
            digest = code_hash(Path(folder))
            if digest:
                hashes[folder] = digest
    return hashes


def environment() -> dict[str, object]:
    """Versions, machine and commit: what somebody needs to run it again."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": get_device_type(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "git": _git_commit(Path.cwd()),
    }


@cache
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
