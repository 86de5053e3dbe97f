"""Media on their way: which rows go from which rank to which, pixels out and features back, and one all-to-all that
takes them there.

Ranks of a group are numbered `(stream · parts + part) · copies + copy`; neighbours form teams (`EncoderSizes`). Shapes:
R rows (patches, or merged features), F numbers in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mindspeed_mm.fsdp.params.sizes.encoder import EncoderSizes
from mindspeed_mm.fsdp.utils.device import copied_to


class Leg(NamedTuple):
    """One item from one rank to another, or to itself."""

    item: int
    source: int
    target: int


@dataclass(frozen=True)
class Media:
    """All items of a call of the tower, in the order of their streams, and who encodes them."""

    rows: Sequence[int]
    """Rows of each item after merging."""
    streams: Sequence[int]
    """The data rank that brings each."""
    teams: Sequence[int]
    """The team that encodes each."""

    def of_stream(self, stream: int) -> list[int]:
        """Items that a data rank brings."""
        return [item for item, found in enumerate(self.streams) if found == stream]

    def of_team(self, team: int) -> list[int]:
        """Items that a team encodes."""
        return [item for item, found in enumerate(self.teams) if found == team]

    def places(self, items: Iterable[int], unit: int = 1) -> dict[int, range]:
        """Item → its rows in a tensor of these, one behind the other, `unit` times as many as after merging."""
        found, start = {}, 0
        for item in items:
            found[item] = range(start, start + self.rows[item] * unit)
            start = found[item].stop
        return found


def pixel_legs(media: Media, sizes: EncoderSizes) -> Iterator[Leg]:
    """To every rank of an item's team, from the rank of the same part and copy that has it."""
    same_media = sizes.parts * sizes.copies
    for item, team in enumerate(media.teams):
        for target in range(team * sizes.team, (team + 1) * sizes.team):
            yield Leg(item, media.streams[item] * same_media + target % same_media, target)


def feature_legs(media: Media, sizes: EncoderSizes) -> Iterator[Leg]:
    """To every rank that brought the item, from one of its team: itself, if it is of the team."""
    same_media = sizes.parts * sizes.copies
    for item, team in enumerate(media.teams):
        for target in range(media.streams[item] * same_media, (media.streams[item] + 1) * same_media):
            is_member = target // sizes.team == team
            yield Leg(item, target if is_member else team * sizes.team + target % sizes.team, target)


def gradient_legs(media: Media, sizes: EncoderSizes) -> Iterator[Leg]:
    """Back from whom features went to. Parts have read different tokens, and their gradients add up; copies all hold
    the same gradient, so one of them sends it."""
    for item, source, target in feature_legs(media, sizes):
        if target % sizes.copies == item % sizes.copies:
            yield Leg(item, target, source)


@dataclass(frozen=True, eq=False)
class Trip:
    """What one rank sends and receives of a tensor (R, F)."""

    sent: Tensor
    """Numbers of the rows to send, by receiver."""
    sent_counts: list[int]
    received: Tensor
    """Where the rows that arrive belong, by sender."""
    received_counts: list[int]
    rows: int
    """Rows of the tensor that they make; rows that nothing arrives for are zero, and what arrives twice adds up."""


def build_trip(
    legs: Iterable[Leg],
    rank: int,
    ranks: int,
    from_places: Mapping[int, range],
    to_places: Mapping[int, range],
    rows: int,
) -> Trip:
    """The part of one rank.

    Args:
        legs: Of all ranks, in one order everywhere.
        rank: This rank's number in the group.
        ranks: Of the group.
        from_places: Rows of items in the tensor that this rank has.
        to_places: Rows of items in the tensor that it will have.
        rows: Of that tensor.
    """
    sent: list[list[range]] = [[] for _ in range(ranks)]
    received: list[list[range]] = [[] for _ in range(ranks)]
    for item, source, target in legs:
        if source == rank:
            sent[target].append(from_places[item])
        if target == rank:
            received[source].append(to_places[item])
    return Trip(_numbers(sent), [*map(_total_length, sent)], _numbers(received), [*map(_total_length, received)], rows)


def _numbers(by_rank: Sequence[Sequence[range]]) -> Tensor:
    rows = [torch.arange(span.start, span.stop) for span in chain.from_iterable(by_rank)]
    return torch.cat([*rows, torch.empty(0, dtype=torch.long)])


def _total_length(spans: Sequence[range]) -> int:
    return sum(map(len, spans))


def carry(rows_RF: Tensor, trip: Trip, group: dist.ProcessGroup) -> Tensor:
    """Take a trip, without a gradient. Every rank of the group calls it."""
    outgoing = rows_RF.index_select(0, copied_to(trip.sent, rows_RF.device))
    incoming = rows_RF.new_empty(sum(trip.received_counts), *rows_RF.shape[1:])
    dist.all_to_all_single(incoming, outgoing, trip.received_counts, trip.sent_counts, group=group)
    arrived = rows_RF.new_zeros(trip.rows, *rows_RF.shape[1:])
    return arrived.index_add_(0, copied_to(trip.received, rows_RF.device), incoming)


def carry_features(rows_RF: Tensor, there: Trip, back: Trip, group: dist.ProcessGroup) -> Tensor:
    """Take a trip; gradients take the other one."""
    return _Carried.apply(rows_RF, there, back, group)  # type: ignore[no-untyped-call]


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RF: Tensor, there: Trip, back: Trip, group: dist.ProcessGroup) -> Tensor:
        ctx.back, ctx.group = back, group
        return carry(rows_RF, there, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return carry(gradients[0], ctx.back, ctx.group), None, None, None
