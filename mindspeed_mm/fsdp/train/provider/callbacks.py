"""The functions that a user hands to `pretrain`, called with what their signatures take.

Scripts written for Megatron-LM and MindSpeed-MM differ in how many arguments their functions have and how many values
they return; every form that those libraries accept is accepted here, any other is one error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, told_as
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.utils.model_parts import setting_of

Function = Callable[..., Any]
"""One of the user."""


class Provided(NamedTuple):
    """What a data provider returned; None: there is none."""

    train: Any = None
    validation: Any = None
    test: Any = None


@dataclass(frozen=True)
class Callbacks:
    """The functions of the user. None: what the configuration names is used, as `mm train` does."""

    model_provider: Callable[..., nn.Module] | None = None
    """`()`, `(*args, **kwargs)` or `(pre_process=True, post_process=True)`: builds the whole model."""
    data_provider: Callable[..., Any] | None = None
    """`()` or `(num_samples)`: returns one to three of loader, data set, iterator or None: training, validation,
    test."""
    forward_step: Callable[..., object] | None = None
    """`(data_iterator, model)`: returns the model's output, and a function that makes the loss of it."""

    def build_model(self) -> nn.Module:
        """Call the model provider.

        Raises:
            ConfigError: It asks for an argument that is not given, or returns no module.
        """
        assert self.model_provider is not None
        stages = {"pre_process": True, "post_process": True}
        takes = _parameters(self.model_provider)
        kinds = {parameter.kind for parameter in takes}
        # A class that has no parameters of its own has those of nn.Module, which takes none.
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds and not isinstance(self.model_provider, type)
        given = stages
        if not takes_any:
            names = {parameter.name for parameter in takes}
            given = {name: value for name, value in stages.items() if name in names}
        _refuse_unfilled(self.model_provider, "model_provider", given)
        model: Any = self.model_provider(**given)
        if isinstance(model, (list, tuple)) and len(model) == 1:
            model = model[0]
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"returned {_described(model)}, not a module",
                where=_named(self.model_provider, "model_provider"),
                key="model_provider",
                way_out="Return the whole model: stages and shards are made of it here.",
            )
        return model

    def build_data(self, num_samples: Sequence[int]) -> Provided:
        """Call the data provider.

        Args:
            num_samples: Samples that training, validation and test ask for, for a provider that wants to know.

        Raises:
            ConfigError: It asks for further arguments, or returns more than three values or no training data.
        """
        assert self.data_provider is not None
        first = (list(num_samples),) if _asks_for_value(self.data_provider) else ()
        _refuse_unfilled(self.data_provider, "train_valid_test_datasets_provider", (), first)
        returned = self.data_provider(*first)
        parts: tuple[Any, ...] = (returned,)
        if isinstance(returned, tuple) or _holds_loaders(returned):
            parts = tuple(returned)
        if len(parts) > len(Provided._fields):
            raise ConfigError(
                f"returned {len(parts)} values",
                key="train_valid_test_datasets_provider",
                way_out="Return training, validation and test data; None where there are none.",
            )
        provided = Provided(*parts)
        if provided.train is None:
            raise ConfigError(
                "returned no training data",
                key="train_valid_test_datasets_provider",
                way_out="Return a DataLoader, a data set or an iterator first.",
            )
        return provided

    def run_forward(self, batch: object, model: nn.Module) -> LossValue:
        """Call the forward step on one micro-batch, and the loss function that it returns.

        Args:
            batch: As the user's loader yields it.
            model: What the forward step calls.

        Raises:
            ConfigError: Something else came back than a loss.
        """
        assert self.forward_step is not None
        _check_takes(self.forward_step, "forward_step", 2, "the data iterator and the model")
        returned = self.forward_step(_OneBatch(batch), model)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2 or not callable(returned[1]):
            raise ConfigError(
                f"returned {_described(returned)}",
                where=_named(self.forward_step, "forward_step"),
                key="forward_step",
                way_out="Return two values: the model's output, and a function that makes the loss of it.",
            )
        output, loss_func = returned
        _check_takes(loss_func, "loss_func", 1, "the output that forward_step returned")
        return read_loss(loss_func(output), _named(loss_func, "loss_func"))


@dataclass(frozen=True)
class LossValue:
    """What a loss function returned."""

    loss: torch.Tensor
    """0-d, differentiable; fp32 at least."""
    tokens: torch.Tensor | None
    """How many tokens the loss is summed over, 0-d; None where the function does not say."""
    report: JsonObject
    """Numbers to show: name → tensor or number, or a pair of a sum and what it is divided by."""


def read_loss(returned: object, name: str = "") -> LossValue:
    """`loss`, `(loss, report)` or `(loss, number of tokens, report)` as one value.

    Args:
        returned: By the loss function.
        name: The function's, for messages, where it is not `loss_func`.

    Raises:
        ConfigError: It has another form, or one of its parts is not a number.
    """
    with told_as(lambda problem: replace(problem, where=name)):
        return _read_loss(returned)


def _read_loss(returned: object) -> LossValue:
    parts: tuple[Any, ...] = (returned, {})
    if isinstance(returned, (tuple, list)):
        parts = tuple(returned)
    if len(parts) not in (2, 3) or not isinstance(parts[0], torch.Tensor) or not isinstance(parts[-1], dict):
        raise ConfigError(
            f"returned {_described(returned)}",
            key="loss_func",
            way_out="Return loss, (loss, {name: number}) or (loss, number of tokens, {name: number}).",
        )
    loss = parts[0]
    if loss.numel() != 1:
        raise ConfigError(f"returned shape {tuple(loss.shape)}", key="loss_func", way_out="Return one number.")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            "returned a loss that depends on no trained parameter",
            key="loss_func",
            way_out="Compute it from the model's output, without detach() or item().",
        )
    loss = loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
    tokens = _number_of_tokens(parts[1], loss) if len(parts) == 3 else None
    return LossValue(loss, tokens, _checked_report(parts[-1]))


def _number_of_tokens(given: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return the number as a 0-d tensor of the loss's type and device. Raises `ConfigError` for no number, and for a
    negative one on the host."""
    is_number = _is_real(given)
    on_host = not isinstance(given, torch.Tensor) or given.device.type == "cpu"  # another device would be waited for
    if not is_number or (on_host and given < 0):
        raise ConfigError(
            f"returned {_described(given)} as the number of tokens",
            key="loss_func",
            way_out="Return one number, not below 0, as the second of three values.",
        )
    return torch.as_tensor(given, device=loss.device).detach().reshape(()).to(loss.dtype)


def _checked_report(report: dict[Any, Any]) -> dict[Any, Any]:
    """With pairs as tuples. A tensor of two is one: Megatron-Core's own losses report so from 0.13 on (`train_step` of
    `megatron/training/training.py` sums both and divides)."""
    found = {}
    for name, value in report.items():
        if isinstance(value, (torch.Tensor, np.ndarray)) and math.prod(value.shape) == 2:
            value = tuple(value.reshape(-1))
        is_pair = isinstance(value, (tuple, list)) and len(value) == 2
        parts = value if is_pair else (value,)
        found[name] = value
        if not all(map(_is_real, parts)):
            raise ConfigError(
                f"reports {_described(value)} as '{name}'",
                key="loss_func",
                way_out="Report one number, or a pair of a sum and what it is divided by.",
            )
    return found


def _is_real(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.size == 1
    return isinstance(value, (int, float))


class _OneBatch(Iterator[Any]):
    """One micro-batch as the iterator that a forward step takes."""

    def __init__(self, batch: object) -> None:
        self._waiting = [batch]

    def __next__(self) -> Any:
        if not self._waiting:
            raise ConfigError(
                "took a second batch for one micro-batch",
                key="forward_step",
                way_out="Call next(data_iterator) once, and set --micro-batch-size for larger batches.",
            )
        return self._waiting.pop()


def _parameters(function: Function) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _asks_for_value(function: Function) -> bool:
    """Whether a function must be given a value, by its place."""
    for parameter in _parameters(function)[:1]:
        by_name = parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        return not by_name and parameter.default is inspect.Parameter.empty
    return False


def _refuse_unfilled(function: Function, key: str, names: Collection[str], first: Sequence[object] = ()) -> None:
    """Raise for parameters that are given no value."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = []
    for parameter in _parameters(function)[len(first) :]:
        is_filled = parameter.kind in kinds or parameter.name in names
        if not is_filled and parameter.default is inspect.Parameter.empty:
            missing.append(parameter.name)
    if missing:
        raise ConfigError(
            f"takes {', '.join(map(repr, missing))}, which is not given",
            key=key,
            way_out="Give it a default, or read it from get_args().",
        )


def _check_takes(function: Function, key: str, count: int, what: str) -> None:
    """Raise for a function that cannot be called with so many values; built-in ones do not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        raise ConfigError(
            f"takes {signature}",
            where=_named(function, key),
            key=key,
            way_out=f"Let it take {what}; bind other values with functools.partial.",
        ) from None


def name_of(function: object) -> str:
    """What a user's function is called; of an object that can be called, its class."""
    while isinstance(function, partial):
        function = function.func
    return setting_of(function, str, "__qualname__") or type(function).__name__


def _named(function: Function, role: str) -> str:
    """The name of a user's function, where it has another than its role."""
    name = name_of(function).rpartition("<locals>.")[2]
    if name == role:
        return ""
    return name


def _holds_loaders(returned: object) -> bool:
    """Whether a list is one of loaders, and not a data set that is a list of samples."""
    if not isinstance(returned, list) or not 0 < len(returned) <= 3:
        return False
    is_loader = (torch.utils.data.DataLoader, torch.utils.data.Dataset, type(None))
    return all(isinstance(each, is_loader) for each in returned)


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(type(each).__name__ for each in value)
        return f"{len(value)} values ({kinds})"
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return f"{value.item()}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (str, bool, int, float)):
        return repr(value)
    return type(value).__name__
