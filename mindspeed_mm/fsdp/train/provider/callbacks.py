"""The functions that a user hands to `pretrain`, called with what their signatures take.

Scripts written for Megatron-LM and MindSpeed-MM differ in how many arguments their functions have and how many values
they return; every form that those libraries accept is accepted here, any other is one error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, told_as


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
    forward_step: Callable[..., Any] | None = None
    """`(data_iterator, model)`: returns the model's output, and a function that makes the loss of it."""

    def build_model(self) -> nn.Module:
        """Call the model provider.

        Raises:
            ConfigError: It asks for an argument that nobody gives, or returns no module.
        """
        assert self.model_provider is not None
        stages = {"pre_process": True, "post_process": True}
        takes = _parameters(self.model_provider)
        # A class that has no parameters of its own has those of nn.Module, which takes none.
        takes_any = not isinstance(self.model_provider, type) and any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in takes
        )
        given = {name: value for name, value in stages.items() if takes_any or name in {p.name for p in takes}}
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
        takes = [p for p in _parameters(self.data_provider) if p.kind is not inspect.Parameter.VAR_KEYWORD]
        positional = takes and takes[0].kind is not inspect.Parameter.KEYWORD_ONLY
        first = (list(num_samples),) if positional and takes[0].default is inspect.Parameter.empty else ()
        _refuse_unfilled(self.data_provider, "train_valid_test_datasets_provider", (), first)
        returned = self.data_provider(*first)
        parts = tuple(returned) if isinstance(returned, tuple) or _holds_loaders(returned) else (returned,)
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

    def run_forward(self, batch: Any, model: nn.Module) -> LossValue:
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
    report: dict[str, Any]
    """Numbers to show: name → tensor or number, or a pair of a sum and what it is divided by."""


def read_loss(returned: Any, name: str = "") -> LossValue:
    """`loss`, `(loss, report)` or `(loss, number of tokens, report)` as one value.

    Args:
        returned: By the loss function.
        name: The function's, for messages, where it is not `loss_func`.

    Raises:
        ConfigError: It is none of them, or one of its parts is not a number.
    """
    with told_as(lambda problem: replace(problem, where=name)):
        return _read_loss(returned)


def _read_loss(returned: Any) -> LossValue:
    parts = tuple(returned) if isinstance(returned, (tuple, list)) else (returned, {})
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
    _check_report(parts[-1])
    return LossValue(loss, tokens, parts[-1])


def _number_of_tokens(given: Any, loss: torch.Tensor) -> torch.Tensor:
    """0-d, beside the loss."""
    is_number = _is_number(given)
    on_host = not isinstance(given, torch.Tensor) or given.device.type == "cpu"  # another device would be waited for
    if not is_number or (on_host and given < 0):
        raise ConfigError(
            f"returned {_described(given)} as the number of tokens",
            key="loss_func",
            way_out="Return one number, not below 0, as the second of three values.",
        )
    return torch.as_tensor(given, device=loss.device).detach().reshape(()).to(loss.dtype)


def _check_report(report: dict[Any, Any]) -> None:
    for name, value in report.items():
        parts = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value,)
        if not all(map(_is_number, parts)):
            raise ConfigError(
                f"reports {_described(value)} as '{name}'",
                key="loss_func",
                way_out="Report one number, or a pair of a sum and what it is divided by.",
            )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) or (hasattr(value, "item") and getattr(value, "size", 0) == 1)


class _OneBatch(Iterator[Any]):
    """One micro-batch as the iterator that a forward step takes."""

    def __init__(self, batch: Any) -> None:
        self._waiting = [batch]

    def __next__(self) -> Any:
        if not self._waiting:
            raise ConfigError(
                "took a second batch for one micro-batch",
                key="forward_step",
                way_out="Call next(data_iterator) once, and set --micro-batch-size for larger batches.",
            )
        return self._waiting.pop()


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _refuse_unfilled(function: Callable[..., Any], key: str, names: Any, first: Sequence[Any] = ()) -> None:
    """Raise for parameters that nobody fills."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    waiting = [p for p in _parameters(function)[len(first) :] if p.kind not in kinds and p.name not in names]
    missing = [p.name for p in waiting if p.default is inspect.Parameter.empty]
    if missing:
        raise ConfigError(
            f"takes {', '.join(map(repr, missing))}, which nobody gives",
            key=key,
            way_out="Give it a default, or read it from get_args().",
        )


def _check_takes(function: Callable[..., Any], key: str, count: int, what: str) -> None:
    """Raise for a function that cannot be called with so many values; of built-in ones nobody can tell."""
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


def _named(function: Any, role: str) -> str:
    """The name of a user's function, where it has another than its role."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    return "" if name == role else name


def _holds_loaders(returned: Any) -> bool:
    """Whether a list is one of loaders, and not a data set that is a list of samples."""
    is_loader = (torch.utils.data.DataLoader, torch.utils.data.Dataset, type(None))
    return isinstance(returned, list) and 0 < len(returned) <= 3 and all(isinstance(e, is_loader) for e in returned)


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values ({', '.join(type(each).__name__ for each in value)})"
    if isinstance(value, torch.Tensor):
        return "a tensor of shape " + str(tuple(value.shape)) if value.numel() != 1 else f"{value.item()}"
    if isinstance(value, (str, bool, int, float)):
        return repr(value)
    return type(value).__name__
