"""The loader over real workers: the same global sequence however it is split, resume, bad samples, dead workers."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data._utils import signal_handling

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError, MachineError
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.data.dataloader import worker_pool
from mindspeed_mm.fsdp.data.dataloader.transport import SharedSlots
from mindspeed_mm.fsdp.data.dataloader.worker_pool import WorkerOptions
from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam


class Numbers:
    """A plugin's data set: sample i is the number i, with whatever `act` does on the way."""

    def __init__(self, size: int, act: Callable[[int], Any] = lambda i: None, **policy: Any) -> None:
        self.size, self.act = size, act
        self.__dict__.update(policy)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"value": index, "extra": self.act(index)}

    def collate_fn(self, samples: Sequence[dict[str, Any]]) -> Batch:
        values = torch.tensor([[s["value"]] for s in samples])
        extras = [s["extra"] for s in samples]
        return {
            "input_ids": values,
            "labels": values.clone(),
            "shift_labels": values.clone(),
            "extras": extras,
        }


def loader(dataset: Any, workers: int = 0, *, timeout_s: float = 600.0, **changes: Any) -> MMDataLoader:
    split = {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "dp_rank": 0,
        "dp_size": 1,
        "seed": 5,
        "position": DataPosition(0, 0),
    }
    keys = {name: changes.pop(name) for name in ("drop_last", "shuffle") if name in changes}
    section = DataloaderParam(num_workers=workers, prefetch_factor=2 if workers else None, **keys)
    return build_mm_dataloader(dataset, section, timeout_s=timeout_s, **(split | changes))


def ids(steps: Any) -> list[str]:
    return [name for step in steps for batch in step for name in batch["sample_ids"]]


def global_sequence(dataset: Any, steps: int, dp_size: int, **changes: Any) -> list[str]:
    """The samples of all ranks in the order that the split claims."""
    ranks = [list(islice(loader(dataset, dp_rank=r, dp_size=dp_size, **changes), steps)) for r in range(dp_size)]
    return [
        name
        for step in zip(*ranks, strict=True)
        for micro_batches in zip(*step, strict=True)
        for batch in micro_batches
        for name in batch["sample_ids"]
    ]


class TestOrder:
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize(
        ("dp_size", "accumulation", "micro", "workers"),
        [(1, 1, 8, 2), (1, 4, 2, 1), (2, 2, 2, 0), (2, 1, 4, 2), (4, 2, 1, 0), (8, 1, 1, 0)],
    )
    def test_one_global_sequence_for_every_split(
        self, dp_size: int, accumulation: int, micro: int, workers: int, drop_last: bool
    ) -> None:
        dataset = Numbers(21)
        expected = global_sequence(dataset, 6, 1, micro_batch_size=8, drop_last=drop_last)
        found = global_sequence(
            dataset,
            6,
            dp_size,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            workers=workers,
            drop_last=drop_last,
        )
        assert found == expected

    def test_the_ledger_of_a_run_that_stops_and_goes_on_under_other_ranks_and_workers(self) -> None:
        dataset, position, ledger = Numbers(23), DataPosition(0, 0), []
        for dp_size, workers, steps in ((1, 0, 2), (2, 0, 3), (1, 2, 4), (4, 0, 5)):
            split = {"micro_batch_size": 4 // dp_size, "drop_last": False, "position": position}
            ledger += global_sequence(dataset, steps, dp_size, workers=workers, **split)
            first = loader(dataset, dp_size=dp_size, **split)
            list(islice(first, steps))
            position = DataPosition.from_dict(first.position.to_dict())
        assert position == DataPosition(2, 14 * 4 - 46)
        for epoch in range(2):
            assert sorted(map(int, ledger[23 * epoch : 23 * (epoch + 1)])) == list(range(23))

    def test_the_position_counts_what_was_yielded_not_what_was_prefetched(self) -> None:
        data = loader(Numbers(100), workers=2)
        steps = iter(data)
        for consumed in range(1, 4):
            next(steps)
            assert data.position == DataPosition(0, 2 * consumed)
        again = ids(islice(iter(data), 2))
        assert again == ids(islice(iter(loader(Numbers(100))), 5))[6:]

    def test_steps(self) -> None:
        assert loader(Numbers(21), drop_last=True).steps_per_epoch == 10
        assert loader(Numbers(21), drop_last=False).steps_per_epoch == 11
        assert loader(Numbers(21), drop_last=True).steps_for(2) == 20
        assert loader(Numbers(21), drop_last=False).steps_for(2) == 21

    @pytest.mark.parametrize("workers", [0, 2])
    def test_one_pass_takes_every_sample_once(self, workers: int) -> None:
        names: list[str] = []
        for rank in range(2):
            split = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "dp_rank": rank, "dp_size": 2}
            data = loader(Numbers(19), workers=workers, drop_last=False, **split)
            steps = list(data.one_pass())
            assert [len(step) for step in steps] == [2, 2, 2]
            for batch in (batch for step in steps for batch in step):
                assert torch.equal(batch["labels"] == -100, batch["shift_labels"] == -100)
                names += [n for n, label in zip(batch["sample_ids"], batch["labels"], strict=True) if label != -100]
            assert data.position == DataPosition(0, 0)
        assert sorted(map(int, names)) == list(range(19))

    def test_random_numbers_of_a_sample_depend_on_it_alone(self) -> None:
        def draw(_: int) -> Any:
            return random.random(), torch.rand(()).item()

        def drawn(**changes: Any) -> dict[str, Any]:
            steps = islice(loader(Numbers(8, draw), **changes), 4)
            return {n: x for step in steps for b in step for n, x in zip(b["sample_ids"], b["extras"], strict=True)}

        torch.manual_seed(0)
        before = torch.get_rng_state()
        alone = drawn()
        assert torch.equal(torch.get_rng_state(), before)
        assert len(set(alone.values())) == 8
        assert drawn(workers=2) == alone
        assert drawn(workers=1, micro_batch_size=1, gradient_accumulation_steps=2) == alone
        assert torch.equal(torch.get_rng_state(), before)
        assert drawn(seed=6) != alone


class TestBadSamples:
    @staticmethod
    def refuse(*bad: int, error: type[DataError] = DataError) -> Callable[[int], None]:
        def act(index: int) -> None:
            if index in bad:
                raise error(f"sample {index} is broken", where=f"rows.jsonl:{index}")

        return act

    @pytest.mark.parametrize("workers", [0, 1])
    def test_policy_error_stops_and_names_the_row(self, workers: int) -> None:
        with pytest.raises(DataError, match=r"^rows.jsonl:3  sample 3 is broken. Leave such rows out"):
            list(islice(loader(Numbers(10, self.refuse(3)), workers=workers), 5))

    def test_replacements_are_the_same_for_every_split_and_counted(self) -> None:
        dataset = Numbers(50, self.refuse(3, 30), on_bad_sample="skip", max_bad_fraction=0.04)
        expected = global_sequence(dataset, 6, 1, micro_batch_size=8)
        assert "3" not in expected
        assert len(expected) == 48
        assert global_sequence(dataset, 6, 2, micro_batch_size=2, gradient_accumulation_steps=2) == expected
        assert global_sequence(dataset, 6, 1, micro_batch_size=8, workers=2) == expected
        other_seed = global_sequence(dataset, 6, 1, micro_batch_size=8, seed=6)
        assert other_seed != expected
        data = loader(dataset, workers=2)
        list(islice(data, 40))
        assert data.counts.bad == {str(i): f"rows.jsonl:{i}  sample {i} is broken" for i in (3, 30)}
        assert data.counts.read == 80

    def test_more_than_the_fraction_is_an_error(self) -> None:
        dataset = Numbers(50, self.refuse(*range(10)), on_bad_sample="skip", max_bad_fraction=0.04)
        with pytest.raises(DataError, match=r"3 of 50 samples are bad, more than 4.000%: rows.jsonl"):
            list(islice(loader(dataset), 100))

    def test_too_long_samples_are_dropped_and_counted_or_stop(self) -> None:
        act = self.refuse(3, 4, 5, error=TooLongError)
        data = loader(Numbers(10, act, truncation="drop"))
        assert not {"3", "4", "5"} & set(ids(islice(data, 5)))
        assert data.counts.too_long >= 3
        assert not data.counts.bad
        with pytest.raises(TooLongError):
            list(islice(loader(Numbers(10, act, truncation="error", on_bad_sample="skip")), 5))

    def test_a_data_set_of_nothing_usable_is_an_error(self) -> None:
        with pytest.raises(DataError, match="100 samples in a row cannot be used"):
            next(iter(loader(Numbers(10, self.refuse(*range(10), error=TooLongError), truncation="drop"))))


class TestWorkers:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_pool, "_POLL_S", 0.2)

    def test_a_killed_worker_is_named_with_its_samples(self) -> None:
        def act(index: int) -> None:
            if index == 9:
                os.kill(os.getpid(), signal.SIGKILL)

        started = time.monotonic()
        with pytest.raises(DataError, match=r"worker 0 \(process \d+\) was killed by SIGKILL .* 8, 9") as caught:
            list(islice(loader(Numbers(40, act), workers=2, shuffle=False), 20))
        assert time.monotonic() - started < 20
        assert "Numbers" in str(caught.value)

    def test_a_hanging_worker_is_named_after_the_time_limit(self) -> None:
        def act(index: int) -> None:
            if index == 3:
                time.sleep(300)

        started = time.monotonic()
        with pytest.raises(DataError, match=r"worker 1 gave nothing for 1 s while it prepared 2, 3") as caught:
            list(islice(loader(Numbers(40, act), workers=2, shuffle=False, timeout_s=1.0), 20))
        assert time.monotonic() - started < 15
        assert "Numbers" in str(caught.value)

    @pytest.mark.edge("S14")
    def test_the_time_limit_is_a_key(self) -> None:
        section = DataloaderParam(num_workers=2, shuffle=False, timeout=1.0)
        split = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 5}
        data = build_mm_dataloader(Numbers(40, lambda i: time.sleep(300 * (i == 3))), section, **split)
        with pytest.raises(DataError, match=r"worker 1 gave nothing for 1 s while it prepared 2, 3"):
            list(islice(data, 20))

    def test_the_end_of_a_killed_worker_never_interrupts_what_comes_after(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch's SIGCHLD handler, installed by any loader of the process, raises wherever the program is."""
        handler = signal.getsignal(signal.SIGCHLD)
        monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
        signal_handling._set_SIGCHLD_handler()
        try:
            data = loader(Numbers(40, lambda i: time.sleep(300 * (i == 3))), workers=2, shuffle=False, timeout_s=1.0)
            with pytest.raises(DataError, match="worker 1 gave nothing"):
                list(islice(data, 20))
            time.sleep(0.3)
        finally:
            signal.signal(signal.SIGCHLD, handler)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_bug_in_a_plugin_names_the_sample_and_the_line(self, workers: int) -> None:
        def act(index: int) -> None:
            if index == 3:
                raise KeyError("pixels")

        told = r"^3  the data set failed: KeyError: 'pixels'\. .* the code at test_dataloader\.py:\d+"
        with pytest.raises(DataError, match=told):
            list(islice(loader(Numbers(40, act), workers=workers, shuffle=False), 20))

    def test_workers_outlive_signals_to_the_group_and_end_with_the_loader(self) -> None:
        def act(index: int) -> int:
            return os.getpid()

        steps = iter(loader(Numbers(40, act), workers=2))
        workers = {pid for batch in next(steps) + next(steps) for pid in batch["extras"]}
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert {pid for step in islice(steps, 8) for batch in step for pid in batch["extras"]} == workers
        steps.close()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def test_batches_that_are_kept_are_not_overwritten(self) -> None:
        steps = list(islice(loader(Numbers(200), workers=2, shuffle=False), 60))
        assert [batch["input_ids"].flatten().tolist() for step in steps for batch in step] == [
            [2 * i, 2 * i + 1] for i in range(60)
        ]

    def test_batches_beyond_a_slot_go_torchs_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small = lambda count, slot_bytes: SharedSlots(count, 64)  # noqa: E731
        monkeypatch.setattr(worker_pool, "SharedSlots", small)
        assert ids(islice(loader(Numbers(40), workers=2), 9)) == ids(islice(loader(Numbers(40)), 9))


def test_slots_keep_types_shapes_and_everything_that_is_no_tensor() -> None:
    slots = SharedSlots(2, slot_bytes=4096)
    batch: Batch = {
        "a": torch.arange(6).view(2, 3).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.zeros(0, 5),
        "d": torch.tensor(True),
        "sample_ids": ["x", "y"],
        "max_length_q": 7,
    }
    first = slots.write(4, batch)
    slots.write(5, {"a": torch.full((6,), 9)})
    found = slots.read(first)
    assert found.keys() == batch.keys()
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype
        else:
            assert found[name] == value


@pytest.mark.parametrize("workers", [0, 2])
def test_real_rows_through_real_workers(
    workers: int, make_rows: Callable[..., Path], param: Callable[..., DatasetParam]
) -> None:
    dataset, _ = build_mm_dataset(param(make_rows(12)))
    data = loader(dataset, workers=workers, micro_batch_size=4)
    batches = [batch for step in islice(data, 3) for batch in step]
    reference = {s["sample_id"]: s for s in (dataset[i] for i in range(12))}
    assert sorted(name for batch in batches for name in batch["sample_ids"]) == sorted(reference)
    for batch in batches:
        for row, name in enumerate(batch["sample_ids"]):
            length = len(reference[name]["input_ids"])
            assert batch["input_ids"][row, :length].tolist() == reference[name]["input_ids"].tolist()
        images = [image for name in batch["sample_ids"] for image in reference[name]["media"]]
        assert torch.equal(batch["pixel_values"], dataset.plugin.collate(images)["pixel_values"])


def test_options_reach_the_loader(make_rows: Callable[..., Path], param: Callable[..., DatasetParam]) -> None:
    dataset, _ = build_mm_dataset(param(make_rows(12)))
    data = build_mm_dataloader(
        dataset,
        DataloaderParam(num_workers=3, prefetch_factor=4),
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=0,
        timeout_s=7,
    )
    assert data._workers == WorkerOptions(
        num_workers=3, prefetch_factor=4, pin_memory=data._workers.pin_memory, timeout_s=7
    )


@pytest.mark.parametrize("what", ["a process", "the slots"])
def test_workers_that_a_machine_has_no_room_for_are_told_by_their_key(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    started: list[Any] = []
    start = multiprocessing.context.ForkProcess.start

    def start_one(process: Any) -> None:
        if started:
            full()
        started.append(process)
        start(process)

    if what == "the slots":
        monkeypatch.setattr(worker_pool, "SharedSlots", full)
    else:
        monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", start_one)
    with pytest.raises(MachineError, match="Cannot allocate memory") as refused:
        next(iter(loader(Numbers(20), 4)))
    (problem,) = refused.value.problems
    assert problem.key == "data.dataloader_param.num_workers" and "Lower it, for example to" in problem.way_out
    for process in started:
        process.join(10)
        assert not process.is_alive()
