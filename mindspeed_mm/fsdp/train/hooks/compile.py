"""Counts what the compiler makes of the blocks."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mm.fsdp.features.speed.compiled_blocks import GraphCount
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine

SETTLED_STEPS = 2
"""Steps after which sizes that vary have been seen to vary."""
MOST_LATE_GRAPHS = 4
"""Graphs made later than that before the log says so."""


def compile_hook(parts: RunParts) -> Hook | None:
    """The hook, where `features.compile` is on."""
    return CompileHook(parts.record.note) if parts.arguments.features.compile else None


class CompileHook(Hook):
    """Counts graphs from the first step on: says what the compiler made of the blocks, and warns once when it goes on
    compiling.

    Args:
        note: Writes a line to the log.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._count = GraphCount()
        self._steps = 0
        self._settled: int | None = None

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Graphs of a run before this one in the same process do not count."""
        self._count = GraphCount()

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """One line when the first steps are done, another when too much is compiled again."""
        self._steps += 1
        if self._steps == SETTLED_STEPS:
            self._settled = self._count.graphs
            self._note(f"compile {self._count.describe()} in {SETTLED_STEPS} steps")
        elif self._settled is not None and self._count.graphs > self._settled + MOST_LATE_GRAPHS:
            self._note(
                f"warning: {self._count.graphs - self._settled} graphs were compiled after step {SETTLED_STEPS}: "
                "shapes vary. Keep them stable by packing (data.dataset_param.basic_parameters.packing), a larger "
                "data.dataloader_param.collate_param.pad_to_multiple_of, or features.compile_plan.dynamic=true"
            )
            self._settled = None
