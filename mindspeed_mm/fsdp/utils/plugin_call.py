"""Calls what a plugin registered with what its signature takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.utils.plugin_import import place_of_error


def call_plugin(
    function: Callable[..., Any],
    offered: Mapping[str, Any],
    *,
    order: Sequence[str],
    spread: Sequence[str] = (),
    key: str,
    name: str,
) -> Any:
    """Call `function` with those of the offered values that it asks for.

    A parameter gets the value of its name; one that must be given and has a name of its own gets the value that `order`
    has at its place.

    Args:
        function: A function, a class, or a class method of a plugin.
        offered: Name → value; several names may stand for one value.
        order: Names of the values, in the order in which they are given to parameters by place, and to `*args`.
        spread: Names of the values that `**kwargs` gets, unless they were given already.
        key: The configuration key that names the plugin's entry, for messages.
        name: What the entry is called there.

    Raises:
        ConfigError: A parameter cannot be given, or the function failed; the line of the plugin is named.
    """
    bound = _bind(function, offered, order, spread, key, name)
    try:
        return function(*bound.args, **bound.kwargs)
    except MMError:
        raise
    except Exception as error:  # a plugin is foreign code: whatever it raises is its cause
        raise ConfigError(
            f"'{name}' cannot be built: {type(error).__name__}: {error}", where=place_of_error(error), key=key
        ) from error


def _bind(
    function: Callable[..., Any],
    offered: Mapping[str, Any],
    order: Sequence[str],
    spread: Sequence[str],
    key: str,
    name: str,
) -> inspect.BoundArguments:
    signature = inspect.signature(function)
    bound = signature.bind_partial()
    given = set(signature.parameters)
    for place, parameter in enumerate(signature.parameters.values()):
        is_by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if parameter.kind is parameter.VAR_POSITIONAL:
            bound.arguments[parameter.name] = tuple(offered[each] for each in order[place:])
            given.update(order[place:])
        elif parameter.kind is parameter.VAR_KEYWORD:
            bound.arguments[parameter.name] = {each: offered[each] for each in spread if each not in given}
        elif parameter.name in offered:
            bound.arguments[parameter.name] = offered[parameter.name]
        elif parameter.default is parameter.empty and is_by_place and place < len(order):
            bound.arguments[parameter.name] = offered[order[place]]
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"'{name}' has a parameter '{parameter.name}', which is not passed to it",
                where=getattr(function, "__qualname__", ""),
                key=key,
                way_out=f"It can have the parameters {', '.join(offered)}; give others a default.",
            )
    return bound
