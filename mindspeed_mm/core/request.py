"""What a command is asked, declared once: a frozen dataclass whose fields are the command's arguments and options.

`cli/requests.py` makes options of a command line of them, the Python door fills the same class, and the task is handed
the object: a default, a range and a help text stand in one place. Whoever makes a request makes one that is whole, as
every value is checked against its declaration. Nothing here imports click or torch.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import ModelKind
from mindspeed_mm.core.suggest import did_you_mean

_DECLARED, _GROUP = "declared", "group"
_LONGEST = 60


@dataclass(frozen=True)
class Declared:
    """How a field of a request is written on a command line, and the numbers that it may be."""

    help: str = ""
    flag: str = ""
    """The option, such as `--frames`; empty: made from the field's name."""
    also: str = ""
    """A second spelling of the option."""
    least: float | None = None
    above: float | None = None
    """The number must be larger than this one."""
    most: float | None = None
    metavar: str | None = None
    only: ModelKind | None = None
    """The one kind of model that the option is for; None: all of them."""
    words: tuple[str, str] | None = None
    """Of a boolean that is written as a word: that of True, and that of False."""
    bare: str = ""
    """The value that the option has where none follows it; empty: one must follow."""
    short_forms: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Further options that take no value and stand for one of this option: flag → the value, and its help."""
    is_argument: bool = False
    """Whether it is written without a flag, by its place."""


def option(help: str, default: Any = None, **declared: Any) -> Any:
    """Declare a field of a request that an option of the command line sets.

    Args:
        help: Text of `--help`, which ends with a full stop.
        default: Value of the field where the option is not given.
        declared: Further fields of `Declared`.
    """
    return field(default=default, kw_only=True, metadata={_DECLARED: Declared(help, **declared)})


def required(help: str, **declared: Any) -> Any:
    """Declare a field that an option of the command line sets, which must be given; arguments as of `option`."""
    return field(kw_only=True, metadata={_DECLARED: Declared(help, **declared)})


def argument(metavar: str | None = None, **default: Any) -> Any:
    """Declare a field of a request that a word of the command line sets by its place; `default` makes it optional."""
    return field(**default, metadata={_DECLARED: Declared(metavar=metavar, is_argument=True)})


def group(kind: type[Request]) -> Any:
    """Declare a field that holds another request, whose options are options of the same command."""
    return field(default_factory=kind, kw_only=True, metadata={_GROUP: kind})


@dataclass(frozen=True)
class RequestField:
    """One argument or option of a command."""

    name: str
    annotation: Any
    default: Any
    """`MISSING` where the field must be given."""
    declared: Declared

    @cached_property
    def types(self) -> tuple[Any, ...]:
        """The types that one value may have, without None."""
        annotation = self.annotation
        if self.is_multiple:
            annotation = get_args(annotation)[0]
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        return tuple(member for member in members if member is not NoneType)

    @property
    def is_multiple(self) -> bool:
        """Whether the option may be repeated, or the argument is several words."""
        return get_origin(self.annotation) is tuple

    @property
    def is_flag(self) -> bool:
        """Whether the option stands alone, without a value."""
        return self.types == (bool,) and self.declared.words is None

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are allowed; empty: any."""
        (kind, *_) = self.types
        if get_origin(kind) is Literal:
            return get_args(kind)
        return ()

    @property
    def flag(self) -> str:
        """The option as it is written; of an argument its name in capitals."""
        if self.declared.is_argument:
            return self.declared.metavar or self.name.upper()
        return self.declared.flag or f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """Text of `--help`, which names the kind of models that the option is for."""
        only = self.declared.only
        if only is not None:
            return f"{only.title}: {_lower(self.declared.help)}"
        return self.declared.help

    def check(self, value: Any) -> None:
        """Raise `UsageError` for a value that this field cannot have."""
        if value is None and self.default is None:
            return
        for each in value if self.is_multiple else (value,):
            self._check_one(each)

    def _check_one(self, value: object) -> None:
        if self.types == (bool,):
            if not isinstance(value, bool):
                way_out = f"Pass {self.name}=True or {self.name}=False."
                raise UsageError(f"{short(value)} is neither True nor False", key=self.flag, way_out=way_out)
        elif self.choices:
            if value not in self.choices:
                hint = did_you_mean(value, self.choices) if isinstance(value, str) else ""
                what = f"{short(value)} is not one of {', '.join(self.choices)}"
                raise UsageError(what, key=self.flag, way_out=hint.rstrip())
        elif str not in self.types and (int in self.types or float in self.types):
            self._check_number(value)

    def _check_number(self, value: Any) -> None:
        is_whole = float not in self.types
        what = "a whole number" if is_whole else "a finite number"
        least, above, most = self.declared.least, self.declared.above, self.declared.most
        bounds = []
        if least is not None:
            bounds.append(f"of at least {least:g}")
        if above is not None:
            bounds.append(f"above {above:g}")
        if most is not None:
            bounds.append(f"up to {most:g}")
        kinds = int if is_whole else (int, float)
        # To Python True is the number 1.
        fits = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if fits and least is not None:
            fits = value >= least
        if fits and above is not None:
            fits = value > above
        if fits and most is not None:
            fits = value <= most
        if not fits:
            raise UsageError(f"{short(value)} is not {' '.join([what, *bounds])}", key=self.flag)


class Request:
    """Base of requests: frozen dataclasses whose values are checked when one is made."""

    __dataclass_fields__: ClassVar[JsonObject]

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: A value has the wrong type, is no allowed word or lies outside its range.
        """
        for each in fields_of(type(self)):
            each.check(getattr(self, each.name))

    @classmethod
    def flag_of(cls, name: str) -> str:
        """The option that sets a field, as it is written on the command line; messages name it.

        Raises:
            KeyError: The request has no such field.
        """
        return {each.name: each.flag for each in fields_of(cls)}[name]


def fields_of(kind: type[Request]) -> tuple[RequestField, ...]:
    """Arguments and options of a request in their order; those of its groups are not among them."""
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(_declared_fields(kind))
    return _FIELDS[kind]


_FIELDS: dict[type[Request], tuple[RequestField, ...]] = {}
"""By request: annotations are read once."""


def _declared_fields(kind: type[Request]) -> Iterator[RequestField]:
    annotations = get_type_hints(kind)
    for each in fields(kind):
        declared = each.metadata.get(_DECLARED)
        if declared is not None:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            yield RequestField(each.name, annotations[each.name], default, declared)


def groups_of(kind: type[Request]) -> Mapping[str, type[Request]]:
    """Requests that are fields of this one, by the names of the fields."""
    return {each.name: each.metadata[_GROUP] for each in fields(kind) if _GROUP in each.metadata}


def all_fields(kind: type[Request]) -> list[RequestField]:
    """Arguments and options of a request and of its groups, in the order of the declarations."""
    own = {each.name: each for each in fields_of(kind)}
    found: list[RequestField] = []
    for each in fields(kind):
        if each.name in own:
            found.append(own[each.name])
        elif each.name in groups_of(kind):
            found += all_fields(groups_of(kind)[each.name])
    return found


def request_of(kind: type[Any], values: Mapping[str, object]) -> Any:
    """A request from flat values, in which those of its groups stand beside its own."""
    own = {each.name: values[each.name] for each in fields_of(kind) if each.name in values}
    inside = {name: request_of(inner, values) for name, inner in groups_of(kind).items()}
    return kind(**own, **inside)


def words_of(request: Request, *, with_arguments: bool = True) -> list[str]:
    """The words of a command line that make this request again; an option that has its default is left out."""
    words: list[str] = []
    for each in fields_of(type(request)):
        value = getattr(request, each.name)
        items = value if each.is_multiple else (value,)
        if each.declared.is_argument:
            words += [str(item) for item in items if item is not None and with_arguments]
        elif value == each.default:
            continue
        elif each.is_flag:
            words.append(each.flag)
        elif each.declared.words is not None:
            words.append(f"{each.flag}={each.declared.words[not value]}")
        else:
            # Written as one word: a value may begin with a dash.
            words += [f"{each.flag}={item}" for item in items]
    for name in groups_of(type(request)):
        words += words_of(getattr(request, name))
    return words


def short(value: object) -> str:
    """A value as messages show it, however long it is."""
    text = str(value) if isinstance(value, Path) else reprlib.repr(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 3]}..."


def _lower(text: str) -> str:
    """A sentence as it goes on after a colon: a capital that is one of several stays, as in `VAE`."""
    if text[1:2].isupper():
        return text
    return f"{text[0].lower()}{text[1:]}"
