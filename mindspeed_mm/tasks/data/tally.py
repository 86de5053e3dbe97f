"""Facts of rows, added up as they come: numbers stay in arrays, so a million rows take some tens of megabytes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part, find_part
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.document_pieces import piece_lengths
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.tasks.data.facts import DenoisedFacts, RowFacts
from mindspeed_mm.tasks.data.faults import TOO_LONG, RowFault, fault_of_reason

MEDIA = ("image", "video", "audio")
_T = TypeVar("_T")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used as it stands."""

    index: int
    """-1: it was left out when the data set was opened, and has no number among the others."""
    place: str
    fault: RowFault

    def to_dict(self) -> dict[str, object]:
        """Return the dictionary that `--bad-rows` writes as one JSON line; rows left out at opening have None as
        `index`."""
        file, _, row = self.place.rpartition(":")
        return {
            "index": self.index if self.index >= 0 else None,
            "file": file,
            "row": int(row) if row.isdigit() else row,
            "kind": self.fault.kind,
            "what": self.fault.what,
            "key": self.fault.key,
            "way_out": self.fault.way_out,
        }


def _of_each_kind(make: Callable[[], _T]) -> dict[str, _T]:
    return {kind: make() for kind in MEDIA}


@dataclass
class RowStatistics:
    """What a pass over the rows found. The arrays have an entry for each usable row."""

    rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    index: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    full_tokens: array[int] = field(default_factory=lambda: array("q"))
    trained: array[int] = field(default_factory=lambda: array("q"))
    patches: array[int] = field(default_factory=lambda: array("q"))
    shrunk: int = 0
    with_media: int = 0
    decoding: int = 0
    """Rows whose media were decoded to know their size."""
    turns: Counter[int] = field(default_factory=Counter)
    """Turns of the model → rows."""
    roles: Counter[str] = field(default_factory=Counter)
    """Role → messages."""
    media: dict[str, Counter[int]] = field(default_factory=lambda: _of_each_kind(Counter))
    """Kind → items of a row → rows."""
    sides: dict[str, Counter[tuple[int, int]]] = field(default_factory=lambda: _of_each_kind(Counter))
    """Kind → (width, height) → items."""
    seconds: dict[str, array[float]] = field(default_factory=lambda: _of_each_kind(lambda: array("d")))
    """Kind → length of each item that has one."""
    denoised: list[tuple[str, DenoisedFacts]] = field(default_factory=list)
    """Place and facts of each sample of a generator."""
    special: list[tuple[str, str]] = field(default_factory=list)
    """Place and token of rows whose own text holds a special token."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """How rows were read where they leave that open → places."""
    empty_answers: list[str] = field(default_factory=list)
    """Places of usable rows with an empty turn of the model."""
    unread: dict[str, list[str]] = field(default_factory=dict)
    """What rows hold and nothing reads → places of the first of them."""
    unread_rows: Counter[str] = field(default_factory=Counter)
    """The same → rows."""
    contents: array[int] = field(default_factory=lambda: array("Q"))
    """Hash of the content of every row that converts."""
    ids: array[int] = field(default_factory=lambda: array("q"))
    """Hash of every row's id."""
    content_index: array[int] = field(default_factory=lambda: array("q"))
    id_index: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, facts: Iterable[RowFacts]) -> RowStatistics:
        """Add up the facts of all rows in new statistics."""
        tally = cls()
        for each in facts:
            tally.add(each)
        return tally

    def add(self, facts: RowFacts) -> None:
        """Add the facts of one row, whether usable or bad."""
        self.rows += 1
        if facts.content:
            self.contents.append(facts.content)
            self.content_index.append(facts.index)
        if facts.row_id is not None:
            self.ids.append(hash(facts.row_id))
            self.id_index.append(facts.index)
        for what in facts.unread:
            self.unread_rows[what] += 1
            places = self.unread.setdefault(what, [])
            if len(places) < _EXAMPLES:
                places.append(facts.place)
        if facts.special:
            self.special.append((facts.place, facts.special))
        for note in facts.notes:
            self.notes.setdefault(note, []).append(facts.place)
        if facts.fault is not None:
            self.bad.append(BadRow(facts.index, facts.place, facts.fault))
            return
        self._add_usable(facts)

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Rows that were found unusable before any was looked at: place → reason."""
        self.rows += len(reasons)
        for place, reason in reasons.items():
            self.bad.append(BadRow(-1, place, fault_of_reason(place, reason)))

    def _add_usable(self, facts: RowFacts) -> None:
        if facts.has_empty_answer:
            self.empty_answers.append(facts.place)
        if facts.denoised is not None:
            self.denoised.append((facts.place, facts.denoised))
        self.index.append(facts.index)
        self.tokens.append(facts.tokens)
        self.full_tokens.append(facts.full_tokens)
        self.trained.append(facts.trained)
        self.patches.append(facts.patches)
        self.shrunk += facts.shrunk
        self.with_media += bool(facts.media)
        self.decoding += facts.decodes
        self.roles.update(facts.roles)
        self.turns[facts.roles.count("assistant")] += 1
        for kind in MEDIA:
            items = [item for item in facts.media if item.kind == kind]
            self.media[kind][len(items)] += 1
            for item in items:
                if item.width:
                    self.sides[item.kind][item.width, item.height] += 1
                if item.seconds:
                    self.seconds[item.kind].append(item.seconds)

    @property
    def usable(self) -> int:
        """Rows that can be trained on."""
        return len(self.index)

    @property
    def too_long(self) -> list[BadRow]:
        """Rows above `cutoff_len` that are not shrunk."""
        return [row for row in self.bad if row.fault.kind == TOO_LONG]

    @property
    def broken(self) -> list[BadRow]:
        """Bad rows of all other kinds."""
        return [row for row in self.bad if row.fault.kind != TOO_LONG]

    @property
    def lengths_too_long(self) -> list[int]:
        """Tokens of the rows above `cutoff_len`, as far as they are known."""
        return [row.fault.tokens for row in self.too_long if row.fault.tokens is not None]

    @property
    def patches_of_media(self) -> list[int]:
        """Of the rows that have any."""
        return [count for count in self.patches if count]

    def full_lengths(self) -> np.ndarray:
        """Lengths before truncation, of usable rows and of those that are too long."""
        usable = np.asarray(self.full_tokens, dtype=np.int64)
        return np.concatenate([usable, np.asarray(self.lengths_too_long, dtype=np.int64)])

    def sample_lengths(self, basic: BasicParameters) -> np.ndarray:
        """Tokens of the samples that usable rows give: a document that training cuts gives several."""
        lengths = np.asarray(self.tokens, dtype=np.int64)
        if basic.if_too_long == "split":
            return piece_lengths(lengths, basic.cutoff_len)
        return lengths

    def longer_documents(self, basic: BasicParameters) -> int:
        """Number of documents that training cuts."""
        lengths = np.asarray(self.tokens)
        if basic.if_too_long == "split":
            return int((lengths > basic.cutoff_len).sum())
        return 0

    def duplicate_rows(self, place: Callable[[int], str]) -> Duplicates:
        """Rows that say what an earlier one says."""
        return _duplicates(self.contents, self.content_index, place)

    def duplicate_ids(self, place: Callable[[int], str]) -> Duplicates:
        """Rows whose id an earlier one has."""
        return _duplicates(self.ids, self.id_index, place)

    def parts(self, ranges: Sequence[tuple[str, int, int]]) -> list[PartCounts]:
        """Rows and tokens of each source."""
        index, tokens = np.asarray(self.index), np.asarray(self.tokens)
        found = []
        for name, first, end in ranges:
            inside = (index >= first) & (index < end)
            found.append(PartCounts(str(name), int(inside.sum()), int(tokens[inside].sum())))
        return found


@dataclass(frozen=True)
class Duplicates:
    """Number of rows that repeat an earlier one, with the places of a few examples."""

    count: int
    examples: tuple[tuple[str, str], ...]
    """First and later place."""


@dataclass(frozen=True)
class PartCounts:
    """One source of a mixture."""

    name: str
    rows: int
    """Usable ones."""
    tokens: int


_EXAMPLES = 3


def _duplicates(marks: array[int], index: array[int], place: Callable[[int], str]) -> Duplicates:
    """Equal marks, by one sort."""
    if not marks:
        return Duplicates(0, ())
    values, rows = np.asarray(marks), np.asarray(index)
    # Equal marks stand together when sorted; a stable sort leaves the earlier row first.
    order = np.argsort(values, kind="stable")
    is_copy = values[order][1:] == values[order][:-1]
    at = np.flatnonzero(is_copy)
    some = at[: 50 * _EXAMPLES]
    later, earlier = rows[order[some + 1]].tolist(), rows[order[some]].tolist()
    examples = sorted(zip(later, earlier, strict=True))[:_EXAMPLES]
    return Duplicates(len(at), tuple((place(first), place(copy)) for copy, first in examples))


# --- shares of a mixture ----------------------------------------------------------------------------------------------
# What each source gives of a mixture, and what it would give by the weights.


@dataclass(frozen=True)
class SourceShare:
    """Share of one source in a mixture: by rows, by tokens and by its weight."""

    name: str
    rows: int
    """Usable ones."""
    tokens: int
    of_rows: float
    of_tokens: float
    weight: float | None
    """Share by the configured weights; None without weights."""

    def to_dict(self) -> dict[str, object]:
        """Return the share as a dictionary for JSON, with measured shares rounded to four digits."""
        return {
            "name": self.name,
            "rows": self.rows,
            "tokens": self.tokens,
            "of_rows": round(self.of_rows, 4),
            "of_tokens": round(self.of_tokens, 4),
            "weight": self.weight,
        }


def shares(dataset: MMDataset, basic: BasicParameters, tally: RowStatistics) -> list[SourceShare]:
    """Rows and tokens of each entry of `dataset:`; empty where the data set does not name its parts."""
    counts = tally.parts(dataset.parts)
    rows = max(1, sum(each.rows for each in counts))
    tokens = max(1, sum(each.tokens for each in counts))
    weights = _weights(dataset.parts, basic)
    total = sum(weights.values())
    found = []
    for number, each in enumerate(counts):
        weight = round(weights.get(number, 0.0) / total, 4) if total else None
        of_rows, of_tokens = each.rows / rows, each.tokens / tokens
        found.append(SourceShare(each.name, each.rows, each.tokens, of_rows, of_tokens, weight))
    return found


def _weights(parts: Sequence[Part], basic: BasicParameters) -> dict[int, float]:
    """Number of each source that has a weight → its weight."""
    if basic.mix is None or not parts:
        return {}
    return {find_part(parts, name): float(weight) for name, weight in basic.mix.weights.items()}
