"""YAML text → tree: what is accepted, what is refused, and the places of everything."""

import contextlib
import time
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.yaml import parser
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import find, place_of, plain


def value_of(text: str) -> Any:
    document = parse_yaml(text, "f.yaml")
    assert document.problems == []
    return plain(document.root)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("1_000", 1000),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("12:30", "12:30"),
        ("2001-01-01", "2001-01-01"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        (".inf", float("inf")),
        ("[1, [2]]", [1, [2]]),
        ("{b: 1}", {"b": 1}),
    ],
)
def test_scalars_are_yaml_1_2(text: str, value: Any) -> None:
    assert value_of(f"a: {text}\n") == {"a": value}


def test_a_text_is_parsed_once_and_each_tree_belongs_to_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    events = parser._events
    monkeypatch.setattr(parser, "_events", lambda text: parsed.append(text) or events(text))
    text = "a: &own {b: [1, 2]}\nc: *own\nd: {<<: *own}\nd: 3 # only once\n"
    one, other = (parse_yaml(text, "run.yaml") for _ in range(2))
    assert len(parsed) == 1 and one.root == other.root and one.problems == other.problems != []
    one.root.value["a"].node.value["b"].node.value.clear()
    one.problems.clear()
    assert plain(one.root)["c"] == plain(other.root)["a"] == {"b": [1, 2]} and other.problems != []
    assert parse_yaml(text, "other.yaml").root.place.source == "other.yaml"
    long = "a: 1\n#" + "x" * (1 << 16)
    for _ in range(2):
        parse_yaml(long, "run.yaml")
    assert len(parsed) == 4


def test_tabs_that_do_not_indent_are_white_space() -> None:
    assert value_of("a: 1\t\nb: x \t # c\nl:\t\n  - 1 \t \n  -\t2\nq:\t'a\tb'\n") == {
        "a": 1,
        "b": "x",
        "l": [1, 2],
        "q": "a\tb",
    }


@pytest.mark.edge("BS14")
@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{number}:\t1\n" for number in range(1500)),
        "a: x" + "\ty" * 1500,
        "l:\n" + "  -\tone\ttwo\n" * 1500,
        "a: &a {" + ", ".join(f"k{number}: 1" for number in range(5000)) + "}\n"
        + "".join(f"m{number}: {{<<: *a}}\n" for number in range(5000)),
    ],
    ids=["tabs of many lines", "tabs of one line", "tabs in a list", "merge keys"],
)  # fmt: skip
def test_the_time_of_a_text_does_not_grow_with_the_square_of_its_length(text: str) -> None:
    begun = time.process_time()
    with contextlib.suppress(ConfigError):
        parse_yaml(text, "f.yaml")
    assert time.process_time() - begun < 2.5


def test_a_tab_in_a_plain_text_is_a_blank() -> None:
    assert value_of("a: one\ttwo \tthree\nb\tc: 1\n") == {"a": "one two  three", "b c": 1}


@pytest.mark.parametrize("text", ["a: !!str\tb\n", "a: |\t# c\n  b\n"])
def test_a_tab_that_separates_nothing_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml:1:\d+  a tab cannot separate these two"):
        parse_yaml(text, "f.yaml")


def test_anchors_aliases_and_merge_keys() -> None:
    text = "a: &x {p: 1, q: 2}\nb: &x {q: 3}\nc:\n  <<: [*x, {q: 4, r: 5}]\n  s: 6\nd: *x\n"
    assert value_of(text) == {"a": {"p": 1, "q": 2}, "b": {"q": 3}, "c": {"q": 3, "r": 5, "s": 6}, "d": {"q": 3}}


def test_explicit_keys_win_over_merged_ones_wherever_they_stand() -> None:
    assert value_of("a: &x {p: 1}\nb: {p: 2, <<: *x}\nc: {<<: *x, p: 3}\n")["b"] == {"p": 2}


def test_places_of_keys_and_values() -> None:
    root = parse_yaml("a:\n  b: 1\n  c:\n    - 2\n    - 3\n", "f.yaml").root
    entry = find(root, "a.b")
    assert entry is not None
    assert (str(entry.key), str(entry.node.place)) == ("f.yaml:2:3", "f.yaml:2:6")
    assert str(place_of(root, ["a", "c", 1])) == "f.yaml:5:7"
    assert str(place_of(root, ["a", "missing"])) == "f.yaml:2:3"


def test_duplicate_keys_are_problems_with_both_lines() -> None:
    document = parse_yaml("t:\n  lr: 1\n  x: 0\n  lr: 2\n", "f.yaml")
    (problem,) = document.problems
    assert (problem.where, problem.key) == ("f.yaml:4:3", "t.lr")
    assert "line 2" in problem.what


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1\n", r"f\.yaml:2:1  a tab indents"),
        ("a:\n  b: 1\n\tc: 1\n", r"f\.yaml:3:1  a tab indents"),
        ("a: 1\n---\nb: 2\n", r"f\.yaml:2:1  a second document"),
        ("a: !!python/object/apply:os.system [x]\n", r"f\.yaml:1:4  tag '!!python/object/apply:os\.system' is refused"),
        ("a: !mine {b: 1}\n", r"tag '!mine' is refused"),
        ("a: *x\n", r"'\*x' names no anchor"),
        ("a: &x [*x]\n", r"'\*x' names no anchor that is complete"),
        ("a: {<<: 1}\n", r"'<<' takes a mapping"),
        ("? [1]\n: 2\n", r"a key is a list"),
        ("a: b: c\n", r"f\.yaml:1:5  not valid YAML"),
        ("a: [1\n", r"not valid YAML"),
        ("a: " + "[" * 70 + "]" * 70 + "\n", r"nested deeper than 64"),
        ("a: ['x', layers.{*}]\n", r"needs quotes"),
        ("a: \x07\n", r"not valid YAML"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "f.yaml")


def test_alias_bomb_is_stopped_before_it_is_written_out() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    with pytest.raises(ConfigError, match="aliases are written out"):
        parse_yaml("\n".join(lines), "f.yaml")
