"""Which modules a feature works on: those that its patterns name, or the model's own blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.utils.model_parts import module_names


def select_modules(model: nn.Module, patterns: Sequence[str], blocks: Sequence[str], key: str) -> list[str]:
    """Names of modules, none inside another, each of which is called itself.

    Args:
        model: The whole model.
        patterns: Of the feature's plan.
        blocks: What to take where there are none.
        key: The patterns' configuration key.

    Raises:
        ConfigError: A pattern matches nothing or what is never called, modules lie inside one another, or the model
            has no blocks of its own.
    """
    names = module_names(model)
    found = resolve_patterns(patterns, names, key=key) if patterns else list(blocks)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} declares no repeated blocks",
            key=key,
            way_out="Name modules that are repeated, e.g. 'model.layers.{*}'.",
        )
    _check_called(model, found, key)
    _check_apart(found, key)
    return found


def _check_called(model: nn.Module, names: Sequence[str], key: str) -> None:
    for name in names:
        module = model.get_submodule(name)
        if type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"'{name}' is a {type(module).__name__}, which is never called itself",
                key=key,
                way_out=f"Name what it holds: '{name}.{{*}}'.",
            )


def _check_apart(names: Sequence[str], key: str) -> None:
    for outer in names:
        if inner := next((name for name in names if name.startswith(f"{outer}.")), None):
            raise ConfigError(
                f"'{inner}' lies inside '{outer}', which is named too: it would be done twice",
                key=key,
                way_out="Name one of them.",
            )
