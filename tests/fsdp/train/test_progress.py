"""What a person and a tracker are shown of a step."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.train.run.event_file import EventFile
from mindspeed_mm.fsdp.train.run.progress import HEADER, Progress, format_line, short_rate
from mindspeed_mm.fsdp.train.run.trackers import TensorBoard, TrackedRun, Trackers
from mindspeed_mm.fsdp.utils.work_progress import clock

METRICS = {
    "step": 120, "loss": 1.8342, "grad_norm": 0.71, "lr": 9.8e-6, "tokens_per_s": 41200.0, "samples_per_s": 9.0,
    "step_ms": 55.5, "data_share": 0.004, "memory_gib": 51.3, "consumed_samples": 7680, "eta_s": 4360.0,
    "global_batch": 64, "samples": 128, "tokens": 65536,
}  # fmt: skip


def test_a_line_stands_under_its_header() -> None:
    line = format_line(METRICS)
    assert line.split() == ["120", "1.8342", "0.71", "9.80e-06", "41.2k", "-", "51.30", "0.4%", "01:12:40"]
    assert len(line) == len(HEADER)


def test_rewards_have_columns_where_a_run_has_rewards() -> None:
    stream = io.StringIO()
    progress = Progress(0, stream=stream)
    for step, further in enumerate(({}, {"reward": 0.123456, "diversity": 12.5}, {}), start=1):
        progress.step({**METRICS, **further, "step": step}, 900, 900)
    header, _, other, drawn, without = stream.getvalue().splitlines()
    assert header == HEADER
    assert other.split()[:5] == ["step", "loss", "reward", "divers.", "grad"]
    assert drawn.split()[:5] == ["2", "1.8342", "0.1235", "12.5", "0.71"]
    assert without.split()[:5] == ["3", "1.8342", "-", "-", "0.71"]
    assert len({len(line) for line in (other, drawn, without)}) == 1


def test_numbers_for_people() -> None:
    assert [short_rate(n) for n in (7, 1234, 2.5e6, 3e9)] == ["7", "1.2k", "2.5M", "3.0G"]
    assert clock(3661.4) == "01:01:01"


def test_log_file_has_the_words_that_older_tools_are_searched_for(tmp_path: Path) -> None:
    progress = Progress(0, log_file=tmp_path / "log" / "train.log", stream=io.StringIO())
    progress.step(METRICS, 900, 900)
    progress.close()
    text = (tmp_path / "log" / "train.log").read_text()
    assert "elapsed time per iteration (ms): 55.5" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.edge("BU7")
def test_a_terminal_breaks_lines_between_words_and_a_file_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    text = "model  Qwen3VLForConditionalGeneration, 0.40 M parameters, weights from /a/very/long/path/without/blanks"
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        progress = Progress(0, log_file=tmp_path / "train.log", stream=stream)
        progress.note(text)
        progress.close()
        shown[type(stream)] = stream.getvalue().splitlines()
    assert shown[io.StringIO] == [text]
    assert all(line.endswith(text) for line in (tmp_path / "train.log").read_text().splitlines())
    assert " ".join(line.strip() for line in shown[Terminal]).split() == text.split()
    assert all(line.startswith(" " * 7) for line in shown[Terminal][1:]) and len(shown[Terminal]) == 3


@pytest.mark.edge("BU7")
def test_details_go_to_the_log_file_alone(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(0, log_file=tmp_path / "train.log", stream=stream)
    progress.keep("shard  plain parameters")
    progress.close()
    assert stream.getvalue() == "" and "shard  plain parameters" in (tmp_path / "train.log").read_text()


def test_plain_lines_are_what_scripts_of_older_tools_take_apart(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(0, stream=stream, plain_lines=True)
    progress.step(METRICS, 900, 900)
    progress.close()
    line = stream.getvalue().strip()
    assert "\n" not in line
    assert line.split(":")[4].split()[0] == "55.5"  # awk -F: '{print $5}'
    assert "iteration      120/     900 | consumed samples:         7680 | " in line
    assert line.endswith("| global batch size: 64 | tokens per sample: 512.0 |")


def test_tensorboard_reads_every_number_of_every_step(tmp_path: Path) -> None:
    trackers = Trackers.of(["tensorboard"], (), print)
    trackers.begin(TrackedRun("run", {}, tmp_path, 1))
    for step in (1, 2):
        trackers.log({**METRICS, "step": step, "loss": 1.0 / step})
    trackers.end(0)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == METRICS.keys() - {"step"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]


def test_other_ranks_say_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(1, log_file=tmp_path / "train.log", stream=stream)
    progress.step(METRICS, 900, 900)
    progress.note("a word")
    progress.close()
    assert stream.getvalue() == "" and not (tmp_path / "train.log").exists()


@pytest.mark.edge("S14")
def test_a_folder_of_events_that_goes_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    trackers = Trackers({"tensorboard": TensorBoard()}, told.append)
    trackers.begin(TrackedRun("run", {}, tmp_path / "run", first_step=1))
    trackers.log({"step": 1, "loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    trackers.log({"step": 2, "loss": 1.0})
    trackers.log({"step": 3, "loss": 1.0})
    trackers.end(0)
    assert len(told) == 1 and "tensorboard stops here" in told[0] and "is gone" in told[0]


def test_tensorboard_reads_every_number_and_passes_over_steps_that_are_done_again(tmp_path: Path) -> None:
    """Its own reader, which compares checksums; numbers that fp32 does not hold are infinite."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    odd = {"nan": math.nan, "huge": 1e300, "low": -1e300, "none": 0.0, "äß/1": -2.5e-7}
    first = EventFile(tmp_path, 1)
    for step in (1, 2, 300):
        first.add_numbers({"loss": step / 7, **odd}, step)
    first.close()
    again = EventFile(tmp_path, 3)
    again.add_numbers({"loss": 5.0}, 3)
    again.close()
    assert len(list(tmp_path.iterdir())) == 2
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(["loss", *odd])
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [
        (1, pytest.approx(1 / 7, rel=1e-7)),
        (2, pytest.approx(2 / 7, rel=1e-7)),
        (3, 5.0),
    ]
    shown = [float(events.Scalars(name)[0].value) for name in ("huge", "low", "none", "äß/1")]
    assert shown == [math.inf, -math.inf, 0.0, pytest.approx(-2.5e-7)]
    assert math.isnan(events.Scalars("nan")[0].value)
