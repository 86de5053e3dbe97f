"""Saved tensors travel to the host and back: the same numbers, each storage once, in the right order."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.memory import activation_offload
from mindspeed_mm.fsdp.features.memory.activation_offload import OffloadedForward, SavedView, offload_activations
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.utils import host_copies
from tests.fsdp.features.dropout_models import KINDS, Step, build, differing, loss_and_gradients
from tests.helpers.tiny_models import make_tiny_qwen3_vl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


@pytest.fixture(autouse=True)
def everything_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1)


def offloaded(model: nn.Module, recompute: Any = None, patterns: tuple[str, ...] = ()) -> nn.Module:
    features = {"enable_activation_offload": True, "activation_offload_plan": {"apply_modules": patterns}}
    if recompute is not None:
        features |= {"recompute": True, "recompute_plan": recompute}
    return FeaturesApplier(FeatureArguments.model_validate(features), find_blocks(model))(model)


def traffic_of(model: nn.Module) -> activation_offload.ActivationTraffic:
    return next(m.forward._traffic for m in model.modules() if isinstance(m.forward, OffloadedForward))


RECOMPUTE = {"": None, "full": {}, "re-entrant": {"use_reentrant": True}, "selective": {"mode": "selective"}}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_to_the_bit(kind: str, recompute: str, folder: Path) -> None:
    plain = loss_and_gradients(*recomputed_alone(kind, folder, RECOMPUTE[recompute]))
    model, step = build(kind, folder)
    names = [name for name, _ in model.named_parameters()]
    assert differing(plain, loss_and_gradients(offloaded(model, RECOMPUTE[recompute]), step)) == []
    assert [name for name, _ in model.named_parameters()] == names


def recomputed_alone(kind: str, folder: Path, plan: Any) -> tuple[nn.Module, Step]:
    model, step = build(kind, folder)
    if plan is not None:
        features = FeatureArguments.model_validate({"recompute": True, "recompute_plan": plan})
        FeaturesApplier(features, find_blocks(model))(model)
    return model, step


def test_a_copy_that_is_read_too_early_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loss_and_gradients(*build("wan", folder))

    def not_yet(self: Any, on_host: torch.Tensor, where: torch.device) -> torch.Tensor:
        return torch.zeros_like(on_host, device=where)

    monkeypatch.setattr(host_copies.HostCopies, "to_device", not_yet)
    model, step = build("wan", folder)
    assert len(differing(plain, loss_and_gradients(offloaded(model), step))) > 10


# --- what travels -----------------------------------------------------------------------------------------------------


class Sent:
    """What went to the host and came back, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out: list[int] = []
        self.back: list[int] = []
        for name, sizes in (("to_host", self.out), ("to_device", self.back)):
            monkeypatch.setattr(host_copies.HostCopies, name, self.counted(name, sizes))

    @staticmethod
    def counted(name: str, sizes: list[int]) -> Any:
        real = getattr(host_copies.HostCopies, name)

        def copy(self: Any, source: torch.Tensor, *where: Any) -> torch.Tensor:
            sizes.append(source.numel())
            return real(self, source, *where)

        return copy


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


class Block(nn.Module):
    """Saves its input twice, a view of it, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=0)
        return x + torch.cat([left, right]) @ self.weight.t() * x.sigmoid()


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(blocks: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(blocks)


NAMES = [f"blocks.{number}" for number in range(3)]
BYTES = 32 * 64 * 4


def step(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(32, 64)).square().mean()


def test_each_storage_goes_once_and_weights_stay(sent: Sent) -> None:
    model = stack()
    saved: list[int] = []
    keep = lambda tensor: (saved.append(tensor.untyped_storage().data_ptr()), tensor)[1]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        plain = step(model)
    assert len(saved) > len(set(saved)), "some storages are saved more than once"
    plain.backward()
    offload_activations(model, NAMES)
    step(model).backward()
    assert set(sent.out) == {BYTES}, "nothing of the size of a weight"
    activations = set(saved) - {block.weight.untyped_storage().data_ptr() for block in model.blocks}
    assert len(sent.out) <= len(activations)


@pytest.mark.edge("D1", "D2")
def test_each_storage_comes_back_once_and_those_of_the_last_module_stay(sent: Sent) -> None:
    model = stack()
    offload_activations(model, NAMES)
    step(model).backward()  # shows which module is the last before the backward pass
    of_two_blocks = len(sent.back)
    assert 0 < of_two_blocks < len(sent.out)
    del sent.out[:], sent.back[:]
    step(model).backward()
    assert len(sent.out) == len(sent.back) == of_two_blocks


@pytest.mark.edge("D1")
def test_a_target_is_never_replaced_while_it_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    offload_activations(model, NAMES)
    loss = step(model)
    written: list[torch.Tensor] = []
    real = host_copies.HostCopies.to_device

    def kept(self: Any, on_host: torch.Tensor, where: torch.device) -> torch.Tensor:
        assert all(on_host is not other for other in written), "its first target would be freed during the copy"
        written.append(on_host)
        return real(self, on_host, where)

    monkeypatch.setattr(host_copies.HostCopies, "to_device", kept)
    loss.backward()
    assert len(written) > 2


def test_small_ones_stay(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", BYTES + 1)
    model = stack()
    offload_activations(model, NAMES)
    step(model).backward()
    assert sent.out == []


def test_with_recomputation_the_inputs_travel(folder: Path, sent: Sent) -> None:
    model = stack()
    features = FeatureArguments.model_validate({"enable_activation_offload": True, "recompute": True})
    FeaturesApplier(features, NAMES)(model)
    for out in (3, 2):  # in the first pass it is not known yet which block is the last
        del sent.out[:], sent.back[:]
        step(model).backward()
        assert sent.out == [BYTES] * out
        assert sent.back == [BYTES] * 2


def test_what_all_blocks_share_goes_once(sent: Sent) -> None:
    shared = torch.randn(16, 64, requires_grad=True)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * shared

    model = nn.Sequential(*(Gated() for _ in range(5)))
    offload_activations(model, [str(number) for number in range(5)])
    model(torch.randn(32, 16, 64)).sum().backward()
    assert sent.out.count(16 * 64 * 4) == 1


def test_not_without_gradients(sent: Sent) -> None:
    model = stack()
    offload_activations(model, NAMES)
    with torch.no_grad():
        step(model)
    assert sent.out == []


def test_the_device_lets_go_one_module_later_and_all_is_freed_after_backward() -> None:
    model = stack(5)
    offload_activations(model, [f"blocks.{number}" for number in range(5)])
    traffic = traffic_of(model)
    homes: list[list[bool]] = []
    parcels: list[weakref.ref[Any]] = []
    real = traffic.close

    def watched(stop: Any) -> None:
        real(stop)
        parcels.extend(weakref.ref(parcel) for parcel in stop.moved_storages)
        homes.append([parcel.home is not None for parcel in stop.moved_storages])
        assert all(parcel.home is None for ref in before for parcel in [ref()] if parcel is not None)
        before[:] = [weakref.ref(parcel) for parcel in stop.moved_storages]

    before: list[weakref.ref[Any]] = []
    traffic.close = watched  # type: ignore[method-assign]
    loss = step(model)
    assert all(all(each) for each in homes[:1]) and len(homes) == 5
    on_device = [ref() for ref in parcels if ref() is not None and ref().home is not None]
    assert 0 < len({id(parcel) for parcel in on_device}) <= len(before)
    loss.backward()
    del loss, on_device
    gc.collect()
    assert [ref for ref in parcels if ref() is not None] == [], "nothing is held after the backward pass"
    assert not traffic._coming


def test_two_micro_batches_at_once_and_a_graph_used_twice() -> None:
    plain, model = stack(), stack()
    offload_activations(model, NAMES)
    for each in (plain, model):
        first, second = each(torch.full((32, 64), 0.5)), each(torch.full((32, 64), 2.0))
        loss = first.square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        second.square().mean().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_strides_come_back() -> None:
    traffic = activation_offload.ActivationTraffic()
    stop = traffic.open(nn.Linear(2, 2))
    whole = torch.arange(24.0).reshape(4, 6)
    views = [whole.t(), whole[1:3, ::2], whole[:, :1].expand(4, 3), whole.to(torch.bfloat16)]
    tickets = [traffic.pack(stop, view) for view in views]
    traffic.close(stop)
    traffic.close(traffic.open(nn.Linear(2, 2)))
    assert all(isinstance(ticket, SavedView) for ticket in tickets) and tickets[0].moved is tickets[1].moved
    for view, ticket in zip(views, tickets, strict=True):
        back = traffic.unpack(ticket)
        assert torch.equal(back, view) and back.stride() == view.stride() and back.dtype == view.dtype


def test_a_copy_has_its_own_traffic() -> None:
    model = stack()
    offload_activations(model, NAMES)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].weight.zero_()
    assert traffic_of(twin) is not traffic_of(model)
    assert not torch.equal(step(twin), step(model))


# --- on an accelerator: a queue beside the computation ----------------------------------------------------------------


class Recorded:
    """Stands for a queue of copies on an accelerator, and writes down what happens; copies are done only when somebody
    waits for them: what is read too early is wrong."""

    log: list[str] = []

    def __init__(self, _device: torch.device) -> None:
        self.pending: list[Any] = []
        self.inside = False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *error: Any) -> None:
        self.inside = False

    def follow(self) -> None:
        self.log.append("follow")

    def mark(self) -> int:
        self.log.append(f"mark {len(self.pending)}")
        return len(self.pending)

    def wait_for(self, mark: int | None) -> None:
        if mark is None:
            return
        self.log.append(f"wait {mark}")
        for run in self.pending[:mark]:
            run()
        self.pending[:mark] = [lambda: None] * mark


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorded]]:
    def lazy(self: Any, target: torch.Tensor, source: torch.Tensor, where: torch.device) -> None:
        if self._queue is None:
            self._queue = Recorded(where)
        self._queue.follow()
        with self._queue:
            assert self._queue.inside
            Recorded.log.append("copy")
            target.fill_(0)
            held = target, source
            self._queue.pending.append(lambda: held[0].copy_(held[1]))

    Recorded.log = []
    monkeypatch.setattr(host_copies.HostCopies, "_copy", lazy)
    yield Recorded


@pytest.mark.parametrize("recompute", [None, {}], ids=["", "recompute"])
def test_copies_run_beside_and_are_waited_for(queue: type[Recorded], recompute: Any, folder: Path) -> None:
    plain = loss_and_gradients(*build("wan", folder))
    model, wan_step = build("wan", folder)
    assert differing(plain, loss_and_gradients(offloaded(model, recompute), wan_step)) == []
    assert queue.log[:2] == ["follow", "copy"], "a copy comes after what computes its source"
    assert queue.log.count("follow") == queue.log.count("copy")


def test_the_order_on_an_accelerator(queue: type[Recorded]) -> None:
    model = stack()
    features = FeatureArguments.model_validate({"enable_activation_offload": True, "recompute": True})
    FeaturesApplier(features, NAMES)(model)
    loss = step(model)
    assert [word for word in queue.log if word != "follow"] == [
        "copy", "mark 1",  # the input of block 0 leaves
        "copy", "mark 2", "wait 1",  # that of block 1; block 0's is let go of once it has left
        "copy", "mark 3", "wait 2",
    ]  # fmt: skip
    del queue.log[:]
    loss.backward()
    assert [word for word in queue.log if word != "follow"] == [
        "wait 3",  # block 2's input is still there, and its copy, this once, must not outlast it
        "copy", "mark 4",  # while block 2 is computed again, block 1's comes
        "copy", "mark 5", "wait 4",  # and block 0's, while block 1 is
        "wait 5",
    ]  # fmt: skip
    del queue.log[:]
    step(model).backward()
    assert [word for word in queue.log if word != "follow"] == [
        "copy", "mark 6", "copy", "mark 7", "wait 6", "mark 7", "wait 7",  # block 2's input stays
        "copy", "mark 8", "copy", "mark 9", "wait 8", "wait 9",
    ]  # fmt: skip


def test_without_waiting_it_would_be_wrong(
    queue: type[Recorded], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(host_copies.HostCopies, "wait", lambda *_: None)
    plain = loss_and_gradients(*build("wan", folder))
    model, wan_step = build("wan", folder)
    assert differing(plain, loss_and_gradients(offloaded(model), wan_step))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "recompute", "message"),
    [
        (("layers.{*}",), None, "matches no module"),
        (("blocks",), None, "never called itself"),
        (("blocks.0", "blocks.0.ffn"), None, "lies inside"),
        (("blocks.{*}.ffn",), {}, "computed again instead of keeping anything"),
    ],
)
def test_refused(patterns: tuple[str, ...], recompute: Any, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        offloaded(build("wan", folder)[0], recompute, patterns)
    assert "features.activation_offload_plan.apply_modules" in str(caught.value)
