"""AdamW in pieces equals torch's to the bit, wherever moments and gradients live; packed moments stay near."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.optimizer import adamw, build, offload, state_formats
from mindspeed_mm.fsdp.optimizer.build import build_optimizer, kind_of
from mindspeed_mm.fsdp.optimizer.clip_grad import clip_grads_, grad_norm
from mindspeed_mm.fsdp.optimizer.offload import offloaded
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao

SIZES = {"embed": (70, 64), "weight": (96, 64), "odd": (9, 7), "vector": (65,), "unused": (40, 64), "scalar": ()}
UNUSED = "unused"
STEPS = 6
OFFLOAD = "gradients on the host"


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, size in SIZES.items():
            setattr(self, name, nn.Parameter(torch.randn(size, generator=generator).to(dtype)))


def optimizer_of(model: nn.Module, *ways: str, **changes: Any) -> torch.optim.Optimizer:
    settings = TrainingArguments.model_validate({"lr": 0.01, "weight_decay": 0.1, **changes})
    return build_optimizer(model, settings, FeatureArguments(enable_gradient_offload=OFFLOAD in ways), note=print)


def trained(
    *ways: str, dtype: torch.dtype = torch.float32, gradient: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    steps: int = STEPS, **changes: Any,
) -> tuple[Model, torch.optim.Optimizer]:  # fmt: skip
    """A model after some steps of two micro-batches with made-up gradients, clipped."""
    model = Model(dtype)
    optimizer = optimizer_of(model, *ways, **changes)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for _ in range(2):
            drawn = {n: torch.randn(p.shape, generator=generator).to(dtype) for n, p in model.named_parameters()}
            loss = sum((p * (gradient(step, drawn[n]) if gradient else drawn[n])).sum()
                       for n, p in model.named_parameters() if n != UNUSED)  # fmt: skip
            loss.backward()
        clip_grads_(model.parameters(), grad_norm(model.parameters()), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_same(left: tuple[Model, Any], right: tuple[Model, Any]) -> None:
    for (name, one), other in zip(left[0].named_parameters(), right[0].parameters(), strict=True):
        assert torch.equal(one, other), name
        states = left[1].state.get(one, {}), right[1].state.get(other, {})
        assert states[0].keys() == states[1].keys(), name
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a parameter and several buckets a step."""
    monkeypatch.setattr(adamw, "PIECE", 1024)
    monkeypatch.setattr(adamw, "bucket_bytes", lambda _room: 20_000)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "ways", [("adamw",), ("adamw_swap",), ("adamw", OFFLOAD), ("adamw_swap", OFFLOAD)], ids=" + ".join
)
def test_equals_torch_to_the_bit(ways: tuple[str, ...], dtype: torch.dtype, fused: bool, small_pieces: None) -> None:
    with mock.patch.object(build, "ShardedAdamW", torch.optim.AdamW):
        expected = trained(dtype=dtype, adam_fused=fused)
    assert type(expected[1]) is torch.optim.AdamW
    assert_same(expected, trained(*ways, dtype=dtype, adam_fused=fused, optimizer=ways[0]))


def test_lost_copy_home_is_seen(small_pieces: None) -> None:
    """The control: moments that are not brought back to the host."""
    with mock.patch.object(offload, "_take_home", lambda *_: None), pytest.raises(AssertionError):
        assert_same(trained(), trained(optimizer="adamw_swap"))


def test_clip_factor_that_is_lost_is_seen(small_pieces: None) -> None:
    with pytest.raises(AssertionError):
        assert_same(trained(), clipped_after_the_step())


def clipped_after_the_step() -> tuple[Model, Any]:
    with mock.patch(f"{__name__}.clip_grads_", lambda *_: None):
        return trained(OFFLOAD)


def test_offloaded_gradients_add_up_on_the_host_and_are_forgotten() -> None:
    model = Model()
    optimizer = optimizer_of(model, OFFLOAD)
    for _ in range(2):
        (model.weight * 3).sum().backward()
        assert model.weight.grad is None
    kept = offloaded(model.weight)
    assert kept is not None and offloaded(model.vector) is None
    assert torch.equal(kept.host, torch.full_like(model.weight, 6))
    assert grad_norm(model.parameters()) == torch.linalg.vector_norm(kept.host)
    optimizer.zero_grad()
    assert offloaded(model.weight) is None
    model.weight.sum().backward()
    assert torch.equal(kept.host, torch.ones_like(model.weight))


# --- packed moments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["bf16", "int8"])
@pytest.mark.parametrize("ways", [("adamw",), ("adamw_swap",), ("adamw", OFFLOAD)], ids=" + ".join)
def test_packed_moments_are_the_same_wherever_they_live(choice: str, ways: tuple[str, ...], small_pieces: None) -> None:
    settings = {"optimizer_state_dtype": choice}
    assert_same(trained(**settings), trained(*ways, optimizer=ways[0], **settings))


def test_bytes_of_packed_moments(small_pieces: None) -> None:
    def per_number(choice: str | None) -> float:
        model, optimizer = trained(optimizer_state_dtype=choice)
        state = optimizer.state[model.weight]
        kept = [t for key, t in state.items() if key != "step"]
        return sum(t.untyped_storage().nbytes() for t in kept) / model.weight.numel()

    assert (per_number(None), per_number("bf16")) == (8.0, 4.0)
    assert per_number("int8") == 2 * (1 + 4 / 64)  # rows of 64: blocks of 64


def test_small_and_odd_parameters_are_not_packed_in_8_bits() -> None:
    model, optimizer = trained(optimizer_state_dtype="int8")
    kinds = {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters() if name != UNUSED}
    packed = {name for name, dtype in kinds.items() if dtype == torch.uint8}
    assert packed == {"embed", "weight"}
    assert {kinds[name] for name in kinds.keys() - packed} == {torch.float32}


def fading(step: int, drawn: torch.Tensor) -> torch.Tensor:
    return drawn if step == 0 else torch.zeros_like(drawn)


def test_second_moment_in_bf16_falls_as_it_should() -> None:
    """After gradients have gone, it falls by 0.1 % a step: less than half the way between neighbours in bf16."""

    def mean_ratio(**changes: Any) -> float:
        model, optimizer = trained(gradient=fading, steps=120, lr=1e-6, **changes)
        begun, begun_optimizer = trained(gradient=fading, steps=1, lr=1e-6)
        now, then = optimizer.state[model.weight]["exp_avg_sq"], begun_optimizer.state[begun.weight]["exp_avg_sq"]
        return float(now.float().sum() / then.sum())

    assert abs(mean_ratio() / 0.999**119 - 1) < 1e-4
    assert abs(mean_ratio(optimizer_state_dtype="bf16") / 0.999**119 - 1) < 3e-3
    with mock.patch.object(state_formats, "rounded_to_bf16", lambda numbers, _seed: numbers.bfloat16()):
        assert mean_ratio(optimizer_state_dtype="bf16") > 0.99  # the control: to the nearest it stays


def test_rounding_by_chance_is_right_in_the_mean_and_repeats() -> None:
    number = torch.full((200_000,), 1 + 2**-9)  # a quarter of the way from 1 to its neighbour
    drawn = state_formats.rounded_to_bf16(number, 3)
    assert drawn.unique().tolist() == [1.0, 1 + 2**-7]
    assert abs(drawn.double().mean() - number[0]) < 3e-5
    assert torch.equal(drawn, state_formats.rounded_to_bf16(number, 3))
    assert not torch.equal(drawn, state_formats.rounded_to_bf16(number, 4))


def test_int8_is_that_of_torchao() -> None:
    """torchao's AdamW8bit on a matrix whose rows are its blocks: codes differ only where a number is on a border."""
    AdamW8bit = load_torchao("optim", key="").AdamW8bit
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(32, 256)) for _ in range(2))
    theirs.data.copy_(ours.data)
    holder = nn.Module()
    holder.weight = ours
    mine = optimizer_of(holder, optimizer_state_dtype="int8", adam_fused=False)
    reference = AdamW8bit([theirs], lr=0.01, weight_decay=0.1)
    torch.compiler.set_stance("force_eager")
    try:
        for _ in range(4):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
            mine.step()
            reference.step()
    finally:
        torch.compiler.set_stance("default")
    state, other = mine.state[ours], reference.state[theirs]
    for key in ("exp_avg", "exp_avg_sq"):
        assert (state[key] != other[key].codes).float().mean() < 1e-3
        torch.testing.assert_close(state[f"{key}_scale"].flatten(), other[key].scale, rtol=1e-5, atol=0)
    assert (ours - theirs).abs().max() < 2e-4  # of updates of 0.01: where a code differs
    assert ((ours - theirs).abs() > 1e-6).float().mean() < 2e-3


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_those_of_torchao(is_signed: bool) -> None:
    """Of a million numbers over all magnitudes, and of the borders and their neighbours."""
    quantize = load_torchao("optim.quant_utils", key="").quantize_8bit_with_qmap
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    borders = state_formats._packing_borders(is_signed, cpu)[0][:-1]
    drawn = torch.rand(1_000_000).pow(8) * (torch.randint(0, 2, (1_000_000,)) * 2 - 1 if is_signed else 1)
    numbers = torch.cat([drawn, torch.tensor([0.0, 1.0, -1.0 if is_signed else 0.0])])
    near = torch.cat([borders, borders.nextafter(torch.tensor(-2.0)), borders.nextafter(torch.tensor(2.0))])
    for some in (numbers, near):
        assert torch.equal(state_formats._codes(some, is_signed), torch.bucketize(some, borders, right=True).int())
    theirs = quantize(numbers, state_formats._numbers(is_signed, cpu))
    # Theirs rounds the distance from a neighbour, ours the border: they differ where a number is the border's next.
    assert (state_formats._codes(numbers, is_signed) != theirs).float().mean() < 2e-5


def test_int8_without_torchao_is_one_error() -> None:
    with (
        mock.patch.dict(sys.modules, {"torchao.optim.quant_utils": None}),
        pytest.raises(MachineError, match=r"mindspeed-mm\[lowbit\]"),
    ):
        optimizer_of(Model(), optimizer_state_dtype="int8")


# --- what else the optimizer promises --------------------------------------------------------------------------------


def test_kinds() -> None:
    def kind(*ways: str, **changes: Any) -> str:
        return kind_of(optimizer_of(Model(), *ways, **changes))

    assert kind() == kind(optimizer="adamw_swap") == kind(OFFLOAD) == "AdamW"
    assert (
        kind(optimizer_state_dtype="bf16") == kind(optimizer_state_dtype="bf16", optimizer="adamw_swap") == "AdamW bf16"
    )


@pytest.mark.parametrize("choice", [None, "bf16"])
def test_fused_falls_back_where_there_is_no_kernel(choice: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(build, "_get_fused_kernels_supported_devices", lambda: ["cuda"]):
        optimizer = optimizer_of(Model(), optimizer_state_dtype=choice)
    assert not optimizer.param_groups[0]["fused"]
    assert "no fused AdamW on cpu" in capsys.readouterr().out


def test_a_parameter_in_several_stretches_of_memory_is_refused() -> None:
    model = Model()
    model.weight = nn.Parameter(torch.randn(64, 96).T)
    with pytest.raises(ConfigError, match="the shard of weight"):
        optimizer_of(model, optimizer="adamw_swap")
    optimizer_of(model)
