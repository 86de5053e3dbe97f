"""Every parallel plan equals one process, in fp64, through the trainer: models that also hears.

Plans, cells that are refused, and faults to find stand in `tests/helpers/plan_matrix.py`.
"""

from __future__ import annotations

import pytest

from tests.helpers.plan_matrix import cells, check_cell, check_fault, check_refusal, faults, refusals

pytestmark = pytest.mark.slow
FAMILIES = ("omni",)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(("family", "plan"), cells(*FAMILIES))
def test_plan_equals_one_process(family: str, plan: str, root: str) -> None:
    check_cell(root, family, plan)


@pytest.mark.parametrize(("family", "plan"), refusals(*FAMILIES))
def test_plan_is_refused(family: str, plan: str, root: str) -> None:
    check_refusal(root, family, plan)


@pytest.mark.parametrize(("family", "plan", "fault"), faults(*FAMILIES))
def test_planted_fault_is_found(family: str, plan: str, fault: str, root: str) -> None:
    check_fault(root, family, plan, fault)
