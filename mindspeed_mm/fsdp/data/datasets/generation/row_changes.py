"""How the rows that a configuration names differ from those that a feature set was made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.data.datasets.generation.rows import GenerationRow
from mindspeed_mm.fsdp.data.feature_store import FeatureRecord, SkippedRow

_SHOWN = 5
_SHOWN_CHARACTERS = 60

_Said = str | tuple[str, tuple[str, ...]]
"""Digest of the row; of older feature sets medium and captions."""


@dataclass(frozen=True)
class _Row:
    """A row then or now."""

    place: str
    path: str
    captions: tuple[str, ...] | None
    """None: not known, of a row that was skipped."""
    said: _Said


def row_changes(
    records: Sequence[FeatureRecord], skipped: Sequence[SkippedRow], rows: Iterable[GenerationRow]
) -> list[Problem]:
    """Rows that were removed, added, changed or put into another order: one problem each, the first five, and how many
    there are.

    Args:
        records: Of the feature set.
        skipped: Of the feature set. What was skipped before it had a number may be back or not.
        rows: As they are now.
    """
    has_digests = all(record.said for record in records)
    then = _rows_then(records, skipped, has_digests)
    unusable = {row.place for row in skipped if row.row is None or not row.said}
    now = [_row_now(row, has_digests) for row in rows]
    said_then, said_now = [row.said for row in then], [row.said for row in now]
    before, today = Counter(said_then), Counter(said_now)
    removed = _surplus(then, before - today)
    added = [row for row in _surplus(now, today - before) if row.place not in unusable]
    problems = list(_described(removed, added))
    if not problems and said_then != list(filter(before.__contains__, said_now)):
        problems = [Problem("the rows are the same, but in a different order", then[0].place)]
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        problems = [*problems[:_SHOWN], Problem(f"… and {more} more rows differ")]
    return problems


def _rows_then(records: Sequence[FeatureRecord], skipped: Sequence[SkippedRow], has_digests: bool) -> list[_Row]:
    """Encoded and skipped rows in their order; rows skipped by an older version cannot be compared."""
    numbered: list[tuple[int, _Row]] = []
    for record in records:
        row = _Row(record.place, record.path, record.captions, _said(record, has_digests))
        numbered.append((record.row, row))
    for left_out in skipped:
        if has_digests and left_out.row is not None and left_out.said:
            numbered.append((left_out.row, _Row(left_out.place, left_out.path, None, left_out.said)))
    numbered.sort(key=lambda pair: pair[0])
    return [row for _, row in numbered]


def _said(record: FeatureRecord, has_digests: bool) -> _Said:
    return record.said if has_digests else (record.path, record.captions)


def _row_now(row: GenerationRow, has_digests: bool) -> _Row:
    said = row.digest if has_digests else (row.name, row.captions)
    return _Row(str(row.place), row.name, row.captions, said)


def _surplus(rows: Sequence[_Row], counts: Counter[_Said]) -> list[_Row]:
    """So many of the rows that say something, the last ones of their kind."""
    left, found = Counter(counts), list[_Row]()
    for row in reversed(rows):
        if left[row.said] > 0:
            left[row.said] -= 1
            found.append(row)
    return found[::-1]


def _described(removed: Sequence[_Row], added: Sequence[_Row]) -> Iterable[Problem]:
    """A removed and an added row of one medium are one that was changed."""
    by_path: dict[str, list[_Row]] = {}
    for row in added:
        by_path.setdefault(row.path, []).append(row)
    for row in removed:
        successors = by_path.get(row.path)
        if successors:
            yield _changed(row, successors.pop(0))
        else:
            yield Problem(f"the row of '{row.path}' was removed", row.place)
    for successors in by_path.values():
        for row in successors:
            yield Problem(f"the row of '{row.path}' was added: it has no features", row.place)


def _changed(then: _Row, now: _Row) -> Problem:
    if then.captions is None or then.captions == now.captions:
        return Problem(f"fields of '{now.path}' other than its caption have changed", now.place)
    return Problem(
        f"the caption of '{now.path}' was {_shown(then.captions)}, is {_shown(now.captions or ())}", now.place
    )


def _shown(captions: tuple[str, ...]) -> str:
    text = repr(captions[0] if len(captions) == 1 else list(captions))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
