"""Which attention kernel is taken, and the reason that the log gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.models.behaviour import attention as attention_choice
from mindspeed_mm.fsdp.models.behaviour.attention import attention_name, check_attention_trains, choose_attention
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from tests.helpers.tiny_models import make_tiny_qwen3

BF16 = torch.bfloat16


class Takes:
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True


class TakesNoFlash(Takes):
    _supports_flash_attn = False


class TakesNothing(TakesNoFlash):
    _supports_sdpa = False


@pytest.mark.parametrize(
    ("device", "packages", "model", "dtype", "name", "reason"),
    [
        ("cuda", ("flash_attn", "flash_attn_interface"), Takes, BF16, "flash_attention_3", "flash_attn_interface is"),
        ("cuda", ("flash_attn",), Takes, BF16, "flash_attention_2", "flash_attn is installed"),
        ("cuda", (), Takes, BF16, "mm_varlen", "flash_attention_3 and flash_attention_2 are not installed"),
        ("cuda", ("flash_attn",), Takes, None, "mm_varlen", "bf16 and fp16 only"),
        ("cuda", ("flash_attn",), TakesNoFlash, BF16, "mm_varlen", "the model takes no flash attention"),
        ("cuda", (), TakesNothing, BF16, "eager", "the model takes nothing else"),
        ("npu", (), Takes, BF16, "mm_varlen", "this is 'npu'"),
        ("cpu", ("flash_attn",), Takes, BF16, "mm_varlen", "this is 'cpu'"),
        ("cuda", ("flash_attn",), None, BF16, "flash_attention_2", "flash_attn is installed"),
    ],
)
def test_the_best_that_runs_here(
    device: str, packages: Any, model: Any, dtype: Any, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "get_device_type", lambda: device)
    found = lambda package: package if package in packages else None  # noqa: E731
    monkeypatch.setattr(attention_choice.importlib.util, "find_spec", found)
    choice = choose_attention(None, model, param_dtype=dtype)
    assert choice.name == name
    assert reason in choice.reason


def test_the_log_says_why(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path)
    for asked, words in (
        (None, "mm_varlen (flash attention is CUDA's, this is 'cpu')"),
        ("sdpa", "sdpa (as configured)"),
    ):
        args = ModelArguments(model_name_or_path=str(folder), attn_implementation=asked)
        assert attention_name(ModelHub.build(args)) == words


def test_what_has_no_backward_pass_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="no backward pass on a CPU"):
        check_attention_trains("flex")
    check_attention_trains("sdpa")
    monkeypatch.setattr(attention_choice, "get_device_type", lambda: "cuda")
    check_attention_trains("flex")


def test_flash_on_the_wrong_type_or_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = choose_attention("flash_attention_3", Takes, param_dtype=BF16)
    assert given_up == ("mm_varlen", "'flash_attention_3' does not run on a CPU")
    monkeypatch.setattr(attention_choice, "get_device_type", lambda: "cuda")
    with pytest.raises(MachineError, match="needs the package flash_attn"):
        choose_attention("flash_attention_2", param_dtype=BF16)
    monkeypatch.setattr(attention_choice.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="bf16 or fp16 only"):
        choose_attention("flash_attention_2", param_dtype=None)


def test_native_sparse_is_no_choice() -> None:
    arguments = Arguments.model_validate({"model": {"attn_implementation": "native-sparse"}})
    (problem,) = [p for p in check_cross_section(arguments) if p.key == "model.attn_implementation"]
    assert "compute it themselves" in problem.what
