"""Packed rows through the whole trainer: the samples of each step packed under a plan equal the same samples padded in
one process, in loss, gradients, clip norm and weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import FAMILIES as TINY
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import EP, FAMILIES, FP64, HYBRID, ONE_F_ONE_B, PP, RING, TP, ULYSSES
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import build_tokenizer
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-9
AUX = "features.loss_cfg.router_aux_loss_coef=0.01"
RECOMPUTE = "features.recompute=true"
SKIPPED = "features.skip_moe_pad_tokens=true"
UNEVEN = "data.dataloader_param.collate_param.pad_to_multiple_of=13"
"""Leaves padding behind the samples of a row."""

PLANS: Mapping[str, tuple[str, int, list[str]]] = {  # name → (family, ranks, overrides)
    "vlm fsdp2": ("vlm", 2, overrides(2, 2, UNEVEN)),
    "vlm ulysses2": ("vlm", 2, overrides(1, 2, ULYSSES, UNEVEN)),
    "vlm ring2": ("vlm", 2, overrides(1, 2, RING, UNEVEN)),
    "vlm tp2": ("vlm", 2, overrides(1, 2, TP, UNEVEN)),
    "vlm pp2": ("vlm", 2, overrides(1, 4, PP, ONE_F_ONE_B, UNEVEN)),
    "vlm recompute": ("vlm", 2, overrides(2, 2, RECOMPUTE)),
    "text moe ep2": ("text moe", 2, overrides(2, 2, EP, UNEVEN, AUX)),
    "text moe ep2, padding skipped": ("text moe", 2, overrides(2, 2, EP, UNEVEN, AUX, SKIPPED)),
    "text moe ulysses2": ("text moe", 2, overrides(1, 2, ULYSSES, UNEVEN, AUX)),
    "vlm by sample": ("vlm", 2, overrides(2, 2, "features.loss_cfg.loss_type=per_sample_loss", UNEVEN)),
    "delta net fsdp2": ("delta net", 2, overrides(2, 2, UNEVEN)),
    "delta net recompute": ("delta net", 2, overrides(2, 2, RECOMPUTE)),
    "delta net tp2": ("delta net", 2, overrides(1, 2, TP)),
    "delta net pp2": ("delta net", 2, overrides(1, 4, PP, ONE_F_ONE_B)),
    "vlm hsdp2×2": ("vlm", 4, overrides(4, 1, HYBRID)),
}
DEFAULT = ("vlm fsdp2",)


def make(folder: Path, family: str) -> str:
    """The run's YAML."""
    if family != "delta net":
        return str(FAMILIES[family].make(folder))
    model = TINY["qwen3_next"].build()
    tokenizer = build_tokenizer()
    model.config.vocab_size = len(tokenizer)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    make_rows(folder, images=(0,))
    return str(make_tiny_run(folder, **FP64))


def steps(yaml: str, words: list[str], packs: bool | None, fault: str | None = None) -> Any:
    with keeping_double():
        return train_steps(yaml, words, fault, packs=packs)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, what the loss is) → YAML and the steps of one process, padded."""
    made: dict[Any, Any] = {}

    def of(family: str, words: list[str]) -> tuple[str, Any]:
        loss = tuple(word for word in words if "loss" in word)
        if family not in made:
            made[family] = make(tmp_path_factory.mktemp(family.replace(" ", "_")), family)
        if (family, loss) not in made:
            # In the same micro-batches: routers are balanced within one, over all ranks.
            alone = overrides(1, 2, *loss)
            made[family, loss] = run_ranks(1, steps, made[family], alone, False)[0]
        return made[family], made[family, loss]

    return of


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_packed_under_a_plan_equals_padded_in_one_process(padded: Any, name: str) -> None:
    family, ranks, words = PLANS[name]
    yaml, expected = padded(family, words)
    for measured in run_ranks(ranks, steps, yaml, words, True):
        compare_steps(expected, measured, TOLERANCE)


@pytest.mark.parametrize("key", ["packing", pytest.param("neat_packing", marks=pytest.mark.slow)])
def test_packs_as_configured_equal_their_samples_padded(padded: Any, key: str) -> None:
    """The packs that the configuration makes, on two ranks, against each of their samples in a row of its own."""
    yaml, _ = padded("vlm", PLANS["vlm fsdp2"][2])
    basic = "data.dataset_param.basic_parameters"
    packs = ["training.micro_batch_size=1", f"{basic}.{key}=true", f"{basic}.cutoff_len=128"]
    expected = steps(yaml, [*packs, "training.gradient_accumulation_steps=4"], False)
    for measured in run_ranks(2, steps, yaml, [*packs, "training.gradient_accumulation_steps=2"], None):
        compare_steps(expected, measured, TOLERANCE)


@pytest.mark.parametrize("name", ["vlm fsdp2", pytest.param("vlm ring2", marks=pytest.mark.slow)])
def test_a_leak_is_seen(padded: Any, name: str) -> None:
    family, ranks, words = PLANS[name]
    yaml, expected = padded(family, words)
    measured = run_ranks(ranks, steps, yaml, words, True, "packed-leak")[0]
    with pytest.raises(ParityError):
        compare_steps(expected, measured, TOLERANCE)


@pytest.mark.slow
def test_a_delta_net_is_not_spread_over_ranks(padded: Any) -> None:
    yaml, _ = padded("delta net", [])

    with pytest.raises(Exception, match="no decoder whose attention can be exchanged"):
        run_ranks(2, steps, yaml, overrides(1, 2, ULYSSES), True)


def test_kernels_that_know_no_borders_are_refused(padded: Any) -> None:
    yaml, _ = padded("vlm", PLANS["vlm fsdp2"][2])
    with pytest.raises(ConfigError, match="knows no borders"):
        steps(yaml, overrides(1, 1, "model.attn_implementation=eager"), True)
