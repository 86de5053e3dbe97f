"""The norm of gradients on any mix of meshes is that of the whole tensors, equal on every rank, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.fsdp.optimizer.clip_grad import clip_grads_, grad_norm
from tests.helpers.distributed import run_ranks

SHAPES = [(5, 4), (8, 2), (3,), (6, 4), (2, 2), (7,)]
"""Uneven over every group, smaller than the group, and even."""
WITHOUT_GRADIENT = 5


class ForbidHostSync(TorchDispatchMode):
    """Raises when a tensor is read on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            raise AssertionError("a tensor was read on the host")
        return func(*args, **(kwargs or {}))


def full_gradients(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters_on(layouts: Sequence[Any], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """One parameter a layout: None for a plain tensor, or (mesh, placements)."""
    parameters = []
    for index, (layout, gradient) in enumerate(zip(layouts, full_gradients(dtype), strict=True)):
        place = (lambda t: t.clone()) if layout is None else (lambda t, at=layout: distribute_tensor(t, at[0], at[1]))
        parameter = nn.Parameter(place(torch.zeros_like(gradient)))
        if index != WITHOUT_GRADIENT:
            parameter.grad = place(gradient)
        parameters.append(parameter)
    return parameters


def measure_on_mixed_meshes() -> dict[str, Any]:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [
        (flat, [Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        None,
        (grid, [Shard(0), Shard(1)]),
        (flat, [Shard(0)]),
        (grid["dp"], [Shard(0)]),
    ]
    parameters = parameters_on(layouts)
    with ForbidHostSync():
        norm = grad_norm(parameters)
        clip_grads_(parameters, norm, 0.5, foreach=True)
    clipped = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    # One rank has a gradient that the others lack: nobody may wait for the rest.
    parameters[0].grad = parameters[0].grad if dist.get_rank() == 0 else None
    return {"norm": norm, "clipped": clipped, "with_holes": grad_norm(parameters), "plain": type(norm) is torch.Tensor}


@pytest.fixture(scope="module")
def mixed() -> list[dict[str, Any]]:
    return run_ranks(4, measure_on_mixed_meshes)


def expected() -> tuple[list[torch.Tensor], torch.Tensor]:
    gradients = full_gradients()[:WITHOUT_GRADIENT]
    return gradients, torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))


def test_norm_over_mixed_meshes_is_that_of_the_whole_tensors(mixed):
    _, norm = expected()
    for result in mixed:
        assert result["plain"]
        torch.testing.assert_close(result["norm"], norm, rtol=1e-14, atol=0)


def test_norm_is_equal_on_all_ranks_to_the_bit(mixed):
    assert all(torch.equal(result["norm"], mixed[0]["norm"]) for result in mixed)
    assert all(torch.equal(result["with_holes"], mixed[0]["with_holes"]) for result in mixed)


def test_clipping_scales_every_gradient(mixed):
    gradients, norm = expected()
    for result in mixed:
        for gradient, clipped in zip(gradients, result["clipped"], strict=True):
            torch.testing.assert_close(clipped, gradient * (0.5 / (norm + 1e-6)), rtol=1e-14, atol=0)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_plain_parameters_clip_as_torch_does(foreach, dtype, max_norm):
    ours, theirs = (parameters_on([None] * len(SHAPES), dtype) for _ in range(2))
    norm = grad_norm(ours)
    clip_grads_(ours, norm, max_norm, foreach=foreach)
    torch_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm, torch_norm.to(norm.dtype), rtol=tolerance, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=0)


def test_nothing_to_measure_is_zero():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert grad_norm([frozen]) == 0
    assert grad_norm([nn.Parameter(torch.ones(2))]) == 0
    assert grad_norm([]) == 0


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    (parameter,) = [nn.Parameter(torch.ones(2))]
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert torch.isnan(grad_norm([parameter]))
