"""Samples of generators: findings, statistics and what a preview tells of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.datasets.generation.sample_description import SampleDescription
from mindspeed_mm.fsdp.data.datasets.generation.sizes import MUCH_CUT, MUCH_ENLARGED, SizeChange
from mindspeed_mm.fsdp.models.diffusion.caption_lengths import CaptionLengths
from mindspeed_mm.tasks.data.facts import DenoisedFacts
from mindspeed_mm.tasks.data.findings import DataFinding, Fix
from mindspeed_mm.tasks.data.histogram import percentiles
from mindspeed_mm.tasks.data.tally import RowStatistics

SIZES = "data.dataset_param.preprocess_parameters"
_EXAMPLES = 3
_MOST_BUCKETS = 12

Told = tuple[str, DenoisedFacts]


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
    told = tally.denoised
    found = [
        _finding(
            "cut captions",
            "have a caption that is longer than what the text encoder reads: its end is cut off",
            [each for each in told if each[1].caption_tokens > each[1].most_tokens > 0],
            lambda facts: f"{facts.caption_tokens} tokens, {facts.most_tokens} are read",
            "shorten the captions, or put what matters first",
        ),
        _finding(
            "empty captions",
            "have an empty caption: they are trained without one",
            [each for each in told if each[1].has_empty_caption],
            lambda facts: f"one of {facts.captions}" if facts.captions > 1 else "its only caption",
            "write captions, or keep them if they are meant as caption dropout (training.diffusion.caption_dropout)",
        ),
        _finding(
            "declarations",
            "declare facts about their medium that differ from the file",
            [each for each in told if each[1].contradiction],
            lambda facts: facts.contradiction,
            "correct the rows, or leave the declarations out: the files' own headers are read then",
        ),
        _finding(
            "enlarged",
            f"have a medium that is enlarged more than {MUCH_ENLARGED:g} times along one side",
            sorted((each for each in told if each[1].enlarged > MUCH_ENLARGED), key=lambda each: -each[1].enlarged),
            lambda facts: f"{facts.enlarged:.3g} times, to {facts.bucket}",
            f"{SIZES}.max_enlargement={MUCH_ENLARGED:g} makes them bad samples; or add a smaller size",
        ),
        _finding(
            "cut away",
            "have a medium that loses more than a third of its area",
            sorted((each for each in told if each[1].cut > MUCH_CUT), key=lambda each: -each[1].cut),
            lambda facts: f"{facts.cut:.0%}, to {facts.bucket}",
            f"{SIZES}.max_cut={MUCH_CUT:.2f} makes them bad samples; or add sizes of other aspects to buckets",
        ),
    ]
    return [*_of_changed_rows(dataset), *(each for each in found if each is not None)]


def _finding(
    kind: str, what: str, rows: Sequence[Told], say: Callable[[DenoisedFacts], str], fix: str
) -> DataFinding | None:
    if not rows:
        return None
    count = "1 row" if len(rows) == 1 else f"{len(rows):,} rows"
    examples = tuple(f"{place}  {say(facts)}" for place, facts in rows[:_EXAMPLES])
    return DataFinding("warning", kind, f"{count} {what}", len(rows), examples, (Fix(fix, 0),))


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


def denoised_stats(tally: RowStatistics) -> dict[str, Any]:
    """Buckets with their samples, frames, fps, caption lengths, and how much is cut away and enlarged, for machines."""
    facts = [each for _, each in tally.denoised]
    if not facts:
        return {}
    sources = [each for each in facts if each.enlarged]
    lengths = [each.caption_tokens for each in facts if each.most_tokens]
    rates = Counter(round(each.fps, 2) for each in facts if each.fps)
    return {
        "buckets": dict(Counter(each.bucket for each in facts).most_common()),
        "captions_of_a_row": dict(sorted(Counter(each.captions for each in facts).items())),
        "caption_tokens": percentiles(lengths),
        "captions_cut": sum(each.caption_tokens > each.most_tokens > 0 for each in facts),
        "captions_empty": sum(each.has_empty_caption for each in facts),
        "frames": percentiles([each.source_frames for each in facts if each.source_frames > 1]),
        "fps": {f"{rate:g}": count for rate, count in rates.most_common()},
        "cut_share": _shares([each.cut for each in sources]),
        "enlarged": _shares([each.enlarged for each in sources]),
    }


def _shares(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    names = {"p50": 50, "p95": 95, "max": 100}
    marks = np.percentile(values, list(names.values()), method="inverted_cdf")
    return {"mean": round(float(np.mean(values)), 3)} | {
        n: round(float(m), 3) for n, m in zip(names, marks, strict=True)
    }


def denoised_lines(stats: dict[str, Any]) -> list[str]:
    """The statistics for people."""
    buckets = list(stats["buckets"].items())
    total = sum(stats["buckets"].values())
    lines = [f"  {size:>16}  {count:>9,}  {count / total:>6.1%}" for size, count in buckets[:_MOST_BUCKETS]]
    if len(buckets) > _MOST_BUCKETS:
        lines.append(f"  … and {len(buckets) - _MOST_BUCKETS} more")
    words = {
        "caption_tokens": "tokens of the longest caption",
        "frames": "frames of a clip",
        "cut_share": "share of a medium that is cut away",
        "enlarged": "times that a medium is enlarged",
    }
    for name, title in words.items():
        if stats[name]:
            lines.append(f"  {title}: " + ", ".join(f"{key} {value:,}" for key, value in stats[name].items()))
    if stats["fps"]:
        lines.append("  frames a second: " + ", ".join(f"{rate} ({n:,})" for rate, n in list(stats["fps"].items())[:8]))
    lines.append("  captions of a row: " + ", ".join(f"{n:,} × {k}" for k, n in stats["captions_of_a_row"].items()))
    lines.append(f"  captions cut: {stats['captions_cut']:,}, empty: {stats['captions_empty']:,}")
    return lines


# --- preview ---------------------------------------------------------------------------------------------------------


def sample_notes(found: SampleDescription, lengths: CaptionLengths | None) -> list[str]:
    """What a preview tells of a sample: its bucket, what is done to the medium, and its captions."""
    notes = [f"size {found.size}"]
    if found.header is not None:
        header, change = found.header, SizeChange.of(found.header, found.size)
        clip = f", {header.frames} frames at {header.fps:g} a second" if header.frames > 1 else ""
        scaled = "enlarged" if change.enlarged > 1 else "scaled"
        notes[0] += (
            f", of a medium of {header.height}×{header.width}{clip}: {scaled} {change.enlarged:.3g} times, "
            f"{change.cut:.1%} cut away"
        )
    measured = lengths(found.captions) if lengths is not None else [None] * len(found.captions)
    for number, (caption, length) in enumerate(zip(found.captions, measured, strict=True)):
        tokens = f" ({length.tokens} tokens{', cut off' if length.is_cut else ''})" if length is not None else ""
        drawn = ", drawn in the first epoch" if len(found.captions) > 1 and number == found.drawn else ""
        notes.append(f"caption{tokens}{drawn}: {caption!r}")
    return [*notes, *([found.contradiction] if found.contradiction else [])]
