"""What a real training step holds, through the real trainer, beside what is predicted for the same batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.loading.local_shard import local
from mindspeed_mm.fsdp.optimizer import adamw
from mindspeed_mm.fsdp.tools.memory_tracker import MemoryPeak, MemoryTracker
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.tiny_run import WORDS


@dataclass
class StepMemory(Hook):
    """Follows the second step: the first one makes the optimizer's state."""

    peak: MemoryPeak | None = None
    batches: list[Batch] = field(default_factory=list)
    """As the objective prepared them."""
    parameter_bytes: int = 0
    state_bytes: int = 0
    """The optimizer's, without its counters of steps."""

    def on_train_begin(self, engine: TrainEngine) -> None:
        real = engine.train_step

        def train_step(micro_batches: Sequence[Batch], **settings: Any) -> Any:
            if engine.iteration != 1:
                return real(micro_batches, **settings)
            prepare = engine.objective.prepare

            def prepared(batch: Batch, **options: Any) -> Batch:
                self.batches.append(prepare(batch, **options))
                return self.batches[-1]

            engine.objective.prepare = prepared  # type: ignore[method-assign]
            with MemoryTracker(engine.model, engine.optimizer, engine.device) as tracker:
                result = real(micro_batches, **settings)
            self.peak = tracker.peak()
            held = [local(parameter) for parameter in engine.model.parameters()]
            states = [state for each in engine.optimizer.state.values() for state in each.values()]
            self.parameter_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
            self.state_bytes = sum(map(bytes_of, states))
            return result

        engine.train_step = train_step  # type: ignore[method-assign]


def measured(yaml: Path, overrides: Sequence[str] = ()) -> StepMemory:
    """Run two steps; what the second one held."""
    memory = StepMemory()
    config = load_with_plugins(yaml, ["training.train_iters=2", *overrides])
    # Moments come in pieces of the size that the machine has room for: here there is always enough.
    with mock.patch.object(adamw, "memory_room_bytes", lambda _: 2**40):
        Trainer(config, hooks=[memory]).train()
    assert memory.peak is not None
    return memory


def make_long_rows(folder: Path, tokens: int, count: int = 8) -> Path:
    """Conversations of about as many tokens each."""
    answer = " ".join(WORDS[index % len(WORDS)] for index in range(tokens))
    rows = [
        {"id": f"r{n}", "messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": answer}]}
        for n in range(count)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"images": []}) + "\n" for row in rows), encoding="utf-8")
    return path


def bytes_of(state: Any) -> int:
    """Bytes of a tensor on this rank; nothing of a number."""
    return local(state).numel() * state.element_size() if isinstance(state, torch.Tensor) and state.ndim else 0
