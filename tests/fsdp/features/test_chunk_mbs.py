"""Modules that take a few rows at a time give the same loss and gradients, and are gathered once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.memory import chunk_mbs
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.fsdp.features.dropout_models import Step, full, kept_bytes
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3

ROWS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def qwen3(folder: Path, **options: bool) -> tuple[nn.Module, Step]:
    """Rows of different lengths, padded in front, so that the mask matters."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float64)
    tokens = torch.randint(10, 60, (ROWS, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) >= torch.tensor([0, 4, 2, 0, 6])[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "use_cache": False, **options}
    return model, lambda model: (model(**batch).logits * mask[..., None]).square().mean()


def wan() -> tuple[nn.Module, Step]:
    from tests.fsdp.features import dropout_models

    model, _ = dropout_models.wan()
    noise = torch.Generator().manual_seed(1)
    batch = {
        "hidden_states": torch.randn(ROWS, 4, 3, 8, 8, generator=noise, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(ROWS, 5, 8, generator=noise, dtype=torch.float64),
        "timestep": torch.linspace(100, 900, ROWS, dtype=torch.float64),
    }
    return model.double(), lambda model: model(**batch, return_dict=False)[0].square().mean()


def flux() -> tuple[nn.Module, Step]:
    from tests.fsdp.features import dropout_models

    model, _ = dropout_models.flux()
    noise = torch.Generator().manual_seed(1)
    batch = {
        "hidden_states": torch.randn(ROWS, 16, 4, generator=noise, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(ROWS, 7, 12, generator=noise, dtype=torch.float64),
        "pooled_projections": torch.randn(ROWS, 6, generator=noise, dtype=torch.float64),
        "timestep": torch.linspace(0.1, 0.9, ROWS, dtype=torch.float64),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return model.double(), lambda model: model(**batch, return_dict=False)[0].square().mean()


TEXT = {"chunk_kwarg_names": ["attention_mask", "position_ids", "position_embeddings"]}
PLANS: dict[str, dict[str, Any]] = {
    "qwen3": TEXT,
    "wan": {"chunk_arg_indexs": [0, 1, 2]},
    "flux": {"chunk_arg_indexs": [0, 1, 2]},  # which diffusers hands over by name
}


def build(kind: str, folder: Path) -> tuple[nn.Module, Step]:
    return {"qwen3": lambda: qwen3(folder), "wan": wan, "flux": flux}[kind]()


def sliced(model: nn.Module, others: dict[str, Any] | None = None, **plan: Any) -> nn.Module:
    features = FeatureArguments.model_validate({"enable_chunk_mbs": True, "chunkmbs_plan": plan, **(others or {})})
    return FeaturesApplier(features, find_blocks(model))(model)


def outcome(model: nn.Module, step: Step) -> dict[str, torch.Tensor]:
    with keeping_double():
        loss = step(model)
        loss.backward()
    return {"loss": full(loss), **{n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}}


def largest_deviation(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("kind", PLANS)
def test_loss_and_gradients_are_the_same(kind: str, size: int, folder: Path) -> None:
    plain = outcome(*build(kind, folder))
    model, step = build(kind, folder)
    names = [name for name, _ in model.named_parameters()]
    assert largest_deviation(plain, outcome(sliced(model, chunk_mbs=size, **PLANS[kind]), step)) < 1e-12
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("others", [{"recompute": True}, {"enable_activation_offload": True}], ids=str)
def test_with_other_features(others: dict[str, Any], folder: Path) -> None:
    plain = outcome(*build("qwen3", folder))
    model, step = build("qwen3", folder)
    assert largest_deviation(plain, outcome(sliced(model, others, chunk_mbs=2, **TEXT), step)) < 1e-12


def test_a_mask_of_other_rows_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = outcome(*build("qwen3", folder))
    real = chunk_mbs.SlicedForward._cut

    def of_the_first_rows(self: Any, value: Any, start: int) -> Any:
        is_mask = isinstance(value, torch.Tensor) and value.dtype == torch.bool
        return real(self, value, 0 if is_mask else start)

    monkeypatch.setattr(chunk_mbs.SlicedForward, "_cut", of_the_first_rows)
    model, step = build("qwen3", folder)
    assert largest_deviation(plain, outcome(sliced(model, chunk_mbs=1, **TEXT), step)) > 1e-6


def test_no_cache_is_filled_with_the_rows_of_other_slices(folder: Path) -> None:
    plain = outcome(*qwen3(folder))
    model, step = qwen3(folder, use_cache=True)
    assert largest_deviation(plain, outcome(sliced(model, chunk_mbs=2, **TEXT), step)) < 1e-12


class Parts(nn.Module):
    """Takes and returns more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor, pair: Any = None, flag: bool = False) -> Any:
        self.calls.append(len(x))
        return self.linear(x), {"again": (x + pair["a"], None), "flag": flag}


def test_trees_go_in_and_come_out() -> None:
    whole, parts = Parts(), Parts()
    parts.load_state_dict(whole.state_dict())
    model = nn.ModuleDict({"block": parts})
    plan = FeatureArguments.model_validate(
        {"chunkmbs_plan": {"chunk_mbs": 2, "chunk_arg_indexs": [0, 1]}}
    ).chunkmbs_plan
    chunk_mbs.run_in_slices(model, ["block"], plan)
    x, pair = torch.randn(5, 3, dtype=torch.float64), {"a": torch.randn(5, 3, dtype=torch.float64), "b": [1]}
    one, other = whole(x, pair, flag=True), parts(x, pair, flag=True)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
    assert parts.calls == [2, 2, 1] and other[1]["flag"] is True and other[1]["again"][1] is None
    with torch.no_grad():
        parts(x, pair)
    assert parts.calls[3:] == [5]


def test_less_is_held_while_a_module_is_computed_again(folder: Path) -> None:
    model, step = build("qwen3", folder)
    slices = sliced(build("qwen3", folder)[0], {"recompute": True}, chunk_mbs=1, **TEXT)
    assert kept_bytes(slices, step) < 0.6 * kept_bytes(model, step)


# --- sharded ----------------------------------------------------------------------------------------------------------


def sharded(folder: str, size: int | None, recompute: bool) -> tuple[dict[str, torch.Tensor], int, int]:
    parallel = ParallelArguments.model_validate({"fsdp_plan": {"param_dtype": "fp64"}})
    init_parallel_state(resolve_parallel_sizes(parallel, dist.get_world_size()), "cpu")
    model, step = build("qwen3", Path(folder))
    blocks = find_blocks(model)
    features = {
        "recompute": recompute,
        "enable_chunk_mbs": size is not None,
        "chunkmbs_plan": {"chunk_mbs": size or 1, **TEXT},
    }
    FeaturesApplier(FeatureArguments.model_validate(features), blocks).pre_fully_shard_apply(model)
    ParallelApplier(parallel, shard_modules=blocks, tie_groups=[["lm_head", "model.embed_tokens"]])(model)
    runs = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    with Gathers() as seen:
        found = outcome(model, step)
    destroy_parallel_state()
    return found, seen.count, len(runs)


class Gathers(TorchDispatchMode):
    """Counts collectives that gather."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in str(operation).replace("_", "")
        return operation(*args, **(kwargs or {}))


def plain_and_sliced(folder: str) -> list[tuple[float, int, int, int, int]]:
    found = []
    for recompute in (False, True):
        plain, *counts = sharded(folder, None, recompute)
        slices, *others = sharded(folder, 2, recompute)
        found.append((largest_deviation(plain, slices), *counts, *others))
    return found


def test_a_sharded_module_is_gathered_once(folder: Path) -> None:
    for cases in run_ranks(2, plain_and_sliced, str(folder)):
        for deviation, gathers, runs, gathers_of_slices, runs_of_slices in cases:
            assert deviation < 1e-12
            assert gathers_of_slices == gathers > 0
            assert runs_of_slices == 3 * runs


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "plan", "message", "key"),
    [
        (
            "qwen3",
            {},
            r"argument 'attention_mask' of 'model.layers.0' has the shape \(5, 1, 9, 9\)",
            "chunk_kwarg_names",
        ),
        ("qwen3", {"chunk_kwarg_names": ["attention_mask"]}, "argument 'position_", "chunk_kwarg_names"),
        ("wan", {}, "argument 1 of 'blocks.0' has the shape", "chunk_arg_indexs"),
        ("wan", {"chunk_arg_indexs": [0, 1, 2, 9]}, "9 is not an argument of 'blocks.0'", "chunk_arg_indexs"),
        ("wan", {"chunk_arg_indexs": [-1]}, "-1 is not an argument", "chunk_arg_indexs"),
        ("wan", {"chunk_kwarg_names": ["mask"]}, "'mask' is not an argument of 'blocks.0'", "chunk_kwarg_names"),
        ("wan", {"apply_modules": ["blocks"]}, "never called itself", "apply_modules"),
        ("wan", {"apply_modules": ["layers.{*}"]}, "matches no module", "apply_modules"),
        ("wan", {"chunk_arg_indexs": []}, "none of the arguments", "chunk_arg_indexs"),
        ("wan", {"chunk_arg_indexs": [0, 1, 2, 3], "batch_dim": 1}, "has the shape", "chunk_arg_indexs"),
    ],
)
def test_refused(kind: str, plan: dict[str, Any], message: str, key: str, folder: Path) -> None:
    model, step = build(kind, folder)
    with pytest.raises(ConfigError, match=message) as caught:
        step(sliced(model, chunk_mbs=2, **plan))
    assert f"features.chunkmbs_plan.{key}" in str(caught.value)


def test_pieces_of_packed_rows_are_refused() -> None:
    model = nn.ModuleDict({"block": Borders()})
    chunk_mbs.run_in_slices(model, ["block"], FeatureArguments().chunkmbs_plan)
    with pytest.raises(ConfigError, match="parts that belong together"):
        model["block"](torch.ones(6, 3), cu_seqlens=torch.tensor([0, 2, 6]))


class Borders(nn.Module):
    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return x


def test_outputs_without_rows_are_refused() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    model = nn.ModuleDict({"block": Mean()})
    chunk_mbs.run_in_slices(model, ["block"], FeatureArguments().chunkmbs_plan)
    with pytest.raises(ConfigError, match="has no rows along 0"):
        model["block"](torch.ones(6, 3))
