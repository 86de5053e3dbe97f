"""The host waits for the device once in a step, when it reads losses and norm, and where transformers' own forward
passes read numbers; nowhere else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from tests.helpers.planned_steps import Quiet
from tests.helpers.synchronisations import counted
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

OURS = {"device:tolist": 1}
BASIC = "data.dataset_param.basic_parameters"
PACKING = (f"{BASIC}.packing=true", f"{BASIC}.cutoff_len=128", "training.micro_batch_size=1")
VISION = {
    "modeling_qwen3_vl:get_image_features": 1,
    "modeling_qwen3_vl:get_placeholder_mask": 1,
    "import_utils:torch_compilable_check": 1,
    "modeling_qwen3_vl:_deepstack_process": 2,
    "forward_backward:__call__": 3,
}
"""Of transformers' tower and of putting images among tokens; the last are the backward passes of these."""
POSITIONS = {"modeling_qwen3_vl:get_rope_index": 10, "modeling_qwen3_vl:get_vision_position_ids": 6}
"""Of padded rows; a packed one brings its positions along."""
BORDERS = {"masking_utils:find_packed_sequence_indices": 1}
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, int]]] = {
    "text": ("text", (), {}),
    "text, two micro-batches, recomputed": (
        "text",
        ("training.gradient_accumulation_steps=2", "features.recompute=true"),
        {},
    ),
    "text, adapters, moving average": ("text", ("training.lora.enable=true", "training.ema.enable=true"), {}),
    "text, by sample": ("text", ("features.loss_cfg.loss_type=per_sample_loss",), {}),
    "text, packed": ("text", PACKING, BORDERS),
    "moe": ("moe", ("features.loss_cfg.router_aux_loss_coef=0.01",), {}),
    "moe, padding skipped": ("moe", ("features.skip_moe_pad_tokens=true",), {}),
    "moe, packed": ("moe", (*PACKING, "features.skip_moe_pad_tokens=true"), BORDERS),
    "vlm": ("vlm", (), VISION | POSITIONS),
    "vlm, packed": ("vlm", PACKING, VISION | BORDERS),
    "flux": ("flux", (), {}),
    "wan": ("t2v", (), {}),
}
"""Family, overrides, and what the libraries read."""


def make(folder: Path, family: str) -> str:
    if family in ("flux", "t2v"):
        return str(make_tiny_generator_run(folder, family))
    if family != "vlm":
        {"text": make_tiny_qwen3, "moe": make_tiny_qwen3_moe, "vlm moe": make_tiny_qwen3_vl_moe}[family](
            folder / "model"
        )
    if family in ("text", "moe"):
        make_rows(folder, images=(0,))
    return str(make_tiny_run(folder))


def waits(yaml: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the second step."""
    found: Counter[str] = Counter()
    real = TrainEngine.train_step

    def train_step(engine: TrainEngine, *args: Any, **kwargs: Any) -> Any:
        if engine.iteration != 1:
            return real(engine, *args, **kwargs)
        with counted(engine.model) as each:
            result = real(engine, *args, **kwargs)
        found.update(each)
        return result

    monkeypatch.setattr(TrainEngine, "train_step", train_step)
    config = load_with_plugins(Path(yaml), ["training.train_iters=2", *words])
    Quiet(config, TrainOptions()).train()
    return found


@pytest.mark.edge("D3")
@pytest.mark.parametrize("name", CASES)
def test_waits_of_a_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, words, library = CASES[name]
    assert dict(waits(make(tmp_path, family), words, monkeypatch)) == OURS | library


def test_a_hidden_wait_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_mm.fsdp.train import train_engine

    real = train_engine.grad_norm

    def waiting(*args: Any) -> torch.Tensor:
        norm = real(*args)
        return norm * float(torch.isfinite(norm))

    monkeypatch.setattr(train_engine, "grad_norm", waiting)
    assert waits(make(tmp_path, "text"), (), monkeypatch).total() == 2
