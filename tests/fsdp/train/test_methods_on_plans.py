"""Methods of post-training × plans: losses, every gradient, clip norm and weights are those of one process.

Methods, plans and faults to find stand in `tests/helpers/method_matrix.py`.
"""

from __future__ import annotations

import pytest

from tests.helpers.method_matrix import FAULTS, PLANS, SPOILT, TOLERANCE, WHOLE, cells, recorded
from tests.helpers.parity import ParityError, compare_steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("methods"))


@pytest.mark.parametrize(("method", "plan"), cells())
def test_a_plan_trains_as_one_process(method: str, plan: str, root: str) -> None:
    (expected,) = recorded(root, WHOLE)[method]
    for found in recorded(root, PLANS[plan])[method]:
        compare_steps(expected, found, TOLERANCE)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", SPOILT)
def test_a_planted_fault_is_seen(method: str, fault: str, root: str) -> None:
    (expected,) = recorded(root, WHOLE)[method]
    found = recorded(root, PLANS["FSDP 2"], fault)[method]
    with pytest.raises(ParityError):
        compare_steps(expected, found[0], TOLERANCE)
