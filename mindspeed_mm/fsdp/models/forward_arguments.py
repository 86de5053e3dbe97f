"""The arguments of a model's `forward`: which ones transformers is told of, and errors about those that are missing or
unknown, in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError

_ABOUT_ARGUMENTS = re.compile(
    r"unexpected keyword|required (positional|keyword-only) argument|multiple values for|(have to|must|cannot) specify"
    r"|\bmust (also )?be provided|must provide|\b(is|are) (missing|required)\b|not used by the model"
)
"""What a `forward`, or `generate`, says of arguments that it lacks or does not know (transformers 5.17 to 5.23)."""


def kept_tokens(logits_to_keep: int | torch.Tensor) -> slice | torch.Tensor:
    """Which tokens have logits, as an index of their axis.

    Args:
        logits_to_keep: How many of the last tokens, or which; 0: all.
    """
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep, None)  # -0 is 0: from the first token on
    return logits_to_keep


def list_arguments(model: nn.Module, names: Iterable[str]) -> None:
    """Let the signature of a `forward` that takes any keyword list what it takes.

    A plugin's `forward(self, **inputs)` that passes them on takes what the class above it takes. transformers reads the
    signature to decide what `generate` accepts and computes (`GenerationMixin._validate_model_kwargs`,
    `_supports_logits_to_keep`, positions of rows that are padded on the left): without them, it refuses the media of a
    question. The class's function gets a `__signature__`; what it does stays as it is. Classes of transformers list
    their arguments themselves and are left alone.

    Args:
        model: The model, perhaps with PEFT's wrapper around it.
        names: What it is given beside what the class above lists.
    """
    owner: Any = model
    if hasattr(model, "get_base_model"):  # PEFT's, which is foreign
        owner = owner.get_base_model()
    forward = type(owner).forward
    if not inspect.isfunction(forward) or forward.__module__.startswith("transformers."):
        return
    own = inspect.signature(forward)
    *parameters, last = own.parameters.values()
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return
    known = [*_inherited(type(owner)), *names]
    for name in dict.fromkeys(known):
        if name not in own.parameters:
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    forward.__signature__ = own.replace(parameters=[*parameters, last])  # type: ignore[attr-defined]


def _inherited(model_class: type) -> list[str]:
    """Arguments by name of the forward that a class overrides, and of those above while they take any keyword."""
    found: list[str] = []
    forwards = [vars(ancestor)["forward"] for ancestor in model_class.__mro__ if "forward" in vars(ancestor)]
    for forward in forwards[1:]:
        if forward is nn.Module.forward:
            break
        parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found += [parameter.name for parameter in parameters if parameter.kind in named]
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


COLLATOR_KEY = "data.dataloader_param.collate_param.model_name"
COLLATOR_WAY_OUT = (
    "Choose the collator of this model, let the data set's collate_fn give what is missing (processors return it "
    "beside input_ids), or change the arguments of the model's forward."
)


@contextmanager
def refusals_explained(
    model: nn.Module,
    given: Iterable[str],
    what: str = "batch",
    *,
    key: str = COLLATOR_KEY,
    way_out: str = COLLATOR_WAY_OUT,
) -> Iterator[None]:
    """Errors of a model's `forward` about its arguments become a `ConfigError`; others pass through.

    Args:
        model: The model.
        given: The keys of what it is given.
        what: What they are the keys of.
        key: The key of the error.
        way_out: What to change, after the list of the keys.

    Raises:
        ConfigError: The model lacks an argument, or was given one that it does not take.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not _ABOUT_ARGUMENTS.search(str(error)):
            raise
        held = ", ".join(sorted(name for name in given if not name.startswith("_")))
        raise ConfigError(
            f"{type(model).__name__.removeprefix('FSDP')}.forward refuses the {what}: {' '.join(str(error).split())}",
            key=key,
            way_out=f"The {what} holds {held}. {way_out}",
        ) from error
