"""Launch scripts of MindSpeed-MM, all of them, through the flags door; and our own through the same comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.upstream.checkout import OF_CHECKOUT, checkout
from tests.upstream.launches import judge, launches, outcomes, table, through_the_door

GOLDEN = Path(__file__).parents[1] / "provider" / "golden"
pytestmark = pytest.mark.skipif(not Path("/bin/bash").exists(), reason="bash is not installed")


@OF_CHECKOUT[0]
@OF_CHECKOUT[1]
def test_launches_of_mindspeed_mm_are_accepted(tmp_path: Path) -> None:
    scripts = checkout()
    assert scripts is not None
    found = outcomes(scripts, tmp_path)
    print(table(found))
    assert len(found) > 50
    assert [each for each in found if each.verdict.endswith("wrongly")] == []


def test_our_own_launches_are_read_as_a_shell_and_a_second_table_read_them(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(GOLDEN, root)
    found = launches(root, tmp_path)
    assert len(found) >= 12
    for name in {Path(started.entry).name for started in found.values()}:
        (root / name).touch()
    answers = through_the_door(found, root)
    judged = [judge(script, started, answers[script], root) for script, started in found.items()]
    assert [(each.script, each.refused, each.wrong) for each in judged if each.verdict != "accepted"] == []
