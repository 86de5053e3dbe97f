"""The words of other trainers and what says the same here: one table, read by `mm config --from`, the YAML reader's
suggestions, `mm schema` and the command line, before any comparison of spelling.

The table is in `peers/`, a TSV file for each tool with the columns

- `words`: names of a setting, with commas between them; `datasets[].path` is a key of each entry of a list;
- `ours`: the key that it becomes here, `-` for none; the first part may be shortened (`SHORT`);
- `how`: how its value is translated: nothing for as it is, a conversion of `tasks/importing`, `idle` for a setting
  without effect here, `no` for one that is not supported;
- `default`: the tool's own default, written out where it changes the training and differs from ours; `@name` is worked
  out from other settings; `first|second` where a second program of the tool (LLaMA-Factory's version 1, `megatron` of
  ms-swift) has another, and nothing behind the bar where it has none;
- `note`: why a setting has no effect, or what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from mindspeed_mm.fsdp.params.schema_walk import places_of_name, walk_fields

Kind = Literal["translated", "idle", "unsupported"]

_FOLDER = Path(__file__).parent / "peers"
_COLUMNS = ("words", "ours", "how", "default", "note")
_KINDS: dict[str, Kind] = {"idle": "idle", "no": "unsupported"}
_MOST_WORDS = 25
"""Rows with more words gather what belongs to other programs of a tool: no answer to somebody who mistyped a key."""
_SHORTEST = 5
"""Letters of a word without a key of ours that is answered."""
SHORT = {
    "basic": "data.dataset_param.basic_parameters",
    "media": "data.dataset_param.preprocess_parameters",
    "attr": "data.dataset_param.attr",
    "loader": "data.dataloader_param",
    "fsdp": "parallel.fsdp_plan",
}
"""First part of a key in the table → what it is short for."""


@dataclass(frozen=True)
class PeerTool:
    """A trainer that people come from."""

    name: str
    """Of its file in `peers/`."""
    title: str
    is_for_generators: bool = False
    base: str = ""
    """File in `peers/` of settings that it has as well, whose words of its own go first."""


TOOLS = {
    tool.name: tool
    for tool in (
        PeerTool("llamafactory", "LLaMA-Factory", base="transformers"),
        PeerTool("ms-swift", "ms-swift", base="transformers"),
        PeerTool("axolotl", "axolotl"),
        PeerTool("trl", "TRL and transformers' Trainer", base="transformers"),
        PeerTool("diffusers", "diffusers' scripts", True),
        PeerTool("kohya", "kohya's sd-scripts", True),
        PeerTool("musubi", "musubi-tuner", True),
        PeerTool("ai-toolkit", "ai-toolkit", True),
        PeerTool("diffsynth", "DiffSynth-Studio", True),
    )
}
"""In the order in which their words are looked up."""


@dataclass(frozen=True)
class PeerRow:
    """A row of the table: settings of a tool that mean the same."""

    words: tuple[str, ...]
    ours: str | None
    how: str
    default: str
    note: str

    @property
    def kind(self) -> Kind:
        """What becomes of these settings."""
        return _KINDS.get(self.how, "translated")


@cache
def rows_of(tool: str) -> tuple[PeerRow, ...]:
    """The rows of a tool, or of `common`, in the order of the file, with those of `base` behind them."""
    header, *lines = (_FOLDER / f"{tool}.tsv").read_text(encoding="utf-8").splitlines()
    assert tuple(header.split("\t")) == _COLUMNS, tool
    rows = tuple(map(_row, lines))
    if tool not in TOOLS or not TOOLS[tool].base:
        return rows
    own = {word for row in rows for word in row.words}
    added = [
        replace(row, words=tuple(word for word in row.words if word not in own)) for row in rows_of(TOOLS[tool].base)
    ]
    return (*rows, *(row for row in added if row.words))


@cache
def words_of(tool: str) -> Mapping[str, PeerRow]:
    """Setting of a tool → its row."""
    return {word: row for row in rows_of(tool) for word in row.words}


@cache
def suggested_keys() -> Mapping[str, str]:
    """Word of another tool → the key here that says the same; our own names are left out."""
    ours = places_of_name()
    found = {word: row.ours for word, row in words_of("common").items() if row.ours}
    for tool in TOOLS:
        for word, row in words_of(tool).items():
            if row.kind == "translated" and row.ours and word not in ours and word.isidentifier() and len(word) > 1:
                found.setdefault(word, row.ours)
    said = {word for word, row in words_of("common").items() if not row.ours}
    return {word: key for word, key in found.items() if word not in said}


@cache
def suggested_sentences() -> Mapping[str, str]:
    """Word of another tool that no key here stands for → what does the same, without a full stop."""
    ours, keys = places_of_name(), suggested_keys()
    found: dict[str, str] = {}
    for tool in ("common", *TOOLS):
        for word, row in words_of(tool).items():
            is_answer = row.kind != "translated" and len(row.words) <= _MOST_WORDS and not row.note.startswith("it ")
            is_theirs = tool == "common" or (word not in ours and len(word) >= _SHORTEST)
            if is_answer and is_theirs and word.isidentifier() and word not in keys:
                found.setdefault(word, row.note)
    return found


def key_for(word: str) -> str | None:
    """The key that says what a word of another tool says, or the only key of that name."""
    word = word.replace("-", "_")
    if word in suggested_keys():
        return suggested_keys()[word]
    places = places_of_name().get(word, [])
    if len(places) == 1:
        return places[0]
    return None


def keys_with_value(word: str) -> list[str]:
    """The keys that take a word as their value: `cosine`."""
    return [key for key, info in walk_fields() if word in _words(info.annotation)]


def _row(line: str) -> PeerRow:
    words, ours, how, default, note = line.split("\t")
    return PeerRow(tuple(words.split(", ")), None if ours == "-" else _in_full(ours), how, default, note)


def _in_full(key: str) -> str:
    first, dot, rest = key.partition(".")
    return f"{SHORT.get(first, first)}{dot}{rest}"


def _words(annotation: object) -> set[object]:
    """Everything that a type lists as a literal."""
    found: set[object] = set()
    for part in get_args(annotation):
        found |= {part} if isinstance(part, str) else _words(part)
    return found
