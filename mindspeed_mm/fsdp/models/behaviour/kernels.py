"""Which kernels compute gated delta nets, short causal convolutions and Kimi delta attention.

transformers decides when it is imported: the package's kernel where the package can be imported, torch operations where
not. A choice replaces the functions that a layer's forward calls, for the layers of this model alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.models.behaviour.rebinding import called_globals, global_of, rebind_globals
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.device import get_device_type


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


def choose_kernels(model: nn.Module, model_args: ModelArguments) -> None:
    """Let layers compute by the kernels that `model.*_implementation` name; null leaves transformers' own choice.

    Args:
        model: Built; call it before packing and sharding.
        model_args: The `model` section.

    Raises:
        MachineError: The kernel does not run on this device, or its package is not installed.
        ConfigError: The model has no such layers.
    """
    others: dict[nn.Module, dict[str, Callable[..., Any]]] = {}
    for key, kernels in KERNELS.items():
        asked = getattr(model_args, key)
        if asked is None:
            continue
        layers = [m for m in model.modules() if type(m).forward is not nn.Module.forward and _calls(m, kernels)]
        if asked != "eager":
            _check(key, kernels, asked, has_layers=bool(layers), model=model)
        for layer in layers:
            names = called_globals(layer) & kernels.functions.keys()
            others.setdefault(layer, {}).update({name: _function(layer, kernels, name, asked) for name in names})
    for layer, functions in others.items():
        rebind_globals(layer, functions)


def _calls(module: nn.Module, kernels: _Kernels) -> bool:
    return bool(called_globals(module) & kernels.functions.keys())


def _check(key: str, kernels: _Kernels, asked: str, *, has_layers: bool, model: nn.Module) -> None:
    where, device_type = f"model.{key}", get_device_type()
    eager = "Take 'eager', or leave it out."
    if asked == "ascendc":
        what = "AscendC kernels run on NPUs only" if device_type != "npu" else "torch_npu has no such AscendC kernel"
        raise MachineError(f"'{asked}': {what}", key=where, way_out=eager)
    if device_type != "cuda":
        raise MachineError(f"'{asked}' kernels run on CUDA only, this is '{device_type}'", key=where, way_out=eager)
    packages = {module.partition(".")[0] for module, _ in kernels.functions.values()}
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise MachineError(
            f"'{asked}' needs the package {kernels.distribution}, which is not installed",
            key=where,
            way_out=f"pip install {kernels.distribution}, or take 'eager'.",
        )
    if not has_layers:
        raise ConfigError(f"{type(model).__name__} has no {kernels.layers}", key=where, way_out="Leave it out.")


def _function(layer: nn.Module, kernels: _Kernels, name: str, asked: str) -> Callable[..., Any]:
    if asked == "eager":
        return _taking_known(inspect.unwrap(global_of(layer, name)))
    module, function = kernels.functions[name]
    return _taking_known(getattr(importlib.import_module(module), function))


def _taking_known(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is handed what layers pass to any of the kernels, and takes what it knows."""
    parameters = inspect.signature(function).parameters
    known = frozenset(parameters)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call
