"""Every line of `tests/edges.py` has a test that proves it."""

from __future__ import annotations

from tests.edges import EDGES, proofs_by_edge


def test_marks_name_edges() -> None:
    assert not set(proofs_by_edge()) - set(EDGES)


def test_every_edge_has_a_test() -> None:
    assert not set(EDGES) - set(proofs_by_edge())
