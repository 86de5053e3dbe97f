"""The kernels that `model.*_implementation` name compute, in the layers of this model alone."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.models.behaviour import kernels as kernel_choice
from mindspeed_mm.fsdp.models.behaviour.kernels import KERNELS, KernelsGivenUp, choose_kernels
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from tests.helpers.packed_families import FAMILIES


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return FAMILIES["qwen3_next"].build()


def asked(**keys: str) -> ModelArguments:
    return ModelArguments.model_validate({f"{name}_implementation": value for name, value in keys.items()})


def output(model: Any) -> torch.Tensor:
    return model(torch.arange(20, 29)[None], use_cache=False).logits


def test_eager_is_torch_and_gives_the_same(model: Any) -> None:
    plain = output(copy.deepcopy(model))
    choose_kernels(model, asked(gdn="eager", causal_conv1d="eager"))
    assert torch.equal(output(model), plain)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CUDA device, and packages whose kernels note that they ran."""
    from transformers.models.qwen3_next import modeling_qwen3_next as library

    ran: list[str] = []

    def kernel(name: str, real: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return real(*args, **kwargs)

        return run

    fake: dict[str, dict[str, Any]] = {}
    for kernels in (KERNELS["gdn_implementation"], KERNELS["causal_conv1d_implementation"]):
        for own, (module, name) in kernels.functions.items():
            fake.setdefault(module, {})[name] = kernel(name, getattr(library, own))
    for name, functions in fake.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernel_choice, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(kernel_choice.importlib.util, "find_spec", lambda name: name)
    return ran


def test_triton_kernels_run_in_this_model_alone(model: Any, on_cuda: list[str]) -> None:
    other = copy.deepcopy(model)
    plain = output(other)
    choose_kernels(model, asked(gdn="triton", causal_conv1d="triton"))
    assert torch.equal(output(model), plain)
    layers = sum(kind == "linear_attention" for kind in model.config.layer_types)
    assert sorted(on_cuda) == sorted(["causal_conv1d_fn", "chunk_gated_delta_rule"] * layers)
    on_cuda.clear()
    output(other)
    assert on_cuda == []


def test_a_model_without_such_layers_is_one_error(model: Any, on_cuda: list[str]) -> None:
    with pytest.raises(ConfigError, match="has no Kimi delta-attention layers"):
        choose_kernels(model, asked(kda="triton"))
    choose_kernels(model, asked(kda="eager"))


@pytest.mark.parametrize(
    ("device", "name", "words"),
    [
        ("cpu", "triton", "run on CUDA only, this is 'cpu'"),
        ("cpu", "ascendc", "run on NPUs only"),
        ("npu", "ascendc", "no such AscendC kernel"),
    ],
)
def test_what_no_such_device_runs_gives_way_to_torch(
    model: Any, device: str, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = output(model)
    monkeypatch.setattr(kernel_choice, "get_device_type", lambda: device)
    choose_kernels(model, asked(gdn=name))
    assert torch.equal(output(model), plain)
    given_up = facts_of(model).noted(KernelsGivenUp)
    assert given_up is not None
    assert words in str(given_up)


def test_what_is_not_installed_is_one_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "get_device_type", lambda: "cuda")
    with pytest.raises(MachineError, match="flash-linear-attention, which is not installed") as caught:
        choose_kernels(model, asked(gdn="triton"))
    assert caught.value.problems[0].key == "model.gdn_implementation"
