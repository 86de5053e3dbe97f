"""One process of `benchmarks.features`: writes the model and its rows, or trains a few steps and says what they cost.

`python -m benchmarks.features_run make FOLDER`; `… measure FOLDER WORD…`, `… peak FOLDER WORD…` and `… predict FOLDER`,
which print one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import communication_rank
from benchmarks.features_cases import (
    FEATURES,
    MEASURED_STEPS,
    MORE_ROWS,
    OFF,
    PREDICTED_ROWS,
    PREDICTED_TOKENS_A_ROW,
    ROWS,
    SHAPE,
    TOKENS_A_ROW,
    WARM_UP_STEPS,
)
from benchmarks.processes import status_kb
from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.tools.memory_tracker import MemoryTracker
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine

GIB = 2**20
"""KiB in one."""


class Costs(Hook):
    """Seconds and loss of each step; of one more step, which is not timed, the most bytes that its tensors held."""

    def __init__(self, timed_steps: int = WARM_UP_STEPS + MEASURED_STEPS) -> None:
        self._timed_steps = timed_steps
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.resident_gib, self.live_gib = 0.0, 0.0
        self._tracker: MemoryTracker | None = None

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Forget the peak of loading: the file that was mapped counted in it."""
        Path("/proc/self/clear_refs").write_text("5")

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Note them."""
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            self.live_gib = self._tracker.peak().total_bytes / 2**30
            return
        self.seconds.append(result.seconds - result.data_seconds)
        self.losses.append(result.loss)
        if len(self.seconds) == self._timed_steps:
            self.resident_gib = status_kb("self", "VmHWM") / GIB
            self._tracker = MemoryTracker(engine.model, engine.optimizer, engine.device)
            self._tracker.__enter__()


def make(folder: Path) -> None:
    """Write them."""
    training = {
        "train_iters": WARM_UP_STEPS + MEASURED_STEPS + 1,
        "micro_batch_size": ROWS,
        "adam_fused": True,
        "lr": 1e-5,
    }
    communication_rank.make(folder, {"dense": SHAPE}, TOKENS_A_ROW, training, param_dtype="bf16")


def measure(folder: Path, words: list[str]) -> dict[str, Any]:
    """Predict, train, and say what it cost."""
    costs = Costs()
    config = load_with_plugins(folder / "dense" / "run.yaml", words)
    prediction = forecast(config.arguments, first_micro_batch(config.arguments))
    before_gib = status_kb("self", "VmRSS") / GIB  # with the imports of the prediction, which are those of training
    engine = communication_rank.Quiet(config, hooks=[costs]).train()
    assert engine is not None
    return {
        "value": 1000 * statistics.median(costs.seconds[WARM_UP_STEPS:]),
        "first_step_ms": 1000 * costs.seconds[0],
        "peak_gib": costs.live_gib,
        "predicted_gib": prediction.peak / 2**30,
        "resident_gib": costs.resident_gib - before_gib,
        "predicted_resident_gib": prediction.resident / 2**30,
        "losses": costs.losses,
        "trained_parameters": sum(p.numel() for p in engine.model.parameters() if p.requires_grad),
    }


def measure_peak(folder: Path, words: list[str]) -> dict[str, Any]:
    """The second step's peak with more rows, beside its prediction."""
    asked = [f"training.micro_batch_size={MORE_ROWS}", "training.train_iters=2", *words]
    config, costs = load_with_plugins(folder / "dense" / "run.yaml", asked), Costs(timed_steps=1)
    predicted = forecast(config.arguments, first_micro_batch(config.arguments)).peak / 2**30
    communication_rank.Quiet(config, hooks=[costs]).train()
    return {"peak_gib": costs.live_gib, "predicted_gib": predicted}


def predict(folder: Path) -> dict[str, Any]:
    """What each feature would hold on an accelerator, with more tokens than this machine has patience for."""
    found = {}
    for name, words in ({OFF: ()} | {name: each.words for name, each in FEATURES.items()}).items():
        arguments = load_with_plugins(folder / "dense" / "run.yaml", list(words)).arguments
        prediction = forecast(arguments, random_tokens(), device_type="cuda")
        sizes = {"peak": prediction.peak, "activations": prediction.activations}
        found[name] = {f"{what}_gib": size / 2**30 for what, size in sizes.items()}
    return found


def random_tokens() -> Batch:
    """A micro-batch of the predicted size."""
    ids = torch.randint(SHAPE.vocabulary, (PREDICTED_ROWS, PREDICTED_TOKENS_A_ROW))
    ids_of_samples = [str(row) for row in range(PREDICTED_ROWS)]
    return {"input_ids": ids, "labels": ids, "shift_labels": ids, "sample_ids": ids_of_samples}


def first_micro_batch(arguments: Arguments) -> Batch:
    """As the run's own loader makes it."""
    data = arguments.data
    dataset, _ = build_mm_dataset(data.dataset_param, seed=arguments.training.seed)
    rows = arguments.training.micro_batch_size
    loader = build_mm_dataloader(
        dataset,
        data.dataloader_param,
        micro_batch_size=rows,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=arguments.training.seed,
    )
    batch: Batch = next(iter(loader))[0]
    return batch


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    elif sys.argv[1] == "peak":
        print(json.dumps(measure_peak(Path(sys.argv[2]), sys.argv[3:])))
    elif sys.argv[1] == "predict":
        print(json.dumps(predict(Path(sys.argv[2]))))
    else:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3:])))
