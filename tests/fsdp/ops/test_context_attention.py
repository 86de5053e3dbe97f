"""Attention over a spread sequence equals dense softmax attention: output and gradients of queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.fsdp.ops.attention import AttentionError
from mindspeed_mm.fsdp.ops.context_attention import language, layer
from mindspeed_mm.fsdp.ops.context_attention.block_kernels import NEVER, CpuKernel, MathKernel, NpuKernel
from mindspeed_mm.fsdp.ops.context_attention.language import AttentionRule, gathered_attention
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups, context_attention
from mindspeed_mm.fsdp.ops.context_attention.layout import LayoutError, SequenceLayout, build_layout
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
from tests.helpers.attention_traffic import AttentionSizes, attention_traffic
from tests.helpers.distributed import run_ranks

Tensor = torch.Tensor
WIDTH = 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Against dense attention in the same type; bf16 against fp64, where entries go up to 7."""
DOCUMENTS = (0, 1, 9, 10, 29, 44, 53)
TENSORS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One attention; borders of keys are those of queries unless given."""

    heads: int = 4
    key_heads: int = 4
    borders: tuple[int, ...] = (0, 37)
    key_borders: tuple[int, ...] | None = None
    causal: bool = False
    hidden: str = ""
    """Keys that nobody sees: `some`; `row`, all of the first row's; `front`, the front half of the first row's."""
    replicated: bool = False
    """Every rank holds all keys."""


CASES = {
    "full": Case(),
    "causal": Case(causal=True),
    "causal, 4 heads on 2": Case(4, 2, causal=True),
    "causal, 4 heads on 1": Case(4, 1, (0, 53), causal=True),
    "5 tokens": Case(4, 2, (0, 5), causal=True),
    "2 tokens": Case(4, 2, (0, 2), causal=True),
    "documents": Case(4, 2, DOCUMENTS),
    "documents, causal": Case(4, 2, DOCUMENTS, causal=True),
    "other keys": Case(4, 2, (0, 37), (0, 11)),
    "other keys, documents": Case(4, 4, (0, 5, 21, 37), (0, 3, 4, 11)),
    "6 heads on 3": Case(6, 3, causal=True),
    "5 heads": Case(5, 5, causal=True),
    "12 heads on 3": Case(12, 3, causal=True),
    "7 heads on 1": Case(7, 1),
    "3 heads": Case(3, 3, causal=True),
    "some keys hidden": Case(4, 2, hidden="some"),
    "every key of a row hidden": Case(4, 4, hidden="row"),
    "keys of one rank hidden": Case(4, 4, hidden="front"),
    "text on every rank": Case(4, 2, (0, 37), (0, 11), replicated=True),
    "masked text on every rank": Case(4, 4, (0, 37), (0, 11), hidden="some", replicated=True),
}
RULES: dict[str, tuple[str, dict[str, Any]]] = {  # name → (case, what the layer asks for)
    "window": ("documents, causal", {"window": 4}),
    "window, one document": ("causal, 4 heads on 2", {"window": 7}),
    "softcap": ("causal, 4 heads on 2", {"softcap": 0.7}),
    "softcap, full": ("documents", {"softcap": 0.7}),
    "sinks": ("documents, causal", {"sinks": (0.5, -1.0, 2.0, 0.0)}),
    "all": ("documents, causal", {"window": 4, "sinks": (0.5, -1.0, 2.0, 0.0), "softcap": 0.7}),
    "all, 5 tokens": ("5 tokens", {"window": 2, "sinks": (0.5, -1.0, 2.0, 0.0), "softcap": 0.7}),
}
"""Layers whose keys are gathered."""
IN_ALL_TYPES = {"causal, 4 heads on 2", "documents, causal", "some keys hidden"}
COUNTED = ("causal, 4 heads on 2", "documents, causal", "12 heads on 3", "7 heads on 1")
SHAPES = {
    2: {"ring": (2, 1), "ulysses": (1, 2)},
    3: {"ring": (3, 1), "ulysses": (1, 3)},
    4: {"ring": (4, 1), "ulysses": (1, 4), "both": (2, 2)},
}
IN_SHORT = {
    2: tuple(CASES),
    4: ("5 tokens", "documents, causal", "12 heads on 3", "3 heads", "keys of one rank hidden"),
}
FAULTS = {
    "log-sum-exp of the rectangle in backward": (2, "causal"),
    "tokens lost at a border": (2, "causal"),
    "masked rows taken for rows of weight one": (2, "keys of one rank hidden"),
    "merged without weights": (2, "full"),
    "window's first key not gathered": (2, "window, one document"),
}


def borders_of_keys(case: Case) -> tuple[int, ...]:
    return case.key_borders or case.borders


def make(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values, gradient of the output and key mask, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    lengths = (case.borders[-1], *[borders_of_keys(case)[-1]] * 2, case.borders[-1])
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    q, k, v, grad = (
        torch.randn(2, length, count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for length, count in zip(lengths, heads, strict=True)
    )
    if not case.hidden:
        return q, k, v, grad, None
    mask = torch.rand(2, lengths[1], generator=generator) > 0.3
    if case.hidden in ("row", "front"):
        mask[0, : lengths[1] if case.hidden == "row" else lengths[1] // 2] = False
    return q, k, v, grad, mask


def dense(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """By the definition, with a mask of queries × keys."""
    q, k, v, grad, mask = make(case, dtype)
    if dtype == torch.bfloat16:
        q, k, v, grad = (tensor.double() for tensor in (q, k, v, grad))
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    seen = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(pairwise(case.borders), pairwise(borders_of_keys(case)), strict=True):
        seen[q0:q1, k0:k1] = True
    if case.causal:
        seen &= torch.ones_like(seen).tril()
    groups = case.heads // case.key_heads
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(groups, 2)) / math.sqrt(WIDTH)
    seen = seen[None, None] if mask is None else seen & mask[:, None, None]
    weights = scores.masked_fill(~seen, NEVER).softmax(-1).nan_to_num(0.0)
    out = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(groups, 2))
    return dict(zip(TENSORS, (out.detach(), *torch.autograd.grad(out, (q, k, v), grad)), strict=True))


def make_groups(shape: tuple[int, int]) -> ContextGroups:
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    ring_group, ulysses_group = (
        mesh[axis].get_group() if mesh[axis].size() > 1 else None for axis in mesh.mesh_dim_names
    )
    return ContextGroups(ring_group, ulysses_group, dist.group.WORLD)


def spread(case: Case, groups: ContextGroups, balanced: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same on own tokens, put back together."""
    q, k, v, grad, mask = make(case, dtype)
    queries = build_layout(
        case.borders[-1], groups.ring_size, groups.ulysses_size, borders=case.borders, balanced=balanced
    )
    keys: SequenceLayout | None = queries
    if case.key_borders is not None:
        borders = case.key_borders
        keys = build_layout(borders[-1], groups.ring_size, groups.ulysses_size, borders=borders, balanced=balanced)
    own = queries.positions(groups.ring_rank, groups.ulysses_rank)
    own_keys = list(range(k.shape[1])) if case.replicated else keys.positions(groups.ring_rank, groups.ulysses_rank)
    q, k, v = (tensor[:, rows].requires_grad_() for tensor, rows in ((q, own), (k, own_keys), (v, own_keys)))
    out = context_attention(
        q, k, v, groups, queries, None if case.replicated else keys, causal=case.causal, key_mask=mask
    )
    gradients = torch.autograd.grad(out, (q, k, v), grad[:, own])
    lengths = (case.borders[-1], case.borders[-1], borders_of_keys(case)[-1], borders_of_keys(case)[-1])
    rows = (own, own, own_keys, own_keys)
    tensors = (out.detach(), *gradients)
    return {
        name: put_together(tensor, place, length)
        for name, tensor, place, length in zip(TENSORS, tensors, rows, lengths, strict=True)
    }


def rule_of(case: Case, asked: dict[str, Any], dtype: torch.dtype) -> AttentionRule:
    sinks = torch.tensor(asked["sinks"], dtype=dtype, requires_grad=True) if "sinks" in asked else None
    return AttentionRule(case.causal, 0.3, asked.get("window"), sinks, asked.get("softcap"))


def dense_by_rule(case: Case, rule: AttentionRule) -> dict[str, Tensor]:
    """By the definition, with a mask of queries × keys."""
    q, k, v, grad, _ = make(case, torch.float64)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    groups, places = case.heads // case.key_heads, torch.arange(q.shape[1])
    document = torch.bucketize(places, torch.tensor(case.borders), right=True)
    distance = places[:, None] - places[None]
    seen = document[:, None] == document[None]
    if case.causal:
        seen &= distance >= 0
    if rule.window is not None:
        seen &= distance < rule.window
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(groups, 2)) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if rule.sinks is not None:
        total = total + rule.sinks.exp()[None, :, None, None]
    out = torch.einsum("bhts,bshd->bthd", weights / total, v.repeat_interleave(groups, 2))
    sinks = () if rule.sinks is None else (rule.sinks,)
    tensors = (out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks), grad))
    return dict(zip((*TENSORS, "dsinks"), tensors, strict=False))


def spread_by_rule(case: Case, rule: AttentionRule, groups: ContextGroups) -> dict[str, Tensor]:
    """The same on own tokens, put back together; queries are taken a few at a time."""
    q, k, v, grad, _ = make(case, torch.float64)
    layout = build_layout(case.borders[-1], groups.ring_size, groups.ulysses_size, borders=case.borders, balanced=True)
    own = layout.positions(groups.ring_rank, groups.ulysses_rank)
    q, k, v = (tensor[:, own].requires_grad_() for tensor in (q, k, v))
    with mock.patch.object(language, "LONGEST_RUN", 1):
        out = gathered_attention(q, k, v, ContextShare(groups, layout), rule)
    sinks = () if rule.sinks is None else (rule.sinks,)
    gradients = torch.autograd.grad(out, (q, k, v, *sinks), grad[:, own])
    found = {
        name: put_together(tensor, own, case.borders[-1])
        for name, tensor in zip(TENSORS, (out.detach(), *gradients), strict=False)
    }
    if sinks:
        dist.all_reduce(gradients[-1])
        found["dsinks"] = gradients[-1]
    return found


def deviation_by_rule(name: str, groups: ContextGroups) -> float:
    """Largest difference of output and gradients; NaN counts as infinite."""
    case, rule = CASES[RULES[name][0]], rule_of(CASES[RULES[name][0]], RULES[name][1], torch.float64)
    expected, found = dense_by_rule(case, rule), spread_by_rule(case, rule, groups)
    assert expected.keys() == found.keys()
    worst = max(float((expected[key] - found[key]).abs().max()) for key in expected)
    return worst if worst == worst else math.inf


def put_together(tensor: Tensor, rows: list[int], length: int) -> Tensor:
    whole = tensor.new_zeros(tensor.shape[0], length, *tensor.shape[2:])
    whole[:, rows] = tensor
    dist.all_reduce(whole)
    return whole


def deviation(case: Case, *args: Any) -> float:
    """Largest difference of output and gradients; NaN counts as infinite."""
    expected, found = dense(case, args[-1]), spread(case, *args)
    worst = max(float((expected[name] - found[name]).abs().max()) for name in TENSORS)
    return worst if worst == worst else math.inf


def planted(fault: str) -> AbstractContextManager[Any]:
    if fault.startswith("log-sum-exp"):
        plain = CpuKernel.backward

        def of_the_rectangle(
            self: Any, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, **kw: Any
        ) -> Any:
            return plain(self, grad, q, k, v, *self.forward(q, k, v, bias, **kw), bias, **kw)

        return mock.patch.object(CpuKernel, "backward", of_the_rectangle)
    if fault.startswith("tokens lost"):
        real = layer.plan_rectangles

        def shorter(*args: Any) -> Any:
            return [[r._replace(k_stop=r.k_stop - (not r.causal)) for r in each] for each in real(*args)]

        return mock.patch.object(layer, "plan_rectangles", shorter)
    if fault.startswith("masked rows"):
        plain_forward = CpuKernel.forward

        def zero(self: Any, *args: Any, **kw: Any) -> Any:
            out, lse = plain_forward(self, *args, **kw)
            return out, lse.masked_fill(lse == NEVER, 0.0)

        return mock.patch.object(CpuKernel, "forward", zero)
    if fault.startswith("window"):
        real_reach = language.reaches
        return mock.patch.object(
            language, "reaches", lambda *args: ((q, (k[0] + 1, k[1])) for q, k in real_reach(*args))
        )
    if fault == "merged without weights":

        def add(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
            total.add_(part)
            lse.copy_(torch.logaddexp(lse, part_lse))

        return mock.patch.object(layer, "merge_", add)
    raise KeyError(fault)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank hands to others, by kind."""
    sent = {"ring": 0, "ulysses": 0}
    isend, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def send(operations: list[Any]) -> Any:
        sent["ring"] += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return isend(operations)

    def exchange(output: Tensor, tensor: Tensor, received: list[int], given: list[int], group: Any) -> Any:
        sent["ulysses"] += (sum(given) - given[group.rank()]) * tensor.element_size()
        return all_to_all(output, tensor, received, given, group=group)

    with (
        mock.patch.object(dist, "batch_isend_irecv", send),
        mock.patch.object(dist, "all_to_all_single", exchange),
    ):
        yield sent


def traffic_ratios(groups: ContextGroups, balanced: bool, name: str) -> list[float]:
    """Measured over expected bytes, of ring and Ulysses; 1 where neither has any."""
    case = CASES[name]
    layout = build_layout(
        case.borders[-1], groups.ring_size, groups.ulysses_size, borders=case.borders, balanced=balanced
    )
    sizes = AttentionSizes(2, case.heads, case.key_heads, WIDTH, value_bytes=8, sum_bytes=8)
    expected = attention_traffic(layout, groups.ring_rank, groups.ulysses_rank, sizes)
    with counted() as sent:
        spread(case, groups, balanced, torch.float64)
    pairs = (
        (sent["ring"], expected.ring_forward + expected.ring_backward),
        (sent["ulysses"], expected.ulysses_forward + expected.ulysses_backward),
    )
    return [measured / wanted if wanted else 1.0 + measured for measured, wanted in pairs]


def run_on_ranks(in_short: bool) -> dict[str, dict[str, float]]:
    here = dist.get_world_size()
    measured: dict[str, dict[str, float]] = {"parity": {}, "faults": {}, "traffic": {}}
    for shape_name, shape in SHAPES[here].items():
        groups = make_groups(shape)
        for balanced in (False, True)[: 1 + (shape[0] > 1)]:
            run = f"{shape_name}, {balanced=}"
            for name in IN_SHORT[here] if in_short else CASES:
                for dtype in TOLERANCE if name in IN_ALL_TYPES else (torch.float64,):
                    off = deviation(CASES[name], groups, balanced, dtype) / TOLERANCE[dtype]
                    measured["parity"][f"{run}, {name}, {dtype}"] = off
            for name in RULES if balanced or shape[0] == 1 else ():
                off = deviation_by_rule(name, groups) / TOLERANCE[torch.float64]
                measured["parity"][f"{run}, gathered, {name}"] = off
            for name in COUNTED:
                ring_ratio, ulysses_ratio = traffic_ratios(groups, balanced, name)
                measured["traffic"] |= {f"{run}, {name}, ring": ring_ratio, f"{run}, {name}, ulysses": ulysses_ratio}
        for fault, (ranks, name) in FAULTS.items():
            if ranks == here and shape_name == "ring":
                with planted(fault):
                    measured["faults"][fault] = (
                        deviation_by_rule(name, groups)
                        if name in RULES
                        else deviation(CASES[name], groups, False, torch.float64)
                    )
    return measured


@cache
def results(ranks: int, in_short: bool) -> list[dict[str, dict[str, float]]]:
    return run_ranks(ranks, run_on_ranks, in_short)


@pytest.mark.parametrize(
    ("ranks", "in_short"), [(2, True), (4, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (3, 4))]
)
def test_spread_attention_equals_dense(ranks: int, in_short: bool) -> None:
    for measured in results(ranks, in_short):
        assert len(measured["parity"]) >= 3 * len(IN_SHORT[4])
        assert {key: value for key, value in measured["parity"].items() if not value <= 1} == {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_are_those_of_the_formula(ranks: int) -> None:
    for measured in results(ranks, True):
        assert len(measured["traffic"]) >= 4 * len(COUNTED)
        assert set(measured["traffic"].values()) == {1.0}, measured["traffic"]


def test_sliding_layer_that_brings_no_window_is_refused() -> None:
    """Gathered keys would show it its whole document."""
    config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    query, share = torch.zeros(1, 1, 8, WIDTH), mock.Mock(layout=mock.Mock(longest_document=8))
    for index, window in ((0, None), (1, 4)):
        layer_module = SimpleNamespace(config=config, layer_idx=index)
        assert language.rule_of(layer_module, query, None, share, {"sliding_window": window}).window == window
    with pytest.raises(AttentionError, match="layer 1 is 'sliding_attention'"):
        language.rule_of(layer_module, query, None, share, {})


def test_traffic_of_an_example_by_hand() -> None:
    """32 heads on 8, width 128, 32768 tokens in bf16 over 8 ranks: ring 117 MB, Ulysses 73 MB forward."""
    sizes = AttentionSizes(1, 32, 8, 128, value_bytes=2, sum_bytes=4)
    ring_alone = attention_traffic(build_layout(32768, 8, 1), 0, 0, sizes)
    ulysses_alone = attention_traffic(build_layout(32768, 1, 8), 0, 0, sizes)
    assert (ring_alone.ring_forward, ring_alone.ring_backward) == (117_440_512, 352_321_536)
    assert (ulysses_alone.ulysses_forward, ulysses_alone.ulysses_backward) == (73_400_320, 73_400_320)
    assert ring_alone.total == 469_762_048


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault: str) -> None:
    assert max(measured["faults"][fault] for measured in results(FAULTS[fault][0], True)) > 1e-3


def tensors_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, grad, mask = make(case, torch.float64)
    bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, NEVER)[:, None, None]
    return q, k, v, grad, bias


@pytest.mark.parametrize("name", ["causal, 4 heads on 2", "7 heads on 1", "every key of a row hidden"])
def test_plain_computation_equals_the_kernel_of_the_cpu(name: str) -> None:
    case = CASES[name]
    q, k, v, grad, bias = tensors_of(case)
    how = {"causal": case.causal, "scale": 0.3}
    outputs = [kernel.forward(q, k, v, bias, **how) for kernel in (CpuKernel(), MathKernel())]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)
    # Of a longer row, as in a ring: the log-sum-exp is larger than that of these keys.
    out, lse = outputs[0][0] * 0.5, outputs[0][1] + 0.1
    gradients = [kernel.backward(grad, q, k, v, out, lse, bias, **how) for kernel in (CpuKernel(), MathKernel())]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_values_of_another_width() -> None:
    """As in latent attention; alone on its rank."""
    q, k, v, grad, _ = make(CASES["causal"], torch.float64)
    wide = torch.cat([v, v], dim=-1).requires_grad_()
    layout = build_layout(q.shape[1], 1, 1)
    out = context_attention(q, k, wide, ContextGroups(), layout, layout, causal=True)
    expected = dense(CASES["causal"], torch.float64)
    torch.testing.assert_close(out, torch.cat([expected["out"]] * 2, dim=-1))
    (found,) = torch.autograd.grad(out[..., :WIDTH], wide, grad)
    torch.testing.assert_close(found[..., :WIDTH], expected["dv"])


def test_tokens_that_the_layout_does_not_give() -> None:
    q, k, v, *_ = make(CASES["causal"], torch.float64)
    layout = build_layout(q.shape[1] + 1, 1, 1)
    with pytest.raises(LayoutError, match="37 tokens came to attention, but the layout gives this rank 38"):
        context_attention(q, k, v, ContextGroups(), layout, layout)


class RecordedNpu:
    """Stands in for the operators of torch_npu: the plain computation behind their signatures and conventions."""

    def npu_fusion_attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, *, scale: float, keep_prob: float, **mask: Any
    ) -> tuple[Tensor, ...]:
        out, lse = MathKernel().forward(q, k, v, None, causal=self._is_causal(layout, mask), scale=scale)
        maximum = torch.full_like(lse, 0.25)
        return out, _copies(maximum), _copies((lse - maximum).exp()), torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, heads: int, layout: str, *, softmax_max: Tensor,
        softmax_sum: Tensor, softmax_in: None, attention_in: Tensor, scale_value: float, keep_prob: float, **mask: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        lse = (softmax_max + softmax_sum.log())[..., 0].transpose(1, 2)
        how = {"causal": self._is_causal(layout, mask), "scale": scale_value}
        return (*MathKernel().backward(grad, q, k, v, attention_in, lse, None, **how), torch.empty(0))

    def _is_causal(self, layout: str, mask: dict[str, Any]) -> bool:
        assert layout == "BSND"
        if not mask:
            return False
        assert mask["sparse_mode"] == 2
        assert mask["atten_mask"].shape == (2048, 2048)
        assert not mask["atten_mask"].tril().any()
        return True


def _copies(x_BTH: Tensor) -> Tensor:
    return x_BTH.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, 8)


@pytest.mark.parametrize("name", ["causal", "7 heads on 1"])
def test_the_entry_of_the_npu_follows_its_conventions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "npu", RecordedNpu(), raising=False)
    case = CASES[name]
    q, k, v, grad, _ = tensors_of(case)
    how = {"causal": case.causal, "scale": 0.3}
    out, lse = NpuKernel().forward(q, k, v, None, **how)
    for one, other in zip((out, lse), MathKernel().forward(q, k, v, None, **how), strict=True):
        torch.testing.assert_close(one, other)
    of_more_keys = lse + 0.1
    found = NpuKernel().backward(grad, q, k, v, out, of_more_keys, None, **how)
    for one, other in zip(found, MathKernel().backward(grad, q, k, v, out, of_more_keys, None, **how), strict=True):
        torch.testing.assert_close(one, other)
