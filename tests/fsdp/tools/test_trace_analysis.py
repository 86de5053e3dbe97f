"""Traces made by hand, whose answers are known exactly."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from mindspeed_mm.fsdp.tools import trace_report
from mindspeed_mm.fsdp.tools.trace_analysis import SHARES, Times, analyse, analyse_files
from mindspeed_mm.fsdp.tools.trace_columns import TraceFile
from mindspeed_mm.fsdp.tools.trace_report import bottleneck, summary_lines

Event = dict[str, Any]


def event(name: str, begin_ms: float, end_ms: float, cat: str = "cpu_op", lane: Any = 1, **args: Any) -> Event:
    pid, tid = (0, f"stream {lane}") if cat.startswith(("kernel", "gpu_")) else (100, lane)
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid,
        "ts": 1e9 + 1000 * begin_ms, "dur": 1000 * (end_ms - begin_ms), "args": args,
    }  # fmt: skip


def span(name: str, begin: float, end: float) -> Event:
    return event(name, begin, end, cat="user_annotation")


def write(path: Path, events: list[Event], rank: int | None = None) -> Path:
    head = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}} if rank is not None else {}
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x"}))
    return path


def times_of(path: Path) -> Times:
    (times,) = analyse(path).ranks.values()
    return times


def in_ms(times: Times) -> dict[str, float]:
    return {name: round(1000 * times.shares[name], 6) for name in SHARES if times.shares[name] > 1e-12}


# --- with a device ---------------------------------------------------------------------------------------------------


def device_trace() -> list[Event]:
    """A step of 100 ms:

    host      data wait 0-10, forward 10-50 (mm at 12-13, in module a.0), backward 50-80, optimizer 85-100
    stream 7  gemm 15-40 and, overlapping, another stream's gemm 30-60; small kernel 70-72
    stream 9  nccl 35-65: hidden 35-60, not hidden 60-65; a second collective 72-80, not hidden
    copies    to the device 8-16: 7 of it not hidden; to the host 90-92
    """
    return [
        span("mm.step 4", 0, 100),
        span("mm.data wait", 0, 10),
        span("mm.forward", 10, 50),
        span("mm.module a", 11, 20),
        span("mm.module a.0", 12, 14),
        event("aten::mm", 12, 13, **{"External id": 5, "Sequence number": 77}),
        span("mm.backward", 50, 80),
        event("autograd::engine::evaluate_function: MmBackward0", 51, 60, lane=2, **{"Sequence number": 77}),
        event("MmBackward0", 52, 58, lane=2, **{"Sequence number": 77, "External id": 8}),
        event("aten::mm", 53, 54, lane=2, **{"External id": 9}),
        span("mm.optimizer", 85, 100),
        event("gemm", 15, 40, "kernel", 7, **{"External id": 5}),
        event("gemm_of_backward", 30, 60, "kernel", 8, **{"External id": 9}),
        event("tiny", 70, 70.005, "kernel", 7),
        event("add", 70.005, 72, "kernel", 7),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 35, 65, "kernel", 9),
        event("ncclDevKernel_ReduceScatter", 72, 80, "kernel", 9),
        event("Memcpy HtoD (Pinned -> Device)", 8, 16, "gpu_memcpy", 10),
        event("Memcpy DtoH (Device -> Pageable)", 90, 92, "gpu_memcpy", 10),
        event("nccl:all_gather", 34, 66, "gpu_user_annotation", 9),
        event("cudaLaunchKernel", 12, 12.5, "cuda_runtime"),
        event("python frame", 0, 100, "python_function"),
        {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 1, "tid": 1, "ts": 5},
    ]


def test_each_moment_of_a_device_trace_is_counted_once(tmp_path: Path) -> None:
    times = times_of(write(tmp_path / "a.json", device_trace(), rank=1))
    compute = (60 - 15) + (72 - 70)
    assert in_ms(times) == {
        "compute": compute,
        "communication": (65 - 60) + (80 - 72),
        "host to device": 15 - 8,
        "device to host": 2,
        "data loading": 8,  # of 10, in 2 of which a copy ran
        "idle": 100 - compute - 13 - 7 - 2 - 8,
    }
    assert 1000 * times.communication == pytest.approx(30 + 8)
    assert 1000 * times.hidden == pytest.approx(60 - 35)
    assert (times.steps, times.short_kernels) == (1, 1)
    assert 1000 * times.window == pytest.approx(100)


def test_kernels_go_to_the_part_and_the_module_that_gave_them(tmp_path: Path) -> None:
    times = times_of(write(tmp_path / "a.json", device_trace()))
    assert times.phases["forward"]["host"] == pytest.approx(0.040)
    # Given in the forward pass: the gemm of 25 ms, and the collective, whose giver is unknown and which starts there.
    assert times.phases["forward"]["work"] == pytest.approx(0.025 + 0.030)
    assert times.phases["backward"]["work"] == pytest.approx(0.030 + 0.002 + 0.008)
    assert times.modules == {"a.0": pytest.approx(0.025 + 0.030)}
    assert times.kernels["gemm"] == pytest.approx(0.025)
    assert times.operators["autograd::engine::evaluate_function: MmBackward0"] == pytest.approx(0.003)
    assert times.operators["MmBackward0"] == pytest.approx(0.005)
    assert times.operators["aten::mm"] == pytest.approx(0.002)
    assert times.calls["aten::mm"] == 2


def test_the_answer_does_not_depend_on_the_order_of_events(tmp_path: Path) -> None:
    events = device_trace()
    one, other = (times_of(write(tmp_path / f"{i}.json", e)) for i, e in enumerate((events, events[::-1])))
    assert one == other


# --- without a device ------------------------------------------------------------------------------------------------


def host_trace() -> list[Event]:
    """Main thread: data wait 0-10 (an operator inside), operators 10-30 nested, waiting in Python 30-50 for gloo, which
    works 25-45 in a thread of its own and adds numbers up there; an operator of another thread 60-70."""
    return [
        span("mm.step 1", 0, 80),
        span("mm.data wait", 0, 10),
        event("aten::stack", 4, 6),
        event("aten::linear", 10, 30),
        event("aten::addmm", 12, 28),
        event("aten::copy_", 13, 15),
        event("autograd::engine::evaluate_function: PostBackward", 30, 50),
        event("gloo:all_reduce", 25, 45, "user_annotation", 7),
        event("aten::add_", 30, 33, lane=7),
        event("aten::relu", 60, 70, lane=3),
    ]


def test_each_moment_of_a_host_trace_is_counted_once(tmp_path: Path) -> None:
    times = times_of(write(tmp_path / "a.json", host_trace()))
    assert in_ms(times) == {"data loading": 10, "compute": 20 + 10, "communication": 15, "idle": 80 - 10 - 30 - 15}
    assert times.hidden == pytest.approx(0.005)
    assert times.operators["aten::linear"] == pytest.approx(0.004)
    assert times.operators["aten::addmm"] == pytest.approx(0.014)
    assert times.operators["aten::copy_"] == pytest.approx(0.002)


def test_a_planted_fault_in_the_classification_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd puts around an operator, taken for work, hides the waits inside of it."""
    monkeypatch.setattr("mindspeed_mm.fsdp.tools.trace_analysis._is_operator", lambda name: True)
    assert in_ms(times_of(write(tmp_path / "a.json", host_trace())))["compute"] == 50


def test_time_between_steps_does_not_count_and_torchs_own_steps_do(tmp_path: Path) -> None:
    events = [
        span("ProfilerStep#0", 0, 10), event("aten::mm", 0, 10), event("aten::mm", 12, 18),
        span("ProfilerStep#1", 20, 30), span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 21, 25),
    ]  # fmt: skip
    times = times_of(write(tmp_path / "a.json", events))
    assert (times.steps, in_ms(times)) == (2, {"compute": 10, "data loading": 4, "idle": 6})


# --- an NPU's trace --------------------------------------------------------------------------------------------------


def test_a_trace_of_an_npu_is_read_by_its_processes(tmp_path: Path) -> None:
    def task(pid: int, name: str, begin: float, end: float, tid: int = 1) -> Event:
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": str(1000 * begin), "dur": 1000 * (end - begin)}

    names = {1: "Python", 2: "CANN", 3: "Ascend Hardware", 4: "Communication", 5: "Overlap Analysis"}
    events = [
        task(1, "mm.step 3", 0, 50), task(1, "mm.data wait", 0, 5), task(1, "aten::mm", 5, 6),
        task(2, "AscendCL@x", 0, 50), task(3, "MatMulV2", 10, 30), task(3, "EVENT_WAIT", 30, 50),
        task(3, "MEMCPY_ASYNC_H2D", 6, 8), task(4, "hcom_allGather__1", 25, 40), task(5, "Computing", 0, 50),
        *({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()),
    ]  # fmt: skip
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(events))
    times = times_of(tmp_path)
    assert in_ms(times) == {"compute": 20, "communication": 10, "host to device": 2, "data loading": 5, "idle": 13}
    assert times.hidden == pytest.approx(0.005)


# --- several ranks and files -----------------------------------------------------------------------------------------


def test_the_slowest_rank_is_the_one_that_waits_least(tmp_path: Path) -> None:
    for rank, work in ((0, 60), (1, 80)):
        events = [span("mm.step 1", 0, 100), event("k", 0, work, "kernel"), event("nccl_x", work, 100, "kernel", 2)]
        write(tmp_path / f"rank{rank}_step1-1.trace.json", events, rank)
    found = analyse(tmp_path)
    assert (found.slowest, round(found.imbalance, 9)) == (1, round(80 / 70 - 1, 9))
    assert bottleneck(found).name == "uneven ranks"
    assert "slowest: rank 1" in "\n".join(summary_lines(found, 5))


def test_files_of_one_rank_add_up(tmp_path: Path) -> None:
    for first in (1, 2):
        write(tmp_path / f"{first}.trace.json", [span(f"mm.step {first}", 0, 10), event("aten::x", 0, 4)], 3)
    found = analyse(tmp_path)
    assert found.files == 2
    assert (found.ranks[3].steps, in_ms(found.ranks[3])) == (2, {"compute": 8, "idle": 12})


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "name", "remedy"),
    [
        ([span("mm.data wait", 0, 40), event("k", 40, 100, "kernel")], "data-bound", "num_workers"),
        ([event("Memcpy HtoD", 0, 40, "gpu_memcpy"), event("k", 40, 100, "kernel")], "copies to the device", "pin_"),
        ([event("nccl", 0, 40, "kernel", 2), event("k", 40, 100, "kernel")], "communication-bound", "prefetch"),
        ([event("k", i, i + 0.005, "kernel") for i in range(100)], "many small kernels", "compile"),
        ([event("k", 0, 50, "kernel")], "host-bound", "manual_gc_interval"),
        ([event("k", 0, 95, "kernel")], "compute-bound", "bf16"),
        ([event("k", 0, 60, "kernel"), event("Memcpy DtoH", 60, 90, "gpu_memcpy")], "copies to the host", "offload"),
    ],
)
def test_the_bottleneck_is_named_with_a_remedy(events: list[Event], name: str, remedy: str, tmp_path: Path) -> None:
    found = bottleneck(analyse(write(tmp_path / "a.json", [span("mm.step 1", 0, 100), *events])))
    assert name in found.name
    assert remedy in found.advice


def test_every_key_that_the_advice_names_exists() -> None:
    keys = {key for key, _ in walk_fields()}
    source = Path(trace_report.__file__).read_text(encoding="utf-8")
    source = source.replace("fsdp.tools.", "")
    named = set(re.findall(r"\b(?:data|training|features|parallel|tools|fsdp_plan|basic_parameters)\.[a-z_.]+", source))
    assert len(named) > 8
    unknown = {n for n in named if not any(k == n.rstrip(".") or k.endswith("." + n.rstrip(".")) for k in keys)}
    assert unknown == set()


# --- files that are none, and large ones -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is not JSON"),
        (b'{"metrics": []}', "no list 'traceEvents'"),
        (b'{"traceEvents": [', "cut short"),
        (b'{"traceEvents": [{"ph": "X", "na', "cut short"),
        (b'{"traceEvents": [{"ph": "M"}, ', "cut short"),
        (b'{"traceEvents": [1, 2]}', "where an event should be"),
        (b'{"traceEvents": []}', "no operators"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a"}]}', "without a time"),
        (gzip.compress(b'{"traceEvents": []}' * 1000, mtime=0)[:-20], "cut short"),
        (b"\x1f\x8bnonsense", "cut short"),
    ],
)
def test_a_file_that_is_no_trace_is_one_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        analyse(path)
    assert str(path) in str(raised.value)


def test_a_path_without_traces_is_one_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DataError, match=r"no trace|does not exist"):
            analyse(path)


def test_events_are_found_wherever_the_chunks_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [event(f"aten::ä{i}]}}", i, i + 1, note='"traceEvents": [') for i in range(40)]
    path = write(tmp_path / "a.json", events)
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("mindspeed_mm.fsdp.tools.trace_columns.CHUNK_CHARACTERS", size)
        assert list(TraceFile(path).events()) == events


PYTHON_CALL = """  {
    "ph": "X",
    "cat": "python_function",
    "name": "google/protobuf/text_format.py(1482): ".",
    "pid": 14308,
    "tid": 14308,
    "ts": 4502886142890.307,
    "dur": 11.978
    ,
    "args": {
      "Python parent id": 819306, "Python id": 820038, "Ev Idx": 922494
    }
  },
"""


@pytest.mark.edge("D4")
def test_python_calls_are_passed_over_whatever_their_names_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes the names of functions that are gone as it finds them: not always JSON."""
    path = write(tmp_path / "a.json", host_trace())
    expected = in_ms(times_of(path))
    text = path.read_text()
    head, tail = text.split('"traceEvents": [')
    path.write_text(f'{head}"traceEvents": [{PYTHON_CALL * 3}{tail.replace("}, {", "}," + PYTHON_CALL + "{")}')
    for size in (7, 1000, 1 << 20):
        monkeypatch.setattr("mindspeed_mm.fsdp.tools.trace_columns.CHUNK_CHARACTERS", size)
        assert in_ms(times_of(path)) == expected


MEASURE = """
import resource, sys
from pathlib import Path
from mindspeed_mm.fsdp.tools.trace_analysis import analyse_files
analyse_files([])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(times,) = analyse_files([Path(sys.argv[1])]).ranks.values()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, sum(times.calls.values()), times.window)
assert "torch" not in sys.modules
"""


def memory_for(events: int, folder: Path) -> tuple[int, int]:
    """(bytes of a large trace, bytes of memory that its analysis took)."""
    path = folder / "large.trace.json"
    one = event("aten::mm", 0, 1, **{"External id": "ID", "Input Dims": "x" * 120}) | {"ts": "TS"}
    text = json.dumps(one, indent=2)  # once: with indents, json is slow
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        for number in range(events):
            comma = ",\n" if number < events - 1 else "\n"
            file.write(text.replace('"TS"', str(1e9 + 1000 * number)).replace('"ID"', str(number)) + comma)
        file.write("]}")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True, timeout=600
    )
    taken, calls, window = done.stdout.split()
    assert int(calls) == events
    assert float(window) == pytest.approx(events / 1000)
    return path.stat().st_size, int(taken)


def test_a_trace_takes_a_fraction_of_its_size_in_memory(tmp_path: Path) -> None:
    size, taken = memory_for(60_000, tmp_path)
    assert size > 18e6
    assert taken < 1.5 * size


@pytest.mark.slow
def test_a_trace_of_500_mb_takes_less_than_its_size(tmp_path: Path) -> None:
    size, taken = memory_for(1_700_000, tmp_path)
    assert size > 500e6
    assert taken < 0.7 * size


def test_a_rank_is_taken_from_the_name_where_the_trace_does_not_say(tmp_path: Path) -> None:
    events = [event("aten::x", 0, 1)]
    paths = [write(tmp_path / "rank_5.json", events), write(tmp_path / "other.json", events)]
    assert sorted(analyse_files(paths).ranks) == [5, 6]
