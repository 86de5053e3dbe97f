"""Expert parallelism by itself: what is refused, how parameters lie, and layers whose tokens are spread as oddly as can
be, against one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.expert.plan import (
    balance_copies,
    check_expert_plan,
    check_inside,
    cut_dim,
    expert_modules,
    is_spread,
    padding_warnings,
    resolve_expert_plan,
    size_problems,
    undivided,
)
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes, resolve_parallel_sizes
from tests.helpers import stub_deep_ep
from tests.helpers.distributed import run_ranks

WIDTH, EXPERTS, CHOICES = 8, 4, 2


class Experts(nn.Module):
    """Fused experts as transformers declares them: plain ones, or with biases and transposed weights."""

    def __init__(self, count: int = EXPERTS, width: int = WIDTH, biased: bool = False) -> None:
        super().__init__()
        self.num_experts, self.config = count, SimpleNamespace(_experts_implementation="eager")
        self.is_transposed, self.has_gate, self.has_bias = biased, False, biased
        inner, outer = (width, 2 * width) if biased else (2 * width, width)
        self.up_proj = nn.Parameter(torch.randn(count, inner, outer))
        self.down_proj = nn.Parameter(torch.randn(count, outer, inner))
        if biased:
            self.up_proj_bias = nn.Parameter(torch.randn(count, 2 * width))
            self.down_proj_bias = nn.Parameter(torch.randn(count, width))
        self.act_fn = nn.Tanh()

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.config._experts_implementation != "eager":
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            return ALL_EXPERTS_FUNCTIONS[self.config._experts_implementation](self, hidden, chosen, weights)
        return self.one_by_one(hidden, chosen, weights)

    def one_by_one(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every expert on every token."""
        none = torch.zeros(())
        up_bias, down_bias = (getattr(self, f"{name}_proj_bias", None) for name in ("up", "down"))
        outputs = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            up, down = self.up_proj[expert], self.down_proj[expert]
            up, down = (up, down) if self.is_transposed else (up.T, down.T)
            inner = self.act_fn(hidden @ up + (none if up_bias is None else up_bias[expert]))
            made = inner @ down + (none if down_bias is None else down_bias[expert])
            outputs = outputs + made * (weights * (chosen == expert)).sum(dim=1, keepdim=True)
        return outputs


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.experts = Experts(**options)

    def forward(self, *routed: torch.Tensor) -> torch.Tensor:
        return self.experts(*routed)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(**options)
        self.double()

    def forward(self, *routed: torch.Tensor) -> torch.Tensor:
        return self.block(*routed)


class OwnBlock(Experts):
    """Brings its own way: here the simplest, all tokens to all ranks."""

    def ep_forward(self, ep_group: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        from torch.distributed.nn.functional import all_gather, all_reduce

        rank, ranks = dist.get_rank(ep_group), dist.get_world_size(ep_group)
        routed = [torch.cat(all_gather(tensor, ep_group)) for tensor in (hidden, weights)]
        parts = [torch.empty_like(chosen) for _ in range(ranks)]
        dist.all_gather(parts, chosen.contiguous(), group=ep_group)
        own = SimpleNamespace(num_experts=self.num_experts // ranks, act_fn=self.act_fn, is_transposed=False)
        own.up_proj, own.down_proj = self.up_proj.to_local(), self.down_proj.to_local()
        everyone = Experts.one_by_one(own, routed[0], torch.cat(parts) - rank * own.num_experts, routed[1])
        return all_reduce(everyone, group=ep_group).chunk(ranks)[rank]


# --- layers on ranks -------------------------------------------------------------------------------------------------

ROUTINGS = {  # tokens of each rank, and which experts they choose
    "uneven tokens": ((5, 2), None),
    "one expert has all": ((4, 3), (2, 3)),
    "nobody goes to the other rank": ((3, 3), "own"),
    "a rank without tokens": ((6, 0), None),
    "nobody has tokens": ((0, 0), None),
}
WAYS = {
    "alltoall": {},
    "allgather": {"ep_plan": {"dispatcher": "allgather"}},
    "deepep": {"ep_plan": {"dispatcher": "deepep"}},
    "balance": {},
}


def routed(tokens: tuple[int, ...], fixed: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for rank, count in enumerate(tokens):
        hidden = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
        weights = torch.rand(count, CHOICES, generator=generator, dtype=torch.float64)
        chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(count)] or
                             [torch.empty(CHOICES, dtype=torch.long)])[:count]  # fmt: skip
        if fixed == "own":
            chosen = torch.tensor([[2 * rank, 2 * rank + 1]]).repeat(count, 1)
        elif fixed is not None:
            chosen = torch.tensor([fixed]).repeat(count, 1)
        made.append((hidden, chosen, weights))
    return made


def step(model: nn.Module, mine: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    hidden, chosen, weights = mine
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    output = model(hidden, chosen, weights)
    (output * torch.arange(1.0, WIDTH + 1)).sum().backward()
    found = {"output": output.detach(), "of hidden": hidden.grad, "of weights": weights.grad}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def run_layers() -> dict[str, Any]:
    """Every routing by every way, on this rank; and how the parameters lie."""
    found: dict[str, Any] = {}
    stub_deep_ep.install()
    stub_deep_ep.ROWS = torch.float64
    found["in bf16"] = run_deepep_in_bf16()
    for way, options in WAYS.items():
        for biased in (False, True):
            parallel = ParallelArguments.model_validate({"expert_parallel_size": 2, **options})
            init_parallel_state(resolve_parallel_sizes(parallel, 2), "cpu")
            model = Model(biased=biased)
            applier = ParallelApplier(parallel, shard_modules=["block"], expert_copies=2 if way == "balance" else 0)
            with mock.patch("mindspeed_mm.fsdp.distributed.expert.plan.check_expert_plan"):
                applier(model)
            for name, (tokens, fixed) in ROUTINGS.items():
                model.zero_grad()
                found[f"{way}, {name}, {biased}"] = step(model, routed(tokens, fixed)[dist.get_rank()])
            found["placements"] = [str(placement) for placement in model.block.experts.up_proj.placements]
            found["line"] = applier.plan.experts.describe()
            destroy_parallel_state()
    found["own"] = run_own_forward()
    found["buffers"] = stub_deep_ep.Buffer.made
    return found


def run_deepep_in_bf16() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same step by DeepEP, which takes nothing else, and by `alltoall`."""
    found = []
    for dispatcher in ("deepep", "alltoall"):
        parallel = ParallelArguments.model_validate(
            {
                "expert_parallel_size": 2,
                "ep_plan": {"dispatcher": dispatcher},
                "fsdp_plan": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
            }
        )
        init_parallel_state(resolve_parallel_sizes(parallel, 2), "cpu")
        model = Model().float()
        on_cuda = mock.patch("mindspeed_mm.fsdp.distributed.expert.plan.get_device_type", lambda: "cuda")
        is_installed = mock.patch("importlib.util.find_spec", lambda name: name)
        rows = mock.patch.object(stub_deep_ep, "ROWS", torch.bfloat16)
        with on_cuda, is_installed, rows:
            ParallelApplier(parallel, shard_modules=["block"])(model)
            hidden, chosen, weights = routed((5, 2), None)[dist.get_rank()]
            found.append(step(model, (hidden.bfloat16(), chosen, weights.bfloat16())))
        destroy_parallel_state()
    return found[0], found[1]


def run_own_forward() -> dict[str, torch.Tensor]:
    parallel = ParallelArguments.model_validate({"expert_parallel_size": 2})
    init_parallel_state(resolve_parallel_sizes(parallel, 2), "cpu")
    model = own_model()
    ParallelApplier(parallel, shard_modules=["block"])(model)
    found = step(model, routed((3, 3), None)[dist.get_rank()])
    destroy_parallel_state()
    return found


def own_model() -> Model:
    model = Model()
    torch.manual_seed(3)
    model.block.experts = OwnBlock().double()
    return model


@cache
def layers() -> list[dict[str, Any]]:
    return run_ranks(2, run_layers)


def compare(
    model: nn.Module, tokens: tuple[int, ...], fixed: Any, found: list[dict[str, torch.Tensor]], rtol: float = 1e-12
) -> None:
    parts = routed(tokens, fixed)
    everyone = tuple(torch.cat(list(column)) for column in zip(*parts, strict=True))
    expected = step(model, everyone)
    for key in ("output", "of hidden", "of weights"):
        torch.testing.assert_close(torch.cat([own[key] for own in found]), expected.pop(key), rtol=rtol, atol=rtol)
    for own in found:
        for name, gradient in expected.items():
            torch.testing.assert_close(own[name], gradient, rtol=rtol, atol=10 * rtol)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_layer_equals_one_process(way: str, name: str, biased: bool) -> None:
    found = [rank[f"{way}, {name}, {biased}"] for rank in layers()]
    # DeepEP takes the router's weights in fp32.
    compare(Model(biased=biased), *ROUTINGS[name], found, 1e-6 if way == "deepep" else 1e-12)


def test_deepep_in_bf16_is_near_alltoall_and_has_one_buffer_a_model() -> None:
    for rank in layers():
        own, other = rank["in bf16"]
        for name, value in other.items():
            assert own[name].dtype == value.dtype, name
            torch.testing.assert_close(own[name], value, rtol=0.05, atol=0.05 * float(value.abs().max()))
        assert rank["buffers"] == 3  # of the step in bf16, and of the two models of every routing


def test_a_model_s_own_forward_is_used() -> None:
    compare(own_model(), (3, 3), None, [rank["own"] for rank in layers()])


def test_the_log_names_sizes_above_one() -> None:
    plan = plan_of(Model(), ranks=8, fully_shard_parallel_size=4)
    assert plan.describe() == (
        "4 experts × 1 layers, 2 on a rank, alltoall over ep 2, each cut over efsdp 2, edp 2 copies"
    )
    assert not is_spread(ParallelArguments.model_validate({"expert_fully_shard_parallel_size": 1}))


def test_parameters_lie_by_expert_and_the_log_says_so() -> None:
    assert layers()[0]["placements"] == [str(Shard(1)), str(Shard(0))]
    assert layers()[0]["line"] == "4 experts × 1 layers, 2 on a rank, alltoall over ep 2, up to 2 busy ones more"


# --- what is refused -------------------------------------------------------------------------------------------------


def plan_of(model: nn.Module, ranks: int = 2, copies: int = 0, **options: Any) -> Any:
    parallel = ParallelArguments.model_validate({"expert_parallel_size": 2, **options})
    return resolve_expert_plan(model, parallel, resolve_parallel_sizes(parallel, ranks), copies)


def test_experts_that_ranks_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"parallel.expert_parallel_size  4 does not divide the 6 experts of b") as e:
        plan_of(Model(count=6), ranks=4, expert_parallel_size=4)
    assert "Nearest sizes that do: 2, 3, 6." in str(e.value)
    assert [p.what for p in size_problems({"a": 128, "b": 128, "c": 60}, 16)] == [
        "16 does not divide the 60 experts of c"
    ]


def test_widths_that_ranks_do_not_divide() -> None:
    assert plan_of(Model(width=6, count=8), ranks=6, expert_fully_shard_parallel_size=3).sizes.efsdp == 3
    with pytest.raises(ConfigError, match=r"5 ranks cannot cut block\.experts\.up_proj \(8 × 16 × 8, 2 ways by expert"):
        plan_of(Model(count=8), ranks=10)


@pytest.mark.parametrize(
    ("shape", "ep", "shards", "dim"),
    [((8, 32, 16), 2, 4, 1), ((8, 30, 16), 2, 4, 2), ((8, 30, 15), 2, 4, 0), ((8, 30, 15), 4, 4, None),
     ((8, 30), 2, 3, 1), ((8, 30), 2, 4, 0), ((128, 1536, 2048), 1, 1024, 2), ((128, 1536, 768), 1, 1024, None)],
)  # fmt: skip
def test_dimension_that_is_cut(shape: tuple[int, ...], ep: int, shards: int, dim: int | None) -> None:
    assert cut_dim(shape, ep, shards) == dim


def test_patterns_name_expert_modules() -> None:
    model = Model()
    plans = ParallelArguments.model_validate({"ep_plan": {"apply_modules": ["block.experts"]}}).ep_plan
    assert expert_modules(model, plans) == ["block.experts"] == expert_modules(model, ParallelArguments().ep_plan)
    with pytest.raises(ConfigError, match="'block' holds no fused experts") as error:
        plan_of(model, ep_plan={"apply_modules": ["block"]})
    assert "such as 'block.experts'" in str(error.value)
    with pytest.raises(ConfigError, match=r"parallel\.ep_plan\.apply_modules"):
        plan_of(model, ep_plan={"apply_modules": ["blocks.*"]})
    with pytest.raises(ConfigError, match="Linear has no experts in fused parameters"):
        plan_of(nn.Linear(2, 2))


def test_the_same_modules_are_sharded() -> None:
    assert plan_of(Model(), ep_plan={"apply_efsdp_modules": ["block.experts"]}).modules == ("block.experts",)
    with pytest.raises(ConfigError, match="apply_efsdp_modules  'block'"):
        plan_of(Model(), ep_plan={"apply_efsdp_modules": ["block"]})


def test_a_parameter_that_is_no_expert_s() -> None:
    model = Model()
    model.block.experts.norm = nn.LayerNorm(WIDTH)
    with pytest.raises(ConfigError, match=r"block\.experts\.norm\.weight \(8,\) is not one of 4 experts"):
        plan_of(model)


def test_expert_modules_lie_inside_wrapped_ones() -> None:
    check_inside(["block.experts"], lambda name: name.startswith("block"))
    with pytest.raises(ConfigError, match=r"the expert module 'layers\.0\.mlp\.experts' lies in no module") as error:
        check_inside(["layers.0.mlp.experts", "layers.1.mlp.experts"], lambda name: False)
    assert "nor do 1 more" in str(error.value) and "'layers.0'" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"ep_plan": {"dispatcher": "mc2"}}, "'mc2' needs NPU devices, and this machine computes on cpu"),
     ({"ep_plan": {"dispatcher": "deepep"}}, "'deepep' needs CUDA devices, and this machine computes on cpu")],
)  # fmt: skip
def test_what_cannot_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_expert_plan(ParallelArguments.model_validate({"expert_parallel_size": 2, **options}))
    assert "Choose alltoall or allgather" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "sends rows in bf16, and fsdp_plan.param_dtype is fp32"),
        ({"fsdp_plan": {"param_dtype": "bf16"}, "expert_parallel_size": 6}, "has kernels for groups of 2, 4, 8, 16"),
        ({"fsdp_plan": {"param_dtype": "bf16"}}, ""),
    ],
)
def test_deepep_says_what_it_takes(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "mindspeed_mm.fsdp.distributed.expert.plan"
    monkeypatch.setattr(f"{where}.get_device_type", lambda: "cuda")
    monkeypatch.setattr(f"{where}.importlib.util.find_spec", lambda name: name)
    given = {"expert_parallel_size": 2, "ep_plan": {"dispatcher": "deepep"}}
    parallel = ParallelArguments.model_validate(given | options)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_expert_plan(parallel)


@pytest.mark.parametrize(
    ("device", "package", "message"),
    [("npu", None, "needs the package torch_npu"), ("npu", "found", "'mc2' is not supported yet")],
)
def test_options_of_accelerators_say_what_is_missing(
    device: str, package: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "mindspeed_mm.fsdp.distributed.expert.plan"
    monkeypatch.setattr(f"{where}.get_device_type", lambda: device)
    monkeypatch.setattr(f"{where}.importlib.util.find_spec", lambda name: package)
    with pytest.raises(ConfigError, match=message):
        check_expert_plan(ParallelArguments.model_validate({"ep_plan": {"dispatcher": "mc2"}}))


def features(**options: Any) -> FeatureArguments:
    return FeatureArguments.model_validate(options)


def test_balance_needs_ranks_and_a_dispatcher_that_can() -> None:
    spread = ParallelArguments.model_validate({"expert_parallel_size": 2})
    assert balance_copies(features(), spread) == 0
    assert balance_copies(features(enable_ep_balance=True), spread) == 2
    with pytest.raises(ConfigError, match=r"enable_ep_balance  true, but parallel\.expert_parallel_size is 1"):
        balance_copies(features(enable_ep_balance=True), ParallelArguments())
    gathered = ParallelArguments.model_validate({"expert_parallel_size": 2, "ep_plan": {"dispatcher": "allgather"}})
    with pytest.raises(ConfigError, match="'allgather' cannot do"):
        balance_copies(features(enable_ep_balance=True), gathered)


# --- without expert parallelism ---------------------------------------------------------------------------------------


def test_experts_are_not_padded_where_another_dimension_divides() -> None:
    model = Model()
    assert list(undivided(model, 4)) == [] and padding_warnings(model, 4) == []
    assert {name: dim for name, _, dim in undivided(model, 8)} == {
        "block.experts.up_proj": 1,
        "block.experts.down_proj": 1,
    }
    assert padding_warnings(model, 8) == []
    (warning,) = padding_warnings(model, 1024)
    assert "4 experts on 1024 ranks are padded, 256.0 times the memory and traffic" in warning
    assert "set parallel.expert_parallel_size" in warning


def test_128_experts_on_1024_ranks() -> None:
    with torch.device("meta"):
        big = Experts(count=128, width=768)
    model = nn.ModuleDict({"experts": big})
    (warning,) = padding_warnings(model, 1024)
    assert "128 experts on 1024 ranks are padded, 8.0 times" in warning


def shard_over_more_ranks_than_experts() -> Any:
    init_parallel_state(ParallelSizes(4, 1, 1, 4, 1, 1, 1, 1, 4, 1), "cpu")
    model = Model(count=2)
    applier = ParallelApplier(ParallelArguments(), shard_modules=["block"])
    applier(model)
    shape, placements = list(model.block.experts.up_proj.to_local().shape), model.block.experts.up_proj.placements
    found = step(model, routed((2, 2, 2, 2), (0, 1))[dist.get_rank()])
    destroy_parallel_state()
    return {
        "shape": shape,
        "placements": [str(p) for p in placements],
        "found": found,
        "warnings": list(applier.plan.warnings),
    }


def test_fewer_experts_than_ranks_are_cut_on_the_next_dimension() -> None:
    ranks = run_ranks(4, shard_over_more_ranks_than_experts)
    assert ranks[0]["shape"] == [2, 4, 8] and ranks[0]["placements"] == [str(Shard(1))] and not ranks[0]["warnings"]
    compare(Model(count=2), (2, 2, 2, 2), (0, 1), [rank["found"] for rank in ranks])
