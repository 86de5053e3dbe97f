"""Whether a batch has the arguments of a model's `forward`, and no others."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.forward_arguments import COLLATOR_KEY


def check_arguments(model: nn.Module, given: Collection[str]) -> set[str]:
    """The names of the arguments that a model's `forward` takes.

    Args:
        model: May be on meta.
        given: Keys of the batch, as far as they are handed to the model.

    Raises:
        ConfigError: The batch has a key that `forward` does not take, or lacks one that it requires.
    """
    parameters = inspect.signature(model.forward).parameters
    too_many = sorted(set(given) - parameters.keys())
    missing = []
    for name, parameter in sorted(parameters.items()):
        if parameter.kind is parameter.VAR_KEYWORD:
            too_many = []  # it takes any
        if _is_required(parameter) and name not in given:
            missing.append(name)
    if too_many or missing:
        raise ConfigError(
            f"{type(model).__name__}.forward {_unfit(too_many, missing)}",
            key=COLLATOR_KEY,
            way_out=_fitting(parameters, too_many),
        )
    return set(parameters)


def _unfit(too_many: Sequence[str], missing: Sequence[str]) -> str:
    """How a batch's keys differ from the arguments of a forward."""
    parts = []
    if too_many:
        parts.append(f"does not take {', '.join(too_many)}, which the batch holds")
    if missing:
        parts.append(f"needs {', '.join(missing)}, which the batch lacks")
    return " and ".join(parts)


def _fitting(parameters: Iterable[str], too_many: Sequence[str]) -> str:
    """What to change about the model or the batch."""
    told = f"It takes {', '.join(parameters)}. "
    if list(too_many) == ["labels"]:
        return f"{told}Take labels and return a loss, or define get_output_embeddings() and return logits."
    return f"{told}Choose the collator of this model, or add the arguments to its forward."


def _is_required(parameter: inspect.Parameter) -> bool:
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return is_named and parameter.default is parameter.empty
