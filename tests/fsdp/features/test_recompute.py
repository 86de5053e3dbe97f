"""Recomputed modules give the same loss and the same gradients, bit for bit, and keep no activations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.memory import recompute
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.fsdp.features.dropout_models import KINDS, build, differing, kept_bytes, loss_and_gradients
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3_vl

SHARED = ("time_text_embed.", "condition_embedder.")
"""Parameters whose output all blocks take in: a re-entrant pass sums their gradients in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def features(**plan: Any) -> FeatureArguments:
    return FeatureArguments.model_validate({"recompute": True, "recompute_plan": plan})


def recomputed(model: nn.Module, **plan: Any) -> nn.Module:
    return FeaturesApplier(features(**plan), find_blocks(model))(model)


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_same_to_the_bit(kind: str, folder: Path) -> None:
    plain = loss_and_gradients(*build(kind, folder))
    model, step = build(kind, folder)
    names = [name for name, _ in model.named_parameters()]
    assert differing(plain, loss_and_gradients(recomputed(model), step)) == []
    assert [name for name, _ in model.named_parameters()] == names
    other = loss_and_gradients(*build(kind, folder))
    assert differing(plain, other) == []  # twice the same: dropout is seeded
    without = build(kind, folder)
    assert differing(plain, loss_and_gradients(without[0].eval(), without[1]))  # and it is active


@pytest.mark.parametrize("kind", KINDS)
def test_reentrant_differs_by_the_order_of_sums_alone(kind: str, folder: Path) -> None:
    plain = loss_and_gradients(*build(kind, folder))
    model, step = build(kind, folder)
    found = loss_and_gradients(recomputed(model, use_reentrant=True), step)
    for name in differing(plain, found):
        assert name.startswith(SHARED)
        torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-8)


def without_rng(*args: Any, **kwargs: Any) -> Any:
    return checkpoint(*args, **{**kwargs, "preserve_rng_state": False})


@pytest.mark.parametrize("kind", KINDS)
def test_other_random_numbers_would_be_seen(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loss_and_gradients(*build(kind, folder))
    monkeypatch.setattr(recompute, "checkpoint", without_rng)
    model, step = build(kind, folder)
    different = differing(plain, loss_and_gradients(recomputed(model), step))
    assert "loss" not in different and len(different) > 10


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "re-entrant"])
@pytest.mark.parametrize("frozen", ["inputs need no gradient", "a block is frozen", "only the last block is trained"])
def test_frozen_parts(frozen: str, use_reentrant: bool, folder: Path) -> None:
    outcomes = []
    for is_on in (False, True):
        model, step = build("wan", folder)
        if frozen == "a block is frozen":
            model.blocks[1].requires_grad_(False)
        elif frozen == "inputs need no gradient":
            model.requires_grad_(False)
            model.blocks.requires_grad_(True)
        else:
            model.requires_grad_(False)
            model.blocks[2].requires_grad_(True)
        if is_on:
            recomputed(model, use_reentrant=use_reentrant)
        outcomes.append(loss_and_gradients(model, step))
    assert [name for name in differing(*outcomes) if not (use_reentrant and name.startswith(SHARED))] == []
    assert outcomes[1]["blocks.2.attn1.to_q.weight"] is not None


def test_a_cache_is_not_written_twice(folder: Path) -> None:
    tokens = torch.arange(20, 32).reshape(2, 6)

    def step(model: nn.Module) -> torch.Tensor:
        return model(input_ids=tokens, use_cache=True).logits.square().mean()

    plain = loss_and_gradients(build("qwen3_vl", folder)[0], step)
    assert differing(plain, loss_and_gradients(recomputed(build("qwen3_vl", folder)[0]), step)) == []


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "re-entrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_dropped(kind: str, use_reentrant: bool, folder: Path) -> None:
    model, step = build(kind, folder)
    before = kept_bytes(model, step)
    assert kept_bytes(recomputed(model, use_reentrant=use_reentrant), step) < 0.5 * before


def test_each_block_runs_once_more_and_only_for_gradients(folder: Path) -> None:
    model, step = build("wan", folder)
    runs: list[nn.Module] = []
    for block in model.blocks:
        block.ffn.register_forward_hook(lambda module, *_: runs.append(module))
    recomputed(model)
    with torch.no_grad():
        step(model)
    assert len(runs) == 3
    step(model).backward()
    assert len(runs) == 3 + 6


def test_every_tensor_is_handed_over_by_position(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random-number generators of accelerators are restored for the devices of positional tensors only."""
    seen: list[tuple[Any, ...]] = []

    def watched(run: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return checkpoint(run, *args, **kwargs)

    monkeypatch.setattr(recompute, "checkpoint", watched)
    model, step = build("flux", folder)
    step(recomputed(model))
    assert [sum(isinstance(arg, torch.Tensor) for arg in args) for args in seen] == [5] * 4


def test_a_copy_runs_its_own_weights(folder: Path) -> None:
    model, step = build("wan", folder)
    twin = copy.deepcopy(recomputed(model))
    with torch.no_grad():
        twin.blocks[0].ffn.net[2].weight.zero_()
    one, other = (loss_and_gradients(each, step) for each in (model, twin))
    assert not torch.equal(one["loss"], other["loss"])  # type: ignore[arg-type]


# --- sharded ---------------------------------------------------------------------------------------------------------

PREFETCH = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}
BLOCKS: dict[str, Any] = {"blocks": {}}
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "FSDP2, prefetch": (
        2,
        {"fsdp_plan": PREFETCH},
        {
            **BLOCKS,
            "re-entrant": {"use_reentrant": True},
            "whole towers": {"apply_modules": ["model.visual", "model.language_model"]},
            "parts of blocks": {"apply_modules": ["model.language_model.layers.{*}.mlp"]},
        },
    ),
    "FSDP2, kept gathered, bf16": (2, {"fsdp_plan": {"reshard_after_forward": False, "param_dtype": "bf16"}}, BLOCKS),
    "HSDP": (4, {"fully_shard_parallel_size": 2}, BLOCKS),
}


def sharded_steps(folder: str, plan: dict[str, Any], recompute_plans: dict[str, Any]) -> dict[str, list[str]]:
    """What differs from the same plan without recomputation, by what is recomputed."""
    outcomes: dict[str, Any] = {}
    parallel = ParallelArguments.model_validate(plan)
    init_parallel_state(resolve_parallel_sizes(parallel, dist.get_world_size()), "cpu")
    built, step = build("qwen3_vl", Path(folder))
    built.model.visual.requires_grad_(False)
    for name, recompute_plan in {"off": None, **recompute_plans}.items():
        model = copy.deepcopy(built)
        blocks = find_blocks(model)
        if recompute_plan is not None:
            FeaturesApplier(features(**recompute_plan), blocks).pre_fully_shard_apply(model)
        ties = [["lm_head", "model.language_model.embed_tokens"]]
        ParallelApplier(parallel, shard_modules=blocks, tie_groups=ties)(model)
        outcomes[name] = [loss_and_gradients(model, step) for _ in range(2)]
    destroy_parallel_state()
    plain = outcomes.pop("off")
    return {
        name: [each for pair in zip(plain, found, strict=True) for each in differing(*pair)]
        for name, found in outcomes.items()
    }


@pytest.mark.parametrize("plan", PLANS)
def test_sharded_steps_are_the_same_to_the_bit(plan: str, folder: Path) -> None:
    ranks, parallel, recompute_plans = PLANS[plan]
    for found in run_ranks(ranks, sharded_steps, str(folder), parallel, recompute_plans):
        assert found == {name: [] for name in recompute_plans}


def sharded_fault(folder: str) -> dict[str, list[str]]:
    with mock.patch.object(recompute, "checkpoint", without_rng):
        return sharded_steps(folder, {}, BLOCKS)


def test_a_fault_under_sharding_is_seen(folder: Path) -> None:
    for found in run_ranks(2, sharded_fault, str(folder)):
        assert all(len(names) > 10 for names in found.values())
