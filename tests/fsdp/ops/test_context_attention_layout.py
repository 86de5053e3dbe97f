"""Where tokens lie: every one once, in step with the score matrix, and with the same causal work on every rank."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mindspeed_mm.fsdp.ops.context_attention.layer import share_heads
from mindspeed_mm.fsdp.ops.context_attention.layout import (
    LayoutError,
    Rectangle,
    SequenceLayout,
    build_layout,
    concatenate_layouts,
    plan_rectangles,
)

ROWS = {
    "one document": (0, 37),
    "five tokens": (0, 5),
    "no token": (0, 0),
    "documents": (0, 1, 9, 10, 29, 44, 53),
    "an empty document": (0, 4, 4, 20),
}


def pairs(rectangle: Rectangle) -> set[tuple[int, int]]:
    return {
        (q, k)
        for q in range(rectangle.q_start, rectangle.q_stop)
        for k in range(rectangle.k_start, rectangle.k_stop)
        if not rectangle.causal or k - rectangle.k_start <= q - rectangle.q_start
    }


def seen_pairs(layout: SequenceLayout, causal: bool) -> list[tuple[int, int]]:
    """(query, key) of all rectangles of all ranks, in places of the sequence."""
    places = [
        [token for rank in range(len(layout.pieces[ring])) for token in layout.positions(ring, rank)]
        for ring in range(layout.ring_size)
    ]
    return [
        (places[ring][q], places[source][k])
        for ring in range(layout.ring_size)
        for source, rectangles in enumerate(plan_rectangles(layout, layout, ring, causal))
        for rectangle in rectangles
        for q, k in pairs(rectangle)
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("row", ROWS)
def test_every_pair_is_met_once(row: str, shape: tuple[int, int], balanced: bool, causal: bool) -> None:
    borders = ROWS[row]
    layout = build_layout(borders[-1], *shape, borders=borders, balanced=balanced)
    expected = [
        (q, k)
        for start, stop in pairwise(borders)
        for q in range(start, stop)
        for k in range(start, q + 1 if causal else stop)
    ]
    assert sorted(seen_pairs(layout, causal)) == expected


def causal_areas(layout: SequenceLayout) -> list[int]:
    ranks = range(layout.ring_size)
    return [sum(len(pairs(r)) for each in plan_rectangles(layout, layout, rank, True) for r in each) for rank in ranks]


def test_documents_balance_when_each_is_a_zigzag() -> None:
    borders = (0, 90, 190, 410, 480, 640)
    balanced, plain = (build_layout(640, 4, 1, borders=borders, balanced=which) for which in (True, False))
    areas, others = causal_areas(balanced), causal_areas(plain)
    assert max(areas) / (sum(areas) / 4) < 1.03
    assert max(others) / (sum(others) / 4) > 1.3
    lengths = balanced.ring_lengths()
    assert max(lengths) - min(lengths) <= 2


def test_short_documents_do_not_pile_up_on_one_rank() -> None:
    layout = build_layout(40, 4, 1, borders=range(41), balanced=True)
    assert layout.ring_lengths() == [10] * 4


def test_a_zigzag_takes_few_rectangles() -> None:
    layout = build_layout(64, 4, 1, balanced=True)
    assert [[len(each) for each in plan_rectangles(layout, layout, rank, True)] for rank in range(4)] == [
        [3, 1, 1, 1],
        [1, 3, 1, 1],
        [1, 1, 3, 1],
        [1, 1, 1, 1],
    ]


def test_text_and_image_as_one_sequence() -> None:
    joint = concatenate_layouts(build_layout(9, 2, 2), build_layout(35, 2, 2))
    assert joint.length == 44
    assert [len(plan_rectangles(joint, joint, 0, False)[source]) for source in (0, 1)] == [1, 1]
    expected = {(q, k) for q in range(44) for k in range(44)}
    seen = seen_pairs(joint, causal=False)
    assert set(seen) == expected
    assert len(seen) == len(expected)


@pytest.mark.parametrize(
    ("pieces", "borders"),
    [
        ((((0, 4),), ((5, 9),)), (0, 9)),
        ((((0, 5),), ((4, 9),)), (0, 9)),
        ((((0, 4),), ((4, 8),)), (0, 9)),
        ((((0, 9),),), (0, 5, 4, 9)),
        ((((0, 9),),), (1, 9)),
    ],
)
def test_lost_and_doubled_tokens_are_refused(pieces: object, borders: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        SequenceLayout(tuple((piece,) for piece in pieces), borders)  # type: ignore[attr-defined]


def test_borders_of_another_row_are_refused() -> None:
    with pytest.raises(LayoutError, match="do not end at the 38 tokens"):
        build_layout(38, 2, 1, borders=(0, 37))


@pytest.mark.parametrize(("heads", "key_heads", "ranks"), [(4, 2, 2), (7, 1, 4), (12, 3, 4), (3, 3, 4), (6, 3, 4)])
def test_each_query_head_finds_its_keys(heads: int, key_heads: int, ranks: int) -> None:
    shares = share_heads(heads, key_heads, ranks)
    assert sorted(head for own in shares.query for head in own) == list(range(heads))
    for rank, own in enumerate(shares.query):
        places = shares.key_of_query(rank)
        if places is None:
            each = len(own) // max(1, len(shares.key[rank]))
            places = [place // max(1, each) for place in range(len(own))]
        assert [shares.key[rank][place] for place in places] == [head // (heads // key_heads) for head in own]
