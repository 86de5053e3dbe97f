"""Muon equals torch's on plain matrices, takes each expert and each projection by itself, and leaves the rest to
AdamW; on shards it equals itself on whole matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.optimizer import muon
from mindspeed_mm.fsdp.optimizer.groups import matrices
from mindspeed_mm.fsdp.optimizer.muon import Muon, orthogonal
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import full
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl

OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "steps": 5, "matched_rms": 0.2}


def group(parameters: list[torch.Tensor], count: int = 1) -> dict[str, Any]:
    return {"params": parameters, "matrices": count}


def muon_on(groups: list[dict[str, Any]], **changes: Any) -> Muon:
    names = {p: str(n) for n, p in enumerate(p for g in groups for p in g["params"])}
    return Muon(groups, names, **OPTIONS | changes)


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stepped(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = draw(*parameter.shape, seed=10 * step + number + 1)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize(("matched", "theirs"), [(0.2, "match_rms_adamw"), (0.0, "original")])
@pytest.mark.parametrize("size", [(6, 10), (12, 5), (7, 7)])
def test_equals_torch(size: tuple[int, int], matched: float, theirs: str) -> None:
    ours, other = (nn.Parameter(draw(*size)) for _ in range(2))
    reference = torch.optim.Muon([other], lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn=theirs)
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # torch iterates in bf16 everywhere
        expected = stepped([other], reference)
    found = stepped([ours], muon_on([group([ours])], matched_rms=matched))
    assert (found[0] - expected[0]).abs().max() < 1e-12
    assert (found[0] - draw(*size)).abs().max() > 0.1


def test_singular_values_end_near_one() -> None:
    assert torch.linalg.svdvals(orthogonal(draw(20, 30), 5)).sub(1).abs().max() < 0.4
    assert torch.linalg.svdvals(orthogonal(draw(3, 20, 8), 10)).sub(1).abs().max() < 0.4
    assert orthogonal(torch.zeros(4, 4), 5).abs().max() == 0


def test_experts_are_matrices_of_their_own() -> None:
    fused = nn.Parameter(draw(4, 12, 5))
    apart = [nn.Parameter(half.clone()) for expert in fused.detach() for half in expert.chunk(2)]
    optimizer, reference = muon_on([group([fused], 2)]), muon_on([group(apart)])
    for seed in range(3):
        fused.grad = draw(4, 12, 5, seed=seed + 1)
        for number, half in enumerate(apart):
            half.grad = fused.grad[number // 2].chunk(2)[number % 2].clone()
        optimizer.step()
        reference.step()
    expected = torch.stack([half.detach() for half in apart]).view(4, 12, 5)
    assert (fused - expected).abs().max() < 1e-12
    whole = nn.Parameter(draw(4, 12, 5))
    assert (stepped([whole], muon_on([group([whole], 1)]), 1)[0] - expected).abs().max() > 1e-3  # the control


def test_few_matrices_at_a_time_are_the_same() -> None:
    parameters = [nn.Parameter(draw(6, 8, 4)) for _ in range(2)]
    expected = stepped(parameters[:1], muon_on([group(parameters[:1])]))
    with mock.patch.object(muon, "AT_A_TIME_BYTES", 8 * 4 * 8 * 2):
        assert torch.allclose(stepped(parameters[1:], muon_on([group(parameters[1:])]))[0], expected[0], atol=1e-14)


def test_the_rest_is_adamw_and_what_has_no_gradient_stays() -> None:
    matrix, vector, idle = nn.Parameter(draw(4, 4)), nn.Parameter(draw(5)), nn.Parameter(draw(3, 3))
    other = nn.Parameter(vector.detach().clone())
    optimizer = muon_on([group([matrix, idle]), group([vector], 0)])
    reference = torch.optim.AdamW([other], lr=0.1, weight_decay=0.2)
    for parameter in (vector, other, matrix):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    reference.step()
    assert torch.equal(vector, other)
    assert torch.equal(idle, draw(3, 3)) and not optimizer.state.get(idle)
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}


# --- which are matrices ----------------------------------------------------------------------------------------------


def names_of(model: nn.Module) -> dict[str, int]:
    return matrices(model, {name for name, _ in model.named_parameters()})


def test_matrices_of_a_mixture_of_experts(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny_qwen3_moe(tmp_path, num_hidden_layers=1))
    prefix = "model.layers.0"
    assert names_of(model) == {
        **{f"{prefix}.self_attn.{name}_proj.weight": 1 for name in "qkvo"},
        f"{prefix}.mlp.gate.weight": 1,
        f"{prefix}.mlp.experts.gate_up_proj": 2,
        f"{prefix}.mlp.experts.down_proj": 1,
    }


def test_matrices_of_a_vision_language_model(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(make_tiny_qwen3_vl(tmp_path))
    found = names_of(model)
    outside = {name for name, p in model.named_parameters() if p.ndim > 1} - found.keys()
    assert all(p.ndim == 2 for name, p in model.named_parameters() if name in found)
    assert {"model.language_model.embed_tokens.weight", "lm_head.weight"} & outside
    assert {"model.visual.patch_embed.proj.weight", "model.visual.pos_embed.weight"} <= outside
    assert {name.split(".")[-2] for name in found if "visual" in name} == {"qkv", "proj", "linear_fc1", "linear_fc2"}


def test_no_matrix_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"training\.optimizer.*no matrix"):
        names_of(nn.Linear(3, 3))


# --- on shards -------------------------------------------------------------------------------------------------------

SIZES = [(6, 10), (6, 10), (6, 10), (5, 8), (3, 4), (6, 10), (8, 12, 5), (2, 9, 4), (4, 6)]
LAYOUTS = {
    "rows": lambda n: [Shard(0)],
    "experts, cut inside": lambda n: [Shard(n - 2)],
    "columns": lambda n: [Shard(n - 1)],
    "copies": lambda n: [Replicate()],
}
GRIDS = {
    "copies of rows": lambda n: [Replicate(), Shard(n - 2)],
    "experts over one, rows over the other": lambda n: [Shard(0), Shard(n - 2)],
    "rows and columns": lambda n: [Shard(n - 2), Shard(n - 1)],
    "rows twice": lambda n: [Shard(n - 2), Shard(n - 2)],
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Numbers in the whole matrices that this rank worked on."""
    worked: list[int] = []
    real = Muon._direction

    def direction(self: Muon, whole: torch.Tensor, count: int) -> torch.Tensor:
        worked.append(whole.numel())
        return real(self, whole, count)

    with mock.patch.object(Muon, "_direction", direction):
        yield worked


def on_shards(ranks: int, layouts: Any, *, at_a_time: int) -> dict[str, Any]:
    """Steps under every layout, on every rank."""
    mesh = init_device_mesh(
        "cpu", (ranks,) if ranks < 4 else (2, 2), mesh_dim_names=("a", "b")[: 1 if ranks < 4 else 2]
    )
    found: dict[str, Any] = {}
    for name in layouts:
        place = (LAYOUTS | GRIDS)[name]
        parameters = [
            nn.Parameter(distribute_tensor(draw(*size, seed=n), mesh, place(len(size)))) for n, size in enumerate(SIZES)
        ]
        optimizer = muon_on([group(parameters[:-1]), group(parameters[-1:], 2)])
        with counted() as worked, mock.patch.object(muon, "AT_A_TIME_BYTES", at_a_time):
            for step in range(2):
                for number, (parameter, size) in enumerate(zip(parameters, SIZES, strict=True)):
                    # One has no gradient at first, on all ranks alike.
                    gradient = draw(*size, seed=100 * step + number)
                    parameter.grad = (
                        None if number == 3 and not step else distribute_tensor(gradient, mesh, place(len(size)))
                    )
                optimizer.step()
        found[name] = {"weights": [full(p) for p in parameters], "worked": sum(worked)}
    return found


def whole() -> list[torch.Tensor]:
    parameters = [nn.Parameter(draw(*size, seed=n)) for n, size in enumerate(SIZES)]
    optimizer = muon_on([group(parameters[:-1]), group(parameters[-1:], 2)])
    for step in range(2):
        for number, (parameter, size) in enumerate(zip(parameters, SIZES, strict=True)):
            parameter.grad = None if number == 3 and not step else draw(*size, seed=100 * step + number)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize(("ranks", "at_a_time"), [(2, 1 << 20), (3, 1)])
def test_shards_equal_whole_matrices(ranks: int, at_a_time: int) -> None:
    expected = whole()
    everything = sum(e.numel() for e in expected) * 2 - expected[3].numel()
    for results in zip(*(r.items() for r in run_ranks(ranks, shards_of_one_axis, ranks, at_a_time)), strict=True):
        for name, result in results:
            for one, other in zip(result["weights"], expected, strict=True):
                assert (one - other).abs().max() < 1e-12, name
        if results[0][0] != "copies":  # no matrix is worked on twice
            assert sum(result["worked"] for _, result in results) == everything


def shards_of_one_axis(ranks: int, at_a_time: int) -> dict[str, Any]:
    return on_shards(ranks, LAYOUTS, at_a_time=at_a_time)


@pytest.mark.slow
def test_grids_equal_whole_matrices() -> None:
    expected = whole()
    for found in run_ranks(4, shards_of_two_axes):
        for name, result in found.items():
            for one, other in zip(result["weights"], expected, strict=True):
                assert (one - other).abs().max() < 1e-12, name


def shards_of_two_axes() -> dict[str, Any]:
    return on_shards(4, GRIDS, at_a_time=1 << 20)


def test_parts_that_are_mixed_up_are_seen() -> None:
    """The control: what the others worked on comes back in the wrong order."""
    for found in run_ranks(2, mixed_up):
        assert max((one - other).abs().max() for one, other in zip(found, whole(), strict=True)) > 1e-3


def mixed_up() -> list[torch.Tensor]:
    real = muon.exchange_parts

    def shifted(outgoing: Any, *rest: Any) -> list[torch.Tensor]:
        return real([part.flatten().roll(1) for part in outgoing], *rest)

    with mock.patch.object(muon, "exchange_parts", shifted):
        assert dist.get_world_size() == 2
        return on_shards(2, ["rows"], at_a_time=1 << 20)["rows"]["weights"]
