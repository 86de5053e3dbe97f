"""Head and loss in slices through the whole trainer: loss, every gradient, clip norm and weights equal those from whole
logits, alone and under every plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.loss import sliced_head
from mindspeed_mm.fsdp.loss.sliced_head import LossRequest, SlicedHead
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import FAMILIES, FP64, LAYERS, ONE_F_ONE_B, PP, RING, TP, ULYSSES
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.schedules import ZBV, case
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-11
OFFLOAD = "features.loss_cfg.router_aux_loss_offload=true"
SLICES = ("features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=3")
DYNAMIC = ("features.enable_dynamic_chunk_loss=true", "features.chunkloss_plan.total_chunk_size=5")
Z_LOSS, BY_SAMPLE = "features.loss_cfg.z_loss_coef=0.01", "features.loss_cfg.loss_type=per_sample_loss"
LORA = ("training.lora.enable=true", "training.lora.rank=2", "training.lora.target_modules=[q_proj, lm_head]")
WHOLE_HEAD = ("training.lora.enable=true", "training.lora.modules_to_save=[lm_head]")
BASIC = "data.dataset_param.basic_parameters"
PACKED = (f"{BASIC}.packing=true", f"{BASIC}.cutoff_len=128", "training.micro_batch_size=1")

PLANS: Mapping[str, tuple[str, int, int, list[str]]] = {  # name → (family, ranks, accumulation, overrides)
    "slices": ("text", 1, 2, [*SLICES, Z_LOSS]),
    "dynamic": ("text", 1, 2, [*DYNAMIC]),
    "by sample": ("text", 1, 2, [*SLICES, BY_SAMPLE, Z_LOSS]),
    "packed": ("text", 1, 2, [*SLICES, *PACKED]),
    "adapter on the head": ("text", 1, 2, [*SLICES, Z_LOSS, *LORA]),
    "head trained whole": ("text", 1, 2, [*SLICES, *WHOLE_HEAD]),
    "head frozen": ("text", 1, 2, [*SLICES, "model.freeze=[lm_head]"]),
    "recompute, the head too": (
        "text", 1, 2, [*SLICES, "features.recompute=true", "features.recompute_plan.apply_modules=[lm_head]"]
    ),
    "fsdp2": ("vlm", 2, 2, [*SLICES, Z_LOSS]),
    "fsdp2, adapter on the head": ("text", 2, 2, [*SLICES, Z_LOSS, *LORA]),
    "tied, fsdp2": ("tied", 2, 2, [*SLICES, Z_LOSS]),
    "tied, tp2": ("tied", 2, 1, [*DYNAMIC, TP]),
    "tied, pp2": ("tied", 2, 4, [*SLICES, PP, ONE_F_ONE_B]),
    "tp2": ("text", 2, 1, [*SLICES, Z_LOSS, TP]),
    "tp2, z-loss of whole rows": ("text", 2, 1, [Z_LOSS, TP]),
    "tp2, adapter on the head": ("text", 2, 1, [*SLICES, Z_LOSS, TP, *LORA]),
    "ulysses2": ("text", 2, 1, [*SLICES, ULYSSES]),
    "ring2": ("vlm", 2, 1, [*DYNAMIC, Z_LOSS, RING]),
    "pp2": ("text", 2, 4, [*SLICES, Z_LOSS, PP, ONE_F_ONE_B]),
    "pp2 zbv": ("text", 2, 4, [*SLICES, PP, ZBV]),
    "vlm moe": ("vlm moe", 1, 2, [*SLICES, "features.loss_cfg.router_aux_loss_coef=0.01", OFFLOAD]),
}  # fmt: skip
DEFAULT = ("slices", "by sample", "adapter on the head", "fsdp2", "tp2")


def steps(yaml: str, words: list[str], fault: bool = False) -> Any:
    with keeping_double(), one_row_lost() if fault else mock.MagicMock():
        return train_steps(yaml, words)


def one_row_lost() -> Any:
    real = SlicedHead._sums

    def sums(self: SlicedHead, hidden: torch.Tensor, request: LossRequest) -> Any:
        return real(self, hidden[1:], LossRequest(request.targets[1:], None, request.z_loss_coef, request.vocabulary))

    return mock.patch.object(sliced_head.SlicedHead, "_sums", sums)


def make_tied(folder: Path) -> Path:
    """Embedding and head are one weight."""
    make_tiny_qwen3(folder / "model", tie=True, **LAYERS)
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, **FP64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, what is trained, accumulation) → YAML and the steps of one process from whole logits."""
    made: dict[Any, Any] = {}
    makers = {"tied": make_tied} | {name: family.make for name, family in FAMILIES.items()}

    def of(family: str, words: list[str]) -> tuple[str, Any]:
        plain = tuple(word for word in words if is_of_the_loss(word))
        if family not in made:
            made[family] = str(makers[family](tmp_path_factory.mktemp(family.replace(" ", "_"))))
        if (family, plain) not in made:
            made[family, plain] = steps(made[family], overrides(1, 2, *plain))
        return made[family], made[family, plain]

    return of


def is_of_the_loss(word: str) -> bool:
    """Whether an override changes what is computed, and not how."""
    is_how = word.startswith(("parallel.", "features.")) and "loss_cfg" not in word
    return not is_how and word != OFFLOAD


def measured(yaml: str, ranks: int, words: list[str], fault: bool = False) -> Any:
    return run_ranks(ranks, steps, yaml, words, fault) if ranks > 1 else [steps(yaml, words, fault)]


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else case(name, PLANS[name][-1], pytest.mark.slow) for name in PLANS]
)
def test_slices_equal_whole_logits(whole: Any, name: str) -> None:
    family, ranks, accumulation, words = PLANS[name]
    yaml, expected = whole(family, words)
    data_ranks = ranks if "fsdp2" in name else 1
    for record in measured(yaml, ranks, overrides(data_ranks, accumulation, *words)):
        compare_steps(expected, record, TOLERANCE)


def test_a_lost_row_is_seen(whole: Any) -> None:
    family, _, accumulation, words = PLANS["slices"]
    yaml, expected = whole(family, words)
    (record,) = measured(yaml, 1, overrides(1, accumulation, *words), fault=True)
    with pytest.raises(ParityError):
        compare_steps(expected, record, TOLERANCE)
