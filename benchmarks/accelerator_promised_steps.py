"""Both ways of a promise that is about whole training steps: two engines in one process, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.accelerator_engine import engine_on
from benchmarks.accelerator_promised_work import Results, Ways
from benchmarks.accelerator_sizes import TINY, Attempt
from benchmarks.accelerator_speed import Sections
from benchmarks.accelerator_step import arguments, batches, losses_of, write_model_folder

SMALL = Attempt("0.2B-4x2048", 0, 32_768, 1024, 3072, 12, 16, 8, 128, 4, 2048, 1)
"""Small enough that two of them, with their optimizers, leave room on any accelerator."""
STEPS = 3
"""Of a round."""
TOTAL = 1000
"""Of the schedule."""


def by_default(device: torch.device, tiny: bool, folder: Path) -> Ways:
    """What the defaults choose, and neither fused kernels nor compiled blocks."""
    plain: Sections = {"features": {"compile": False, "fused_kernels": False}}
    return _steps(device, tiny, folder, {}, plain)


def without_waits(device: torch.device, tiny: bool, folder: Path) -> Ways:
    """Numbers read one step late, and each in its own step; a small model, whose steps are short."""
    plain: Sections = {"features": {"compile": False, "fused_kernels": False}}
    return _steps(device, tiny, folder, plain, plain, other_waits=True)


def fp8(device: torch.device, tiny: bool, folder: Path) -> Ways:
    """Linear layers in fp8 and in bf16, both compiled."""
    features: dict[str, Any] = {"compile": True, "fused_kernels": False}
    if tiny or device.type not in ("cuda", "npu"):
        features["compile_plan"] = {"backend": "aot_eager"}
    compiled: Sections = {"features": features}
    recipe = {"recipe_name": "fp8", "extra_args": {"emulate": tiny}}
    return _steps(device, tiny, folder, compiled | {"training": {"quantization_plan": recipe}}, compiled)


def _steps(
    device: torch.device, tiny: bool, folder: Path, ours: Sections, other: Sections, *, other_waits: bool = False
) -> Ways:
    attempt = TINY if tiny else SMALL
    write_model_folder(attempt, folder)
    notes = []

    def way(sections: Sections, *, waits: bool) -> Callable[[], Results]:
        torch.manual_seed(0)
        engine = engine_on(device, arguments(attempt, folder, sections), TOTAL)
        if waits:
            engine.late = False
        notes.append("late" if engine.late else "not late")
        taken = iter(range(TOTAL))

        def call() -> Results:
            steps = [batches(attempt, next(taken)) for _ in range(STEPS)]
            return [torch.tensor(losses_of(engine, steps))]

        return call

    return Ways(way(ours, waits=False), way(other, waits=other_waits), f"numbers are read {' / '.join(notes)}")
