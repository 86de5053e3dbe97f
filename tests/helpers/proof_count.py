"""A pytest plugin that counts the proofs that a run of tests reaches: faster tests can be shown to prove as much.

    python -m pytest -p tests.helpers.proof_count --count-proofs proofs.json

writes a table: folder of tests → how many lines with a proof were reached, how often, and how many planted faults were
executed. A proof is an `assert`, a `pytest.raises` or `pytest.warns`, or an `assert_*` of torch or numpy; a planted
fault is a proof that expects an `AssertionError`. What processes of their own reach is not counted.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parents[2]
OPTION = "--count-proofs"
_COUNTER = "__proof_reached__"

Place = tuple[str, int]
_reached: Counter[Place] = Counter()
_faults: Counter[Place] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--count-proofs FILE`."""
    parser.addoption(OPTION, metavar="FILE", help="count the proofs that are reached, and write them to FILE")


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Before any test file is imported."""
    if any(word.startswith(OPTION) for word in args) or early_config.known_args_namespace.count_proofs:
        begin()


def begin() -> None:
    """Count from now on: in files that are imported later."""
    setattr(builtins, _COUNTER, _note)
    pytest.register_assert_rewrite("tests.helpers", "tests.tasks", "tests.fsdp", "tests.families", "tests.examples")
    rewrite.PYC_TAIL = f"-proofs{rewrite.PYC_TAIL}"  # compiled files of other runs do not count
    plain = rewrite.AssertionRewriter.visit_Assert

    def counted(self: Any, node: ast.Assert) -> list[ast.stmt]:
        call = ast.parse(f"{_COUNTER}(__file__, {node.lineno})").body[0]
        for part in ast.walk(call):
            ast.copy_location(part, node)
        return [call, *plain(self, node)]

    rewrite.AssertionRewriter.visit_Assert = counted  # type: ignore[method-assign]
    pytest.raises = _watched(pytest.raises)
    pytest.warns = _watched(pytest.warns)
    import numpy.testing
    import torch.testing

    torch.testing.assert_close = _watched(torch.testing.assert_close)
    for name in ("assert_allclose", "assert_array_equal", "assert_equal", "assert_array_almost_equal"):
        setattr(numpy.testing, name, _watched(getattr(numpy.testing, name)))


def _note(file: str, line: int, *, is_fault: bool = False) -> None:
    _reached[file, line] += 1
    if is_fault:
        _faults[file, line] += 1


def _watched(proof: Callable[..., Any]) -> Any:
    @functools.wraps(proof)
    def noted(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        expected = args[0] if args else None
        is_fault = isinstance(expected, type) and issubclass(expected, AssertionError)
        _note(frame.f_code.co_filename, frame.f_lineno, is_fault=is_fault)
        return proof(*args, **kwargs)

    return noted


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each worker writes its own part; the one that started them adds the parts up."""
    file = session.config.getoption(OPTION)
    if not file:
        return
    target, worker = Path(file), getattr(session.config, "workerinput", None)
    if worker is not None:
        target = target.with_name(f"{target.name}.{worker['workerid']}")
    found = [[place, times, _faults[place]] for place, times in sorted(_reached.items())]
    for part in sorted(target.parent.glob(f"{target.name}.gw*")) if worker is None else ():
        found += json.loads(part.read_text())
        part.unlink()
    target.write_text(json.dumps(found if worker is not None else summary(found), indent=1) + "\n")


def summary(found: list[Any]) -> dict[str, dict[str, int]]:
    """Folder → lines with a proof that were reached, how often, and faults that were planted."""
    table: dict[str, dict[str, int]] = {}
    lines: dict[str, set[tuple[str, int]]] = {}
    for (name, line), times, faults in found:
        path = Path(name)
        if not path.is_relative_to(ROOT / "tests"):
            continue
        folder = str(path.parent.relative_to(ROOT))
        lines.setdefault(folder, set()).add((name, line))
        row = table.setdefault(folder, {"lines": 0, "times": 0, "faults": 0})
        row["times"] += times
        row["faults"] += faults
    for folder, row in table.items():
        row["lines"] = len(lines[folder])
    total = {name: sum(row[name] for row in table.values()) for name in ("lines", "times", "faults")}
    return dict(sorted(table.items())) | {"all": total}
