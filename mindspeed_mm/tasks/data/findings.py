"""What a pass over the rows says about a run: findings, the gravest first, each with what to change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam, PreprocessParameters
from mindspeed_mm.tasks.data.tally import BadRow, Duplicates, RowStatistics

BASIC = "data.dataset_param.basic_parameters"
_EXAMPLES = 3
_SAVED_SHARES = (0.5, 0.9, 0.99, 1.0)
_ROUND_TO = 64
"""Suggested lengths are multiples of it."""


@dataclass(frozen=True)
class Fix:
    """A change that helps against a finding, and how many rows it saves."""

    what: str
    """The change, as one would type or make it."""
    saves_rows: int


@dataclass(frozen=True)
class DataFinding:
    """Something about the rows that a person should know before training."""

    severity: Literal["error", "warning"]
    """error: the run would stop, or train on nothing; warning: it would go on."""
    kind: str
    what: str
    rows: int
    """How many it concerns."""
    examples: tuple[str, ...] = ()
    """Some of them, with their places."""
    fixes: tuple[Fix, ...] = ()
    others: int | None = None
    """Further examples, which are not rows; null: the rows beside those that are named."""

    @property
    def is_error(self) -> bool:
        """Whether `mm data check` ends with 4 because of it."""
        return self.severity == "error"


@dataclass(frozen=True)
class Terms:
    """What of the configuration decides whether a finding is an error."""

    basic: BasicParameters
    preprocess: PreprocessParameters
    dataloader: DataloaderParam
    global_batch: int
    rows: int
    """Number of rows in the whole data set."""
    repeated: int = 0
    """Samples of an epoch beside the first of each row."""


def find_all(
    tally: RowStatistics, terms: Terms, place: Callable[[int], str], elsewhere: MediaSearch | None = None
) -> list[DataFinding]:
    """Every finding, errors first, and of each severity the one with most rows first.

    Args:
        tally: What the pass found.
        terms: From the configuration.
        place: Names a row.
        elsewhere: Looks for missing media in likely folders.
    """
    found = [
        *bad_rows(tally, terms, elsewhere),
        *too_long(tally, terms),
        *too_few(tally, terms),
        *above_the_budget(tally, terms),
        *duplicates("duplicate ids", "have the id of an earlier row", tally.duplicate_ids(place)),
        *duplicates(
            "duplicate rows", "repeat the text of an earlier row, about the same media", tally.duplicate_rows(place)
        ),
        *special_tokens(tally, terms),
        *notes(tally),
        *empty_answers(tally),
        *unread_fields(tally),
    ]
    return sorted(found, key=lambda finding: (not finding.is_error, -finding.rows))


def bad_rows(tally: RowStatistics, terms: Terms, elsewhere: MediaSearch | None = None) -> Iterator[DataFinding]:
    """One finding for each kind of fault; an error where the run would stop for it."""
    by_kind: dict[str, list[BadRow]] = defaultdict(list)
    for row in tally.broken:
        by_kind[row.fault.kind].append(row)
    share = len(tally.broken) / max(tally.rows, 1)
    may_skip = terms.basic.on_bad_sample == "skip" and share <= terms.basic.max_bad_fraction
    kinds = sorted(by_kind, key=lambda kind: -len(by_kind[kind]))
    for kind in kinds:
        rows = by_kind[kind]
        fixes: list[Fix] = []
        if elsewhere is not None and kind == "missing media":
            fixes += elsewhere(rows)
        fixes += _advised(rows)
        if not may_skip and kind == kinds[0] and kind != "configuration":
            # rounded up: the suggested limit must not be below the share itself
            fraction = min(1.0, np.ceil(share * 1000 + 1e-9) / 1000)
            fixes.append(
                Fix(
                    f"or train without the bad rows: {BASIC}.on_bad_sample=skip {BASIC}.max_bad_fraction={fraction:g}",
                    len(tally.broken),
                )
            )
        yield DataFinding(
            "warning" if may_skip else "error",
            kind,
            f"{rows_told(len(rows))} cannot be used: {_SENTENCES.get(kind, kind)}",
            len(rows),
            tuple(f"{row.place}  {_label(row)}{row.fault.what}" for row in rows[:_EXAMPLES]),
            tuple(fixes),
        )


MediaSearch = Callable[[Sequence[BadRow]], Sequence[Fix]]
"""Rows whose media are missing → settings under which they would be found."""

_SENTENCES = {
    "missing media": "a file that they name does not exist",
    "media outside the roots": "they name media that may not be opened",
    "placeholders and media differ": "text and media do not match one to one",
    "marked rows": "they say that they are not to be trained",
    "other": "for another reason",
    "roles": "the turns are not in a valid order",
    "nothing is trained": "none of their tokens would be trained",
    "everything is trained": "the label mask covers the prompt too",
    "text files": "the file cannot be read there",
    "fields": "fields are missing, or hold something else than text or messages",
    "chat template": "the chat template does not take them",
    "the model takes no such media": "they hold media of a kind that the model does not take",
    "preference pairs": "better and worse answer do not make a pair",
    "media beyond the limits": "a medium is larger, longer or narrower than the model takes",
    "configuration": "what the configuration names does not fit them",
    "broken media": "a medium is broken, or is not what its name says",
}


def _label(row: BadRow) -> str:
    """The field; a key of the configuration stands in the remedy."""
    key = row.fault.key
    if key and not key.startswith("data."):
        return f"{key}  "
    return ""


def _advised(rows: Sequence[BadRow]) -> list[Fix]:
    """What the errors themselves advise, the most frequent first."""
    counts = Counter(row.fault.way_out for row in rows if row.fault.way_out)
    return [Fix(way_out, 0) for way_out, _ in counts.most_common(2)]


def too_long(tally: RowStatistics, terms: Terms) -> Iterator[DataFinding]:
    """Rows that are left out or shortened, with the lengths that would keep them."""
    rows, policy, cutoff = tally.too_long, terms.basic.if_too_long, terms.basic.cutoff_len
    if tally.shrunk:
        longest = int(max(tally.full_tokens))
        yield DataFinding(
            "warning",
            "shortened",
            f"{rows_told(tally.shrunk)} lose whole turns, to fit cutoff_len {cutoff}",
            tally.shrunk,
            fixes=(Fix(f"{BASIC}.cutoff_len={_rounded_length(longest)}", tally.shrunk),),
        )
    if not rows:
        return
    lengths = np.sort(tally.lengths_too_long)
    fixes = [Fix(f"{BASIC}.cutoff_len={length}", saved) for length, saved in lengths_that_save(lengths)]
    has_several_turns = any(rows for turns, rows in tally.turns.items() if turns > 1)
    if not tally.turns.keys() - {0} and policy in ("drop", "error"):
        stored = ""
        if terms.basic.streaming:  # rows that are streamed are not measured, and so not cut
            stored = f"{BASIC}.streaming=false "
        fixes.append(Fix(f"{stored}{BASIC}.truncation=split cuts documents into pieces", len(rows)))
    if policy != "shrink" and has_several_turns:
        fixes.append(Fix(f"{BASIC}.truncation=shrink keeps the first turns of those that have several", 0))
    consequence = {
        "error": "would stop the run",
        "drop": "are left out",
        "shrink": "cannot be shortened and are left out",
        "split": "are left out, since only documents are cut",
    }[policy]
    share = len(rows) / max(tally.rows, 1)
    severity: Literal["error", "warning"] = "warning"
    if policy == "error" or not tally.usable:
        severity = "error"
    yield DataFinding(
        severity,
        "too long",
        f"{rows_told(len(rows))} ({share:.1%}) have more tokens than cutoff_len {cutoff} and {consequence}",
        len(rows),
        tuple(f"{row.place}  {row.fault.what}" for row in rows[:_EXAMPLES]),
        tuple(fixes),
    )


def lengths_that_save(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Lengths that keep a half, most and all of the rows that are too long, with how many each keeps.

    Args:
        lengths: Of these rows, ascending.
    """
    found: dict[int, int] = {}
    if not len(lengths):
        return []
    for share in _SAVED_SHARES:
        needed = int(lengths[int(np.ceil(share * len(lengths))) - 1])
        length = _rounded_length(needed)
        found[length] = int((lengths <= length).sum())
    return list(found.items())


def _rounded_length(length: int) -> int:
    return -(-length // _ROUND_TO) * _ROUND_TO


def too_few(tally: RowStatistics, terms: Terms) -> Iterator[DataFinding]:
    """Fewer usable rows than an optimizer step takes."""
    if tally.rows < terms.rows:
        return  # a part of the rows tells nothing about all of them
    if tally.usable == 0 and tally.bad:
        yield DataFinding("error", "nothing is left", "no row can be used", tally.rows)
    elif len(tally.sample_lengths(terms.basic)) + terms.repeated < terms.global_batch:
        what = f"{rows_told(tally.usable)} can be used, fewer than one global batch of {terms.global_batch}"
        if not terms.dataloader.drop_last:
            yield DataFinding("warning", "too few rows", what, tally.usable)
            return
        keep_last = "data.dataloader_param.drop_last=false: a step then takes rows of the next epoch too"
        smaller = "lower training.micro_batch_size or gradient_accumulation_steps"
        fixes = (Fix(keep_last, tally.usable), Fix(smaller, tally.usable))
        yield DataFinding("error", "too few rows", what, tally.usable, fixes=fixes)


def above_the_budget(tally: RowStatistics, terms: Terms) -> Iterator[DataFinding]:
    """Rows that no micro-batch has room for."""
    budgets = {
        "max_tokens_per_batch": tally.sample_lengths(terms.basic),
        "max_patches_per_batch": np.asarray(tally.patches),
    }
    for name, sizes in budgets.items():
        most = terms.dataloader.get(name)
        if most is None or not len(sizes):
            continue
        over = int((sizes > most).sum())
        if over:
            # Where none fits there is no step to be made of them, whatever the policy.
            severity: Literal["error", "warning"] = "warning"
            consequence = "are left out"
            if terms.basic.if_too_long == "error" or over == len(sizes):
                severity, consequence = "error", "would stop the run"
            yield DataFinding(
                severity,
                f"above {name}",
                f"{rows_told(over)} alone are larger than {name} {most} and {consequence}",
                over,
                fixes=(Fix(f"data.dataloader_param.{name}={int(sizes.max())}", over),),
            )


def duplicates(kind: str, says: str, found: Duplicates) -> Iterator[DataFinding]:
    """Yield a warning of this kind if any row repeats an earlier one, with example places."""
    if found.count:
        yield DataFinding(
            "warning",
            kind,
            f"{rows_told(found.count)} {says}",
            found.count,
            tuple(f"{later}  as {first}" for first, later in found.examples),
            (Fix("drop the copies, or keep them if the weight is meant", 0),),
        )


def special_tokens(tally: RowStatistics, terms: Terms) -> Iterator[DataFinding]:
    """Texts that hold a token which the template uses to end a turn, or to stand for a medium."""
    if tally.special:
        key = "data.dataset_param.preprocess_parameters.split_special_tokens"
        what, fix = "it is read as plain text", f"{key}=false reads it as the token, if that is meant"
        if not terms.preprocess.split_special_tokens:
            what, fix = "the model reads a control token, not words", f"{key}=true reads it as plain text"
        yield DataFinding(
            "warning",
            "special tokens in the text",
            f"{rows_told(len(tally.special))} contain a special token in their text: {what}",
            len(tally.special),
            tuple(f"{place}  '{token}'" for place, token in tally.special[:_EXAMPLES]),
            (Fix(fix, 0),),
        )


def notes(tally: RowStatistics) -> Iterator[DataFinding]:
    """Rows that leave open how they are meant, and how they were read."""
    for note, places in tally.notes.items():
        yield DataFinding(
            "warning", "read by a rule", f"{rows_told(len(places))}: {note}", len(places), tuple(places[:_EXAMPLES])
        )


def empty_answers(tally: RowStatistics) -> Iterator[DataFinding]:
    """Yield a warning if usable rows have a trained turn of the model without text."""
    if tally.empty_answers:
        rows = len(tally.empty_answers)
        has = "has" if rows == 1 else "have"
        yield DataFinding(
            "warning",
            "empty answers",
            f"{rows_told(rows)} {has} an empty answer: only its end mark is trained, which teaches the model to say "
            "nothing",
            rows,
            tuple(tally.empty_answers[:_EXAMPLES]),
            (Fix("write the answers or drop the rows, unless silence is meant", 0),),
        )


def unread_fields(tally: RowStatistics) -> Iterator[DataFinding]:
    """What rows hold and nothing reads: one finding, with the most frequent first."""
    counts = tally.unread_rows.most_common()
    if not counts:
        return
    shown = [f"{what}: {rows_told(rows)}, the first {tally.unread[what][0]}" for what, rows in counts[:_MOST_UNREAD]]
    yield DataFinding(
        "warning",
        "not read",
        "rows hold fields that nothing reads: they change neither what is learned nor what the model sees",
        counts[0][1],
        tuple(shown),
        tuple(Fix(way_out, 0) for way_out in _ways_out(what for what, _ in counts)),
        others=max(len(counts) - _MOST_UNREAD, 0),
    )


_MOST_UNREAD = 12


def _ways_out(found: Iterable[str]) -> Iterator[str]:
    """What to do about what is not read, where there is something."""
    found = list(found)
    if any(what.endswith("in a text") for what in found):
        yield "write <image>, <video> or <audio> where a medium belongs, and its path into the column of its kind"
    if any(what.startswith("column") for what in found):
        yield "name a column that is to be read in data.dataset_param.attr"


def rows_told(rows: int) -> str:
    """Return the number of rows in words: `1 row`, `1,200 rows`."""
    if rows == 1:
        return f"{rows:,} row"
    return f"{rows:,} rows"


def to_dict(finding: DataFinding) -> dict[str, object]:
    """Return the finding and its fixes as plain dictionaries, for JSON."""
    return asdict(finding)
