"""Requests: one declaration of each option, checked whoever makes the request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.core.request import (
    Request,
    all_fields,
    argument,
    group,
    option,
    request_of,
    required,
    words_of,
)


@dataclass(frozen=True)
class Inner(Request):
    depth: int = option("How deep.", 2, least=1, most=8)


@dataclass(frozen=True)
class Asked(Request):
    model: Path = argument()
    others: tuple[str, ...] = argument(default=())
    out: Path = required("Where to.")
    warmth: float | None = option("How warm.", above=0, most=2, only=GENERATOR)
    least: float = option("At least.", 0.5, least=0)
    kind: Literal["red", "blue"] = option("Which one.", "red")
    names: tuple[str, ...] = option("Names.", (), flag="--name")
    loud: bool = option("Loudly.", False)
    goes_on: bool = option("yes: it goes on.", True, words=("yes", "no"))
    which: int | str | None = option("A number or a word.")
    inner: Inner = group(Inner)
    unseen: str = "not an option"


def asked(**changes: Any) -> Asked:
    return request_of(Asked, {"model": Path("m"), "out": Path("o"), **changes})


@pytest.mark.parametrize(
    ("changes", "key", "what"),
    [
        ({"warmth": 0}, "--warmth", "0 is not a finite number above 0 up to 2"),
        ({"warmth": 2.5}, "--warmth", "2.5 is not a finite number above 0 up to 2"),
        ({"warmth": float("nan")}, "--warmth", "nan is not a finite number above 0 up to 2"),
        ({"warmth": True}, "--warmth", "True is not a finite number"),
        ({"least": float("inf")}, "--least", "inf is not a finite number of at least 0"),
        ({"least": None}, "--least", "None is not a finite number"),
        ({"depth": 9}, "--depth", "9 is not a whole number of at least 1 up to 8"),
        ({"depth": 1.5}, "--depth", "1.5 is not a whole number"),
        ({"kind": "bleu"}, "--kind", "'bleu' is not one of red, blue"),
        ({"loud": "yes"}, "--loud", "'yes' is neither True nor False"),
        ({"goes_on": 1}, "--goes-on", "1 is neither True nor False"),
    ],
)
def test_values_are_checked_when_a_request_is_made(changes: dict[str, Any], key: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked(**changes)
    (problem,) = caught.value.problems
    assert (problem.key, problem.what[: len(what)]) == (key, what)


def test_a_near_word_is_offered() -> None:
    with pytest.raises(UsageError, match="Did you mean 'blue'"):
        asked(kind="bleu")


def test_options_stand_by_keyword_and_in_the_order_of_their_declaration() -> None:
    with pytest.raises(TypeError):
        Asked(Path("m"), (), Path("o"))  # type: ignore[misc]
    with pytest.raises(TypeError, match="out"):
        Asked(Path("m"))  # type: ignore[call-arg]
    names = ["model", "others", "out", "warmth", "least", "kind", "names", "loud", "goes_on", "which", "depth"]
    assert [each.name for each in all_fields(Asked)] == names
    assert {each.name: each.flag for each in all_fields(Asked)}["names"] == "--name"
    assert {each.name: each.help for each in all_fields(Asked)}["warmth"] == "Generators: how warm."


def test_the_words_of_a_request_leave_defaults_out() -> None:
    assert words_of(asked()) == ["m", "--out=o"]
    changed = asked(
        others=("a", "b"), warmth=1.5, kind="blue", names=("-x", ""), loud=True, goes_on=False, which=3, depth=4
    )
    options = ["--out=o", "--warmth=1.5", "--kind=blue", "--name=-x", "--name=", "--loud", "--goes-on=no", "--which=3"]
    assert words_of(changed) == ["m", "a", "b", *options, "--depth=4"]
    assert words_of(changed, with_arguments=False) == [*options, "--depth=4"]


def test_a_message_can_name_the_option_of_a_field() -> None:
    assert [Asked.flag_of(name) for name in ("names", "goes_on", "model")] == ["--name", "--goes-on", "MODEL"]
    with pytest.raises(KeyError):
        Asked.flag_of("name")
