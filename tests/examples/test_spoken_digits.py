"""The example of speech: no voice is in two splits, rows say what is said, and models learn to hear voices that they
have not heard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import soundfile

from mindspeed_mm.core.errors import MachineError

FOLDER = Path(__file__).parents[2] / "examples/spoken_digits"
speaks = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; what it finds beside it is forgotten again."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import make_spoken_digits

    yield make_spoken_digits
    for name in ("make_spoken_digits", "tiny_listeners"):
        sys.modules.pop(name, None)


def test_no_voice_is_in_two_splits_and_digits_are_said_as_often(example: ModuleType) -> None:
    voices = [voice for variants in example.VOICES.values() for voice in variants]
    assert len(voices) == len(set(voices)) >= 30
    for split in example.VOICES:
        clips = list(example.plan_clips(split))
        assert clips == list(example.plan_clips(split))  # the same each time
        assert {clip.voice.split("+")[1] for clip in clips} == set(example.VOICES[split])
        assert len(set(Counter(clip.digit for clip in clips).values())) == 1
        assert len({clip.name for clip in clips}) == len(clips)


def test_rows_say_what_is_said(example: ModuleType) -> None:
    import random

    for clip in example.plan_clips("validation"):
        told = example.transcript(clip)
        assert (told["audios"], told["messages"][1]["content"]) == ([clip.name], example.WORDS[clip.digit])
        which, parity = example.questions(clip, random.Random(0))
        assert which["messages"][1]["content"] == example.WORDS[clip.digit]
        assert parity["messages"][1]["content"] == ("odd" if clip.digit in (1, 3, 5, 7, 9) else "even")


def test_a_missing_speaker_is_told_with_the_way_out(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="apt-get install espeak-ng"):
        example.check_speaker()


@speaks
def test_voices_that_this_release_lacks_are_told(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    example.check_speaker()
    monkeypatch.setitem(example.VOICES, "test", ("nobody",))
    with pytest.raises(MachineError, match="lacks the voices nobody"):
        example.check_speaker()


@speaks
def test_clips_are_short_and_differ(example: ModuleType, tmp_path: Path) -> None:
    clips = list(example.plan_clips("test"))[:20]
    (tmp_path / "clips" / "test").mkdir(parents=True)
    heard = set()
    for clip in clips:
        example.say(clip, tmp_path)
        samples, rate = soundfile.read(tmp_path / clip.name)
        assert rate == example.RATE
        assert 0.15 < len(samples) / rate <= example.WINDOW_S
        assert abs(samples[0]) > 0 < abs(samples[-1])
        heard.add(samples.tobytes())
    assert len(heard) == len(clips)


@speaks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "run", "rows", "metric"),
    [("asr", "asr", "transcripts", ("--metric", "wer")), ("questions", "answers", "questions", ())],
)
def test_voices_that_were_not_heard_are_understood(
    tmp_path: Path, recipe: str, run: str, rows: str, metric: tuple[str, ...]
) -> None:
    """The commands of the page, with other folders."""
    mm = [sys.executable, "-m", "mindspeed_mm"]
    data, saved = "runs/spoken_digits/data", f"runs/spoken_digits/{run}"
    scored = ["--data", f"{data}/{rows}/test.jsonl", "--media-dir", data, "--max-new-tokens", "8", *metric]
    for words in (
        [sys.executable, str(FOLDER / "make_spoken_digits.py")],
        [*mm, "train", str(FOLDER / f"spoken_digits_{recipe}_config.yaml")],
        [*mm, "evaluate", saved, *scored],
    ):
        subprocess.run(words, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=1500)
    results = json.loads((tmp_path / saved / "eval/results.json").read_text())
    for task in results["tasks"].values():
        right = 1 - task["rate"] if metric else task["accuracy"]
        assert right >= 0.9, results["tasks"]
