"""A configuration as the Python door is given it: a file or a mapping, sections beside it, a model object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.tasks.given.arguments import given_sections
from mindspeed_mm.tasks.given.rows import named_path

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_mm.fsdp.params.loader import ResolvedConfig


@dataclass(frozen=True)
class GivenConfig:
    """What was given, not looked into yet."""

    source: Path | JsonMapping
    """A YAML file, or a mapping of its sections."""
    overrides: tuple[Any, ...]
    """Mappings of sections and `section.key=value`; later ones win."""
    model: nn.Module | None
    """A model object, which stands for the folder of one."""

    @classmethod
    def of(cls, config: object, model: object, overrides: Sequence[str], **sections: object) -> GivenConfig:
        """From the arguments of `mm.train` and `mm.check`.

        Raises:
            UsageError: One of them is of another kind.
        """
        module, named = _model(model)
        source = config
        if source is None:
            source = {}
        elif not isinstance(source, Mapping):
            source = named_path(source, "config")
        return cls(source, (given_sections(**sections) | named, *overrides), module)


def resolved(source: Path | JsonMapping, overrides: Sequence[Any] = ()) -> ResolvedConfig:
    """The configuration, validated, with the plugins that it names."""
    from mindspeed_mm.tasks.given.run_as_model import load_of_run  # pydantic

    return load_of_run(source, overrides)


def _model(model: object) -> tuple[nn.Module | None, JsonObject]:
    """A model object, and what is said of the `model` section."""
    if model is None:
        return None, {}
    if isinstance(model, Mapping):
        return None, {"model": model}
    if isinstance(model, str | os.PathLike):
        return None, {"model": {"model_name_or_path": str(named_path(model, "model"))}}
    from torch import nn  # heavy

    if isinstance(model, nn.Module):
        return model, {}
    raise UsageError(
        f"{type(model).__name__} is not a model",
        key="model",
        way_out="Give the model's folder, a torch module, or a mapping of the section.",
    )
