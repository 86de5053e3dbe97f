"""A reference is counted: its memory in the forecast, its forward passes in FLOPs, beside what a real step holds and
does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.distributed import run_ranks
from tests.helpers.measured_memory import measured
from tests.helpers.tiny_media_pairs import PAIRS as MEDIA_PAIRS
from tests.helpers.tiny_media_pairs import make_tiny_media_pairs
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_pairs import PAIRS
from tests.helpers.tiny_run import WORDS, make_tiny_run

TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "num_hidden_layers": 4, "vocab_size": 2048, "layer_types": None,
}  # fmt: skip
BF16 = "parallel.fsdp_plan.param_dtype=bf16"
FROZEN = "posttrain.reference.kind=frozen"
LORA = "training.lora.enable=true"
WITHIN = 0.03
"""Of the measured peak; 0.1 is promised."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of answers of equal lengths, so that nothing is padded."""
    folder = tmp_path_factory.mktemp("text")
    make_tiny_qwen3(folder / "model", **TEXT)
    chosen, rejected = (" ".join(WORDS[(n + shift) % len(WORDS)] for n in range(30)) for shift in (0, 0))
    row = {
        "messages": [{"role": "user", "content": "Go."}], "images": [],
        "chosen": {"role": "assistant", "content": f"{chosen} {WORDS[0]}"},
        "rejected": {"role": "assistant", "content": f"{rejected} {WORDS[1]}"},
    }  # fmt: skip
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row | {"id": f"r{n}"}) + "\n" for n in range(8)), encoding="utf-8")
    basic = {"dataset": str(rows), "dataset_dir": str(folder), "stage": "rm"}
    data = {"dataset_param": PAIRS | {"basic_parameters": basic}, "dataloader_param": {"num_workers": 0}}
    return make_tiny_run(folder, data=data, posttrain={"method": "dpo"})


def deviations(yaml: Path, words: tuple[str, ...], ranks: int = 1) -> tuple[float, float]:
    """How far the forecast is from what was measured; and how far it would be without the reference."""
    real = measured(yaml, words)
    assert real.peak is not None
    predicted = forecast(load_with_plugins(yaml, words).arguments, real.batches[-1], world_size=ranks)
    without = predicted.peak - predicted.reference
    return tuple(abs(each / real.peak.total_bytes - 1) for each in (predicted.peak, without))  # type: ignore[return-value]


ADAPTERS = pytest.param((FROZEN, LORA, BF16), marks=pytest.mark.slow)


@pytest.mark.parametrize("words", [(FROZEN,), ADAPTERS], ids=["all trained", "adapters in bf16"])
def test_memory_of_a_frozen_reference(text: Path, words: tuple[str, ...]) -> None:
    found, without = deviations(text, words)
    assert found < WITHIN < without


@pytest.mark.slow
@pytest.mark.parametrize("words", [(FROZEN,), (FROZEN, LORA, BF16)], ids=["all trained", "adapters in bf16"])
def test_memory_of_a_frozen_reference_on_two_ranks(text: Path, words: tuple[str, ...]) -> None:
    run_ranks(2, _two_ranks, str(text), words)


def _two_ranks(yaml: str, words: tuple[str, ...]) -> None:
    found, without = deviations(Path(yaml), words, ranks=2)
    assert found < WITHIN < without, os.environ["RANK"]


class CountedFlops(Hook):
    """What torch counts in the second step, and what the step's tally says of it."""

    def on_train_begin(self, engine: TrainEngine) -> None:
        real = engine.train_step

        def train_step(*given: Any, **settings: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = real(*given, **settings)
            # Of media the encoders work in the step, too; they are no part of the model.
            in_model = counter.get_flop_counts()[type(engine.model).__name__]
            self.done, self.told = sum(in_model.values()), result.tally.flops["full"]
            return result

        engine.train_step = train_step  # type: ignore[method-assign]


def flops(yaml: Path, *words: str) -> float:
    """What the tally says, as a multiple of what torch counts."""
    hook = CountedFlops()
    Trainer(load_with_plugins(yaml, ["training.train_iters=1", *words]), hooks=[hook]).train()
    return hook.told / hook.done


EAGER = "model.attn_implementation=eager"


FROZEN_BESIDE = pytest.param((LORA, FROZEN), marks=pytest.mark.slow)


@pytest.mark.parametrize("words", [(), (LORA,), FROZEN_BESIDE], ids=["frozen", "adapters off", "frozen, adapters"])
def test_flops_of_a_reference(text: Path, words: tuple[str, ...]) -> None:
    assert flops(text, EAGER, *words) == pytest.approx(1, abs=0.02)


def test_flops_of_pairs_of_media(tmp_path: Path) -> None:
    """Beside supervised training, which is counted with the same share of what torch does not count (attention)."""
    yaml = make_tiny_media_pairs(tmp_path)
    assert flops(yaml, *MEDIA_PAIRS) == pytest.approx(flops(yaml), rel=0.02)
