"""Time and memory of a GRPO step of `mm train` over TRL's GRPOTrainer: 24 prompts, 8 answers of up to 8 tokens each,
drawn by transformers' `generate` on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.posttraining import Method, measured

METHOD = Method("grpo", batch=192, warm_up_steps=2, measured_steps=8, target=0.8)


def run(work: Path) -> dict[str, Any] | None:
    """Measure; None without TRL."""
    return measured(METHOD, work)
