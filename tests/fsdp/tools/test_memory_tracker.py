"""Bytes that the tracker counts: against sums by hand, against torch's own tracker, and under FSDP2."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.tools.memory_tracker import MemoryTracker
from tests.helpers.distributed import run_ranks

F32 = 4


class Stack(nn.Module):
    """Two linear layers without bias: 4 → 8 → 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.second = nn.Linear(8, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_the_peak_of_a_forward_pass_is_the_sum_by_hand() -> None:
    model, x = Stack(), torch.ones(3, 4)
    with MemoryTracker(model) as tracker:
        y = model(x)
    peak = tracker.peak()
    weights, hidden, out = (4 * 8 + 8 * 2) * F32, 3 * 8 * F32, 3 * 2 * F32
    assert peak.total_bytes == weights + x.nbytes + hidden + out
    assert (peak.module, peak.direction) == ("second", "forward")
    assert peak.by_module["first"] == {"parameters": 4 * 8 * F32, "temporary": hidden}  # no backward pass was run
    assert y.shape == (3, 2)


def test_the_peak_of_a_step_is_the_sum_by_hand() -> None:
    model, x = Stack(), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with MemoryTracker(model, optimizer) as tracker:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        after_step = tracker.current_bytes
        optimizer.zero_grad()
        after_zero = tracker.current_bytes
    weights = (4 * 8 + 8 * 2) * F32
    assert after_step == weights + x.nbytes + loss.nbytes + 2 * weights  # gradients and momenta
    assert after_step - after_zero == weights
    first, second, hidden, out = 4 * 8 * F32, 8 * 2 * F32, 3 * 8 * F32, 3 * 2 * F32
    peak = tracker.peak()
    # In the backward pass of `second`: x and hidden are kept, we hold the loss, the pass holds the loss's gradient;
    # gradients of y, of its weight and of hidden are there. In that of `first`: x, hidden's gradient, both weights'.
    # The optimizer's step is higher.
    at_second = weights + x.nbytes + hidden + 2 * loss.nbytes + out + second + hidden
    at_first = weights + x.nbytes + 2 * loss.nbytes + hidden + second + first
    at_step = weights + x.nbytes + loss.nbytes + 2 * weights
    assert peak.total_bytes == max(at_second, at_first, at_step) == at_step
    assert peak.by_category == {
        "parameters": weights, "gradients": weights, "optimizer": weights, "inputs": x.nbytes,
        "activations": loss.nbytes,
    }  # fmt: skip
    assert peak.module == "(optimizer step)"
    modules = tracker.module_peaks()
    assert modules["second"]["backward"] == at_second
    assert modules["first"]["backward"] == at_first


def test_activations_are_told_from_what_is_given_back_at_once() -> None:
    """relu keeps its result, and the result of `first` goes at once: relu does not need it."""

    class Relu(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    model = Relu()
    x = torch.ones(300, 4)
    with MemoryTracker(model) as tracker:
        y = model(x).sum()
        y.backward()
    kinds = tracker.peak().by_module
    assert kinds["(model)"]["activations"] == 300 * 8 * F32
    assert "activations" not in kinds["first"]


def test_what_is_made_again_is_told_apart() -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    model = Again()
    with MemoryTracker(model) as tracker:
        model(torch.ones(1000, 8)).sum().backward()
    peak = tracker.peak()
    # The fifth layer's backward pass: its input and those before it were made again, but the first, which was kept.
    assert peak.by_category["recomputed"] == 4 * 1000 * 8 * F32
    assert peak.module == "body.4"
    assert peak.by_category.get("activations", 0) <= 1000 * 8 * F32 + F32
    assert peak.direction == "backward"


def test_torchs_own_tracker_counts_the_same_total() -> None:
    mem_tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")

    def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def build() -> tuple[Any, ...]:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16)]
        model = nn.Sequential(*layers)
        return model, torch.randn(50, 16), torch.optim.AdamW(model.parameters(), foreach=False)

    model, x, optimizer = build()
    step(model, x, optimizer)
    with MemoryTracker(model, optimizer) as ours:
        step(model, x, optimizer)
    model, x, optimizer = build()
    step(model, x, optimizer)
    gc.collect()
    theirs = mem_tracker.MemTracker()
    theirs.track_external(model, optimizer, x)
    with theirs:
        step(model, x, optimizer)
    (total,) = [snapshot["Total"] for snapshot in theirs.get_tracker_snapshot("peak").values()]
    assert ours.peak().total_bytes == total


def test_storages_that_change_their_size_are_followed() -> None:
    model = Stack()
    with MemoryTracker(model) as tracker:
        begun = tracker.current_bytes
        held = torch.zeros(1000)
        held.untyped_storage().resize_(0)
        assert tracker.current_bytes == begun
        held.untyped_storage().resize_(8000)
        assert tracker.current_bytes == begun + 8000
        del held
        assert tracker.current_bytes == begun
    assert tracker.peak().by_category["gathered"] == 8000
    assert torch.UntypedStorage.resize_.__qualname__ != "MemoryTracker._resizing.<locals>.resize_"


def test_a_planted_fault_is_noticed() -> None:
    """A tracker that misses one tensor does not give the sum by hand."""

    class Blind(MemoryTracker):
        def _hold(self, key: int, size: int, *args: Any) -> None:
            super()._hold(key, 0 if size == 3 * 8 * F32 else size, *args)

    model, x = Stack(), torch.ones(3, 4)
    with Blind(model) as tracker:
        y = model(x)
    assert tracker.peak().total_bytes != (4 * 8 + 8 * 2) * F32 + x.nbytes + 3 * 8 * F32 + y.nbytes


def sharded_steps(tracked: bool) -> tuple[list[torch.Tensor], list[dict[str, int]]]:
    """Weights after two steps of four sharded layers, and what was held at the peaks of a forward pass, of both passes,
    and of the optimizer's step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    trackers: list[MemoryTracker] = []

    def watched() -> Any:
        if not tracked:
            return nullcontext()
        trackers.append(MemoryTracker(model, optimizer))
        return trackers[-1]

    with watched():
        model(torch.ones(1, 64))
    for step in range(2):
        x = torch.randn(10, 64, generator=torch.Generator().manual_seed(step))
        with watched():
            model(x).square().mean().backward()
        with watched():
            optimizer.step()
        optimizer.zero_grad()
    weights = [p.to_local().detach().clone() for p in model.parameters()]
    peaks = [tracker.peak() for tracker in trackers]
    assert all(sum(peak.by_category.values()) == peak.total_bytes for peak in peaks)
    return weights, [peaks[i].by_category for i in (0, -2, -1)] if tracked else []


def test_shards_are_counted_as_shards_and_tracking_changes_nothing() -> None:
    plain = run_ranks(2, sharded_steps, False)
    tracked = run_ranks(2, sharded_steps, True)
    whole = 64 * 64 * F32
    for (weights, _), (same, (forward, passes, step)) in zip(plain, tracked, strict=True):
        assert all(map(torch.equal, weights, same))
        for peak in (forward, passes, step):
            assert peak["parameters"] == 4 * whole / 2
        assert forward["gathered"] in (whole, 2 * whole)  # of the layer at work, and of the next
        # how many gradients are there already when both passes hold most, threads that reduce them decide
        assert passes["gradients"] in [n * whole / 2 for n in (1, 2, 3, 4)]
        assert step["gradients"] == step["optimizer"] == 4 * whole / 2
        assert "gathered" not in step
