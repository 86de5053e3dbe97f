"""Value types of the schema: what a YAML may hold for each kind of key, with messages that show the value found."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.redaction import hide, is_below_secret

REVEALED = {"revealed": True}
"""Context of `model_dump` by which secrets are dumped, too: for the code that needs them, never for a file."""
_TRUE_WORDS = frozenset({"true", "yes", "on"})
_FALSE_WORDS = frozenset({"false", "no", "off"})


class Section(BaseModel):
    """A section of the YAML: frozen, closed to unknown keys; the docstring under a field is its help.

    Plugins may read it as a mapping: `section["key"]`, `.get`, `in`, `**section`, iteration over its keys.
    Secrets (`core.redaction.is_secret_name`, and all below `headers`) are hidden when it is dumped or printed.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        defer_build=True,
        protected_namespaces=(),
    )
    NULL_MEANS: ClassVar[Mapping[str, str]] = {}
    """Keys whose null stands for a value that follows from other keys → the property that has this value."""

    @model_validator(mode="before")
    @classmethod
    def _empty_section(cls, value: object) -> object:
        """`section:` with nothing below it is null in YAML: all defaults."""
        if value is None:
            return {}
        return value

    @model_serializer(mode="wrap")
    def _without_secrets(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> JsonObject:
        values: JsonObject = dump(self)
        if info.context == REVEALED:
            return values
        own = self.__dict__
        for name, value in values.items():
            # A section inside has hidden its own: at each level again, the time would grow with the depth.
            if not isinstance(own.get(name), Section) or is_below_secret((name,)):
                values[name] = hide(value, name)
        return values

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        for name, value in super().__repr_args__():
            yield name, hide(value, name or "")

    def __getitem__(self, key: str) -> Any:
        """The value of a key, sections as they are. Raises `KeyError`."""
        return self._entries()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries()

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # pydantic gives pairs, a mapping its keys
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __bool__(self) -> bool:
        return True  # a section without keys is one all the same

    def keys(self) -> KeysView[str]:
        """Names of all keys, those that plugins added last."""
        return self._entries().keys()

    def values(self) -> ValuesView[Any]:
        """Return the values of all keys, those that plugins added last."""
        return self._entries().values()

    def items(self) -> ItemsView[str, Any]:
        """(key, value) of all keys."""
        return self._entries().items()

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key, or the default where there is no such key."""
        return self._entries().get(key, default)

    def to_dict(self) -> JsonObject:
        """Plain dicts and lists all the way down, as the YAML has them, secrets too. A copy: changing it changes no
        section."""
        return self.model_dump(mode="json", context=REVEALED)

    def _entries(self) -> JsonObject:
        return {**self.__dict__, **(self.model_extra or {})}


class OpenSection(Section):
    """A section to which the chosen model's or dataset's plugin may add keys of its own."""

    model_config = ConfigDict(extra="allow")


def show(value: object) -> str:
    """A value as a YAML file would hold it, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"'{value}'" if isinstance(value, str) else str(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."


def fault(message: str) -> PydanticCustomError:
    """A validation error that carries a finished sentence."""
    return PydanticCustomError("mm_value", "{message}", {"message": message})


def _flag(value: object) -> object:
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, bool):
        return word
    if isinstance(word, str) and word in _TRUE_WORDS | _FALSE_WORDS:
        return word in _TRUE_WORDS
    raise fault(f"{show(value)} is not true or false")


def _flag_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return _flag(value)
    except PydanticCustomError:
        raise fault(f"{show(value)} is not true, false or auto") from None


_LARGEST = 2**63 - 1
"""What a tensor, a file and a library can count to."""


def _whole(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise fault(f"{show(value)} is not a whole number")
    if abs(value) > _LARGEST:
        raise fault(f"a number of {len(str(abs(value)))} digits is out of range: at most {_LARGEST:,}")
    return value


def _number(value: object) -> object:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise fault(f"{show(value)} is not a number") from None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise fault(f"{show(value)} is not a number")
    if (isinstance(number, int) and abs(number) > _LARGEST) or not math.isfinite(number):
        raise fault(f"{show(value)} is not a finite number")
    return float(number)


def _path(value: object) -> object:
    if isinstance(value, str) and value.lower() in _TRUE_WORDS | _FALSE_WORDS | {""}:
        raise fault(f"{show(value)} is not a path. Leave the key out, or write null, to switch it off")
    return value


def names_of(value: object) -> tuple[str, ...]:
    """A list of names, or one alone."""
    if value is None:
        return ()
    entries = (value,) if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise fault(f"{show(value)} is not a list of names")
    return tuple(entries)


def _token_list(value: object) -> object:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise fault(f"{show(value)} is not a list of tokens")
    for token in value:
        if not isinstance(token, str):
            raise fault(f"{show(token)} is not a text. Write tokens that look like numbers or words of YAML in quotes")
        if not token.strip():
            raise fault(f"{show(token)} is empty: a token has at least one visible character")
        if value.count(token) > 1:
            raise fault(f"{show(token)} is listed {value.count(token)} times")
    return tuple(value)


def _level(value: object) -> object:
    word = str(value).removeprefix("level")
    if isinstance(value, bool) or word not in {"0", "1", "2"}:
        raise fault(f"{show(value)} is not one of 0, 1, 2")
    return int(word)


def renamed(**words: str) -> BeforeValidator:
    """Older words for the same value: `renamed(custom="raw")`."""
    return BeforeValidator(lambda value: words.get(value, value) if isinstance(value, str) else value)


def null_means(default: object) -> BeforeValidator:
    """`null` stands for the default."""
    return BeforeValidator(lambda value: default if value is None else value)


Flag = Annotated[bool, BeforeValidator(_flag)]
"""true or false; older files also write yes, no, on, off."""
FlagOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_flag_or_auto)]
"""true, false, or auto: where it can be had."""
Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number; `1e4` counts, `true` does not."""
Positive = Annotated[Whole, Field(ge=1)]
"""A whole number from 1."""
Natural = Annotated[Whole, Field(ge=0)]
"""A whole number from 0."""
Number = Annotated[float, BeforeValidator(_number)]
"""A finite number; a quoted one counts."""
Ratio = Annotated[Number, Field(ge=0, le=1)]
"""A number from 0 to 1."""
Seconds = Annotated[Number, Field(gt=0)]
"""A time in seconds, above 0."""
PathText = Annotated[str, BeforeValidator(_path)]
"""A path; relative ones are tried against the working directory, then against the YAML's folder."""
Names = Annotated[tuple[str, ...], BeforeValidator(names_of)]
"""A list of names; one alone may stand without brackets."""
Tokens = Annotated[tuple[str, ...], BeforeValidator(_token_list)]
"""A list of different tokens; in a file, the path of a text with one token a line."""
PATTERNS = "patterns"
"""Marks the type of a key whose texts are patterns of module or parameter names."""
Patterns = Annotated[Names, PATTERNS]
"""A list of patterns of module or parameter names (`core/patterns.py`); one alone may stand without brackets."""
Dtype = Literal["bf16", "fp16", "fp32", "fp64"]
"""A floating-point type."""
Level = Annotated[int, BeforeValidator(_level)]
"""0, 1 or 2; older files write `level1`."""
