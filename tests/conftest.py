"""What holds for all tests."""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mindspeed_mm.core import kept_hashes
from mindspeed_mm.core.garbage import freeze_for_good
from tests.helpers.rank_server import serve_from_a_copy
from tests.helpers.registered import forgetting
from tests.helpers.threads import collect_rarely, collect_when_many


def pytest_configure() -> None:
    """A shell starts commands in the background with some signals ignored, and children inherit that; the tests of
    stopping send these signals. Sums over another number of threads differ in the last bit, and ranks have one. No
    test cuts the power: the disk need not be waited for, a tenth of a second at every small run. Nor does the user's
    cache take what tests hash, or a stream what libraries log (`helpers/logged.py` keeps it)."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.fsync = lambda descriptor: None
    kept_hashes.user_cache = functools.wraps(kept_hashes.user_cache)(lambda: None)
    logging.root.addHandler(logging.NullHandler())
    collect_rarely()
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """What was imported is no garbage: looking through it over and over takes longer than most tests. Nor is a
    configuration written out for each line of a log that nobody reads, as transformers does whenever it reads one."""
    freeze_for_good()
    for name, kind in (
        ("configuration_utils", "PreTrainedConfig"),
        ("generation.configuration_utils", "GenerationConfig"),
    ):
        if (module := sys.modules.get(f"transformers.{name}")) is not None:
            getattr(module, kind).__repr__ = object.__repr__


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, and every fixture that it makes, draws the same numbers, whatever the worker ran before. A copy of
    this process as it is before the first of them is what ranks are forked from."""
    serve_from_a_copy()
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _no_plugin_stays() -> Iterator[None]:
    """What a file's tests register is gone after them: a plugin changes what an export reads, and which files run
    before is chance."""
    with forgetting():
        yield


def pytest_runtest_logfinish() -> None:
    """A worker runs hundreds of trainings in its own process. What a test has replaced is back by now."""
    collect_when_many()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where files are dealt out to workers: those that take long first."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.helpers.scheduling import LongFilesFirst  # imports pytest-xdist, which need not be installed

    return LongFilesFirst(config, log)
