"""Which attention kernel is taken, and the reason that the log gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.models.behaviour import attention as attention_choice
from mindspeed_mm.fsdp.models.behaviour.attention import (
    attention_name,
    check_attention_trains,
    choose_attention,
    need_of,
)
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from tests.helpers.fake_kernels import fresh_process, pretend_device, pretend_installed, registered, wrong_numbers
from tests.helpers.tiny_models import make_tiny_qwen3

BF16 = torch.bfloat16


class Takes:
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True


class TakesFlex(Takes):
    _supports_flex_attn = True


class TakesNothing(Takes):
    _supports_sdpa = False


HOPPER, AMPERE, CPU = ("cuda", (9, 0)), ("cuda", (8, 0)), ("cpu", (0, 0))
FA3, FA4, FA2 = ("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0b36"), ("flash-attn", "2.8.3")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with fresh_process(), registered("FA3", wrong_numbers), registered("FA4", wrong_numbers):
        yield


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends a device, and packages on it."""

    def pretend(device: tuple[str, tuple[int, int]], *packages: tuple[str, str]) -> None:
        pretend_device(monkeypatch, *device)
        monkeypatch.setattr(attention_choice, "get_device_type", lambda: device[0])
        for number, package in enumerate(packages):
            pretend_installed(monkeypatch, tmp_path / str(number), *package)

    return pretend


@pytest.mark.parametrize(
    ("device", "packages", "model", "dtype", "name", "kernel", "reason"),
    [
        (HOPPER, (FA3, FA4), Takes, BF16, "mm_varlen", "flash_attention_3", "flash-attn-3 3.0.0 is installed"),
        (HOPPER, (FA4,), Takes, BF16, "mm_varlen", "flash_attention_4", "flash-attn-4 4.0.0b36 is installed"),
        (AMPERE, (FA2, FA3), Takes, BF16, "mm_varlen", "torch_flash", ""),
        (AMPERE, (), Takes, None, "mm_varlen", "", "torch_flash takes no other types than bf16 and fp16"),
        (AMPERE, (), TakesNothing, BF16, "eager", "", "the model takes nothing else"),
        (("npu", (0, 0)), (), Takes, BF16, "mm_varlen", "npu_fusion_attention", ""),
        (CPU, (FA2, FA3), Takes, BF16, "mm_varlen", "", ""),
        (HOPPER, (FA3,), None, BF16, "sdpa", "flash_attention_3", "flash-attn-3 3.0.0 is installed"),
    ],
)
def test_the_best_that_runs_here(
    device: Any,
    packages: Any,
    model: Any,
    dtype: Any,
    name: str,
    kernel: str,
    reason: str,
    machine: Callable[..., None],
) -> None:
    machine(device, *packages)
    choice = choose_attention(None, model, param_dtype=dtype)
    assert (choice.name, choice.kernel(), choice.reason) == (name, kernel, reason)


CAPPED = SimpleNamespace(sub_configs={"text_config": None}, text_config=SimpleNamespace(attn_logit_softcapping=50.0))
DROPPING = SimpleNamespace(attention_dropout=0.1, head_dim=64)
LATENT = SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@pytest.mark.parametrize(
    ("device", "config", "name", "kernel", "reason"),
    [
        (HOPPER, CAPPED, "flex_attention", "", "flash_attention_3 takes no capped scores"),
        (CPU, CAPPED, "eager", "", "sdpa takes no capped scores"),
        (HOPPER, DROPPING, "mm_varlen", "", "flash_attention_3 takes no dropout"),
        (HOPPER, LATENT, "mm_varlen", "", "flash_attention_3 takes no values of another width than keys"),
    ],
)
def test_what_a_model_needs(
    device: Any, config: Any, name: str, kernel: str, reason: str, machine: Callable[..., None]
) -> None:
    machine(device, FA3)
    choice = choose_attention(None, TakesFlex, config=config, param_dtype=BF16)
    assert (choice.name, choice.kernel()) == (name, kernel)
    assert choice.reason.startswith(reason)


def test_layers_of_two_widths_need_the_wider() -> None:
    """transformers refuses to tell a setting of a configuration whose layers differ in it, as Gemma 4's do."""
    text = transformers.Gemma4TextConfig(
        num_hidden_layers=6, hidden_size=64, num_attention_heads=2, head_dim=16, global_head_dim=32
    )
    assert need_of(text, BF16).width == need_of(transformers.Gemma4Config(text_config=text), BF16).width == 32


def test_capped_scores(machine: Callable[..., None]) -> None:
    with pytest.raises(
        ConfigError, match="'sdpa' takes no capped scores"
    ):  # torch's function would leave them as they are
        choose_attention("sdpa", Takes, config=CAPPED, param_dtype=BF16)
    machine(HOPPER)
    assert choose_attention(None, Takes, config=CAPPED, param_dtype=BF16).name == "eager"  # it takes no flex attention


def test_the_log_says_why(tmp_path: Path, machine: Callable[..., None]) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")

    def told(asked: Any) -> str:
        args = ModelArguments(model_name_or_path=str(folder), attn_implementation=asked)
        return attention_name(ModelHub.build(args, param_dtype=BF16))

    assert (told(None), told("sdpa")) == ("mm_varlen", "sdpa (as configured)")
    machine(HOPPER, FA2, FA3, FA4)
    assert told(None) == "mm_varlen by flash_attention_3 (flash-attn-3 3.0.0 is installed)"
    assert told("flash_attention_4") == "mm_varlen by flash_attention_4 (as configured)"
    assert told("sdpa") == "sdpa by torch_flash (as configured)"  # this torch has no cuDNN


def test_packed_rows_and_rings_by_another_kernel(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(HOPPER)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    model = nn.Module()
    facts_of(model).attention = choose_attention(None, Takes, param_dtype=BF16)
    lacking = "(flash-attn-3 is not installed; flash-attn-4 is not installed)"
    assert attention_name(model) == f"mm_varlen by cudnn, packed rows by torch_flash {lacking}"
    model.config = SimpleNamespace(_attn_implementation="mm_context")  # type: ignore[assignment]
    assert attention_name(model) == "mm_context by torch_flash"


def test_what_has_no_backward_pass_is_refused_before_training(machine: Callable[..., None]) -> None:
    with pytest.raises(MachineError, match="no backward pass on a CPU"):
        check_attention_trains("flex")
    check_attention_trains("sdpa")
    machine(HOPPER)
    check_attention_trains("flex")


@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_a_cpu_computes_by_what_it_has(asked: str) -> None:
    given_up = choose_attention(asked, Takes, param_dtype=BF16)
    assert given_up[:3] == ("mm_varlen", f"'{asked}' does not run on a CPU", "")


@pytest.mark.parametrize(
    ("device", "packages", "asked", "dtype", "error", "words"),
    [
        (HOPPER, (), "flash_attention_2", BF16, MachineError, "needs the package flash-attn, which is not installed"),
        (HOPPER, (FA4,), "flash_attention_2", BF16, MachineError, "needs the package flash-attn,"),
        (HOPPER, (FA2,), "flash_attention_2", None, ConfigError, "bf16 or fp16 only"),
        (HOPPER, (FA4,), "flash_attention_3", BF16, MachineError, "flash-attn-3 is not installed"),
        (AMPERE, (FA3,), "flash_attention_3", BF16, MachineError, "does not run on compute capability 8.0"),
        (AMPERE, (FA4,), "flash_attention_4", BF16, MachineError, "does not run on compute capability 8.0"),
        (("npu", (0, 0)), (FA3,), "flash_attention_3", BF16, MachineError, "runs on cuda only, and this is 'npu'"),
        (HOPPER, (FA3,), "flash_attention_3", None, ConfigError, "param_dtype: bf16"),
    ],
)
def test_what_is_asked_for_and_cannot_be_had(
    device: Any, packages: Any, asked: str, dtype: Any, error: Any, words: str, machine: Callable[..., None]
) -> None:
    machine(device, *packages)
    with pytest.raises(error, match=words) as caught:
        choose_attention(asked, Takes, param_dtype=dtype)
    assert caught.value.problems[0].key == "model.attn_implementation"


def test_what_is_asked_for_and_does_not_load(machine: Callable[..., None]) -> None:
    machine(HOPPER, FA3)
    with registered("FA3", None), pytest.raises(MachineError, match="flash-attn-3 does not load") as caught:
        choose_attention("flash_attention_3", Takes, param_dtype=BF16)
    assert caught.value.problems[0].key == "model.attn_implementation"


def test_native_sparse_is_no_choice() -> None:
    arguments = Arguments.model_validate({"model": {"attn_implementation": "native-sparse"}})
    (problem,) = [p for p in check_cross_section(arguments) if p.key == "model.attn_implementation"]
    assert "compute it themselves" in problem.what
