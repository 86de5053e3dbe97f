"""`mm data stats`: how many rows and tokens, how long, how large the media, and which lengths and budgets would fit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.packing import best_fit
from mindspeed_mm.fsdp.data.dataloader.sampler import SAMPLERS, permutation
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam
from mindspeed_mm.tasks.data.check import look_through
from mindspeed_mm.tasks.data.denoised import DenoisedStats, denoised_stats
from mindspeed_mm.tasks.data.histogram import Bin, as_dicts, histogram, percentiles
from mindspeed_mm.tasks.data.opening import open_data
from mindspeed_mm.tasks.data.tally import MEDIA, RowStatistics, SourceShare, shares
from mindspeed_mm.tasks.requests.data import DataStatsRequest

_PACKED_ROWS = 100_000
"""So many rows tell how well packing does."""
_KEPT_SHARE = 0.99
_ROUND_TO = 64
_BATCH_FACTORS = (0.5, 1, 2, 4)
_LEAST_PACKS = 8
"""Minimum number of packs: with fewer, the last one, which is left half empty, dominates the estimate."""


class SizeCount(NamedTuple):
    """A size of media in pixels, and how many items have it."""

    width: int
    height: int
    items: int


@dataclass(frozen=True)
class MediaStats:
    """All media of one kind."""

    kind: str
    items: int
    rows: int
    """With at least one."""
    most_in_a_row: int
    per_row: dict[int, int]
    """Items of a row → rows."""
    sizes: list[SizeCount]
    """The most frequent sizes."""
    pixels: dict[str, float]
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, object]:
        """Return the statistics as a dictionary for JSON, each size as `width`, `height` and `items`."""
        return vars(self) | {"sizes": [size._asdict() for size in self.sizes]}


@dataclass(frozen=True)
class PackingEstimate:
    """How full packed micro-batches of some size become."""

    tokens: int
    """Tokens of a micro-batch."""
    rows_kept: float
    """Share of the rows that fit."""
    packs: int
    fill: float
    """Share of a pack that is not padding."""


@dataclass
class DataStats:
    """What the rows are like."""

    path: Path
    rows: int
    read: int
    usable: int
    cutoff_len: int
    seconds: float = 0.0
    shares: list[SourceShare] = field(default_factory=list)
    roles: dict[str, int] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    """Turns of the model → rows."""
    tokens: dict[str, float] = field(default_factory=dict)
    trained_share: float = 0.0
    patches: dict[str, float] = field(default_factory=dict)
    token_bins: list[Bin] = field(default_factory=list)
    patch_bins: list[Bin] = field(default_factory=list)
    media: list[MediaStats] = field(default_factory=list)
    batch_tokens: int = 0
    """Most tokens of a micro-batch that is filled by size."""
    configured: Literal["packed", "padded", ""] = ""
    """How micro-batches are made: `padded` to the longest of so many rows; empty: in another way."""
    cut: int = 0
    """Documents longer than `cutoff_len`, which training takes in pieces."""
    samples: int = 0
    """Samples that usable rows give: more than rows where documents are cut."""
    padded_fill: float = 0.0
    """Share of a batch that is not padding, with rows padded to the longest of a random micro-batch."""
    packing: list[PackingEstimate] = field(default_factory=list)
    suggestions: list[str] = field(default_factory=list)
    denoised: DenoisedStats | None = None
    """Statistics of a generator's samples."""

    def to_dict(self) -> dict[str, object]:
        """Return all statistics as a dictionary for JSON; bins and nested statistics become dictionaries, too."""
        return vars(self) | {
            "path": str(self.path),
            "shares": [each.to_dict() for each in self.shares],
            "token_bins": as_dicts(self.token_bins),
            "patch_bins": as_dicts(self.patch_bins),
            "media": [kind.to_dict() for kind in self.media],
            "packing": list(map(vars, self.packing)),
            "denoised": self.denoised or {},
        }


def run(request: DataStatsRequest) -> DataStats:
    """Read the rows once and describe them.

    Raises:
        MMError: The configuration or the files are off; single rows are not an error here.
    """
    data = open_data(request.config, request.overrides, validation=request.validation, patient=True)
    began = time.monotonic()
    tally = look_through(data, decode=False, limit=request.limit, workers=request.workers)
    seconds = round(time.monotonic() - began, 2)
    if not tally.usable:
        first = tally.bad[0]
        raise DataError(
            f"none of the {tally.rows} rows can be used; the first: {first.fault.what}",
            where=first.place,
            key=first.fault.key,
            way_out="See mm data check.",
        )
    basic, training = data.param.basic_parameters, data.arguments.training
    stats = DataStats(request.config, data.rows, tally.rows, tally.usable, basic.cutoff_len)
    stats.shares = shares(data.dataset, basic, tally)
    stats.roles, stats.turns = dict(tally.roles.most_common()), dict(sorted(tally.turns.items()))
    for kind in MEDIA:
        rows_without = tally.media[kind][0]
        if sum(tally.media[kind].values()) > rows_without:
            stats.media.append(_of_media(tally, kind))
    budget = data.arguments.data.dataloader_param.max_tokens_per_batch
    stats.batch_tokens = budget or training.micro_batch_size * basic.cutoff_len
    stats.configured = _configured(data.arguments.data.dataloader_param, basic)
    stats.denoised = denoised_stats(tally)
    if any(tally.tokens):  # samples of generators have none
        _describe_sizes(stats, tally)
        stats.samples = len(tally.sample_lengths(basic))
        stats.cut = tally.longer_documents(basic)
        if data.dataset.rows_of_a_sample == 1:  # lengths of pairs are sums: what padding wastes is not known of them
            _describe_batches(stats, tally, basic, training.micro_batch_size, training.seed)
    stats.seconds = seconds
    return stats


def _describe_sizes(stats: DataStats, tally: RowStatistics) -> None:
    patches = tally.patches_of_media
    stats.tokens, stats.patches = percentiles(tally.tokens), percentiles(patches)
    stats.token_bins, stats.patch_bins = histogram(tally.full_lengths()), histogram(patches)
    stats.trained_share = round(sum(tally.trained) / max(sum(tally.tokens), 1), 4)


def _of_media(tally: RowStatistics, kind: str) -> MediaStats:
    per_row, sides = tally.media[kind], tally.sides[kind]
    pixels: list[int] = []
    for (width, height), count in sides.items():
        pixels += [width * height] * count
    return MediaStats(
        kind,
        items=sum(items * rows for items, rows in per_row.items()),
        rows=sum(rows for items, rows in per_row.items() if items),
        most_in_a_row=max(per_row),
        per_row=dict(sorted(per_row.items())),
        sizes=[SizeCount(*side, count) for side, count in sides.most_common(5)],
        pixels=percentiles(pixels),
        seconds=_of_seconds(tally, kind),
    )


def _of_seconds(tally: RowStatistics, kind: str) -> dict[str, float]:
    found = np.sort(np.asarray(tally.seconds[kind]))
    if not len(found):
        return {}
    return {
        "total": round(float(found.sum()), 2),
        "mean": round(float(found.mean()), 2),
        "p50": round(float(found[len(found) // 2]), 2),
        "max": round(float(found[-1]), 2),
    }


# --- batches ---------------------------------------------------------------------------------------------------------


def _configured(loader: DataloaderParam, basic: BasicParameters) -> Literal["packed", "padded", ""]:
    """How micro-batches are made, in the words of `DataStats.configured`."""
    if basic.packs:
        return "packed"
    by_size = loader.max_tokens_per_batch or loader.dataloader_mode == "variable" or loader.sampler_type not in SAMPLERS
    return "" if by_size else "padded"


def _describe_batches(
    stats: DataStats, tally: RowStatistics, basic: BasicParameters, micro_batch_size: int, seed: int
) -> None:
    """What padding wastes, what packing would not, and which settings follow."""
    lengths = tally.full_lengths()
    if basic.if_too_long == "split":  # whatever is longer and usable is a document
        lengths = np.concatenate([tally.sample_lengths(basic), np.asarray(tally.lengths_too_long, dtype=np.int64)])
    # best-fit packing of millions of rows would take minutes and tell nothing more
    lengths = _some(lengths, seed)
    kept = lengths[lengths <= stats.cutoff_len]
    stats.padded_fill = round(padded_fill(kept, micro_batch_size, seed), 4)
    for factor in _BATCH_FACTORS:
        estimate = packing_at(lengths, round(factor * stats.batch_tokens), stats.cutoff_len)
        if estimate is not None:
            stats.packing.append(estimate)
    suggested = _rounded(int(np.quantile(lengths, _KEPT_SHARE, method="inverted_cdf")))
    stats.suggestions = _suggestions(stats, lengths, suggested, micro_batch_size)


def _some(lengths: np.ndarray, seed: int) -> np.ndarray:
    if len(lengths) <= _PACKED_ROWS:
        return lengths
    return lengths[permutation(len(lengths), seed, 0)[:_PACKED_ROWS]]


def padded_fill(lengths: np.ndarray, micro_batch_size: int, seed: int) -> float:
    """Share of tokens in batches of a random order that are not padding; 0 for no samples."""
    if not len(lengths):
        return 0.0
    drawn = lengths[permutation(len(lengths), seed, 0)]
    starts = np.arange(0, len(drawn), micro_batch_size)
    rows = np.diff([*starts, len(drawn)])  # of each micro-batch; the last may have fewer
    longest = np.maximum.reduceat(drawn, starts)
    return float(drawn.sum() / (longest * rows).sum())


def packing_at(lengths: np.ndarray, tokens: int, cutoff_len: int) -> PackingEstimate | None:
    """How full packs of a size become; None where no sample fits."""
    kept = lengths[lengths <= min(tokens, cutoff_len)]
    if not len(kept):
        return None
    packs = len(best_fit(kept.tolist(), tokens))
    return PackingEstimate(
        tokens, round(len(kept) / len(lengths), 4), packs, round(int(kept.sum()) / (packs * tokens), 4)
    )


def _suggestions(stats: DataStats, lengths: np.ndarray, suggested: int, micro_batch_size: int) -> list[str]:
    """Settings that the lengths speak for, each with its reason."""
    found = []
    lost = int((lengths > stats.cutoff_len).sum())
    if lost:
        found.append(f"cutoff_len={suggested} keeps {_KEPT_SHARE:.0%} of the rows; now {1 - lost / len(lengths):.1%}")
    kept = lengths[lengths <= stats.cutoff_len]
    if len(kept):
        most = int(kept.max()) * micro_batch_size
        found.append(
            f"max_tokens_per_batch={_rounded(most)} takes the memory of today's largest micro-batch of "
            f"{micro_batch_size} and holds {most / float(kept.mean()):.1f} rows on average"
        )
    for packed in stats.packing:
        takes_as_much = packed.tokens == stats.batch_tokens and packed.packs >= _LEAST_PACKS
        if stats.configured != "packed" and takes_as_much and packed.fill > stats.padded_fill:
            found.append(f"packing=true fills micro-batches to {packed.fill:.1%}, padding to {stats.padded_fill:.1%}")
    return found


def _rounded(length: int) -> int:
    return -(-length // _ROUND_TO) * _ROUND_TO
