"""Samples of generators: findings, statistics and what a preview tells of one, with the media that a row names beside
the target: sources, masks, controls, sounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypedDict, TypeVar

import numpy as np

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader, SampleDescription
from mindspeed_mm.fsdp.data.datasets.generation.sizes import MUCH_CUT, MUCH_ENLARGED, SizeChange
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLength, CaptionLengths
from mindspeed_mm.tasks.data.facts import DenoisedFacts, RoleFacts
from mindspeed_mm.tasks.data.findings import DataFinding, Fix, rows_told
from mindspeed_mm.tasks.data.histogram import percentiles
from mindspeed_mm.tasks.data.tally import RowStatistics

SIZES = "data.dataset_param.preprocess_parameters"
_EXAMPLES = 3
_MOST_BUCKETS = 12
_MOST_RATES = 8

Told = tuple[str, DenoisedFacts]
"""A row's place and its facts."""


class DenoisedStats(TypedDict):
    """Statistics of a generator's samples; percentiles by name (`p50`, `max` …), empty where there is nothing."""

    buckets: dict[str, int]
    """Bucket → samples, the fullest first."""
    captions_of_a_row: dict[int, int]
    """Number of captions → rows that have as many."""
    caption_tokens: dict[str, float]
    captions_cut: int
    captions_empty: int
    frames: dict[str, float]
    """Frames of clips."""
    fps: dict[str, int]
    """Frame rate → samples, the most frequent first."""
    cut_share: dict[str, float]
    enlarged: dict[str, float]
    roles: dict[str, RoleStats]
    """Of the media that rows name beside the target."""


def is_denoised(dataset: MMDataset) -> bool:
    """Whether a data set is a generator's."""
    return dataset.sizes is not None


def lengths_of(dataset: MMDataset) -> CaptionLengths | None:
    """What measures captions; None where the model's folder lacks the tokenizers, as a run on features allows."""
    try:
        return dataset.caption_lengths()
    except MMError:
        return None


# --- findings --------------------------------------------------------------------------------------------------------


def denoised_findings(dataset: MMDataset, tally: RowStatistics) -> list[DataFinding]:
    """What a person should know of captions, declarations, scaling, and of features whose rows have changed."""
    found = list(_of_changed_rows(dataset))
    for kind, what, is_meant, say, fix in _FINDINGS:
        rows = _rows_where(is_meant, tally.denoised)
        if rows:
            found.append(_warning_on_rows(kind, what, rows, say, fix))
    found += _much_scaled(tally.denoised)
    return found


def _rows_where(is_meant: Callable[[DenoisedFacts], bool], told: Sequence[Told]) -> list[Told]:
    return [(place, facts) for place, facts in told if is_meant(facts)]


def _is_cut(facts: DenoisedFacts) -> bool:
    """Whether a caption is longer than what is read of it, where that is known."""
    return facts.caption_tokens > facts.most_tokens > 0


_FINDINGS: tuple[tuple[str, str, Callable[[DenoisedFacts], bool], Callable[[DenoisedFacts], str], str], ...] = (
    (
        "cut captions",
        "with a caption that is longer than what the text encoder reads: its end is cut off",
        _is_cut,
        lambda facts: f"{facts.caption_tokens} tokens, {facts.most_tokens} are read",
        "shorten the captions, or put what matters first",
    ),
    (
        "empty captions",
        "with an empty caption: trained without one",
        lambda facts: facts.has_empty_caption,
        lambda facts: f"one of {facts.captions}" if facts.captions > 1 else "its only caption",
        "write captions, or keep them if they are meant as caption dropout (training.diffusion.caption_dropout)",
    ),
    (
        "declarations",
        "with declarations of the medium that differ from the file",
        lambda facts: bool(facts.contradiction),
        lambda facts: facts.contradiction,
        "correct the rows, or leave the declarations out: the files' own headers are read then",
    ),
)
"""Kind, what is wrong with rows, which rows, what is said of an example, and the way out."""


def _much_scaled(told: Sequence[Told]) -> Iterator[DataFinding]:
    """Media that are enlarged or cut a lot, the worst as examples."""
    enlarged = _rows_where(lambda facts: facts.enlarged > MUCH_ENLARGED, told)
    if enlarged:
        yield _warning_on_rows(
            "enlarged",
            f"with a medium that is enlarged more than {MUCH_ENLARGED:g} times along one side",
            sorted(enlarged, key=lambda each: each[1].enlarged, reverse=True),
            lambda facts: f"{facts.enlarged:.3g} times, to {facts.bucket}",
            f"{SIZES}.max_enlargement={MUCH_ENLARGED:g} makes them bad samples; or add a smaller size",
        )
    cut = _rows_where(lambda facts: facts.cut > MUCH_CUT, told)
    if cut:
        yield _warning_on_rows(
            "cut away",
            "with a medium that loses more than a third of its area",
            sorted(cut, key=lambda each: each[1].cut, reverse=True),
            lambda facts: f"{facts.cut:.0%}, to {facts.bucket}",
            f"{SIZES}.max_cut={MUCH_CUT:.2f} makes them bad samples; or add sizes of other aspects to buckets",
        )


def _warning_on_rows(
    kind: str, what: str, rows: Sequence[Told], say: Callable[[DenoisedFacts], str], fix: str
) -> DataFinding:
    examples = tuple(f"{place}  {say(facts)}" for place, facts in rows[:_EXAMPLES])
    return DataFinding("warning", kind, f"{rows_told(len(rows))} {what}", len(rows), examples, (Fix(fix, 0),))


def _of_changed_rows(dataset: MMDataset) -> Iterator[DataFinding]:
    problems = dataset.row_changes()
    if problems:
        yield DataFinding(
            "error",
            "changed rows",
            "the rows have changed since their features were extracted",
            len(problems),
            tuple(str(problem) for problem in problems[:_EXAMPLES]),
            (Fix("run mm extract again: it encodes what is new; or mm train with --accept-data-change", 0),),
        )


# --- statistics ------------------------------------------------------------------------------------------------------


def denoised_stats(tally: RowStatistics) -> DenoisedStats | None:
    """Buckets with their samples, frames, fps, caption lengths, and how much is cut away and enlarged, for machines;
    None where there are no samples of a generator."""
    if not tally.denoised:
        return None
    buckets: Counter[str] = Counter()
    captions: Counter[int] = Counter()
    rates: Counter[float] = Counter()
    tokens, frames = [], []
    cut, enlarged = [], []
    captions_cut = captions_empty = 0
    for _, facts in tally.denoised:
        buckets[facts.bucket] += 1
        captions[facts.captions] += 1
        captions_cut += _is_cut(facts)
        captions_empty += facts.has_empty_caption
        if facts.most_tokens:
            tokens.append(facts.caption_tokens)
        if facts.source_frames > 1:
            frames.append(facts.source_frames)
        if facts.fps:
            rates[round(facts.fps, 2)] += 1
        if facts.enlarged:  # 0: the header of the medium was not read
            cut.append(facts.cut)
            enlarged.append(facts.enlarged)
    return {
        "buckets": dict(buckets.most_common()),
        "captions_of_a_row": dict(sorted(captions.items())),
        "caption_tokens": percentiles(tokens),
        "captions_cut": captions_cut,
        "captions_empty": captions_empty,
        "frames": percentiles(frames),
        "fps": {f"{rate:g}": count for rate, count in rates.most_common()},
        "cut_share": shares(cut),
        "enlarged": shares(enlarged),
        "roles": _role_stats(facts.roles for _, facts in tally.denoised),
    }


def denoised_lines(stats: DenoisedStats) -> list[str]:
    """Return lines of text with the statistics of a generator's samples: sizes, captions, frames and roles."""
    buckets = stats["buckets"]
    total = sum(buckets.values())
    lines = []
    for size, count in islice(buckets.items(), _MOST_BUCKETS):
        lines.append(f"  {size:>16}  {count:>9,}  {count / total:>6.1%}")
    if len(buckets) > _MOST_BUCKETS:
        lines.append(f"  … and {len(buckets) - _MOST_BUCKETS} more")
    lines += _percentile_line("tokens of the longest caption", stats["caption_tokens"])
    lines += _percentile_line("frames of a clip", stats["frames"])
    lines += _percentile_line("share of a medium that is cut away", stats["cut_share"])
    lines += _percentile_line("times that a medium is enlarged", stats["enlarged"])
    if stats["fps"]:
        rates = with_counts(stats["fps"])[:_MOST_RATES]
        lines.append(f"  frames a second: {', '.join(rates)}")
    lines.append(f"  captions of a row: {', '.join(times_each(stats['captions_of_a_row']))}")
    lines.append(f"  captions cut: {stats['captions_cut']:,}, empty: {stats['captions_empty']:,}")
    return lines + _role_lines(stats["roles"])


# --- preview ---------------------------------------------------------------------------------------------------------


def sample_notes(found: SampleDescription, lengths: CaptionLengths | None) -> list[str]:
    """What a preview tells of a sample: its bucket, what is done to the medium, and its captions."""
    size = f"size {found.size} (height × width)"
    if found.header is not None:
        size += f", of a medium of {_medium_words(found.header, SizeChange.of(found.header, found.size))}"
    notes = [size]
    measured: Sequence[CaptionLength] = []
    if lengths is not None:
        measured = lengths(found.captions)
    for number, caption in enumerate(found.captions):
        title = "caption"
        if measured:
            cut_off = ", cut off" if measured[number].is_cut else ""
            title += f" ({measured[number].tokens} tokens{cut_off})"
        if len(found.captions) > 1 and number == found.drawn:
            title += ", drawn in the first epoch"
        notes.append(f"{title}: {caption!r}")
    if found.contradiction:
        notes.append(found.contradiction)
    return notes


def _medium_words(header: MediaHeader, change: SizeChange) -> str:
    medium = f"{header.height}×{header.width}"
    if header.frames > 1:
        medium += f", {header.frames} frames at {header.fps:g} a second"
    scaled = "enlarged" if change.enlarged > 1 else "scaled"
    return f"{medium}: {scaled} {change.enlarged:.3g} times, {change.cut:.1%} cut away"


# --- media beside the target ------------------------------------------------------------------------------------------

_Key = TypeVar("_Key")

_MOST_SIZES = 5


class RoleStats(TypedDict):
    """What the media of one role are like, for machines."""

    kinds: dict[str, int]
    """Kind → media."""
    sizes: dict[str, int]
    """The most frequent sizes as `width × height`, with their media."""
    frames: Mapping[str, float]
    seconds: dict[str, float]
    cut_share: dict[str, float]


def _role_stats(samples: Iterable[Sequence[RoleFacts]]) -> dict[str, RoleStats]:
    """Role → statistics of its media in all samples."""
    by_role: dict[str, list[RoleFacts]] = {}
    for roles in samples:
        for each in roles:
            by_role.setdefault(each.role, []).append(each)
    return {role: _of_role(found) for role, found in by_role.items()}


def _of_role(found: Sequence[RoleFacts]) -> RoleStats:
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    frames, seconds, cut = [], [], []
    for each in found:
        medium = each.medium
        kinds[medium.kind] += 1
        if medium.width:
            sizes[f"{medium.width} × {medium.height}"] += 1
            cut.append(each.cut)
        if medium.frames > 1:
            frames.append(medium.frames)
        if medium.seconds:
            seconds.append(medium.seconds)
    return {
        "kinds": dict(kinds.most_common()),
        "sizes": dict(sizes.most_common(_MOST_SIZES)),
        "frames": percentiles(frames),
        "seconds": shares(seconds),
        "cut_share": shares(cut),
    }


def shares(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 95th percentile and most of some values; nothing of none."""
    if not values:
        return {}
    found = {"mean": float(np.mean(values))}
    # inverted_cdf: a value that a row has, not one between two
    for name, percent in {"p50": 50, "p95": 95, "max": 100}.items():
        found[name] = float(np.percentile(values, percent, method="inverted_cdf"))
    return {name: round(value, 3) for name, value in found.items()}


def _role_lines(stats: Mapping[str, RoleStats]) -> list[str]:
    """Return lines of text with the statistics of each role: kinds, sizes, frames, seconds and share cut away."""
    lines = []
    for role, told in stats.items():
        lines.append(f"  {role.replace('_', ' ')}: {', '.join(times_each(told['kinds']))}")
        if told["sizes"]:
            sizes = with_counts(told["sizes"])[:_MOST_SIZES]
            lines.append(f"    most frequent sizes (width × height): {', '.join(sizes)}")
        lines += _percentile_line("  frames", told["frames"])
        lines += _percentile_line("  seconds", told["seconds"])
        lines += _percentile_line("  share that is cut away", told["cut_share"])
    return lines


def _percentile_line(title: str, values: Mapping[str, float]) -> list[str]:
    """One line of named values; none where there are no values."""
    if not values:
        return []
    return [f"  {title}: {named_numbers(values)}"]


def named_numbers(values: Mapping[str, float]) -> str:
    """Join names and numbers in one line of text, such as `median 12, largest 1,200`."""
    return ", ".join(f"{name} {value:,}" for name, value in values.items())


def times_each(counts: Mapping[_Key, int]) -> list[str]:
    """`1,200 × image` of each."""
    return [f"{count:,} × {name}" for name, count in counts.items()]


def with_counts(counts: Mapping[_Key, int]) -> list[str]:
    """Return each key with its count as text, such as `640×480 (1,200)`."""
    return [f"{name} ({count:,})" for name, count in counts.items()]
