"""Plans that a process makes while the trainer is at the step before: the same steps, whatever a stop interrupts."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import DataPosition
from mindspeed_mm.fsdp.data.dataloader import planning, side_process
from mindspeed_mm.fsdp.data.dataloader.order import Planned
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape, StepPlan, StepPlanner, plan_step
from tests.fsdp.data.test_ledger import KINDS, order_of, run, texts

BUFFERED = [kind for kind in KINDS if "plain" not in kind]
AS_SAVED = {
    "packed": "7d0fdd9d9fbfdcaa",
    "packed, 2 rows' worth": "a4e27383cf891a80",
    "budget": "932defbc91e8e7da",
    "budget of patches": "7f4e5d31212e85a1",
    "similar lengths": "9456f598086b15dc",
    "mixed": "f401604546d069bc",
    "mixed by tokens": "10aa327643cc2a7c",
    "in order": "8680f0251fe1bcab",
}
"""Kind → digest of its first 40 steps and positions, as runs were planned that are resumed today."""


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few samples wait, a process plans."""
    monkeypatch.setattr(planning, "FEWEST_SAMPLES", 1)
    monkeypatch.setattr(side_process, "_POLL_S", 0.1)


def ahead_from(kind: str, micro_batches: int, drop_last: bool, position: DataPosition, steps: int) -> list[Planned]:
    """Steps of a run that ends while one more is under way."""
    order = order_of(texts(kind), kind, micro_batches, drop_last)
    with closing(order.steps(position, ahead=True)) as found:
        return list(islice(found, steps))


def told(planned: Planned) -> str:
    batches = [[list(map(list, batch.picks)), batch.blank_rows, repr(batch.cost)] for batch in planned.step]
    return json.dumps([batches, planned.after.to_dict()])


def digest(kind: str) -> str:
    """Of steps of several sizes, over the end of an epoch."""
    found, position = hashlib.sha256(), DataPosition(0, 0)
    for drop_last in (False, True):
        orders = [order_of(texts(kind), kind, count, drop_last) for count in (4, 7)]
        for number in range(20):
            planned = orders[number % 3 == 2].step(position)
            found.update(told(planned).encode())
            position = planned.after
    return found.hexdigest()[:16]


@pytest.mark.parametrize("kind", BUFFERED)
def test_the_order_of_a_saved_run_is_kept(kind: str) -> None:
    """A saved position means the steps that it meant to the code that saved it."""
    assert digest(kind) == AS_SAVED[kind]


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("kind", "drop_last"),
    [("packed", False), ("packed", True), ("budget", False), ("similar lengths", True), ("mixed", False)],
)
def test_a_run_goes_on_from_a_stop_with_a_plan_under_way(kind: str, drop_last: bool) -> None:
    before = set(multiprocessing.active_children())
    order, whole, position = order_of(texts(kind), kind, 4, drop_last), [], DataPosition(0, 0)
    for _ in range(16):
        whole.append(order.step(position))
        position = whole[-1].after
    found: list[Planned] = []
    for steps in (5, 1, 10):
        saved = json.loads(json.dumps(found[-1].after.to_dict())) if found else {"epoch": 0, "index": 0}
        found += ahead_from(kind, 4, drop_last, DataPosition.from_dict(saved), steps)
    assert found == whole
    assert set(multiprocessing.active_children()) <= before  # a worker of tests may hold others


@pytest.mark.usefixtures("beside")
def test_loaders_of_other_ranks_and_workers_go_on() -> None:
    kind = "budget of patches"
    whole = run(texts(kind), kind, [(6, 1, 4, 0)])
    assert run(texts(kind), kind, [(2, 2, 2, 1), (4, 1, 4, 2)]) == whole


@pytest.mark.usefixtures("beside")
def test_a_pass_takes_every_sample_once() -> None:
    dataset = texts("packed")
    passes = [list(order_of(dataset, "packed", 4, False).one_pass(ahead=ahead)) for ahead in (False, True)]
    assert passes[0] == passes[1]
    rows = [pick.row for planned in passes[1] for batch in planned.step for pick in batch.picks]
    assert set(rows) == set(range(400))


@pytest.mark.parametrize("fault", ["late", "lost"])
@pytest.mark.usefixtures("beside")
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is applied a step late; a sample that waits and is not planned with."""
    if fault == "late":
        honest, plans = StepPlanner.wait, list[StepPlan]()

        def late(self: StepPlanner) -> StepPlan:
            plans.append(honest(self))
            return plans[max(0, len(plans) - 2)]

        monkeypatch.setattr(StepPlanner, "wait", late)
    else:
        begin = StepPlanner.begin
        monkeypatch.setattr(StepPlanner, "begin", lambda self, sizes, overdue: begin(self, sizes[:-1], overdue))
    with pytest.raises((AssertionError, IndexError)):
        test_a_run_goes_on_from_a_stop_with_a_plan_under_way("packed", False)


# --- the process ------------------------------------------------------------------------------------------------------

SHAPE = BatchShape("packed", 64)
SIZES = np.array([[n % 60 + 1, 0] for n in range(900)])


@pytest.fixture
def planner() -> Iterator[StepPlanner]:
    with closing(StepPlanner(SHAPE, 8, beside=True, timeout_s=20.0)) as planner:
        yield planner


def pid_of(planner: StepPlanner) -> int:
    assert planner._process is not None
    return int(planner._process._side._process.pid)


def test_few_samples_and_a_run_without_workers_need_no_process(planner: StepPlanner) -> None:
    others = StepPlanner(SHAPE, 8, beside=False, timeout_s=20.0)
    for each, sizes in ((planner, SIZES), (others, np.tile(SIZES, (2, 1)))):
        each.begin(sizes, 0)
        assert each.wait().batches.lists() == plan_step(SHAPE, sizes, 0, 8).batches.lists()
        assert each._process is None


def test_many_go_to_one_that_makes_the_same_plan(planner: StepPlanner) -> None:
    for times in (2, 3, 2):
        sizes = np.tile(SIZES, (times, 1))
        planner.begin(sizes, 5)
        own, found = plan_step(SHAPE, sizes, 5, 8), planner.wait()
        assert found.batches.lists() == own.batches.lists() and found.costs.tolist() == own.costs.tolist()
    assert pid_of(planner) != os.getpid()


@pytest.mark.usefixtures("beside")
def test_an_error_of_a_plan_is_the_trainers(planner: StepPlanner) -> None:
    planner.begin(np.array([[65, 0]]), 0)
    with pytest.raises(DataError, match=r"ValueError: sample 0 does not fit a pack.* while planning a step of 8"):
        planner.wait()
    planner.begin(SIZES, 0)
    assert len(planner.wait().batches) == 8


@pytest.mark.usefixtures("beside")
def test_one_that_is_killed_is_told(planner: StepPlanner) -> None:
    planner.begin(SIZES, 0)
    planner.wait()
    os.kill(pid_of(planner), signal.SIGKILL)
    planner.begin(SIZES, 0)
    with pytest.raises(DataError, match=r"num_workers  the process that plans steps died .*at 8 micro-batches"):
        planner.wait()


@pytest.mark.usefixtures("beside")
def test_one_that_hangs_is_told(planner: StepPlanner) -> None:
    planner.begin(SIZES, 0)
    planner.wait()
    os.kill(pid_of(planner), signal.SIGSTOP)
    assert planner._process is not None
    planner._process._side._timeout_s = 0.3
    planner.begin(SIZES, 0)
    with pytest.raises(DataError, match="the process that plans steps gave nothing for 0 s"):
        planner.wait()


def trainer(out: str) -> None:
    """Takes steps for ever, each with the next one under way."""
    order = order_of(texts("packed"), "packed", 4, False)
    for planned in order.steps(DataPosition(0, 0), ahead=True):
        assert planned.step
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        Path(out).with_suffix(".new").write_text(" ".join(pids))
        Path(out).with_suffix(".new").rename(out)
        time.sleep(0.01)


@pytest.mark.usefixtures("beside")
def test_it_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "pids"
    process = multiprocessing.get_context("fork").Process(target=trainer, args=(str(out),))
    process.start()
    deadline = time.monotonic() + 30
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join()
    pids = [int(pid) for pid in out.read_text().split()]
    assert len(pids) == 2  # one measures, one plans
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Whether it is there, and not merely waited for by nobody."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
