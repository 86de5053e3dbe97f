"""Every family of generators under every plan that it can have: loss, gradients and weights of two steps are those of
one process in fp64, and what cannot be is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.distributed.context import generators
from mindspeed_mm.fsdp.distributed.context.generators import SpreadSample
from mindspeed_mm.fsdp.distributed.pipeline.carried import CarriedOutputs
from mindspeed_mm.fsdp.ops.attention import AttentionError
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.skiparse import skiparse_attention
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.families.test_conditioned_generators import write_run
from tests.families.test_generators import FP64, make_run
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_families import FAMILIES, smaller_pictures

TOLERANCE = 1e-6
"""Some families turn positions in fp32."""
SIDE = 32
"""Pixels: the families' own sizes have too few tokens for four ranks."""
SIDE_OF_COARSE = 64
"""For Wan2.2 5B, a token of which is 32 pixels wide."""
RING, ULYSSES = "parallel.ring_attention_size=2", "parallel.ulysses_parallel_size=2"
TENSOR = "parallel.tensor_parallel_size=2"
STAGES = "parallel.pipeline_parallel_size=2"
PLANS = {
    "ring": (2, (RING,)), "ulysses": (2, (ULYSSES,)), "both": (4, (RING, ULYSSES)), "tensor": (2, (TENSOR,)),
    "pipeline": (2, (STAGES, "training.micro_batch_size=1", "training.gradient_accumulation_steps=2")),
}  # fmt: skip
GIVEN_MEDIA = ("kontext", "fill", "flf2v", "vace")
SPREAD = tuple(
    name for name in FAMILIES if not name.startswith("sana") and not name.endswith(("_replace", "opensoraplan_1_5"))
)
IN_SETS = ("opensoraplan", "opensoraplan_i2v")
"""Families that attend within sets of tokens: ranks of a ring would hold parts of them."""
ON_RINGS = tuple(name for name in SPREAD if name not in IN_SETS)
SPLIT = tuple(name for name in FAMILIES if name not in ("lumina2", "z_image", "sana_video"))
"""The tiny Lumina has one head of keys, and the tiny Z-Image an odd number of features."""
CHAINS = (
    *(name for name in FAMILIES if name not in ("wan2_2", "wan2_2_i2v", "opensoraplan_1_5")),
    "kontext",
    "fill",
    "flf2v",
)
"""Families whose blocks run one behind the other."""
BY_DEFAULT = {
    "pipeline": ("flux2", "cogvideox"),
    "tensor": ("flux2", "sd3"),
    "ring": ("qwen_image", "wan2_2_5b_ti2v"),
    "ulysses": ("hunyuan_video",),
}


def yamls_of(names: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Name → its YAML."""
    yamls = {}
    for name in names:
        (folder / name).mkdir()
        side = SIDE_OF_COARSE if name.startswith("wan2_2_5b") else SIDE
        yaml = make_run(name, folder / name, side) if name in FAMILIES else write_run(folder / name, name) / "run.yaml"
        yamls[name] = str(yaml)
    return yamls


def steps_of(yamls: dict[str, str], words: tuple[str, ...]) -> dict[str, Any]:
    """Name → its recorded steps, on this rank."""
    with keeping_double(), smaller_pictures():
        return {name: train_steps(yaml, [*FP64, "training.micro_batch_size=2", *words]) for name, yaml in yamls.items()}


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        *[(plan, names) for plan, names in BY_DEFAULT.items() if names],
        *[pytest.param(plan, ON_RINGS, marks=pytest.mark.slow) for plan in ("ring", "both")],
        pytest.param("ulysses", SPREAD, marks=pytest.mark.slow),
        pytest.param("tensor", SPLIT, marks=pytest.mark.slow),
        *[pytest.param("pipeline", CHAINS[at::3], marks=pytest.mark.slow) for at in range(3)],
        *[pytest.param(plan, GIVEN_MEDIA, marks=pytest.mark.slow) for plan in ("ring", "ulysses")],
    ],
)
def test_a_spread_sample_trains_like_a_whole_one(plan: str, names: tuple[str, ...], tmp_path: Path) -> None:
    ranks, words = PLANS[plan]
    yamls = yamls_of(names, tmp_path)
    expected = steps_of(yamls, ())
    for measured in run_ranks(ranks, steps_of, yamls, words):
        for name in names:
            print(name, end=": ")
            compare_steps(expected[name], measured[name], TOLERANCE)


def without_masks(yamls: dict[str, str], words: tuple[str, ...]) -> dict[str, Any]:
    """A planted fault: keys that are hidden are attended to."""
    with mock.patch.object(SpreadSample, "key_mask", lambda *_: None):
        return steps_of(yamls, words)


def test_a_mask_that_is_lost_is_seen(tmp_path: Path) -> None:
    yamls = yamls_of(("lumina2",), tmp_path)
    expected = steps_of(yamls, ())["lumina2"]
    measured = run_ranks(2, without_masks, yamls, (RING,))[0]["lumina2"]
    with pytest.raises(ParityError):
        compare_steps(expected, measured, TOLERANCE)


def without_conditions(yamls: dict[str, str], words: tuple[str, ...]) -> dict[str, Any]:
    """A planted fault: the conditions that travel beside the hidden states are lost."""

    def next_one(self: CarriedOutputs) -> torch.Tensor:
        self._handed_in += 1
        return torch.zeros_like(self.received[self._handed_in - 1])

    with mock.patch.object(CarriedOutputs, "_next", next_one):
        return steps_of(yamls, words)


def test_conditions_that_are_lost_between_stages_are_seen(tmp_path: Path) -> None:
    yamls = yamls_of(("sd3",), tmp_path)
    expected = steps_of(yamls, ())["sd3"]
    measured = run_ranks(2, without_conditions, yamls, PLANS["pipeline"][1])[0]["sd3"]
    with pytest.raises(ParityError):
        compare_steps(expected, measured, TOLERANCE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wan2_2", "it is two transformers, each of which has samples of its own"),
        pytest.param("vace", "its blocks are no chain", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_are_no_chain_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    words = ("training.gradient_accumulation_steps=2", "--nproc", 2)
    said = mm("check", yamls_of((name,), tmp_path)[name], STAGES, *words)
    assert said.code != 0
    assert f"cannot be cut into stages: {reason}" in said.err + said.out


def test_sets_of_tokens_are_not_cut_by_a_ring(tmp_path: Path) -> None:
    said = mm("check", yamls_of(("opensoraplan",), tmp_path)["opensoraplan"], RING, "--nproc", 2)
    assert said.code != 0
    assert "attends within sets of tokens" in said.err + said.out and "ulysses_parallel_size" in said.err + said.out


def whole_per_rank(*_: Any) -> Any:
    """A planted fault: each rank deals out its own tokens alone."""
    return lambda query, key, value, sets, kernel, key_mask=None: skiparse_attention(query, key, value, sets, kernel)


def in_own_sets(yamls: dict[str, str], words: tuple[str, ...]) -> dict[str, Any]:
    with mock.patch.object(generators, "_within_sets", whole_per_rank):
        return steps_of(yamls, words)


def test_sets_of_a_rank_s_own_tokens_are_seen(tmp_path: Path) -> None:
    yamls = yamls_of(("opensoraplan",), tmp_path)
    expected = steps_of(yamls, ())["opensoraplan"]
    for run, is_right in ((steps_of, True), (in_own_sets, False)):
        for measured in run_ranks(2, run, yamls, (ULYSSES,)):
            if is_right:
                compare_steps(expected, measured["opensoraplan"], TOLERANCE)
            else:
                with pytest.raises(ParityError):
                    compare_steps(expected, measured["opensoraplan"], TOLERANCE)


@pytest.mark.parametrize(
    "mask", [torch.zeros(1, 1, 1, 6), torch.ones(1, 2, 6, 6, dtype=torch.bool), torch.ones(1, 1, 1, 5).bool()]
)
def test_masks_that_are_not_understood_are_refused(mask: torch.Tensor) -> None:
    sample = SpreadSample(ContextGroups())
    sample.place("image", 6)
    assert sample.key_mask(("image",), torch.ones(1, 1, 6, 6, dtype=torch.bool)).shape == (1, 6)
    sample.begin(True)
    sample.place("image", 6)
    with pytest.raises(AttentionError, match=r"masks attention to 6 tokens across ranks by torch\."):
        sample.key_mask(("image",), mask)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sana", "its feed-forward layers are convolutions"),
        pytest.param("sana_video", "its feed-forward layers are convolutions", marks=pytest.mark.slow),
        ("hunyuan_video_i2v_replace", "its blocks count the tokens of the first frame"),
    ],
)
def test_samples_that_cannot_be_spread_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    said = mm("check", make_run(name, tmp_path, SIDE), RING, "--nproc", 2)
    assert said.code != 0
    assert f"cannot spread a sample over ranks: {reason}" in said.err + said.out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lumina2", "2 does not divide the 1 heads of noise_refiner.0.attn.to_k"),
        pytest.param("z_image", "2 does not divide the 85 features", marks=pytest.mark.slow),
        pytest.param("sana_video", "tensor parallelism knows no plan for this model", marks=pytest.mark.slow),
    ],
)
def test_layers_that_cannot_be_split_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    said = mm("check", make_run(name, tmp_path, SIDE), TENSOR, "--nproc", 2)
    assert said.code != 0
    assert reason in said.err + said.out
