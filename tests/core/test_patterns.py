"""Module patterns: what matches, in which order, and what is said when nothing does."""

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import holding_others, pattern_of, resolve_patterns

NAMES = [
    "",
    "model",
    "model.visual",
    "model.visual.blocks.0",
    "model.visual.blocks.1",
    "model.layers.0",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1",
    "model.layers.10",
    "model.layers.11",
    "model.layers.11.self_attn.q_proj",
    "model.layersX0",
    "lm_head",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.visual", ["model.visual"]),
        ("model.visual.blocks.{*}", ["model.visual.blocks.0", "model.visual.blocks.1"]),
        ("model.layers.{0-1}", ["model.layers.0", "model.layers.1"]),
        ("model.layers.{1,11}", ["model.layers.1", "model.layers.11"]),
        ("model.layers.{0-0, 10-11}", ["model.layers.0", "model.layers.10", "model.layers.11"]),
        ("model.layers.1?", ["model.layers.10", "model.layers.11"]),
        ("*.q_proj", ["model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.q_proj"]),
        ("model.layers?0", ["model.layers.0", "model.layersX0"]),
    ],
)
def test_whole_names_match(pattern: str, expected: list[str]) -> None:
    assert resolve_patterns([pattern], NAMES, key="k") == expected


def test_dot_is_literal() -> None:
    with pytest.raises(ConfigError, match="matches no module"):
        resolve_patterns(["model.layers.0"], ["modelXlayersX0"], key="k")


def test_order_is_that_of_the_names_and_each_is_listed_once() -> None:
    found = resolve_patterns(["lm_head", "model.layers.{1}", "model.layers.{*}"], NAMES, key="k")
    assert found == ["model.layers.0", "model.layers.1", "model.layers.10", "model.layers.11", "lm_head"]


def test_suffix_only_where_it_is_allowed() -> None:
    assert len(resolve_patterns(["q_proj"], NAMES, key="k", allow_suffix=True)) == 2
    with pytest.raises(ConfigError):
        resolve_patterns(["q_proj"], NAMES, key="k")
    with pytest.raises(ConfigError):  # a part of a name is not a suffix
        resolve_patterns(["proj"], NAMES, key="k", allow_suffix=True)


def test_every_pattern_without_a_match_is_named_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_patterns(["model.vissual.blocks.{*}", "lm_head", "zzz"], NAMES, key="parallel.fsdp_plan.apply_modules")
    problems = caught.value.problems
    assert [problem.key for problem in problems] == ["parallel.fsdp_plan.apply_modules"] * 2
    assert "model.visual.blocks.0" in problems[0].way_out
    assert "'zzz'" in problems[1].what


@pytest.mark.parametrize("pattern", ["a.{", "a.}", "a.{x}", "a.{3-1}", "a.{}", "a.{1-}", "a.{0-999999999}"])
def test_malformed_braces_are_named(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"brace|range"):
        resolve_patterns([pattern], NAMES, key="k")


def test_modules_that_hold_others() -> None:
    names = ["", "model", "model.layers.1", "model.layers.10", "model.layers.11"]
    assert holding_others(names, ["model.layers.1", "model.layers.11.self_attn"]) == ["model", "model.layers.11"]


def test_the_pattern_of_a_name_matches_all_names_like_it() -> None:
    assert pattern_of("model.layers.11.self_attn.q_proj") == "model.layers.{*}.self_attn.q_proj"
    assert (pattern_of("0.conv1.2"), pattern_of("lm_head")) == ("{*}.conv1.{*}", "lm_head")
    assert resolve_patterns([pattern_of("model.layers.1")], NAMES, key="k") == [
        "model.layers.0", "model.layers.1", "model.layers.10", "model.layers.11"
    ]  # fmt: skip
