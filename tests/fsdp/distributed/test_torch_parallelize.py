"""How a plan is applied: what is wrapped, in which precision, in which prefetch order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.sharding import fully_shard as fully_shard_parallel
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import (
    Unit,
    build_offload_policy,
    check_dtypes,
    check_reshard,
    fsdp_modules,
    plan_units,
    root_options,
    set_gradient_sync,
    set_prefetch,
    unit_options,
)
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan, ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.helpers.distributed import run_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """Embedding, three blocks, norm and a tied head."""

    def __init__(self, width: int = 8, words: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
TIES = [["embed", "head"]]
IDS = torch.arange(6)[None]


def build(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(0)
    return Tied().to(dtype)


def apply(model: nn.Module, parallel: dict[str, Any], **plan: Any) -> nn.Module:
    arguments = ParallelArguments.model_validate(parallel)
    init_parallel_state(resolve_parallel_sizes(arguments, dist.get_world_size()), "cpu")
    try:
        return ParallelApplier(arguments, **({"shard_modules": BLOCKS, "tie_groups": TIES} | plan))(model)
    finally:
        destroy_parallel_state()


def wrapped_names(model: nn.Module) -> list[str]:
    return sorted(name for name, module in model.named_modules() if isinstance(module, FSDPModule))


# Pure parts.


def test_units_keep_the_execution_order_and_join_ties():
    units = plan_units(["embed", *BLOCKS, "head"], TIES)
    assert units == [Unit(("embed", "head")), *(Unit((name,)) for name in BLOCKS)]


def test_units_leave_out_what_is_ignored():
    units = plan_units(["tower.blocks.0", "tower", "towers", "layers.0"], [], ["tower"])
    assert [unit.names for unit in units] == [("towers",), ("layers.0",)]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, (None, None, None)),
        ({"param_dtype": "bf16"}, (torch.bfloat16, torch.float32, None)),
        ({"param_dtype": "fp64"}, (torch.float64, torch.float64, None)),
        (
            {"param_dtype": "bf16", "reduce_dtype": "bf16", "output_dtype": "fp32"},
            (torch.bfloat16, torch.bfloat16, torch.float32),
        ),
    ],
)
def test_precision(plan, expected):
    section = FsdpPlan.model_validate(plan)
    inner = unit_options(section, mesh=None)
    root = root_options(inner, section)["mp_policy"]
    assert (root.param_dtype, root.reduce_dtype, root.output_dtype) == expected
    assert inner["mp_policy"] == MixedPrecisionPolicy(*expected[:2], output_dtype=None)


@pytest.mark.edge("D3")
def test_host_memory_is_pinned_only_beside_an_accelerator(monkeypatch):
    plan = FsdpPlan(cpu_offload=True, pin_memory=True)
    assert type(build_offload_policy(FsdpPlan())) is OffloadPolicy
    assert build_offload_policy(plan) == CPUOffloadPolicy(pin_memory=False)
    monkeypatch.setattr(fully_shard_parallel, "get_device_type", lambda: "cuda")
    assert build_offload_policy(plan) == CPUOffloadPolicy(pin_memory=True)
    assert build_offload_policy(FsdpPlan(cpu_offload=True)) == CPUOffloadPolicy(pin_memory=True)
    assert build_offload_policy(FsdpPlan(cpu_offload=True, pin_memory=False)) == CPUOffloadPolicy(pin_memory=False)


def test_a_group_to_reshard_to_must_divide():
    for fits in (True, False, 1, 2, 4):
        check_reshard(fits, 4)
    with pytest.raises(ConfigError, match="groups of 3 do not divide the 4 ranks"):
        check_reshard(3, 4)


def test_trainable_parameters_of_one_unit_share_a_dtype():
    block = Block(4)
    block.down.bfloat16()
    with pytest.raises(ConfigError, match=r"blocks\.0 holds trainable parameters of bfloat16 and float32"):
        check_dtypes(["blocks.0"], block.parameters())
    check_dtypes(["blocks.0"], block.up.parameters())
    block.down.requires_grad_(False)
    check_dtypes(["blocks.0"], block.parameters())


def test_stages_are_made_before():
    applier = ParallelApplier(ParallelArguments.model_validate({"pipeline_parallel_size": 2}))
    with pytest.raises(ConfigError, match="the model was not split into stages"):
        applier.pre_fully_shard_apply(nn.Linear(2, 2))


class Recorder:
    """Stands for a wrapped block and notes whom it is told to gather ahead."""

    def __init__(self) -> None:
        self.ahead: list[Any] = []
        self.behind: list[Any] = []

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        self.ahead = modules

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        self.behind = modules


def test_prefetch_follows_a_stack_and_never_enters_a_tower(monkeypatch):
    names = ["tower.blocks.0", "tower.blocks.1", "tower", "layers.0", "layers.1", "layers.2"]
    recorders = {name: Recorder() for name in names}
    monkeypatch.setattr(fully_shard_parallel, "_gathered_together", lambda _, unit, __: [recorders[unit.names[0]]])
    set_prefetch(nn.Module(), plan_units(names, TIES), forward=2, backward=1)
    seen = {
        name: (
            [names[list(recorders.values()).index(r)] for r in found.ahead],
            [names[list(recorders.values()).index(r)] for r in found.behind],
        )
        for name, found in recorders.items()
    }
    assert seen == {
        "tower.blocks.0": (["tower.blocks.1"], []),
        "tower.blocks.1": ([], ["tower.blocks.0"]),
        "tower": ([], []),
        "layers.0": (["layers.1", "layers.2"], []),
        "layers.1": (["layers.2"], ["layers.0"]),
        "layers.2": ([], ["layers.1"]),
    }


def test_inner_modules_are_gathered_with_their_blocks(monkeypatch):
    """With them at once, and wherever they are gathered ahead; in backward from the last to the first."""
    names = ["layers.0", "layers.1", "layers.2"]
    blocks = {name: Recorder() for name in names}

    def gathered(_: nn.Module, unit: Any, hooked: Any) -> list[Any]:
        (name,) = unit.names
        inner = [f"{name}.a", f"{name}.b"] if name in hooked else []
        return [blocks[name], *inner]

    monkeypatch.setattr(fully_shard_parallel, "_gathered_together", gathered)
    set_prefetch(nn.Module(), plan_units(names, TIES), forward=1, backward=1, hooked=["layers.0", "layers.1"])
    name_of = {id(block): name for name, block in blocks.items()}
    seen = {}
    for name, block in blocks.items():
        seen[name] = [[name_of.get(id(m), m) for m in found] for found in (block.ahead, block.behind)]
    assert seen == {
        "layers.0": [
            ["layers.0.a", "layers.0.b", "layers.1", "layers.1.a", "layers.1.b"],
            ["layers.0.b", "layers.0.a"],
        ],
        "layers.1": [
            ["layers.1.a", "layers.1.b", "layers.2"],
            ["layers.1.b", "layers.1.a", "layers.0", "layers.0.b", "layers.0.a"],
        ],
        "layers.2": [[], ["layers.1", "layers.1.b", "layers.1.a"]],
    }


# On ranks.


class ShardsItself(Tied):
    """A model with hooks of its own."""

    def fully_shard(self, fsdp_plan: FsdpPlan) -> bool:
        from torch.distributed.fsdp import fully_shard

        self.seen = [fsdp_plan.param_dtype]
        fully_shard(self.blocks[0])
        fully_shard(self)
        return True

    def set_modules_to_prefetch(self, fsdp_plan: FsdpPlan, ep_plan: Any) -> bool:
        self.seen.append(type(ep_plan).__name__)
        return True


class DeclinesToShard(Tied):
    def fully_shard(self, fsdp_plan: FsdpPlan) -> bool:
        return False


def apply_every_plan() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = apply(build(), {})
    found["wrapped"] = wrapped_names(plain)
    found["sharded"] = all(isinstance(p, DTensor) for p in plain.parameters())
    found["names kept"] = [name for name, _ in plain.named_parameters()] == [n for n, _ in build().named_parameters()]
    found["tie kept"] = plain.head.weight is plain.embed.weight
    found["patterns win"] = wrapped_names(apply(build(), {"fsdp_plan": {"apply_modules": ["blocks.{1-2}", "norm"]}}))
    ignoring = apply(build(), {"fsdp_plan": {"ignored_modules": ["blocks.1"]}})
    found["ignored, trained"] = [tuple(p.to_local().shape) for p in ignoring.blocks[1].parameters()]
    half_frozen = build()
    half_frozen.blocks[1].requires_grad_(False)
    apply(half_frozen, {"fsdp_plan": {"ignored_modules": ["blocks.1"]}})
    found["ignored, frozen"] = [type(p) is nn.Parameter for p in half_frozen.blocks[1].parameters()]
    own = ShardsItself()
    apply(own, {"fsdp_plan": {"param_dtype": "bf16"}})
    found["own hooks"] = (wrapped_names(own), own.seen)
    found["declined"] = wrapped_names(apply(DeclinesToShard(), {}))
    try:
        apply(build(), {"fsdp_plan": {"apply_modules": ["block.0"]}})
    except ConfigError as error:
        found["no match"] = str(error)
    return found


@pytest.fixture(scope="module")
def applied() -> dict[str, Any]:
    return run_ranks(2, apply_every_plan)[0]


def test_blocks_ties_and_root_are_wrapped(applied):
    assert applied["wrapped"] == ["", *BLOCKS, "embed", "head"]
    assert applied["sharded"]


def test_no_name_changes_and_ties_live_on(applied):
    assert applied["names kept"] and applied["tie kept"]


def test_patterns_win_over_the_models_own_list(applied):
    assert applied["patterns win"] == ["", "blocks.1", "blocks.2", "embed", "head", "norm"]


def test_a_pattern_without_a_match_is_an_error(applied):
    assert "parallel.fsdp_plan.apply_modules" in applied["no match"] and "blocks.0" in applied["no match"]


def test_ignored_modules_stay_whole(applied):
    assert applied["ignored, trained"] == [(8, 8), (8,), (8, 8), (8,)]
    assert applied["ignored, frozen"] == [True] * 4


def test_a_models_own_hooks_come_first(applied):
    assert applied["own hooks"] == (["", "blocks.0"], ["bf16", "EpPlan"])
    assert applied["declined"] == ["", *BLOCKS, "embed", "head"]


def train_in_half_precision() -> dict[str, Any]:
    """bf16 in the blocks, fp32 masters and sums, a frozen bf16 block beside them, fp32 output of the root alone."""
    model = build()
    model.blocks[1].requires_grad_(False).bfloat16()
    plan = {"fsdp_plan": {"param_dtype": "bf16", "output_dtype": "fp32"}}
    apply(model, plan)
    seen: dict[str, Any] = {}
    model.blocks[2].register_forward_hook(lambda _m, inputs, output: seen.update(block=(inputs[0].dtype, output.dtype)))
    logits = model(IDS)
    logits.float().square().sum().backward()
    gradients = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
    reference = build()
    reference(IDS).square().sum().backward()
    total = dist.get_world_size() * reference.blocks[0].up.weight.grad
    error = (model.blocks[0].up.weight.grad.full_tensor() - total).abs().max() / total.abs().max()
    return {
        "block": [str(dtype) for dtype in seen["block"]],
        "output": str(logits.dtype),
        "gradients": sorted(gradients),
        "frozen": [p.grad is None for p in model.blocks[1].parameters()],
        "error": float(error),
    }


def test_mixed_precision_keeps_masters_and_sums_in_fp32():
    for found in run_ranks(2, train_in_half_precision):
        assert found["block"] == ["torch.bfloat16", "torch.bfloat16"]
        assert found["output"] == "torch.float32" and found["gradients"] == ["torch.float32"]
        assert found["frozen"] == [True] * 4
        assert found["error"] < 3e-2


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that run inside it, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"gather": 0, "reduce": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            self.counts["gather" if "gather" in name else "reduce"] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(parallel: dict[str, Any], micro_batches: int) -> dict[str, int]:
    model = apply(build(), parallel)
    with CountCollectives() as mode:
        for index in range(micro_batches):
            set_gradient_sync(model, index == micro_batches - 1)
            model(IDS).square().sum().backward()
    return mode.counts


def count_for_every_plan() -> dict[str, dict[str, int]]:
    zero2 = {"fsdp_plan": {"reshard_after_forward": False}}
    return {
        f"{name}, {n}": count_collectives(plan, n)
        for name, plan in {"zero3": {}, "zero2": zero2, "replicated": {"fully_shard_parallel_size": 1}}.items()
        for n in (1, 3)
    }


def test_accumulation_communicates_no_more_than_it_must():
    """Five units (tied ends, three blocks, root): gradients travel once a step, and with ZeRO-2 so do parameters.
    ZeRO-3 gathers its blocks anew in every pass, forward and backward."""
    counts = run_ranks(2, count_for_every_plan)[0]
    assert counts["zero3, 1"] == {"gather": 2 + 2 * 3, "reduce": 5}
    assert counts["zero3, 3"] == {"gather": 2 + 3 * 2 * 3, "reduce": 5}
    assert counts["zero2, 1"] == counts["zero2, 3"] == {"gather": 5, "reduce": 5}
    assert counts["replicated, 1"]["reduce"] == counts["replicated, 3"]["reduce"] == 5


def test_every_wrapped_module_sums():
    assert run_ranks(1, divide_factors) == [[(1.0, True)] * 5]


def test_one_process_is_wrapped_only_for_precision_or_offload():
    assert run_ranks(1, wrapped_by_plan) == [[0, 6, 6, 6]]  # the blocks, the tied pair and the root


def wrapped_by_plan() -> list[int]:
    plans = [{}, {"param_dtype": "bf16"}, {"output_dtype": "fp32"}, {"cpu_offload": True}]
    return [len(wrapped_names(apply(build(), {"fsdp_plan": plan}))) for plan in plans]


def divide_factors() -> list[tuple[float, bool]]:
    model = apply(build(), {"fsdp_plan": {"param_dtype": "fp32"}})
    states = [module._get_fsdp_state() for module in fsdp_modules(model)]
    if hasattr(states[0], "_fsdp_param_groups"):
        groups = {id(group): group for state in states for group in state._fsdp_param_groups}
    else:  # one a module, in torch 2.11
        groups = {id(state._fsdp_param_group): state._fsdp_param_group for state in states if state._fsdp_param_group}
    return [(g.gradient_divide_factor, g.force_sum_reduction_for_comms) for g in groups.values()]
