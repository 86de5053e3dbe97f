"""Where the tokens of one sequence lie: which rank holds which intervals, and which rectangles of the score matrix that
makes for each pair of ranks. Pure: neither tensors nor process groups.

Everything about masks is decided here. Intervals are cut at document borders; two of one document meet in full, in a
causal square, or not at all, so no attention mask is ever built for causal, packed or uneven sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

from mindspeed_mm.core.errors import MMError

Interval = tuple[int, int]
"""Tokens from the first number up to, without, the second."""
Piece = tuple[Interval, ...]
"""Intervals in the order in which a rank holds them."""


class LayoutError(MMError):
    """Tokens are placed nowhere or twice, or two layouts do not go together."""


class Segment(NamedTuple):
    """An interval inside one document."""

    document: int
    start: int
    stop: int
    local: int
    """Where it begins among the tokens of the rank that it was asked for."""

    @property
    def span(self) -> Interval:
        """(start, stop) of the segment among the tokens of its rank."""
        return self.local, self.local + self.stop - self.start


class Rectangle(NamedTuple):
    """Queries and keys that meet, both counted among the tokens of their ring ranks."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    """A square on the diagonal: each query sees the keys up to its own place."""


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """How one sequence lies over ring × ulysses ranks.

    Args:
        pieces: By ring rank, by ulysses rank: what the rank holds.
        borders: Document borders, 0 first, the length last.

    Raises:
        LayoutError: A token lies nowhere or on two ranks, or the borders do not ascend from 0.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    borders: tuple[int, ...]

    def __post_init__(self) -> None:
        check_borders(self.borders)
        everywhere = chain.from_iterable(chain.from_iterable(self.pieces))
        intervals = sorted(interval for interval in everywhere if interval[0] < interval[1])
        reached = 0
        for start, stop in (*intervals, (self.length, self.length)):  # the last one asks whether the end is reached
            if start != reached:
                raise LayoutError(f"intervals {intervals} do not cover the tokens 0…{self.length} once each")
            reached = stop

    @property
    def length(self) -> int:
        """Number of tokens in the whole sequence."""
        return self.borders[-1]

    @property
    def ring_size(self) -> int:
        """Number of ranks in the ring."""
        return len(self.pieces)

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document."""
        return max((stop - start for start, stop in pairwise(self.borders)), default=0)

    def piece_lengths(self, ring_rank: int) -> list[int]:
        """Tokens on each ulysses rank of one ring rank."""
        return list(map(count_tokens, self.pieces[ring_rank]))

    @property
    def leaves_ranks_empty(self) -> bool:
        """Whether a rank has no token."""
        return 0 in map(count_tokens, chain.from_iterable(self.pieces))

    def ring_lengths(self) -> list[int]:
        """Tokens on each ring rank, its ulysses ranks together."""
        return [sum(self.piece_lengths(rank)) for rank in range(self.ring_size)]

    def positions(self, ring_rank: int, ulysses_rank: int) -> list[int]:
        """Places in the sequence of the tokens that a rank holds, in its order."""
        places: list[int] = []
        for start, stop in self.pieces[ring_rank][ulysses_rank]:
            places += range(start, stop)
        return places

    def segments(self, ring_rank: int, ulysses_rank: int | None = None) -> list[Segment]:
        """The intervals of a ring rank, or of one of its ulysses ranks, cut at document borders, with their places
        among its tokens."""
        found, local, document = [], 0, 0
        held: Iterable[Interval] = chain.from_iterable(self.pieces[ring_rank])
        if ulysses_rank is not None:
            held = self.pieces[ring_rank][ulysses_rank]
        for start, stop in merge_intervals(held):
            # An interval may lie in front of the one before it: the search begins anew.
            if start < self.borders[document]:
                document = 0
            while start < stop:
                while self.borders[document + 1] <= start:
                    document += 1
                end = min(stop, self.borders[document + 1])
                found.append(Segment(document, start, end, local))
                local += end - start
                start = end
        return found


def build_layout(
    length: int, ring: int, ulysses: int, *, borders: Sequence[int] | None = None, balanced: bool = False
) -> SequenceLayout:
    """The layout of a sequence of any length over ring × ulysses ranks.

    Args:
        length: Tokens.
        ring: Ranks of the ring. Each of its shares is cut into `ulysses` runs of equal length, up to one token.
        ulysses: Ranks that exchange heads.
        borders: Document borders of a packed row; one document when None.
        balanced: Zigzag inside each document, which gives every ring rank the same causal work: a document is cut into
            2 · ring parts, and a rank takes one from the front and its mirror image. Otherwise one run a rank.

    Raises:
        LayoutError: The borders are out of order, or do not end at `length`.
    """
    documents = tuple(borders) if borders is not None else (0, length)
    if documents[-1:] != (length,):
        raise LayoutError(f"document borders {documents} do not end at the {length} tokens of the row")
    check_borders(documents)
    shares: Sequence[Sequence[Interval]]
    if balanced and ring > 1:
        shares = _zigzag_shares(documents, ring)
    else:
        shares = _equal_cuts([(0, length)], ring)
    return SequenceLayout(tuple(tuple(_equal_cuts(share, ulysses)) for share in shares), documents)


def concatenate_layouts(first: SequenceLayout, second: SequenceLayout) -> SequenceLayout:
    """The layout of two sequences, one behind the other, as one document: every rank holds its tokens of the first and
    then its tokens of the second.

    Raises:
        LayoutError: They lie over different numbers of ranks.
    """
    if list(map(len, first.pieces)) != list(map(len, second.pieces)):
        raise LayoutError("two sequences that attend to each other lie over different numbers of ranks")

    def joined(one: Piece, other: Piece) -> Piece:
        return (*one, *shifted(other, first.length))

    pieces = tuple(tuple(map(joined, *on_ring)) for on_ring in zip(first.pieces, second.pieces, strict=True))
    return SequenceLayout(pieces, (0, first.length + second.length))


def scale_layout(layout: SequenceLayout, unit: int, borders: Sequence[int]) -> SequenceLayout:
    """The layout of tokens of which each `unit` in a row are one of another layout: a rank holds all of them.

    Args:
        layout: Of the units.
        unit: Tokens in each.
        borders: Document borders among the tokens.
    """

    def scaled(piece: Piece) -> Piece:
        return tuple((start * unit, stop * unit) for start, stop in piece)

    pieces = tuple(tuple(map(scaled, on_ring)) for on_ring in layout.pieces)
    return SequenceLayout(pieces, tuple(borders))


@lru_cache(maxsize=32)
def plan_rectangles(
    queries: SequenceLayout, keys: SequenceLayout, ring_rank: int, causal: bool
) -> tuple[tuple[Rectangle, ...], ...]:
    """By ring rank of the keys: the rectangles in which the queries of `ring_rank` meet them. The same for every layer,
    so it is kept.

    Raises:
        LayoutError: The ring sizes or the numbers of documents differ, or causal intervals overlap in part.
    """
    if queries.ring_size != keys.ring_size or len(queries.borders) != len(keys.borders):
        raise LayoutError("queries and keys lie over different rings, or hold different numbers of documents")
    own = queries.segments(ring_rank)
    by_source = []
    for source in range(keys.ring_size):
        by_source.append(tuple(meet(own, keys.segments(source), causal)))
    return tuple(by_source)


def meet(queries: Sequence[Segment], keys: Sequence[Segment], causal: bool) -> list[Rectangle]:
    """Rectangles in which segments of the same document meet.

    Raises:
        LayoutError: Causal segments overlap in part.
    """
    by_document: dict[int, list[Segment]] = defaultdict(list)
    for key in keys:
        by_document[key.document].append(key)
    squares, full = [], []
    for query in queries:
        for key in by_document[query.document]:
            # Causal queries and keys lie in one layout, whose intervals coincide or are apart.
            if not causal or key.stop <= query.start:
                full.append(Rectangle(*query.span, *key.span, False))
            elif (key.start, key.stop) == (query.start, query.stop):
                squares.append(Rectangle(*query.span, *key.span, True))
            elif key.start < query.stop:
                raise LayoutError(f"tokens {query.start}…{query.stop} and {key.start}…{key.stop} overlap in part")
    return squares + _joined(full)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same tokens in the same order, with neighbours that touch made one and empty intervals left out."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def count_tokens(intervals: Iterable[Interval]) -> int:
    """Tokens in all of the intervals together."""
    return sum(stop - start for start, stop in intervals)


def shifted(intervals: Iterable[Interval], by: int) -> list[Interval]:
    """Intervals moved to the right."""
    return [(start + by, stop + by) for start, stop in intervals]


def check_borders(borders: Sequence[int]) -> None:
    """Raise `LayoutError` unless borders ascend from 0."""
    if len(borders) < 2 or borders[0] != 0 or any(stop < start for start, stop in pairwise(borders)):
        raise LayoutError(f"document borders {tuple(borders)} do not ascend from 0")


def even_bounds(count: int, parts: int) -> list[Interval]:
    """`count` things in `parts` runs of equal length, up to one."""
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _zigzag_shares(borders: Sequence[int], ring: int) -> list[list[Interval]]:
    """By ring rank: of 2 · ring equal parts of each document, one from the front and its mirror image. A causal query
    sees the keys up to its own place, so that both together cost as much as any other such pair."""
    shares: list[list[Interval]] = [[] for _ in range(ring)]
    for document, (start, stop) in enumerate(pairwise(borders)):
        parts = shifted(even_bounds(stop - start, 2 * ring), start)
        for turn in range(ring):
            # Documents take turns: what does not divide falls to another rank each time.
            shares[(turn + document) % ring] += [parts[turn], parts[2 * ring - 1 - turn]]
    return [merge_intervals(share) for share in shares]


def _equal_cuts(intervals: Sequence[Interval], parts: int) -> list[Piece]:
    """Intervals cut into `parts` runs with equally many tokens, up to one."""
    cuts = []
    # Bounds are counted among the tokens of the intervals, one behind the other, as is `local`.
    for first, last in even_bounds(count_tokens(intervals), parts):
        run, local = [], 0
        for start, stop in intervals:
            low, high = max(first - local, 0), min(last - local, stop - start)
            if low < high:
                run.append((start + low, start + high))
            local += stop - start
        cuts.append(tuple(run))
    return cuts


def _joined(rectangles: list[Rectangle]) -> list[Rectangle]:
    """The same area in fewer rectangles: neighbours along the keys, then along the queries, become one."""
    along_keys: list[Rectangle] = []
    for found in sorted(rectangles):  # those of the same queries stand next to each other, by the start of their keys
        last = along_keys[-1] if along_keys else None
        if last is not None and last[:2] == found[:2] and last.k_stop == found.k_start:
            along_keys[-1] = last._replace(k_stop=found.k_stop)
        else:
            along_keys.append(found)
    joined: list[Rectangle] = []
    for found in sorted(along_keys, key=lambda each: (each.k_start, each.k_stop, each.q_start)):
        last = joined[-1] if joined else None
        if last is not None and last[2:4] == found[2:4] and last.q_stop == found.q_start:
            joined[-1] = last._replace(q_stop=found.q_stop)
        else:
            joined.append(found)
    return joined
