"""Which samples share a row, and the row: best fit under a cap on tokens and one on encoder patches; documents one
behind the other, with their borders.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mindspeed_mm.core.json_file import JsonObject


@dataclass(frozen=True)
class Groups:
    """Samples in groups, by index."""

    members: np.ndarray
    """One group after the other, ascending in each."""
    starts: np.ndarray
    """Where each group begins, and the end of the last: one more than there are groups."""

    @classmethod
    def by_label(cls, labels: np.ndarray) -> Groups:
        """Groups in the order of their labels.

        Args:
            labels: (samples,) the group of each, from 0 on; those that no sample has are left out.
        """
        counts = np.bincount(labels)
        # numpy sorts numbers of 16 bits by counting.
        narrow = labels
        if len(counts) < 2**16:
            narrow = labels.astype(np.uint16)
        return cls(np.argsort(narrow, kind="stable"), np.concatenate([[0], np.cumsum(counts[counts > 0])]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def firsts(self) -> np.ndarray:
        """The first index of each group."""
        return self.members[self.starts[:-1]]

    def labels(self) -> np.ndarray:
        """(samples,) the number of each one's group."""
        labels = np.empty(len(self.members), dtype=np.int64)
        labels[self.members] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return labels

    def only(self, chosen: Sequence[int]) -> Groups:
        """These groups, in this order."""
        starts = self.starts.tolist()
        parts = [self.members[starts[number] : starts[number + 1]] for number in chosen]
        return Groups(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))

    def lists(self) -> list[list[int]]:
        """The indices of each group."""
        members, starts = self.members.tolist(), self.starts.tolist()
        return [members[start:end] for start, end in itertools.pairwise(starts)]


def best_fit(
    tokens: Sequence[int] | np.ndarray,
    capacity: int,
    patches: Sequence[int] | np.ndarray | None = None,
    max_patches: int | None = None,
    first: int = 0,
) -> Groups:
    """Deal samples into as few packs as best fit finds: the largest first, each into the fullest pack that has room;
    of packs that are equally full, into the one that became so last.

    A function of its arguments alone. It takes some seconds for 10⁶ samples.

    Args:
        tokens: Of each sample.
        capacity: Most tokens of a pack.
        patches: Encoder work of each sample; None: not counted.
        max_patches: Most patches of a pack; None: any number.
        first: So many samples, from the beginning, are dealt before the others, which fill up their packs.

    Returns:
        The packs by their first index, so that the first pack holds the first sample.

    Raises:
        ValueError: A sample exceeds a cap by itself.
    """
    length = np.asarray(tokens, dtype=np.int64)
    if patches is None or max_patches is None:  # without a limit: nothing works for the encoder
        work, limit = np.zeros_like(length), 1
    else:
        work, limit = np.asarray(patches, dtype=np.int64), max_patches
    misfits = np.flatnonzero((length > capacity) | (work > limit))
    if len(misfits):
        index = int(misfits[0])
        raise ValueError(f"sample {index} does not fit a pack: {length[index]} tokens, {work[index]} patches")
    if bool((work * capacity <= length * limit).all()):  # tokens are always used up before patches are
        work = np.zeros_like(length)
    # The cap that a sample uses up most of says how hard it is to place.
    share = np.maximum(length / capacity, work / limit)
    hardest = np.argsort(-share, kind="stable")
    if first:
        hardest = np.concatenate([hardest[hardest < first], hardest[hardest >= first]])
    packs = np.empty(len(length), dtype=np.int64)
    # `hardest` is a permutation: writing through it puts each pack back at its sample's own index.
    packs[hardest] = _dealt(_Runs.of(length[hardest], work[hardest]), capacity, limit)
    return Groups.by_label(_by_first_index(packs))


def _by_first_index(packs: np.ndarray) -> np.ndarray:
    """The same packs, numbered in the order in which they first occur."""
    indices = np.arange(len(packs))
    firsts = np.zeros(packs.max(initial=-1) + 1, dtype=np.int64)
    firsts[packs[::-1]] = indices[::-1]  # the last that is written stays, which is the first index
    numbers = np.empty_like(firsts)
    numbers[np.argsort(firsts)] = np.arange(len(firsts))
    return numbers[packs]


class _Runs(NamedTuple):
    """Samples in the order in which they are dealt, those of equal size at once."""

    tokens: list[int]
    """Of each sample of a run."""
    patches: list[int]
    counts: list[int]
    least_tokens: list[int]
    """The fewest that a sample behind a run has: a pack with less room is done."""
    least_patches: list[int]

    @classmethod
    def of(cls, tokens: np.ndarray, patches: np.ndarray) -> _Runs:
        begins = np.ones(len(tokens), dtype=bool)
        begins[1:] = (tokens[1:] != tokens[:-1]) | (patches[1:] != patches[:-1])
        starts = np.flatnonzero(begins)
        of_runs, of_patches, counts = tokens[starts], patches[starts], np.diff(starts, append=len(tokens))
        least = [_least_behind(each).tolist() for each in (of_runs, of_patches)]
        return cls(of_runs.tolist(), of_patches.tolist(), counts.tolist(), *least)


def _least_behind(numbers: np.ndarray) -> np.ndarray:
    """The least of those behind each; behind the last one more than any has."""
    beyond = np.append(numbers[1:], numbers.max(initial=0) + 1)[: len(numbers)]
    # A running minimum from the back: element n is the least of those from n on.
    return np.minimum.accumulate(beyond[::-1])[::-1]


def _dealt(runs: _Runs, capacity: int, max_patches: int) -> np.ndarray:
    """(samples,) the pack of each, in the order of the runs.

    A pack that took a sample is the fullest afterwards, so it takes as many of the same size as it has room for.
    """
    packs = _OpenPacks(sum(runs.counts))
    made, into, times = 0, [], []
    for tokens, patches, count, least_tokens, least_patches in zip(*runs, strict=True):
        while count:
            found = packs.take(tokens, patches)
            if found is None:
                found = (made, capacity, max_patches)
                made += 1
            pack, room, spare = found
            fit = count
            if fit * tokens > room:
                # Not zero: the pack was found because it has room for one.
                fit = room // tokens
            if fit * patches > spare:
                fit = spare // patches
            count, room, spare = count - fit, room - fit * tokens, spare - fit * patches
            into.append(pack)
            times.append(fit)
            if room >= least_tokens and spare >= least_patches:
                packs.put(pack, room, spare)
    return np.repeat(np.array(into, dtype=np.int64), times)


class _BlockOfPacks:
    """Some packs in the order of their keys."""

    __slots__ = ("keys", "most_spare", "packs", "spares")

    def __init__(self, keys: list[int], packs: list[int], spares: list[int]) -> None:
        self.keys, self.packs, self.spares = keys, packs, spares
        self.most_spare = max(spares, default=-1)

    def half(self) -> _BlockOfPacks:
        """Give away the second half."""
        at = len(self.keys) // 2
        other = _BlockOfPacks(self.keys[at:], self.packs[at:], self.spares[at:])
        del self.keys[at:], self.packs[at:], self.spares[at:]
        self.most_spare = max(self.spares)
        return other


class _OpenPacks:
    """Packs that may take more, by the tokens they have room for, and of equal room the latest first.

    They stand in blocks of about √n. A block knows the most patches that one of its packs has room for, so that blocks
    without a fit are passed over: taking and putting take about √n, whichever cap binds.

    Args:
        samples: How many are dealt at most.
    """

    def __init__(self, samples: int) -> None:
        self._longest_block = max(32, math.isqrt(samples))
        self._span, self._puts = samples + 1, 0
        self._blocks = [_BlockOfPacks([], [], [])]
        self._borders = [0]
        """No key of a block is below its border. A key is room · span, less the number of the put; so the packs of one
        room follow each other, the latest first."""

    def take(self, tokens: int, patches: int) -> tuple[int, int, int] | None:
        """Take out the fullest pack that has room: its number, and its tokens and patches that are free. None: there
        is none."""
        least = tokens * self._span  # of the keys of such packs
        first = bisect_right(self._borders, least) - 1
        block = self._blocks[first]
        if block.most_spare >= patches:
            spares = block.spares
            for place in range(bisect_left(block.keys, least), len(spares)):
                if spares[place] >= patches:
                    return self._taken(first, place)
        for number in range(first + 1, len(self._blocks)):
            block = self._blocks[number]
            if block.most_spare >= patches:
                place = next(place for place, spare in enumerate(block.spares) if spare >= patches)
                return self._taken(number, place)
        return None

    def put(self, pack: int, room: int, spare: int) -> None:
        """Put in a pack with its free tokens and patches."""
        self._puts += 1
        # Within one room later puts have smaller keys, so bisect_left finds the latest; `//` gives the room.
        key = (room + 1) * self._span - self._puts
        number = bisect_right(self._borders, key) - 1
        block = self._blocks[number]
        place = bisect_left(block.keys, key)
        block.keys.insert(place, key)
        block.packs.insert(place, pack)
        block.spares.insert(place, spare)
        if spare > block.most_spare:
            block.most_spare = spare
        if len(block.keys) > self._longest_block:
            other = block.half()
            self._blocks.insert(number + 1, other)
            self._borders.insert(number + 1, other.keys[0])

    def _taken(self, number: int, place: int) -> tuple[int, int, int]:
        block = self._blocks[number]
        key, pack, spare = block.keys.pop(place), block.packs.pop(place), block.spares.pop(place)
        if number and not block.keys:
            del self._blocks[number], self._borders[number]
        elif spare == block.most_spare:
            block.most_spare = max(block.spares, default=-1)
        return pack, key // self._span, spare


def packed_row(
    documents: Sequence[Mapping[str, np.ndarray]],
    fills: Mapping[str, float],
    multiple: int,
    positions: Sequence[torch.Tensor],
) -> JsonObject:
    """One row (1, T) of documents that are to see nothing of each other, under the names that transformers has for it.

    No `attention_mask`: borders say it all. The first token of a document has no label: a model that shifts `labels`
    itself would predict it from the document before. What fills the row up to a multiple is one more document, without
    labels; `pad_tokens` says how long it is.

    Args:
        documents: Arrays along tokens (L,), of each sample.
        fills: Key → what padding has.
        multiple: T is one of it.
        positions: (1 or 4, L) of each sample.
    """
    lengths = [len(document["input_ids"]) for document in documents]
    padding = -sum(lengths) % multiple
    row: JsonObject = {}
    # (1, T): documents end to end, the padding as a last one.
    for name, fill in fills.items():
        pieces = [document[name] for document in documents]
        if name == "labels":
            pieces = [_without_first(piece, fill) for piece in pieces]
        pieces.append(np.full(padding, fill, dtype=pieces[0].dtype))
        row[name] = torch.from_numpy(np.concatenate(pieces))[None]
    if padding:
        lengths.append(padding)
        positions = [*positions, _counted(padding, like=positions[0])]
    # FlashAttention's varlen kernels take int32.
    borders = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    joined_RT = torch.cat(list(positions), dim=1)
    row["position_ids"] = joined_RT
    if len(joined_RT) > 1:  # mRoPE: (4, 1, T), rows of kinds before the batch
        row["position_ids"] = joined_RT[:, None]
    row |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    return row | {"max_length_q": max(lengths), "max_length_k": max(lengths), "pad_tokens": padding}


def _without_first(labels_L: np.ndarray, fill: float) -> np.ndarray:
    masked = labels_L.copy()
    masked[:1] = fill
    return masked


def _counted(tokens: int, like: torch.Tensor) -> torch.Tensor:
    """0, 1, 2 … in as many rows and in the same form (see `PositionRule`)."""
    numbers = torch.arange(tokens)
    if like.dtype == torch.int32:  # the bits of fp32 numbers
        numbers = numbers.float().view(torch.int32)
    return numbers.expand(len(like), -1)
