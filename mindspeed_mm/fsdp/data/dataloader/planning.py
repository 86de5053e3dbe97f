"""Which samples of a buffer share a micro-batch, and which micro-batches make a step: pure functions of sizes.

A step waits for its slowest rank, so its micro-batches should cost the same. Micro-batches are made of everything that
is buffered; those nearest in cost to the one with the oldest sample make up the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from mindspeed_mm.fsdp.data.data_utils.packing import best_fit
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize

ATTENTION_TOKENS = 2**14
"""Tokens of a sample at which attention costs as much as everything else: 6 × the width of blocks of 2 to 3 thousand
channels. α of the cost Σ tokens + α·Σ tokens² is its reciprocal."""
PATCH_TOKENS = 0.1
"""What a patch (or an audio frame) costs an encoder, in tokens of the language model: the ratio of their parameters
(0.4 to 0.7 B of an encoder beside 4 to 8 B)."""


Indices = TypeVar("Indices", list[int], np.ndarray)


@dataclass(frozen=True)
class BatchShape:
    """What a micro-batch may hold.

    `packed`: samples one after the other, padding none. `padded`: rows as long as the longest. `rows`: so many samples
    of similar length, whatever their size.
    """

    kind: Literal["packed", "padded", "rows"]
    tokens: int
    """Most tokens, those of padding included; for `rows` not a limit."""
    patches: int | None = None
    """Most patches."""
    rows: int = 0
    """Samples of a micro-batch, for `rows`."""
    multiple: int = 1
    """Padded rows are a multiple of so many tokens."""

    def lookahead(self, count: int) -> int:
        """Micro-batches to buffer for steps of `count`: enough of nearly every cost to choose among (measured:
        `benchmarks/batches.py`). Fixed numbers of rows differ in cost far more than filled budgets do."""
        return 3 * count + (256 if self.kind == "rows" else 16)

    def padded(self, tokens: int) -> int:
        """Tokens of a row of its own."""
        if self.kind == "packed":
            return tokens
        return -(-tokens // self.multiple) * self.multiple  # rounded up

    def fits(self, size: SampleSize) -> bool:
        """Whether a sample fits a micro-batch of its own."""
        if self.patches is not None and size.patches > self.patches:
            return False
        return self.kind == "rows" or self.padded(size.tokens) <= self.tokens

    def load(self, samples: int, tokens: int, patches: int) -> float:
        """Micro-batches that so many samples fill at least; `tokens` with the padding of each alone."""
        full = samples / self.rows if self.kind == "rows" else tokens / self.tokens
        if self.patches is not None:
            full = max(full, patches / self.patches)
        return full

    def cost(self, sizes: Sequence[SampleSize]) -> float:
        """What a micro-batch takes, in tokens of an endless number of short samples."""
        encoder = PATCH_TOKENS * sum(size.patches for size in sizes)
        tokens = [size.tokens for size in sizes]
        if self.kind == "packed":
            return encoder + sum(_cost_of_rows(1, each) for each in tokens)
        return encoder + _cost_of_rows(len(sizes), self.padded(max(tokens)))

    def micro_batches(self, sizes: Sequence[SampleSize], overdue: int = 0) -> list[list[int]]:
        """Divide samples, the oldest first, into micro-batches: indices of each, in order of age.

        Args:
            sizes: Of each sample.
            overdue: So many, the oldest, share as few micro-batches as they can; the others fill these up.
        """
        divide = self._packed if self.kind == "packed" else self._grouped
        return list(map(sorted, divide(sizes, overdue)))

    def _packed(self, sizes: Sequence[SampleSize], overdue: int) -> list[list[int]]:
        """By best fit. The oldest may have landed in what was filled last: then that is filled up from the others."""
        tokens, patches = [size.tokens for size in sizes], [size.patches for size in sizes]
        made = best_fit(tokens, self.tokens, patches, self.patches, overdue)
        fills = [self._fill(sizes, each) for each in made]
        if len(made) == 1 or fills[0] > min(fills):
            return made
        # The first pack holds the oldest sample, so it is used next, however empty. The longest go into it first: they
        # leave room elsewhere for what is drawn later.
        first = made[0]
        for i in sorted(set(range(len(sizes))) - set(first), key=lambda i: (-tokens[i], i)):
            if self._fill(sizes, [*first, i]) <= 1:
                first.append(i)
        packs, moved = [first], set(first)
        for pack in made[1:]:
            left = [i for i in pack if i not in moved]
            if left:
                packs.append(left)
        return packs

    def _fill(self, sizes: Sequence[SampleSize], pack: Sequence[int]) -> float:
        """How full a pack is; above 1 it holds too much."""
        tokens = patches = 0
        for i in pack:
            tokens += sizes[i].tokens
            patches += sizes[i].patches
        return self.load(len(pack), tokens, patches)

    def _grouped(self, sizes: Sequence[SampleSize], overdue: int) -> list[list[int]]:
        """Neighbours by length. What does not fill a group remains at the end that the oldest is not at."""
        order = sorted(range(len(sizes)), key=lambda i: (-sizes[i].tokens, i))
        if overdue:
            # The longest of them come first and the shortest of the others follow their shortest: neighbours in length.
            oldest: list[int] = []
            others: list[int] = []
            for i in order:
                (oldest if i < overdue else others).append(i)
            return self._cut(sizes, oldest + others[::-1])
        groups = self._cut(sizes, order)
        # Cut from the longest on, the last group is the one that is not full; from the shortest on, the other end is.
        if len(groups) > 1 and 0 in groups[-1]:
            groups = self._cut(sizes, order[::-1])
        return groups

    def _cut(self, sizes: Sequence[SampleSize], order: Sequence[int]) -> list[list[int]]:
        groups: list[list[int]] = []
        longest = patches = 0
        for i in order:
            tokens, more = self.padded(sizes[i].tokens), sizes[i].patches
            longest, patches = max(longest, tokens), patches + more
            if not groups or not self._has_room(len(groups[-1]) + 1, longest, patches):
                groups.append([])
                longest, patches = tokens, more
            groups[-1].append(i)
        return groups

    def _has_room(self, rows: int, longest: int, patches: int) -> bool:
        is_within = rows <= self.rows if self.kind == "rows" else rows * longest <= self.tokens
        return is_within and (self.patches is None or patches <= self.patches)


def _cost_of_rows(rows: int, tokens: int) -> float:
    """Of rows of so many tokens each."""
    return rows * tokens * (1 + tokens / ATTENTION_TOKENS)


def nearest_in_cost(costs: Sequence[float], wanted: Sequence[int], count: int) -> list[int]:
    """So many micro-batches, `wanted` (at most so many) among them, whose costs lie within the narrowest span; the
    costliest first."""
    # In the order of costs the narrowest span is a window of neighbours, so it is found by trying where it may start.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    places = sorted(order.index(number) for number in wanted)
    first, last = places[0], places[-1]
    if last - first >= count:  # they alone span more than a window: whatever lies between them makes it no wider
        between = sorted(set(range(first, last)).difference(places))
        places = sorted(places + between[: count - len(places)])
        return [order[place] for place in places]
    starts = range(max(0, last - count + 1), min(first, len(order) - count) + 1)
    best = min(starts, key=lambda start: (costs[order[start]] - costs[order[start + count - 1]], start))
    return order[best : best + count]


def divided(parts: Sequence[Indices], count: int) -> list[Indices]:
    """So many micro-batches (lists or arrays), by halving the longest; empty ones where there are too few samples."""
    parts = list(parts)
    while len(parts) < count:
        longest = max(range(len(parts)), key=lambda i: len(parts[i]))
        if len(parts[longest]) <= 1:
            return parts + [parts[0][:0]] * (count - len(parts))
        half = (len(parts[longest]) + 1) // 2
        parts[longest : longest + 1] = [parts[longest][:half], parts[longest][half:]]
    return parts


def imbalance(costs: Sequence[float], ranks: int) -> float:
    """How much longer a step takes than if its cost were spread evenly: each turn of accumulation waits for its
    costliest micro-batch. 1.0 is even.

    Args:
        costs: Of the micro-batches of a step, by accumulation and then by rank.
        ranks: Ranks with different samples.
    """
    turns = np.asarray(costs, dtype=np.float64).reshape(-1, ranks)
    # The last number keeps a step whose micro-batches cost nothing from dividing by zero.
    return float(turns.max(axis=1).sum() / max(turns.mean(axis=1).sum(), 1e-12))
