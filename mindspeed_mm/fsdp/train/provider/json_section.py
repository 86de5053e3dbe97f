"""A section of model.json, data.json or tools.json as functions of a user read it: by attribute or by key."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_mm.core.json_file import JsonObject


class JsonSection(Namespace):
    """`section.text_decoder.num_layers`, `section["text_decoder"]`, `section.get("num_layers", 1)`, `to_dict()`.

    Args:
        values: As the file has them; sections inside become the same.
    """

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        super().__init__(**{str(key): _as_section(value) for key, value in (values or {}).items()})

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key, or `default`."""
        return vars(self).get(key, default)

    def keys(self) -> Any:
        """Its keys; with `[]` it can stand behind `**`."""
        return vars(self).keys()

    def items(self) -> Any:
        """Pairs of keys and values."""
        return vars(self).items()

    def to_dict(self) -> JsonObject:
        """As plain dicts and lists."""
        return {key: _as_plain(value) for key, value in vars(self).items()}


def _as_section(value: object) -> object:
    if isinstance(value, Mapping):
        return JsonSection(value)
    if isinstance(value, list):
        return [_as_section(each) for each in value]
    return value


def _as_plain(value: object) -> object:
    if isinstance(value, JsonSection):
        return value.to_dict()
    if isinstance(value, list):
        return [_as_plain(each) for each in value]
    return value
