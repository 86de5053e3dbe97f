"""Workers that gain too much memory are started anew, and the batches are those that would have come anyway."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest

from mindspeed_mm.fsdp.data.dataloader import worker_pool
from mindspeed_mm.fsdp.data.dataloader.worker_pool import WorkerMemory, own_bytes
from tests.fsdp.data.test_dataloader import Numbers, loader

_LEAK_BYTES = 2 << 20


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every fourth delivery, and allow 16 MiB."""
    monkeypatch.setattr(worker_pool, "_LOOK_EVERY", 4)
    options = worker_pool.WorkerOptions
    monkeypatch.setattr("mindspeed_mm.fsdp.data.build.WorkerOptions", partial(options, most_growth_bytes=16 << 20))


def leak(held: list[Any]) -> Any:
    """Pages of their own: what is freed in a heap that was forked would take in as much without growing."""

    def more(_index: int) -> int:
        pages = mmap.mmap(-1, _LEAK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(os.urandom(_LEAK_BYTES))
        held.append(pages)
        return os.getpid()

    return more


def taken(data: Any, steps: int) -> list[tuple[list[int], list[int]]]:
    """Samples of each batch, and the processes that made them."""
    iterator = iter(data)
    batches = [step[0] for step in islice(iterator, steps)]
    iterator.close()
    return [(batch["input_ids"].flatten().tolist(), batch["extras"]) for batch in batches]


def test_workers_that_leak_are_started_anew_and_nothing_is_lost() -> None:
    with pytest.warns(
        UserWarning, match=r"data worker \d has grown by \d+ MiB to \d+ MiB: the workers are started again"
    ):
        found = taken(loader(Numbers(200, leak([])), workers=2), 60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = taken(loader(Numbers(200, lambda index: os.getpid()), workers=2), 60)
    assert [samples for samples, _ in found] == [samples for samples, _ in expected]
    assert len({pid for _, pids in expected for pid in pids}) == 2
    assert len({pid for _, pids in found for pid in pids}) >= 4


def test_a_data_set_that_ends_is_not_started_again() -> None:
    before = set(multiprocessing.active_children())
    data = loader(Numbers(40, leak([])), workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [step[0]["input_ids"].flatten().tolist() for step in data.one_pass()]
    assert batches == [[i, i + 1] for i in range(0, 40, 2)]
    assert set(multiprocessing.active_children()) <= before


_MEMORY_TO_ORDER = """
import mmap, sys

held = []
for line in sys.stdin:
    kind, mib = line.split()
    pages = mmap.mmap(-1, int(mib) << 20, flags=getattr(mmap, kind) | mmap.MAP_ANONYMOUS)
    for start in range(0, len(pages), mmap.PAGESIZE):
        pages[start] = 1
    held.append(pages)
    print("taken", flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that takes memory when told, and nothing else: a test's own process frees and takes as it likes."""
    with subprocess.Popen(
        [sys.executable, "-c", _MEMORY_TO_ORDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        yield started
        started.kill()


def test_what_is_shared_or_was_there_before_is_no_growth(process: subprocess.Popen[str]) -> None:
    def take(kind: str, mib: int) -> None:
        assert process.stdin is not None and process.stdout is not None
        print(kind, mib, file=process.stdin, flush=True)
        assert process.stdout.readline() == "taken\n"

    memory = WorkerMemory(16 << 20)
    take("MAP_PRIVATE", 64)
    assert [memory.note_delivery([process.pid]) for _ in range(8)] == [None] * 8
    take("MAP_SHARED", 64)
    assert [memory.note_delivery([process.pid]) for _ in range(4)] == [None] * 4
    take("MAP_PRIVATE", 32)
    said = [memory.note_delivery([process.pid]) for _ in range(4)]
    assert said[:3] == [None] * 3
    assert str(said[3]).startswith("data worker 0 has grown by 32 MiB to ")
    assert own_bytes(process.pid) > 96 << 20
    assert own_bytes(2**30) == 0  # no such process
