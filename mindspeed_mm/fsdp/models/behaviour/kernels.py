"""Which kernels compute gated delta nets, short causal convolutions and Kimi delta attention.

transformers decides when it is imported: the package's kernel where the package can be imported, torch operations where
not. A choice replaces the functions that a layer's forward calls, for the layers of this model alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.forward_stack import Forward, called_globals, global_of, rebind_globals
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


class _Kernels(NamedTuple):
    """What a key is about."""

    layers: str
    """In words."""
    distribution: str
    """What to install."""
    functions: Mapping[str, tuple[str, str]]
    """Name in transformers' files → module and name of the kernel."""


KERNELS: Mapping[str, _Kernels] = {
    "gdn_implementation": _Kernels(
        "gated delta-net layers",
        "flash-linear-attention",
        {
            "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
            "torch_recurrent_gated_delta_rule": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        },
    ),
    "causal_conv1d_implementation": _Kernels(
        "causal convolutions",
        "causal-conv1d",
        {
            "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn"),
            "causal_conv1d_update": ("causal_conv1d", "causal_conv1d_update"),
        },
    ),
    "kda_implementation": _Kernels(
        "Kimi delta-attention layers",
        "flash-linear-attention",
        {
            "chunk_kimi_delta_attention": ("fla.ops.kda", "chunk_kda"),
            "recurrent_kimi_delta_attention": ("fla.ops.kda", "fused_recurrent_kda"),
        },
    ),
}
"""Names of transformers 5.23."""


class KernelsGivenUp(NamedTuple):
    """Kernels that this kind of device cannot run; torch's own operations compute the same in their place."""

    reasons: tuple[str, ...]
    """In words, one for each key."""

    def __str__(self) -> str:
        return f"torch's operations ({'; '.join(self.reasons)})"


def choose_kernels(model: nn.Module, model_args: ModelArguments) -> None:
    """Let layers compute by the kernels that `model.*_implementation` name; null leaves transformers' own choice.

    A kernel that this kind of device cannot run gives way to torch's operations, so that a file trains on a laptop and
    on a cluster; the model's facts note it.

    Args:
        model: Built; call it before packing and sharding.
        model_args: The `model` section.

    Raises:
        MachineError: The package of the kernel is not installed.
        ConfigError: The model has no such layers.
    """
    others: dict[nn.Module, dict[str, Forward]] = {}
    given_up = []
    for key, kernels in KERNELS.items():
        asked: str | None = attribute_at(model_args, key)
        if asked is None:
            continue
        layers = [module for module in model.modules() if _may_call(module, kernels)]
        if asked != "eager" and not layers:
            raise ConfigError(
                f"{type(model).__name__} has no {kernels.layers}", key=f"model.{key}", way_out="Leave it out."
            )
        why = _lacks(asked)
        if why:
            given_up.append(f"{key}: {why}")
            asked = "eager"
        if asked != "eager":
            _check_installed(key, kernels, asked)
        for layer in layers:
            functions = others.setdefault(layer, {})
            for name in called_globals(layer) & kernels.functions.keys():
                functions[name] = _function(layer, kernels, name, asked)
    for layer, functions in others.items():
        rebind_globals(layer, functions)
    if given_up:
        facts_of(model).note(KernelsGivenUp(tuple(given_up)))


def _may_call(module: nn.Module, kernels: _Kernels) -> bool:
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not called_globals(module).isdisjoint(kernels.functions)


def _lacks(asked: str) -> str:
    """Why no device of this kind runs a kernel; empty where it can."""
    device_type = get_device_type()
    if asked == "ascendc":
        if device_type == "npu":
            return "torch_npu has no such AscendC kernel"
        return "AscendC kernels run on NPUs only"
    if asked == "triton" and device_type != "cuda":
        return f"'triton' kernels run on CUDA only, this is '{device_type}'"
    return ""


def _check_installed(key: str, kernels: _Kernels, asked: str) -> None:
    packages = {module.partition(".")[0] for module, _ in kernels.functions.values()}
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise MachineError(
            f"'{asked}' needs the package {kernels.distribution}, which is not installed",
            key=f"model.{key}",
            way_out=f"pip install {kernels.distribution}, or take 'eager'.",
        )


def _function(layer: nn.Module, kernels: _Kernels, name: str, asked: str) -> Forward:
    if asked == "eager":
        return _taking_known(inspect.unwrap(global_of(layer, name)))
    module, function = kernels.functions[name]
    return _taking_known(attribute_at(importlib.import_module(module), function))


def _taking_known(function: Forward) -> Forward:
    """A function that is handed what layers pass to any of the kernels, and takes what it knows."""
    parameters = inspect.signature(function).parameters
    known = frozenset(parameters)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call
