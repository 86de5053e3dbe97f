"""Which samples share a row, and the row: best fit under a cap on tokens and one on encoder patches; documents one
behind the other, with their borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def best_fit(
    tokens: Sequence[int],
    capacity: int,
    patches: Sequence[int] | None = None,
    max_patches: int | None = None,
    first: int = 0,
) -> list[list[int]]:
    """Deal samples into as few packs as best fit finds: the largest first, each into the fullest pack that has room.

    A function of its arguments alone. It takes some seconds for 10⁶ samples.

    Args:
        tokens: Of each sample.
        capacity: Most tokens of a pack.
        patches: Encoder work of each sample; None: not counted.
        max_patches: Most patches of a pack; None: any number.
        first: So many samples, from the beginning, are dealt before the others, which fill up their packs.

    Returns:
        Indices of the samples of each pack, ascending; packs by their first index, so that the first pack holds the
        first sample.

    Raises:
        ValueError: A sample exceeds a cap by itself.
    """
    if patches is None or max_patches is None:  # without a limit: nothing works for the encoder
        work, limit = [0] * len(tokens), 1
    else:
        work, limit = list(patches), max_patches
    for index, (length, load) in enumerate(zip(tokens, work, strict=True)):
        if length > capacity or load > limit:
            raise ValueError(f"sample {index} does not fit a pack: {length} tokens, {load} patches")
    packs = _Packs(capacity, limit)
    # The cap that a sample uses up most of says how hard it is to place.
    hardest = sorted(range(len(tokens)), key=lambda i: (i >= first, -max(tokens[i] / capacity, work[i] / limit), i))
    for index in hardest:
        packs.add(index, tokens[index], work[index])
    return sorted((sorted(pack) for pack in packs.members), key=lambda pack: pack[0])


class _Packs:
    """Open packs by the tokens they have room for."""

    def __init__(self, capacity: int, max_patches: int) -> None:
        self.members: list[list[int]] = []
        self._capacity, self._max_patches = capacity, max_patches
        self._spare_patches: list[int] = []
        self._with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._rooms = 0
        """Bit r is set where some pack has room for r tokens: the tightest fit is the lowest bit that is high
        enough."""

    def add(self, index: int, tokens: int, patches: int) -> None:
        """Put a sample into the fullest pack that takes it, or into a new one."""
        found = next(self._fitting(tokens, patches), None)
        if found is None:
            pack, room = len(self.members), self._capacity
            self.members.append([])
            self._spare_patches.append(self._max_patches)
        else:
            room, place = found
            pack = self._with_room[room].pop(place)
            if not self._with_room[room]:
                self._rooms ^= 1 << room
        self.members[pack].append(index)
        self._spare_patches[pack] -= patches
        left = room - tokens
        self._with_room[left].append(pack)
        self._rooms |= 1 << left

    def _fitting(self, tokens: int, patches: int) -> Iterator[tuple[int, int]]:
        """(room, place among the packs with this room), the fullest first."""
        rooms = self._rooms >> tokens << tokens
        while rooms:
            lowest = rooms & -rooms
            room = lowest.bit_length() - 1
            packs = self._with_room[room]
            for place in range(len(packs) - 1, -1, -1):
                if self._spare_patches[packs[place]] >= patches:
                    yield room, place
            rooms ^= lowest


def packed_row(
    documents: Sequence[Mapping[str, np.ndarray]],
    fills: Mapping[str, float],
    multiple: int,
    positions: Sequence[torch.Tensor],
) -> dict[str, Any]:
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
    row: dict[str, Any] = {}
    for name, fill in fills.items():
        pieces = [document[name] for document in documents]
        if name == "labels":
            pieces = [_without_first(piece, fill) for piece in pieces]
        pieces.append(np.full(padding, fill, dtype=pieces[0].dtype))
        row[name] = torch.from_numpy(np.concatenate(pieces))[None]
    if padding:
        lengths.append(padding)
        positions = [*positions, _counted(padding, like=positions[0])]
    borders = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    joined_RT = torch.cat(list(positions), dim=1)
    row["position_ids"] = joined_RT if len(joined_RT) == 1 else joined_RT[:, None]
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
