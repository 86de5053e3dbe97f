"""Every row arrives where it belongs, and its gradient comes back once: all layouts of eight ranks, acted out in one
process, and one all-to-all between real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_mm.fsdp.distributed.towers.travel import (
    Leg,
    Media,
    Trip,
    build_trip,
    carry_features,
    feature_legs,
    gradient_legs,
    pixel_legs,
)
from mindspeed_mm.fsdp.params.sizes.encoder import EncoderSizes
from tests.helpers.distributed import run_ranks

LAYOUTS = [
    EncoderSizes(streams, parts, copies, ring, ulysses)
    for streams in (1, 2, 4)
    for parts in (1, 2)
    for copies in (1, 2)
    for ring, ulysses in ((1, 1), (2, 1), (2, 2))
    if (streams * parts * copies) % (ring * ulysses) == 0
]
Legs = Callable[[Media, EncoderSizes], Iterable[Leg]]


def media_for(sizes: EncoderSizes, seed: int = 0) -> Media:
    draw = random.Random(seed)
    streams = [stream for stream in range(sizes.streams) for _ in range(draw.randint(1, 3))]
    return Media([draw.randint(1, 5) for _ in streams], streams, [draw.randrange(sizes.teams) for _ in streams])


def brought(media: Media, sizes: EncoderSizes, rank: int) -> list[int]:
    return media.of_stream(rank // (sizes.parts * sizes.copies))


def encoded(media: Media, sizes: EncoderSizes, rank: int) -> list[int]:
    return media.of_team(rank // sizes.team)


def rows_of(media: Media, items: list[int]) -> Tensor:
    """Rows that say which item they are of, and which row of it."""
    return torch.tensor([[item, row] for item in items for row in range(media.rows[item])]).reshape(-1, 2)


def acted_out(trips: list[Trip], tensors: list[Tensor]) -> list[Tensor]:
    """What `carry` makes on every rank."""
    sent = [tensor[trip.sent].split(trip.sent_counts) for trip, tensor in zip(trips, tensors, strict=True)]
    results = []
    for rank, trip in enumerate(trips):
        incoming = torch.cat([from_rank[rank] for from_rank in sent])
        assert [len(from_rank[rank]) for from_rank in sent] == trip.received_counts
        results.append(incoming.new_zeros(trip.rows, 2).index_add_(0, trip.received, incoming))
    return results


def trips_of(media: Media, sizes: EncoderSizes, legs: Legs, have: Any, get: Any) -> list[Trip]:
    trips = []
    for rank in range(sizes.ranks):
        places = [media.places(items(media, sizes, rank)) for items in (have, get)]
        rows = sum(map(len, places[1].values()))
        trips.append(build_trip(legs(media, sizes), rank, sizes.ranks, *places, rows))
    return trips


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_pixels_reach_the_whole_team_and_features_all_who_brought_them(sizes: EncoderSizes) -> None:
    media, ranks = media_for(sizes), range(sizes.ranks)
    own = [rows_of(media, brought(media, sizes, rank)) for rank in ranks]
    here = [rows_of(media, encoded(media, sizes, rank)) for rank in ranks]
    for legs, have, get, start, end in (
        (pixel_legs, brought, encoded, own, here),
        (feature_legs, encoded, brought, here, own),
    ):
        found = acted_out(trips_of(media, sizes, legs, have, get), start)
        assert all(torch.equal(one, other) for one, other in zip(found, end, strict=True))


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_gradients_of_parts_add_up_and_those_of_copies_count_once(sizes: EncoderSizes) -> None:
    media, ranks = media_for(sizes), range(sizes.ranks)
    ones = [torch.ones(len(rows_of(media, brought(media, sizes, rank))), 2) for rank in ranks]
    found = acted_out(trips_of(media, sizes, gradient_legs, brought, encoded), ones)
    for item in range(len(media.rows)):
        # Spread over the team, which sums its members' gradients.
        total = sum(
            float(found[rank][media.places(encoded(media, sizes, rank))[item]].sum())
            for rank in ranks
            if item in encoded(media, sizes, rank)
        )
        assert total == 2 * media.rows[item] * sizes.parts


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_a_gradient_goes_to_the_rank_that_the_feature_came_from(sizes: EncoderSizes) -> None:
    media = media_for(sizes)
    there = {(leg.item, leg.target): leg.source for leg in feature_legs(media, sizes)}
    for item, source, target in gradient_legs(media, sizes):
        assert there[item, source] == target


def travel() -> list[Any]:
    """Rank 0 encodes all, then rank 1 nothing: both get their features back, and the gradient is the loss's."""
    sizes, rank = EncoderSizes(streams=2), dist.get_rank()
    media = Media([2, 1, 3], [0, 1, 1], [0, 0, 0])
    own, here = (media.places(items(media, sizes, rank)) for items in (brought, encoded))
    count = [sum(map(len, places.values())) for places in (own, here)]
    there = build_trip(feature_legs(media, sizes), rank, 2, here, own, count[0])
    back = build_trip(gradient_legs(media, sizes), rank, 2, own, here, max(count[1], 1))
    # A rank that has nothing to encode has a row of its own that nobody reads.
    features = torch.arange(12.0 if rank == 0 else 2.0).reshape(-1, 2).requires_grad_()
    found = carry_features(features, there, back, dist.group.WORLD)  # type: ignore[arg-type]
    (found * (rank + 1)).sum().backward()
    return [found.detach(), features.grad]


def test_between_ranks() -> None:
    (first, first_gradient), (second, second_gradient) = run_ranks(2, travel)
    rows = torch.arange(12.0).reshape(-1, 2)
    assert torch.equal(first, rows[:2]) and torch.equal(second, rows[2:])
    assert torch.equal(first_gradient, torch.tensor([1.0, 1, 2, 2, 2, 2])[:, None].expand(6, 2))
    assert torch.equal(second_gradient, torch.zeros(1, 2))
