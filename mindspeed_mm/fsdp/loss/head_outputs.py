"""What a model's own code does with the logits that its output head returns: soft-capping, a scale, a cast.

A head that returns a loss instead of logits must do that itself, slice by slice, and the model's code must leave the
loss alone. Nothing of it is known by name: a model is asked, before it has weights, what it does with a tensor that
remembers what is done to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.ops.forward_stack import Forward, forwards_replaced
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

KEY = "features.enable_chunk_loss"
_ELEMENTWISE = {"mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "tanh"}
_CASTS = {"float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16, "half": torch.float16}


@dataclass(frozen=True)
class LogitStep:
    """One operation on logits, element by element."""

    name: str
    operation: Callable[..., torch.Tensor]
    operands: tuple[Any, ...]


class LogitSteps:
    """Operations between a head and the logits that its model returns.

    Args:
        steps: In order.
    """

    def __init__(self, steps: tuple[LogitStep, ...] = ()) -> None:
        self.steps = steps

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as the model returns them; differentiable."""
        for step in self.steps:
            logits = step.operation(logits, *step.operands)
        return logits

    def __bool__(self) -> bool:
        return bool(self.steps)


class RecordingTensor(torch.Tensor):
    """A tensor that stays what it is under operations on its elements, and remembers them."""

    steps: list[LogitStep]
    others: list[str]
    """Names of operations that do not work on elements."""
    is_written: bool
    """Whether one of these wrote into it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Remember an operation, or do what is asked."""
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], RecordingTensor):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own, *operands = args
        known = _step_of(func, tuple(operands), kwargs)
        if known is not None:
            own.steps += known
            return own
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        name = _name_of(func)
        if isinstance(result, torch.Tensor) or name == "__setitem__":
            own.others.append(name)
            own.is_written |= result is own or name == "__setitem__"
        return result


def recording(tensor: torch.Tensor) -> RecordingTensor:
    """The same values and gradients."""
    own = tensor.as_subclass(RecordingTensor)
    own.steps, own.others, own.is_written = [], [], False
    return own


def _name_of(func: Callable[..., object]) -> str:
    return str(attribute_at(func, "__name__", func))


def _step_of(
    func: Callable[..., object], operands: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[LogitStep] | None:
    """What an operation adds to the list: nothing, if it changes no value; None when it does not work on elements."""
    name = _name_of(func)
    if name in _CASTS:
        return [LogitStep("to", torch.Tensor.to, (_CASTS[name],))]
    if name == "to":
        for operand in (*operands, *kwargs.values()):
            if isinstance(operand, torch.dtype):
                return [LogitStep("to", torch.Tensor.to, (operand,))]
        return []
    if name == "contiguous":
        return []
    if name in _ELEMENTWISE and not kwargs and all(isinstance(each, int | float) for each in operands):
        return [LogitStep(name, func, operands)]
    return None


def find_logit_steps(model: nn.Module, head_name: str) -> LogitSteps:
    """Ask a model what it does behind its head, by running the code around the head with everything else left out.

    Args:
        model: Built; parameters may be on meta.
        head_name: Of the head.

    Returns:
        Nothing also for code that cannot run so: `check_untouched` looks again at every pass.

    Raises:
        ConfigError: Something else than operations on elements.
    """
    return _requested_steps(model, head_name) or LogitSteps()


def known_logit_steps(model: nn.Module, head_name: str) -> LogitSteps | None:
    """The same; None where a model does something else with its logits, or its code cannot tell."""
    try:
        return _requested_steps(model, head_name)
    except ConfigError:
        return None


def _requested_steps(model: nn.Module, head_name: str) -> LogitSteps | None:
    owner = model.get_submodule(head_name.rpartition(".")[0])
    head = model.get_submodule(head_name)
    returned = recording(torch.zeros(1, 1, 2))
    hidden = torch.zeros(1, 1, 2)
    answers: dict[nn.Module, Forward] = {child: lambda *_, **__: _Outputs(hidden) for child in owner.children()}
    answers[head] = lambda *_, **__: returned
    with forwards_replaced(answers), torch.no_grad():
        try:
            output = owner.forward(**_inputs_of(owner))
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
    logits = named_output(output, "logits")
    if logits is not None and (logits is not returned or returned.is_written):
        raise _touched(owner, returned)
    return LogitSteps(tuple(returned.steps))


def check_untouched(
    model: nn.Module, logits: torch.Tensor, returned: RecordingTensor | None, behind: LogitSteps
) -> None:
    """Raise `ConfigError` when what a model returns is not what its head did, after the steps that the head did.

    A tensor of a simulation remembers nothing: only a model that does nothing with its logits is asked to return it.
    """
    if returned is not None and not isinstance(returned, RecordingTensor):
        if logits is returned or behind:
            return
        raise _touched(model, None)
    is_same = returned is not None and logits is returned and not returned.is_written
    if not is_same or returned is None or tuple(returned.steps) != behind.steps:
        raise _touched(model, returned)


def _touched(model: nn.Module, returned: RecordingTensor | None) -> ConfigError:
    seen: list[str] = []
    if returned is not None:
        seen += [*returned.others, *(step.name for step in returned.steps)]
    done = f" ({', '.join(dict.fromkeys(seen))})" if seen else ""
    return ConfigError(
        f"{type(model).__name__.removeprefix('FSDP')} changes the logits behind its output head{done}, which a loss in "
        "slices cannot follow",
        key=KEY,
        way_out="Leave it out for this model.",
    )


class _Outputs:
    """Stands for the output of any module in front of the head: hidden states, and None for all else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, at: object) -> torch.Tensor | tuple[()]:
        if isinstance(at, slice):
            return ()
        return self.last_hidden_state


def _inputs_of(owner: nn.Module) -> dict[str, torch.Tensor]:
    if "input_ids" not in inspect.signature(owner.forward).parameters:
        return {}
    return {"input_ids": torch.zeros(1, 1, dtype=torch.long, device="meta")}


def named_output(output: object, name: str) -> object:
    """What a model's output, a dict or an object, has under a name; None where it has nothing."""
    if isinstance(output, Mapping):
        return output.get(name)
    return attribute_at(output, name)
