"""Where each value of a configuration came from, and the configuration written out with that."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_mm.core.json_file import parse_json

_PLAIN_TEXT = re.compile(r"[A-Za-z_./][\w./{}*-]*(?: [\w./-]+)*")
UNSET = ("default", "card", "run")
"""Kinds of origin of values that nothing has set."""
_LINE = re.compile(r'(?P<indent>(?:  )*)(?P<name>"(?:[^"\\]|\\.)*"|[^\s"#][^:]*):(?P<value>.*)')
_WORDS_WITH_MEANING = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    kind: Literal["default", "card", "yaml", "command line", "python", "derived", "run"]
    """`card`: default of a model's or dataset's own key. `python`: given in a call. `derived`: worked out from other
    values. `run`: default of the version that began the run which is resumed."""
    where: str = ""
    """file:line:column, or what it was derived from."""

    def __str__(self) -> str:
        if self.kind == "yaml":
            return self.where
        if self.where:
            return f"{self.kind}: {self.where}"
        return self.kind


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a section with keys."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def dump_with_origins(tree: Mapping[str, object], origins: Mapping[str, Origin]) -> str:
    """YAML of a nested dict; each value is followed by its origin as a comment."""
    return "\n".join(_lines(tree, origins, "", 0)) + "\n"


def read_defaults(text: str) -> set[str]:
    """The dotted keys that nothing had set, of a configuration that `dump_with_origins` wrote."""
    found, path = set(), [""]
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        level = len(match["indent"]) // 2
        name = match["name"]
        path[level:] = [parse_json(name) if name.startswith('"') else name]
        if match["value"] and match["value"].rpartition("  # ")[2].partition(": ")[0] in UNSET:
            found.add(".".join(path))
    return found


def _lines(tree: Mapping[str, object], origins: Mapping[str, Origin], prefix: str, level: int) -> Iterator[str]:
    for name, value in tree.items():
        head = f"{'  ' * level}{_scalar(name)}:"
        if isinstance(value, Mapping) and value:
            yield head
            yield from _lines(value, origins, f"{prefix}{name}.", level + 1)
        else:
            origin = origins.get(prefix + name)
            text = f"{head} {_flow(value)}"
            yield f"{text.ljust(48)}  # {origin}" if origin else text


def _flow(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_flow(item) for item in value)}]"
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(str(name))}: {_flow(item)}" for name, item in value.items()]
        return f"{{{', '.join(entries)}}}"
    return _scalar(value)


def _scalar(value: object) -> str:
    """A scalar that every YAML reader reads back as it is: `1.0e-05` is a number to all of them, `1e-05` is not."""
    if isinstance(value, str):
        has_meaning = value.lower() in _WORDS_WITH_MEANING or "{" in value
        if _PLAIN_TEXT.fullmatch(value) and not has_meaning:
            return value
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        text = repr(value)
        if "e" in text and "." not in text:
            return text.replace("e", ".0e")
        return text
    return json.dumps(value, default=str)
