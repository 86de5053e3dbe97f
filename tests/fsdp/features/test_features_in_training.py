"""Recomputation, offloading and slices through the real trainer, under every plan: two steps equal those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.fsdp.features.memory import activation_offload
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import EP, FAMILIES, ONE_F_ONE_B, PP, RING, TP, ULYSSES
from tests.helpers.planned_steps import train_steps

RECOMPUTE = "features.recompute=true"
SELECTIVE = "features.recompute_plan.mode=selective"
SKIP = "model.skip_flash_attn_recompute=true"
OFFLOAD = "features.enable_activation_offload=true"
ON: dict[str, tuple[str, ...]] = {
    "full": (RECOMPUTE,),
    "selective": (RECOMPUTE, SELECTIVE),
    "attention kept": (RECOMPUTE, SKIP),
    "offload": (OFFLOAD,),
    "offload, full": (OFFLOAD, RECOMPUTE),
    "offload, selective": (OFFLOAD, RECOMPUTE, SELECTIVE),
}
"""Equal to the bit."""
SLICES = ("features.enable_chunk_mbs=true", "features.chunkmbs_plan.chunk_mbs=1")
OF_TEXT = "features.chunkmbs_plan.chunk_kwarg_names=[attention_mask, position_ids, position_embeddings]"
OF_GENERATORS = "features.chunkmbs_plan.chunk_arg_indexs=[0, 1, 2]"
ROUNDED = 1e-12
"""Of sums over rows in another order, relative as in `Deviation`."""

FSDP = ("training.micro_batch_size=2", "training.gradient_accumulation_steps=2")
ONE = ("training.micro_batch_size=4", "training.gradient_accumulation_steps=2")
BASIC = "data.dataset_param.basic_parameters"
PACKED = ("training.micro_batch_size=1", f"{BASIC}.packing=true", f"{BASIC}.cutoff_len=128")
LORA = ("training.lora.enable=true", "training.lora.rank=4", "training.lora.target_modules=[q_proj, v_proj, down_proj]")
PLANS: dict[tuple[str, str], tuple[str, ...]] = {
    ("text", "fsdp2"): FSDP,
    ("text", "tp2"): (*ONE, TP),
    ("text", "ulysses2"): (*ONE, ULYSSES),
    ("text", "ring2"): (*ONE, RING),
    ("text", "pp2"): (*FSDP[:1], "training.gradient_accumulation_steps=4", PP, ONE_F_ONE_B),
    ("text", "packed"): (*FSDP, *PACKED),
    ("text", "packed ulysses2"): (*ONE, ULYSSES, *PACKED),
    ("text", "lora"): (*FSDP, *LORA),
    ("text moe", "ep2"): (*FSDP, EP, "features.loss_cfg.router_aux_loss_coef=0.1"),
    ("text moe", "packed ep2"): (*FSDP, EP, *PACKED),
    ("vlm", "fsdp2"): FSDP,
    ("vlm", "packed"): (*FSDP, *PACKED),
    ("vlm moe", "ep2"): (*FSDP, EP),
    ("wan", "fsdp2"): FSDP,
    ("wan", "pp2"): (*FSDP[:1], "training.gradient_accumulation_steps=4", PP, ONE_F_ONE_B),
    ("flux", "fsdp2"): FSDP,
    ("flux", "ring2"): (*ONE, RING),
}
IN_SHORT = ("full", "selective", "attention kept", "offload", "slices, offload, full")
"""Features of the default run, under the plan of the model with most parts."""


class Attention(TorchDispatchMode):
    """Counts runs of the attention kernel."""

    runs = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return operation(*args, **(kwargs or {}))


def differing(yaml: str, plan: tuple[str, ...], features: dict[str, tuple[float, tuple[str, ...]]]) -> dict[str, str]:
    """On each rank: features whose steps differ from those without, with what differs; and those that run attention
    again although they keep its results, or do not although they keep nothing."""
    found = {}
    with keeping_double(), mock.patch.object(activation_offload, "SMALLEST_BYTES", 1):
        with Attention() as once:
            off = train_steps(yaml, list(plan))
        for name, (tolerance, words) in features.items():
            try:
                with Attention() as seen:
                    steps = train_steps(yaml, [*plan, *words])
                compare_steps(off, steps, tolerance)
            except ParityError as error:
                found[name] = str(error)
            if name in ("full", "selective", "attention kept") and (seen.runs > once.runs) != (name == "full"):
                found[f"{name}, attention"] = f"{seen.runs} runs, {once.runs} without"
    return found


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _Made(tmp_path_factory.mktemp("runs"))


class _Made(dict[str, str]):
    """Family → its run, made when asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, family: str) -> str:
        folder = self._root / family.replace(" ", "_")
        folder.mkdir()
        self[family] = str(FAMILIES[family].make(folder))
        return self[family]


def features_of(family: str, plan: str) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Name → what it may be off by, overrides."""
    features = {name: (0.0, words) for name, words in ON.items()}
    if "packed" not in plan:
        rows = OF_GENERATORS if family in ("wan", "flux") else OF_TEXT
        features["slices"] = (ROUNDED, (*SLICES, rows))
        features["slices, offload, full"] = (ROUNDED, (*SLICES, rows, *ON["offload, full"]))
    return features


def check(family: str, plan: str, features: dict[str, tuple[float, tuple[str, ...]]], yamls: dict[str, str]) -> None:
    for found in run_ranks(2, differing, yamls[family], PLANS[family, plan], features):
        assert found == {}


def test_features_equal_none(yamls: dict[str, str]) -> None:
    features = features_of("text moe", "ep2")
    check("text moe", "ep2", {name: features[name] for name in IN_SHORT}, yamls)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "plan"), PLANS)
def test_all_features_equal_none(family: str, plan: str, yamls: dict[str, str]) -> None:
    check(family, plan, features_of(family, plan), yamls)


@pytest.mark.slow
def test_a_fault_is_seen(yamls: dict[str, str]) -> None:
    for found in run_ranks(2, faulty, yamls["text"]):
        assert found.keys() == {"offload"}


def faulty(yaml: str) -> dict[str, str]:
    """What comes back is of another module."""
    real = activation_offload.ActivationTraffic.unpack

    def rounded(self: activation_offload.ActivationTraffic, ticket: object) -> object:
        tensor = real(self, ticket)
        return tensor * (1 + 1e-9) if isinstance(ticket, activation_offload.SavedView) else tensor

    with mock.patch.object(activation_offload.ActivationTraffic, "unpack", rounded):
        return differing(yaml, FSDP, {"offload": (1e-12, ON["offload"])})
