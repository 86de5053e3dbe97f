"""The flags of a converter's subcommand: which there are, by the method's parameters, and what a command line or a YAML
file says of them.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Union, get_args, get_origin

from mindspeed_mm.core.errors import ConfigError, Problem, UsageError, count_problems
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.suggest import did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

Subcommand = Callable[..., object]
"""A method of a converter: its parameters are the flags of a subcommand."""
Values = dict[str, object]
"""Values of flags by name, those of a section in a table of their own."""
_REQUIRED = inspect.Parameter.empty
"""The default of a flag that has none."""


@dataclass(frozen=True)
class ConverterFlag:
    """One flag of a subcommand."""

    annotation: object
    default: object
    help: str

    @property
    def is_required(self) -> bool:
        """Whether the subcommand cannot do without it."""
        return self.default is _REQUIRED

    @property
    def types(self) -> tuple[object, ...]:
        """The types that its value may have."""
        return _members(self.annotation)


def flags_of(method: Subcommand) -> dict[str, ConverterFlag]:
    """The flags of a subcommand by name; that of a value inside a section is dotted."""
    described = _argument_help(method)
    found: dict[str, ConverterFlag] = {}
    for name, parameter in _parameters(method).items():
        section = _section_class(parameter.annotation)
        if section is None:
            found[name] = ConverterFlag(parameter.annotation, parameter.default, described.get(name, ""))
        else:
            found |= _section_flags(name, section, is_required=parameter.default is _REQUIRED)
    return found


def _parameters(method: Subcommand) -> dict[str, inspect.Parameter]:
    """The parameters besides `self`; one without an annotation is text."""
    _, *parameters = inspect.signature(method, eval_str=True).parameters.values()
    found = {parameter.name: parameter for parameter in parameters}
    for name, parameter in found.items():
        if parameter.annotation is inspect.Parameter.empty:
            found[name] = parameter.replace(annotation=str)
    return found


def _section_flags(prefix: str, section: type[BaseModel], *, is_required: bool) -> dict[str, ConverterFlag]:
    found: dict[str, ConverterFlag] = {}
    for name, field in section.model_fields.items():
        flag = f"{prefix}.{name}"
        inner = _section_class(field.annotation)
        required = is_required and field.is_required()
        if inner is not None:
            found |= _section_flags(flag, inner, is_required=required)
            continue
        default: object
        if required:
            default = _REQUIRED
        elif field.is_required():  # of a section that may be left out
            default = None
        else:
            default = field.get_default()
        found[flag] = ConverterFlag(field.annotation, default, field.description or "")
    return found


def _members(annotation: object) -> tuple[object, ...]:
    """The types that a union allows, or the one type."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _section_class(annotation: object) -> type[BaseModel] | None:
    """The pydantic model of an annotation, also of an optional one."""
    from pydantic import BaseModel

    for member in _members(annotation):
        if inspect.isclass(member) and issubclass(member, BaseModel):
            return member
    return None


def _argument_help(method: Subcommand) -> dict[str, str]:
    """The `Args:` section of a docstring: name → text."""
    section = inspect.cleandoc(method.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        # An argument begins at the first indentation; what is indented further goes on with it.
        begins = re.match(r"    (\w+):(.*)", line)
        if begins:
            name, text = begins.groups()
        else:
            text = line
        found[name] = f"{found.get(name, '')} {text.strip()}".strip()
    return found


def parse_flags(
    words: list[str], fields: Mapping[str, ConverterFlag], command: str, other_names: Mapping[str, str] | None = None
) -> Values:
    """What flags of a command line say, not yet checked against their types.

    Args:
        words: `--flag value`, `--flag=value`, or a switch alone.
        fields: The flags of the subcommand. Dashes in their names count as underscores.
        command: How it was called, for messages.
        other_names: Another name of a flag → the flag.

    Raises:
        UsageError: A flag is unknown or has no value.
    """
    given: Values = {}
    remaining = list(reversed(words))
    while remaining:
        flag, equals, value = remaining.pop().partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        name = (other_names or {}).get(name, name)
        _check_field(flag, name, fields, command)
        if not equals:
            if remaining and not remaining[-1].startswith("--"):
                value = remaining.pop()
            elif name in fields and bool in fields[name].types:
                value = "true"
            else:
                raise UsageError(f"'--{name}' needs a value", way_out=f"See {command} --help.")
        merge(given, _nested(name, _value(value, name, fields)))
    return given


def of_environment(fields: Mapping[str, ConverterFlag], prefix: str) -> Values:
    """What environment variables say, as `MM_CONVERT_QWEN2VLCONVERTER__HF_TO_MM__CFG__MM_DIR`. They are read where
    `JSONARGPARSE_DEFAULT_ENV` is true, as MindSpeed-MM's scripts set it.

    Args:
        fields: The flags of the subcommand.
        prefix: The converter's name and the subcommand's, two underscores between them.
    """
    given: Values = {}
    if os.environ.get("JSONARGPARSE_DEFAULT_ENV", "").lower() not in {"true", "1", "yes", "y"}:
        return given
    for name in fields:
        text = os.environ.get(f"MM_CONVERT_{prefix}__{name.replace('.', '__')}".upper())
        if text is not None:
            merge(given, _nested(name, _value(text, name, fields)))
    return given


def _check_field(flag: str, name: str, fields: Collection[str], command: str) -> None:
    if not flag.startswith("--"):
        raise UsageError(f"'{flag}' is not a flag", way_out=f"Flags begin with two dashes. See {command} --help.")
    if name not in fields and not _is_section(name, fields):
        near = did_you_mean(flag, [f"--{known}" for known in fields])
        raise UsageError(f"unknown flag '{flag}'", way_out=f"{near}See {command} --help.")


def _value(text: str, name: str, fields: Mapping[str, ConverterFlag]) -> object:
    """Paths and words stay text; lists, tables, numbers and switches are YAML."""
    allowed: tuple[object, ...] = (dict,)  # of a section
    if name in fields:
        allowed = fields[name].types
    if str in allowed or Path in allowed:
        return text
    value = _yaml(text, f"--{name}")
    if not isinstance(value, str):
        return value
    # `a,b,c,d`, as the documents write lists and mappings.
    items = [item.strip() for item in value.split(",")]
    kinds = [get_origin(member) or member for member in allowed]
    if dict in kinds and len(items) % 2 == 0:
        return dict(zip(items[::2], items[1::2], strict=True))
    if list in kinds:
        return items
    return value


def _nested(name: str, value: object) -> Values:
    *sections, last = name.split(".")
    nested = {last: value}
    for section in reversed(sections):
        nested = {section: nested}
    return nested


def merge(into: Values, values: Mapping[str, object]) -> None:
    """Put values over others in place, section by section."""
    for key, value in values.items():
        inner = into.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            merge(inner, value)
        else:
            into[key] = value


def taken(flag: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The values of a flag that may stand anywhere, and the other words."""
    values, others = [], []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != flag:
            others.append(word)
        elif equals:
            values.append(value)
        else:
            following = next(remaining, None)
            if following is None:
                raise UsageError(f"'{flag}' needs a value")
            values.append(following)
    return values, others


def validated(method: Subcommand, given: Mapping[str, object], command: str) -> Values:
    """The arguments for a subcommand's method.

    Args:
        method: The subcommand.
        given: Values of its flags.
        command: How it was called, for messages.

    Raises:
        ConfigError: A value is missing, unknown or of the wrong type; all of them are named.
    """
    from pydantic import ConfigDict, ValidationError, create_model

    parameters = _parameters(method)
    fields: JsonObject = {}
    for name, parameter in parameters.items():
        default = ... if parameter.default is _REQUIRED else parameter.default
        fields[name] = parameter.annotation, default
    model = create_model("Flags", __config__=ConfigDict(extra="forbid"), **fields)
    try:
        checked = model.model_validate(dict(given))
    except ValidationError as error:
        what = "the flags do not fit."
        problems = []
        for each in error.errors():
            problems += _problems(each, method)
            if each["type"] == "missing" and "For example" not in what:
                what += f" For example: {_example(command, parameters)}"
        raise ConfigError(what, problems=problems) from None
    return dict(checked)  # the fields only, sections as their models


def _example(command: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """A command with every flag that it needs."""
    words = [command]
    for name, parameter in parameters.items():
        if parameter.default is _REQUIRED:
            for flag, *_ in _needs(name, parameter.annotation):
                words.append(f"--{flag} {flag.rpartition('.')[2].upper()}")
    return " ".join(words)


def _problems(error: ErrorDetails, method: Subcommand) -> list[Problem]:
    """What is wrong with a flag; of a section that is missing, each flag in it that is needed."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    name = ".".join(path)
    if error["type"] == "missing":
        return _missing(path, method)
    if error["type"] == "extra_forbidden":
        return [Problem("is unknown", key=f"--{name}", way_out=did_you_mean(name, list(flags_of(method))).strip())]
    message = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    return [Problem(f"{error['input']!r:.80}: {message}", key=f"--{name}")]


def _missing(path: list[str], method: Subcommand) -> list[Problem]:
    parameter, *inside = path
    annotation: object = _parameters(method)[parameter].annotation
    for part in inside:
        section = _section_class(annotation)
        assert section is not None  # pydantic looked for a field in it
        annotation = section.model_fields[part].annotation
    flags = flags_of(method)
    problems = []
    for flag, *others in _needs(".".join(path), annotation):
        if others:
            names = ", ".join(other.rpartition(".")[2] for other in others)
            problems.append(Problem(f"is needed, or another: {names}", key=f"--{flag}"))
        else:
            problems.append(Problem("is needed", key=f"--{flag}", way_out=flags[flag].help))
    return problems


def _needs(name: str, annotation: object) -> Iterator[list[str]]:
    """Flags that a parameter cannot do without, each with those that would do in its place."""
    section = _section_class(annotation)
    if section is None:
        yield [name]
        return
    fields = section.model_fields
    required = [part for part, field in fields.items() if field.is_required()]
    if not required:
        yield [f"{name}.{part}" for part in fields]
    for part in required:
        yield from _needs(f"{name}.{part}", fields[part].annotation)


def as_flag(problem: Problem, flags: Collection[str]) -> Problem:
    """Under the flag that somebody has to change, where the key is its name or the end of it."""
    key = problem.key
    if not key or key.startswith("--"):
        return problem
    if _is_section(key, flags):
        return replace(problem, key=f"--{key}")
    meant = [flag for flag in flags if f".{flag}".endswith(f".{key}")]
    if len(meant) != 1:
        return problem
    return replace(problem, key=f"--{meant[0]}")


def _is_section(name: str, flags: Collection[str]) -> bool:
    return any(flag.startswith(f"{name}.") for flag in flags)


def read_yaml(file: Path) -> Values:
    """Values of flags out of a file of `--config`.

    Raises:
        ConfigError: It cannot be read, is not valid YAML or not a table.
    """
    from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text

    content = _yaml(read_config_text(file), str(file))
    if content is not None and not isinstance(content, dict):
        raise ConfigError("is not a table of flags", where=str(file), key="--config")
    return _without_empty(content or {})


def _yaml(text: str, where: str) -> object:
    from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
    from mindspeed_mm.fsdp.params.yaml.tree import plain

    document = parse_yaml(text, where)
    if document.problems:
        raise ConfigError(count_problems(where, document.problems), problems=document.problems)
    return plain(document.root)


def _without_empty(content: Mapping[str, object]) -> Values:
    """What `--print_config` left open is not given."""
    kept: Values = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            value = _without_empty(value)
        if value is not None and value != {}:
            kept[key] = value
    return kept


def as_yaml(fields: Mapping[str, ConverterFlag], given: Mapping[str, object]) -> str:
    """Every flag with its value, its help above it; what is needed and not given is left open."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    root = CommentedMap()
    for name, flag in fields.items():
        *path, last = name.split(".")
        place, values = root, given
        for part in path:
            place = place.setdefault(part, CommentedMap())
            inside = values.get(part)
            values = inside if isinstance(inside, Mapping) else {}
        help_line, default = flag.help, flag.default
        if flag.is_required:
            help_line, default = f"{flag.help} (needed)", None
        shown = values.get(last, default)
        place[last] = str(shown) if isinstance(shown, Path) else shown
        place.yaml_set_comment_before_after_key(last, before=help_line, indent=2 * len(path))
    out = io.StringIO()
    YAML().dump(root, out)
    return out.getvalue()
