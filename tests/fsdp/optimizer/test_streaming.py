"""Buckets come and go in the right order, two at a time, and never more than there is room for."""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.optimizer import offload
from mindspeed_mm.fsdp.optimizer.offload import MOST_BYTES, StreamedItem, bucket_bytes, in_buckets, work_in_buckets

CPU = torch.device("cpu")


class Recorder:
    """Stands for an accelerator's queue of copies: writes down what is asked of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._copies = 0
        self._marks = 0

    def __enter__(self) -> None:
        self.said.append("copies")

    def __exit__(self, *error: object) -> None:
        pass

    def mark(self) -> int:
        self._marks += 1
        self.said.append(f"mark {self._marks}")
        return self._marks

    def follow(self) -> None:
        self.said.append("after the work so far")

    def wait_for(self, mark: int) -> None:
        self.said.append(f"wait for {mark}")

    def finish(self) -> None:
        self.said.append("finish")


def items(count: int, numel: int = 128) -> list[StreamedItem[int]]:
    return [StreamedItem(n, [torch.full((numel,), float(n))], [torch.full((numel,), 10.0)]) for n in range(count)]


def test_next_bucket_comes_while_one_is_worked_on() -> None:
    recorder, pieces = Recorder(), items(3)
    work_in_buckets(pieces, lambda bucket: recorder.said.append(f"work {bucket[0].item}"), 1024, CPU, recorder)
    first, begin = ["after the work so far"], ["copies", "mark 1"]
    assert recorder.said == [
        *first, *begin,
        "copies", "mark 2", "wait for 1", "work 0", "after the work so far", "copies",
        "copies", "mark 3", "wait for 2", "work 1", "after the work so far", "copies",
        "wait for 3", "work 2", "after the work so far", "copies",
        "finish",
    ]  # fmt: skip


def test_what_visits_goes_home_changed_and_gifts_do_not() -> None:
    pieces = items(5)

    def work(bucket: list[StreamedItem[int]]) -> None:
        for piece in bucket:
            visit, gift = piece.staged
            visit.add_(gift)
            gift.zero_()

    work_in_buckets(pieces, work, 3000, CPU)
    assert all(torch.equal(p.updated[0], torch.full((128,), p.item + 10.0)) for p in pieces)
    assert all(torch.equal(p.read_only[0], torch.full((128,), 10.0)) and not p.staged for p in pieces)


def test_two_buffers_of_the_largest_bucket(monkeypatch) -> None:
    taken: list[int] = []
    real = torch.empty
    monkeypatch.setattr(offload.torch, "empty", lambda size, **options: taken.append(size) or real(size, **options))
    work_in_buckets(items(9), lambda _: None, 2048, CPU)
    assert taken == [2048, 2048]


def test_nothing_to_move_takes_no_buffer() -> None:
    seen: list[int] = []
    work_in_buckets(
        [StreamedItem(n, extra_bytes=600) for n in range(5)], lambda b: seen.append(len(b)), 1300, CPU, Recorder()
    )
    assert seen == [2, 2, 1]


def test_a_piece_larger_than_a_bucket_goes_alone() -> None:
    assert [len(bucket) for bucket in in_buckets(items(3), 10)] == [1, 1, 1]
    assert list(in_buckets([], 10)) == []


def test_bucket_size() -> None:
    assert bucket_bytes(3_000_000) == 1_000_000
    assert bucket_bytes(1 << 40) == MOST_BYTES
    assert bucket_bytes(-5) == bucket_bytes(0) == 0
