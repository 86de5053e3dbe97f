"""Time and memory of a DPO step of `mm train` over TRL's DPOTrainer: all parameters trained, a frozen reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.posttraining import Method, measured

METHOD = Method("dpo", batch=24, warm_up_steps=5, measured_steps=30, target=1.0)


def run(work: Path) -> dict[str, Any] | None:
    """Measure; None without TRL."""
    return measured(METHOD, work)
