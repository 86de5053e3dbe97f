"""The list of `mm ui` and what it shows of a run: what is opened, what half-written, deleted and hostile runs do, and
that looking changes nothing."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.tasks.ui import listing
from mindspeed_mm.tasks.ui.board import Showing
from mindspeed_mm.tasks.ui.listing import Board, Brief
from tests.helpers.many_runs import STEPS, make_run

RUNS = 60
OPENED_OF_A_RUN = 2
"""Its record, and the end of its metrics."""
_opened: list[str] = []
_watched: list[str] = []


def _note(event: str, given: tuple[Any, ...]) -> None:
    if _watched and event == "open" and isinstance(given[0], str | bytes):
        name = os.fsdecode(given[0])
        if name.startswith(_watched[0]):
            _opened.append(name)


@functools.cache
def _note_from_now_on() -> None:
    """Not at import: a hook can never be taken away, and slows down whatever else the process does."""
    sys.addaudithook(_note)


@contextmanager
def opened_below(folder: Path) -> Iterator[list[str]]:
    """Inside, the names of all files below a folder that this process opens."""
    _note_from_now_on()
    _opened.clear()
    _watched.append(f"{folder}/")
    try:
        yield _opened
    finally:
        _watched.clear()


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of everything below a folder, and of itself."""
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in (folder, *folder.rglob("*"))}


def named(board: Board) -> dict[str, Brief]:
    return {run.name: run for run in board.look().runs}


def test_files_opened_of_many_runs(tmp_path: Path) -> None:
    for number in range(RUNS):
        make_run(tmp_path / f"group{number % 3}" / f"run{number}")
    board = Board(tmp_path)
    with opened_below(tmp_path) as opened:
        assert len(board.look().runs) == RUNS
    assert len(opened) == OPENED_OF_A_RUN * RUNS
    with opened_below(tmp_path) as opened:
        assert len(board.look().runs) == RUNS
    assert opened == []
    with (tmp_path / "group1" / "run1" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 41, "loss": 0.125}\n')
    with opened_below(tmp_path) as opened:
        run = named(board)["group1/run1"]
    assert (run.step, run.numbers["loss"]) == (41, 0.125) and len(opened) == OPENED_OF_A_RUN


def test_a_run_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    showing = Showing(tmp_path)
    stamp, html = showing.show([run])
    assert html and "<svg" in html
    with opened_below(tmp_path) as opened:
        assert showing.show([run], stamp) == (stamp, None)
        assert showing.show([run]) == (stamp, html)
    assert opened == []
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 41, "loss": 0.125}\n')
    changed, newer = showing.show([run], stamp)
    assert changed != stamp and newer and "0.1250" in newer and "0.1250" not in html


def test_states(tmp_path: Path) -> None:
    for status in ("finished", "stopped", "failed"):
        make_run(tmp_path / status, status=status, steps=STEPS // 2)
    running = make_run(tmp_path / "alive", status="running")
    make_run(tmp_path / "dead", status="running")
    starting = tmp_path / "new"
    shutil.copytree(make_run(tmp_path / "copied"), starting)
    for name in ("run.json", "metrics.jsonl"):
        (starting / name).unlink()
    (make_run(tmp_path / "broken") / "run.json").write_text('{"status": "fini')
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 3, "loss": 0.5}\n{"step": 4, "lo')
    with RunFolder(running).lock("one"), RunFolder(starting).lock("two"):
        before = stamps(tmp_path)
        found = named(Board(tmp_path))
        assert stamps(tmp_path) == before
    states = {name: run.state for name, run in found.items()}
    assert states == {
        "finished": "finished", "stopped": "stopped", "failed": "failed", "alive": "running", "dead": "killed",
        "new": "starting", "copied": "finished", "broken": "unreadable",
    }  # fmt: skip
    assert next(iter(found)) == "alive"  # those that run come first
    assert (found["broken"].step, found["stopped"].step, found["stopped"].total) == (3, STEPS // 2, STEPS)
    assert found["finished"].numbers == {"loss": 4 / STEPS + 1e-3, "lr": 1e-3, "val_loss": 0.501}


def test_what_is_no_run_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"status": "mine"}')
    (tmp_path / "other" / "deeper.yaml").write_text("model: {}\n")
    run = make_run(tmp_path / "other" / "run")
    make_run(run / "iter_0000001" / "inside")
    make_run(tmp_path / ".hidden" / "run")
    (tmp_path / "link").symlink_to(run)
    found = Board(tmp_path).look()
    assert [each.name for each in found.runs] == ["other/run"] and found.configs == ["other/deeper.yaml"]
    assert Board(run).look().runs[0].name == "run"  # the board's folder may be a run itself


def test_a_folder_with_too_many_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_ENTRIES", 10)
    make_run(tmp_path / "run")
    for number in range(20):
        (tmp_path / f"{number}.txt").touch()
    assert "first 10 files" in Board(tmp_path).look().notes[0]


NAMES = (
    "<script>alert(1)</script>",
    'a "quoted" name',
    "it's",
    "tab\there",
    "line\nend",
    "esc\x1b[2J",
    "é" * 127,
    "b" * 255,
)


def test_hostile_names_are_listed_and_harmless(tmp_path: Path) -> None:
    for name in NAMES:
        make_run(tmp_path / name)
    make_run(tmp_path / "half").rename(Path(os.fsdecode(os.fsencode(tmp_path) + b"/half\xff")))
    board = Board(tmp_path)
    found = named(board)
    assert len(found) == len(NAMES) + 1
    assert all(name.isprintable() for name in found)
    _, html = Showing(tmp_path).show([found[name].path for name in (NAMES[0], NAMES[1], "half\\udcff", "esc\\x1b[2J")])
    assert html is not None
    assert "<script" not in html and "&lt;script&gt;" in html
    html.encode()  # also as UTF-8
    assert all(run.id.isalnum() and board.path_of(run.id) == run.path for run in found.values())
    assert board.path_of("../../etc") is None


def test_a_hostile_name_of_a_number_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    bad = 'reward/" onload="alert(1)'
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1, {json.dumps(bad)}: {n}}}\n' for n in (1, 2)))
    _, html = Showing(tmp_path).show([run])
    assert html is not None and 'onload="' not in html and "onload=&#34;" in html


def test_a_run_that_is_deleted_while_somebody_looks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other")
    board, showing = Board(tmp_path), Showing(tmp_path)
    board.look()
    shutil.rmtree(run)
    with pytest.raises(DataError, match="is gone"):
        showing.show([run])
    with pytest.raises(DataError, match="is gone"):
        showing.show([other, run])
    assert [each.name for each in board.look().runs] == ["other"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run.json", "{"),
        ("run.json", "[1]"),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}\n'),
        ("metrics.jsonl", '{"step": 1, "loss": {"a": 1}, "step_ms": "x"}\n'),
        ("best.json", '{"step": 1}'),
        ("eval/results.json", '{"tasks": 7}'),
        ("eval/samples.jsonl", '{"correct": true, "image": {"a": 1}}\n'),
        ("events.jsonl", '{"time": "noon", "kind": ["save"]}\n'),
    ],
)
def test_files_that_no_run_writes_are_named(tmp_path: Path, file: str, content: str) -> None:
    run = make_run(tmp_path / "run")
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(content)
    Board(tmp_path).look()
    try:
        Showing(tmp_path).show([run])
    except DataError as error:
        assert "run" in str(error)


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 41, "lo')
    assert named(Board(tmp_path))["run"].step == STEPS
    assert "<svg" in (Showing(tmp_path).show([run])[1] or "")


# --- nothing outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "run.json", "resolved.yaml", "eval/samples.jsonl", "samples/iter_1/a.png"]
)
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "loss": 7.125, "status": "secret", "exit_code": 0, "packages": {}}\n')
    run = make_run(tmp_path / "board" / "run")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    found = named(Board(run.parent))
    assert "secret" not in repr(found) and "7.125" not in repr(found)
    with pytest.raises(DataError, match=f"{name}.*does not follow"):
        Showing(run.parent).show([run])


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", ".lock"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", status="running")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert len(Board(tmp_path).look().runs) == 1
    if name != ".lock":
        with pytest.raises(DataError, match="a device"):
            Showing(tmp_path).show([run])


def test_pictures_are_shown_from_below_the_folder_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "board" / "run")
    for folder in (tmp_path, tmp_path / "board"):
        Image.new("RGB", (8, 8), (200, 3, 3)).save(folder / "red.png")
    sample = {"task": "t", "question": "q", "expected": "e", "given": "g", "correct": False, "image": "red.png"}
    (run / "eval").mkdir()
    (run / "eval" / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    for media, is_shown in ((tmp_path / "board", True), (tmp_path, False), (Path("/"), False)):
        results = {"accuracy": 0, "tasks": {}, "media_dir": str(media)}
        (run / "eval" / "results.json").write_text(json.dumps(results))
        _, html = Showing(run.parent.resolve()).show([run])
        assert html is not None and ("data:image" in html) == is_shown, media


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", hf_token="hf_" + "a" * 30, command=["mm", "train", "x.api_key=topsecret1"])
    (run / "resolved.yaml").write_text("posttrain: {rewards: [{api_key: topsecret2}]}\n")
    (run / "events.jsonl").write_text(
        json.dumps({"time": 1, "kind": "note", "step": 1, "api_key": "topsecret3"}) + "\n"
    )
    _, html = Showing(tmp_path).show([run])
    assert html is not None and "topsecret" not in html and "hf_a" not in html and "•••" in html


def test_looking_changes_nothing(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    before = stamps(tmp_path)
    Board(tmp_path).look()
    Showing(tmp_path).show(runs)
    assert stamps(tmp_path) == before


def test_as_many_runs_are_compared_as_there_are_colours(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{number}", lr=number + 1.0) for number in range(7)]
    _, html = Showing(tmp_path).show(runs[:6])
    assert html is not None and "What differs in the configurations" in html and "var(--series-6)" in html
    for wrong in ([], runs):
        with pytest.raises(UsageError, match="cannot be compared"):
            Showing(tmp_path).show(wrong)
