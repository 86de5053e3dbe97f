"""Makes a command of a request: the options of the command line are the fields of the class."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.request import Request, RequestField, all_fields, request_of

Kind = TypeVar("Kind", bound=Request)


def takes(kind: type[Kind]) -> Callable[[Callable[[Kind], Any]], Callable[..., Any]]:
    """Give a command the arguments and options of a request, and hand it the request.

    Args:
        kind: A request. If it has a field `checkpoint`, the command gets the folder of the checkpoint that is meant as
            its `model`, and stderr says which one it is.
    """

    worded = [each for each in all_fields(kind) if each.declared.words is not None]
    shortened = [each for each in all_fields(kind) if each.declared.short_forms]

    def decorate(command: Callable[[Kind], object]) -> Callable[..., object]:
        @functools.wraps(command)
        def called(**values: object) -> Any:
            for each in worded:
                yes, _ = each.declared.words or ("", "")
                values[each.name] = values[each.name] == yes
            for each in shortened:
                for flag, (value, _) in each.declared.short_forms.items():
                    if values.pop(_name_of(flag)):
                        values[each.name] = value
            request: Kind = request_of(kind, values)
            if hasattr(request, "checkpoint"):
                from mindspeed_mm.cli.sharing import at_checkpoint

                request = at_checkpoint(request)
            return command(request)

        with_options: Callable[..., object] = called
        # click lists parameters in the reverse order in which decorators are applied.
        for each in reversed(all_fields(kind)):
            with_options = _parameter(each)(with_options)
        return with_options

    return decorate


def given_names() -> frozenset[str]:
    """Fields of the request that somebody has written on the command line, also with their default."""
    context = click.get_current_context()
    names = (parameter.name or "" for parameter in context.command.params)
    return frozenset(n for n in names if context.get_parameter_source(n) is ParameterSource.COMMANDLINE)


def _parameter(each: RequestField) -> Callable[[Callable[..., object]], Callable[..., object]]:
    declared = each.declared
    if declared.is_argument:
        settings: JsonObject = {"type": _type_of(each), "metavar": declared.metavar}
        if each.is_multiple:
            settings |= {"nargs": -1, "required": each.default is MISSING}
        elif each.default is not MISSING:
            settings |= {"required": False, "default": each.default}
        return click.argument(each.name, **settings)
    settings = {"help": each.help, "metavar": declared.metavar}
    if each.is_flag:
        settings["is_flag"] = True
    else:
        settings |= {"type": _type_of(each), "multiple": each.is_multiple, "required": each.default is MISSING}
        if float in each.types:
            settings["callback"] = _finite
    if declared.words is not None:
        settings |= {"default": declared.words[not each.default], "show_default": True}
    elif each.default is not MISSING and not each.is_multiple:
        settings["default"] = each.default
        settings["show_default"] = not isinstance(each.default, bool) and each.default not in (None, "")
    if declared.bare:
        settings |= {"is_flag": False, "flag_value": declared.bare}
    spellings = [each.flag, declared.also] if declared.also.startswith("--") else [declared.also, each.flag]
    made = click.option(*filter(None, spellings), each.name, **settings)

    def with_short_forms(command: Callable[..., object]) -> Callable[..., object]:
        for flag, (_, help_text) in declared.short_forms.items():
            # A name of its own: click gives an option without a value that of the last one with the same name.
            command = click.option(flag, _name_of(flag), is_flag=True, help=help_text)(command)
        return made(command)

    return with_short_forms


def _name_of(flag: str) -> str:
    return flag.strip("-").replace("-", "_")


def _type_of(each: RequestField) -> object:
    declared = each.declared
    if each.choices or declared.words is not None:
        return click.Choice(list(declared.words or each.choices))
    if Path in each.types:
        return click.Path(path_type=Path)
    if str in each.types:
        return click.STRING
    if int in each.types:
        low, high = _whole_number(declared.least), _whole_number(declared.most)
        if low is None and high is None:
            return click.INT
        return click.IntRange(low, high)
    if float in each.types:
        least = declared.above if declared.least is None else declared.least
        if least is None and declared.most is None:
            return click.FLOAT
        return click.FloatRange(least, declared.most, min_open=declared.above is not None)
    raise TypeError(f"an option of the types {each.types}")


def _whole_number(number: float | None) -> int | None:
    if number is None:
        return None
    return int(number)


def _finite(_context: click.Context, parameter: click.Parameter, value: object) -> object:
    """Refuse nan and inf, which are floats to click."""
    for number in value if isinstance(value, tuple) else (value,):
        if number is not None and not math.isfinite(number):
            raise UsageError(f"{number} is not a number", key=parameter.opts[0], way_out="Give a finite number.")
    return value
