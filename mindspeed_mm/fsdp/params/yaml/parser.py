"""YAML 1.2 text → tree.

ruamel.yaml scans and parses; the tree is built here, so that anchors, merge keys, duplicate keys, depth and size are in
our hands and nothing is ever constructed but plain values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.scanner import Scanner

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.yaml.tree import MappingEntry, Node, SourcePosition, clone

MOST_DEPTH = 64
MOST_NODES = 50_000
_LONGEST_KEPT = 1 << 16
"""Characters of a text whose tree is kept."""
_CORE = "tag:yaml.org,2002:"
_FLOATS = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


@dataclass
class YamlDocument:
    """A parsed YAML text: its tree, and faults that did not stop the parser."""

    root: Node
    problems: list[Problem] = field(default_factory=list)
    """Faults that did not stop the parser: duplicate keys."""


def parse_yaml(text: str, source: str) -> YamlDocument:
    """The tree of a text, which belongs to the caller alone: nothing in it is shared, aliases are written out.

    A command reads the same file several times, so the trees of short texts are kept.

    Args:
        text: YAML. Tabs are accepted wherever they do not indent.
        source: Name of the text, for places.

    Raises:
        ConfigError: Not YAML, more than one document, too deep, too large once aliases are written out, or a tag that
            asks for more than a plain value.
    """
    document = _kept(text, source) if len(text) <= _LONGEST_KEPT else _parse(text, source)
    return YamlDocument(clone(document.root), list(document.problems))


@lru_cache(maxsize=128)  # the cards of all models, and a run's files
def _kept(text: str, source: str) -> YamlDocument:
    return _parse(text, source)


def _parse(text: str, source: str) -> YamlDocument:
    lines = []
    for line in text.split("\n"):
        has_other_blanks = line.rstrip() != line.rstrip(" \r\n")
        lines.append(line.rstrip() if has_other_blanks else line)
    try:
        return _Builder(_events("\n".join(lines)), source).document()
    except MarkedYAMLError as error:
        raise _not_yaml(error, lines, source) from None
    except YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}", where=source) from None


class _Scanner(Scanner):
    """The library's, for which a tab is a blank also in block style and in plain scalars, unless it indents."""

    def scan_to_next_token(self) -> None:
        reader = self.reader
        super().scan_to_next_token()
        while reader.peek() == "\t" and reader.buffer[reader.pointer - reader.column : reader.pointer].strip():
            self._skip_blanks()
            super().scan_to_next_token()

    def scan_plain_spaces(self, indent: object, start_mark: object) -> object:
        begin = self.reader.column
        self._skip_blanks()
        if self.reader.peek() in "\r\n\x85\u2028\u2029":
            return super().scan_plain_spaces(indent, start_mark)
        if self.reader.column > begin:
            return [" " * (self.reader.column - begin)]
        return []

    def _skip_blanks(self) -> None:
        while self.reader.peek() in "\t ":
            self.reader.forward()


def _events(text: str) -> Iterator[Event]:
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner = _Scanner
    parsed: Iterator[Event] = iter(yaml.parse(text))
    return parsed


def _not_yaml(error: MarkedYAMLError, lines: Sequence[str], source: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return ConfigError(f"not valid YAML: {error.problem}", where=source)
    place = str(SourcePosition(source, mark.line + 1, mark.column + 1))
    line = lines[mark.line] if mark.line < len(lines) else ""
    if line[mark.column : mark.column + 1] == "\t":
        what = "a tab cannot separate these two" if line[: mark.column].strip() else "a tab indents this line"
        return ConfigError(what, where=place, way_out="YAML is indented with spaces: replace the tab.")
    context = f" ({error.context})" if error.context else ""
    needs_quotes = re.search(r"\[[^\]]*\w\.?\{[*\d]", line)
    hint = "Inside [ ] a pattern with braces needs quotes: ['layers.{*}']." if needs_quotes else ""
    return ConfigError(f"not valid YAML: {error.problem}{context}", where=place, way_out=hint)


class _Builder:
    """Builds nodes from parser events; each `_build` consumes the events of one node."""

    def __init__(self, events: Iterator[Event], source: str) -> None:
        self.events = events
        self.source = source
        self.resolver = YAML(typ="safe", pure=True).resolver
        self.anchors: dict[str, Node] = {}
        self.merged = 0
        """Entries that `<<` has added so far."""
        self.problems: list[Problem] = []
        self.path: list[str] = []

    def document(self) -> YamlDocument:
        next(self.events)  # the stream starts
        start = next(self.events)
        if isinstance(start, StreamEndEvent):
            return YamlDocument(Node(None, SourcePosition(self.source, 1, 1)))
        root = self._build(next(self.events), level=0)
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                raise self._fault(event, "a second document begins here", "A configuration must be one YAML document.")
            if not isinstance(event, DocumentEndEvent | StreamEndEvent):
                raise self._fault(event, "there is text after the end of the document", "Remove it.")
        return YamlDocument(root, self.problems)

    def _build(self, event: Any, level: int) -> Node:
        if level > MOST_DEPTH:
            raise self._fault(event, f"nested deeper than {MOST_DEPTH} levels", "Flatten it.")
        if isinstance(event, AliasEvent):
            return self._alias(event)
        if isinstance(event, ScalarEvent):
            node = Node(self._scalar(event), self._place(event), end=_end_of_event(event))
        elif isinstance(event, SequenceStartEvent):
            node = self._sequence(event, level)
        else:
            node = self._mapping(event, level)
        if event.anchor:
            node.anchored = True
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: AliasEvent) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            near = did_you_mean(event.anchor, self.anchors)
            raise self._fault(event, f"'*{event.anchor}' names no anchor that is complete before it", near.strip())
        return Node(node.value, self._place(event), node.size, node.depth, node.anchored, _end_of_event(event))

    def _sequence(self, event: object, level: int) -> Node:
        self._check_tag(event, "seq")
        node = Node([], self._place(event))
        for item in iter(lambda: next(self.events), None):
            if isinstance(item, SequenceEndEvent):
                break
            child = self._build(item, level + 1)
            node.value.append(child)
            self._grow(node, child)
        return node

    def _mapping(self, event: object, level: int) -> Node:
        self._check_tag(event, "map")
        node = Node({}, self._place(event))
        merged: list[Node] = []
        for item in iter(lambda: next(self.events), None):
            if isinstance(item, MappingEndEvent):
                break
            if not isinstance(item, ScalarEvent):
                raise self._fault(item, "a key is a list, a mapping or an alias", "Keys are plain words.")
            self.path.append(item.value)
            child = self._build(next(self.events), level + 1)
            self.path.pop()
            self._grow(node, child)
            if item.value == "<<" and item.implicit[0]:
                merged += self._merge_sources(child)
            else:
                self._add(node.value, item, child)
        for source in merged:
            self.merged += len(source.value)
            if self.merged > MOST_NODES:
                raise self._too_large(node)
            for name, entry in source.value.items():
                node.value.setdefault(name, entry)
        return node

    def _grow(self, parent: Node, child: Node) -> None:
        parent.size += child.size
        parent.depth = max(parent.depth, child.depth + 1)
        parent.anchored |= child.anchored
        if parent.size > MOST_NODES or parent.depth > MOST_DEPTH:
            raise self._too_large(parent)

    @staticmethod
    def _too_large(node: Node) -> ConfigError:
        what = f"more than {MOST_NODES} values once aliases are written out"
        return ConfigError(what, where=str(node.place), way_out="Use fewer aliases.")

    def _add(self, entries: dict[str, MappingEntry], key: ScalarEvent, child: Node) -> None:
        place = self._place(key)
        if key.value in entries:
            first = entries[key.value].key.line
            dotted = ".".join([*self.path, key.value])
            self.problems.append(
                Problem(f"'{key.value}' is given twice, first in line {first}", str(place), dotted, "Keep one of them.")
            )
        entries[key.value] = MappingEntry(place, child)

    def _merge_sources(self, node: Node) -> list[Node]:
        sources = node.value if isinstance(node.value, list) else [node]
        if not all(isinstance(source.value, dict) for source in sources):
            raise ConfigError("'<<' takes a mapping, or a list of mappings", where=str(node.place))
        return sources

    def _scalar(self, event: ScalarEvent) -> Any:
        text: str = event.value
        tag = event.tag
        if tag is None:
            tag = f"{_CORE}str"
            if event.implicit[0]:
                tag = self.resolver.resolve(ScalarNode, text, (True, False))
        kind = str(tag).removeprefix(_CORE)
        try:
            return _SCALARS[kind](text)
        except KeyError:
            raise self._refused(event, str(tag)) from None
        except ValueError:
            raise self._fault(event, f"'{text}' cannot be read as {kind}", "Quote it to make it text.") from None

    def _check_tag(self, event: Any, kind: str) -> None:
        if event.tag is not None and str(event.tag) != _CORE + kind:
            raise self._refused(event, str(event.tag))

    def _refused(self, event: object, tag: str) -> ConfigError:
        short = tag.replace(_CORE, "!!")
        return self._fault(event, f"tag '{short}' is refused: a configuration holds plain values", "Remove the tag.")

    def _fault(self, event: object, what: str, way_out: str) -> ConfigError:
        return ConfigError(what, where=str(self._place(event)), way_out=way_out)

    def _place(self, event: Any) -> SourcePosition:
        return SourcePosition(self.source, event.start_mark.line + 1, event.start_mark.column + 1)


def _end_of_event(event: Any) -> tuple[int, int]:
    return event.end_mark.line + 1, event.end_mark.column + 1


def _whole_value(text: str) -> int:
    digits = text.replace("_", "")
    prefixed = digits.lstrip("+-")[:2].lower() in {"0x", "0o", "0b"}
    if prefixed:
        return int(digits, 0)
    return int(digits)


def _fraction(text: str) -> float:
    if text.lower() in _FLOATS:
        return _FLOATS[text.lower()]
    return float(text.replace("_", ""))


_SCALARS: dict[str, Callable[[str], object]] = {
    "str": str,
    "timestamp": str,
    "null": lambda text: None,
    "bool": lambda text: text.lower() in {"true", "yes", "on"},
    "int": _whole_value,
    "float": _fraction,
}
