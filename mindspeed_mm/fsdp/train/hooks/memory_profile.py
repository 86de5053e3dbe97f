"""A profile of the memory of some steps (`tools.memory_profile`).

It begins when the step before the first one has ended, so that the wait for data is part of what is recorded.
"""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.tools_args import MemoryProfile
from mindspeed_mm.fsdp.tools.memory_profiler import MemoryProfiler, idle_settings
from mindspeed_mm.fsdp.train.hooks.profiled_steps import Note, check_reached, existing_ranks, within
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


def memory_profile_hook(parts: RunParts) -> Hook | None:
    """The hook, where `tools.memory_profile` asks for this rank."""
    return build_memory_profile_hook(parts.arguments, parts.job.rank, parts.job.world_size, parts.record.note)


def build_memory_profile_hook(arguments: Arguments, rank: int, world_size: int, note: Note) -> Hook | None:
    """The profiler of memory that the configuration asks for on this rank.

    Raises:
        ConfigError: A rank that is not there.
    """
    memory = arguments.tools.memory_profile
    if not memory.enable:
        return None
    ranks = existing_ranks(memory.dump_ranks, world_size, "tools.memory_profile.dump_ranks")
    for words in idle_settings(memory):
        note(f"warning: {words}")
    if arguments.features.compile:
        note("memory: while it is recorded, compiled blocks run as if features.compile were off")
    if rank not in ranks:
        return None
    run_folder = Path(arguments.training.save) if arguments.training.save else None
    return MemoryProfileHook(memory, within(run_folder, memory.save_path), rank, note)


class MemoryProfileHook(Hook):
    """Records the memory of steps `start_step` to `end_step` - 1."""

    def __init__(self, settings: MemoryProfile, folder: Path, rank: int, note: Note) -> None:
        self._settings, self._folder, self._rank, self._note = settings, folder, rank, note
        self._first, self._end_step = max(1, settings.start_step), settings.end_step
        self._profiler: MemoryProfiler | None = None
        self._is_due = False

    def on_train_begin(self, engine: TrainEngine) -> None:
        """See that the steps are reached; they may begin at once."""
        self._is_due = check_reached(self._first, self._end_step, engine, "tools.memory_profile", self._note)
        self._begin(engine)

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Begin or end when it is time."""
        if self._profiler is not None and result.step >= self._end_step - 1:
            self._end(result.step)
        self._begin(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """The run ends within the steps: what was recorded counts."""
        self._end(engine.iteration)

    def on_failure(self, engine: TrainEngine) -> None:
        """End a recording that has begun, without a report."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.abandon()

    def _begin(self, engine: TrainEngine) -> None:
        upcoming = engine.iteration + 1
        if self._is_due and self._first <= upcoming <= engine.last_step:
            self._is_due = False
            self._profiler = MemoryProfiler(
                self._settings, self._folder, self._rank, engine.model, engine.optimizer, engine.device
            )
            self._profiler.start(upcoming)

    def _end(self, last_step: int) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        try:
            report = profiler.stop(last_step)
        except OSError as error:
            self._note(f"warning: {self._folder} could not be written ({error.strerror or error}); training goes on")
            return
        for line in report.lines():
            self._note(line)
        self._note(f"  written to {self._folder}")
