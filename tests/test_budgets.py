"""How densely the package is written, per 1,000 lines of code: what makes it slow to read stays under a bound, and what
explains it above one. A change that crosses a bound is written another way, or moves the bound and says why."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mindspeed_mm"
AT_MOST = {"conditional expressions": 13.0, "names Any": 10.5}
AT_LEAST = {"comments": 25.0}
WHOLE_CONFIGURATION = 100
"""Parameters that take the whole `Arguments`: most functions read a section or two, and are given these."""
_NOT_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}


def counted(source: str) -> Counter[str]:
    """Lines of code (without blank lines, comments and docstrings), and what the bounds are about."""
    found: Counter[str] = Counter()
    tree = ast.parse(source)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found["comments"] += bool(lines)  # not those of the file's head
        elif token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        found["conditional expressions"] += isinstance(node, ast.IfExp)
        found["names Any"] += isinstance(node, ast.Name) and node.id == "Any"
        if isinstance(node, ast.arg) and node.annotation is not None:
            found["whole configuration"] += ast.unparse(node.annotation).split(" | ")[0] == "Arguments"
    found["code"] = len(lines)
    return found


def broken(found: Counter[str]) -> list[str]:
    """The bounds that are crossed, with what was found."""
    said = []
    for what, bound in AT_MOST.items():
        share = 1000 * found[what] / found["code"]
        if share > bound:
            said.append(f"{what}: {share:.1f} per 1,000 lines of code, at most {bound:g}")
    for what, bound in AT_LEAST.items():
        share = 1000 * found[what] / found["code"]
        if share < bound:
            said.append(f"{what}: {share:.1f} per 1,000 lines of code, at least {bound:g}")
    if found["whole configuration"] > WHOLE_CONFIGURATION:
        said.append(f"functions of the whole configuration: {found['whole configuration']} of {WHOLE_CONFIGURATION}")
    return said


def test_the_package_keeps_its_bounds() -> None:
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        found += counted(path.read_text(encoding="utf-8"))
    assert broken(found) == []


SOURCE = '''"""A module."""

from typing import Any


def one(args: Arguments, value: Any) -> int:
    """Docstring."""
    # Why it is so.
    return 1 if value else 2
'''


def test_what_is_counted() -> None:
    assert counted(SOURCE) == {
        "code": 3, "comments": 1, "conditional expressions": 1, "names Any": 1, "whole configuration": 1,
    }  # fmt: skip
    assert counted("# Head.\n")["comments"] == 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, ""),
        ({"conditional expressions": 14}, "conditional expressions: 14.0"),
        ({"names Any": 11}, "names Any: 11.0"),
        ({"comments": 24}, "comments: 24.0"),
        ({"whole configuration": 101}, "functions of the whole configuration: 101"),
    ],
)
def test_a_bound_that_is_crossed_is_told(more: dict[str, int], says: str) -> None:
    said = broken(Counter({"code": 1000, "comments": 25} | more))
    assert [line.startswith(says) for line in said] == [True] * bool(says)
