from __future__ import annotations

from tests.helpers.covering import covering, pairs_in, smallest_failing

NAMES = [f"f{number}" for number in range(12)]


def may_meet(one: str, other: str) -> bool:
    return {one, other} != {"f0", "f1"}


def test_every_pair_that_may_meet_is_covered_by_few_configurations() -> None:
    found = covering(NAMES, may_meet, 5)
    assert {pair for names in found for pair in pairs_in(names)} == set(pairs_in(NAMES)) - {("f0", "f1")}
    assert max(map(len, found)) == 5
    assert len(found) <= 14, "65 pairs, ten at most in a configuration"
    assert found == covering(NAMES, may_meet, 5)


def test_what_a_configuration_does_not_show_is_covered_by_another() -> None:
    found = covering(NAMES, may_meet, 5, lambda names, pair: "f3" not in names or "f3" in pair)
    shown = {pair for names in found for pair in pairs_in(names) if "f3" not in names or "f3" in pair}
    assert shown == set(pairs_in(NAMES)) - {("f0", "f1")}


def test_the_fewest_that_fail_are_found() -> None:
    assert smallest_failing(("a", "b", "c", "d"), lambda part: "c" in part) == ("c",)
    assert smallest_failing(("a", "b", "c", "d"), lambda part: {"b", "d"} <= set(part)) == ("b", "d")
    assert smallest_failing(("a", "b", "c"), lambda part: len(part) == 3) == ("a", "b", "c")
