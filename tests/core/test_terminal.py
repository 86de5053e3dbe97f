"""Control characters of models, rows, files and servers are shown, not sent."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import click
import pytest

from mindspeed_mm.cli.main import run
from mindspeed_mm.core.terminal import say, say_json, visible
from mindspeed_mm.fsdp.train.run.progress import Progress
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from tests.helpers.tiny_run import make_tiny_run

CLIPBOARD, CLEAR = "\x1b]52;c;Y2FuYXJ5\x07", "\x1b[2J\x9b2J\r"


def controls(text: str) -> set[str]:
    """The control characters in a text, but for line ends and tabs."""
    return {each for each in text if (ord(each) < 32 or 127 <= ord(each) < 160) and each not in "\n\t"}


@pytest.mark.edge("BS12")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext é 漢 \u200f", "plain\n\ttext é 漢 \u200f"),
        (CLIPBOARD, "\\x1b]52;c;Y2FuYXJ5\\x07"),
        (CLEAR, "\\x1b[2J\\x9b2J\\r"),
        ("a\r\nb\x00\x7f", "a\nb\\x00\\x7f"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_what_is_shown(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert visible(text) == shown
    say(text, end="|")
    say(text, err=True)
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{shown}|", f"{shown}\n")


@pytest.mark.edge("BS12")
def test_json_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"text": f"{CLIPBOARD}{CLEAR} é", "path": Path("a"), "half": "\ud800"}
    say_json(value)
    say_json(value, indent=2)
    said = capsys.readouterr().out
    one, _, other = said.partition("\n")
    assert json.loads(one) == json.loads(other) == {**value, "path": "a"} and not controls(said) and "é" in one


@pytest.mark.edge("BS12")
def test_own_colours_stay_and_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    own = click.style("head", bold=True) + click.style("▀", fg=(1, 2, 3), bg=(4, 5, 6)) + click.style("x", fg="red")
    say(f"{own}{CLEAR}\x1b[8mhidden\x1b[1;1H", styled=True)
    assert capsys.readouterr().out == f"{own}\\x1b[2J\\x9b2J\\r\\x1b[8mhidden\\x1b[1;1H\n"


@pytest.mark.edge("BS12")
def test_a_screen_of_another_alphabet_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    say("é")
    assert stream.buffer.getvalue() == b"\\xe9\n"  # type: ignore[attr-defined]


@pytest.mark.edge("BS12")
def test_errors_notes_and_previews_show_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{tmp_path}/{CLIPBOARD}.yaml"]) == 2
    said = capsys.readouterr()
    assert not controls(said.out + said.err) and "\\x1b]52;c;" in said.out + said.err
    log, stream, work = tmp_path / "train.log", io.StringIO(), io.StringIO()
    Progress(0, log_file=log, stream=stream).note(f"row {CLEAR}")
    WorkProgress(stream=work).note(f"row {CLEAR}")
    assert not controls(stream.getvalue() + work.getvalue() + log.read_text())
    path = make_tiny_run(tmp_path, training={"train_iters": 1})
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("What is it like?", f"What {json.dumps(CLEAR + CLIPBOARD)[1:-1]}?"))
    capsys.readouterr()
    assert run(["data", "preview", str(path), "--rows", "1"]) == 0
    said = capsys.readouterr()
    assert not controls(said.out + said.err) and "\\x1b[2J" in said.out
