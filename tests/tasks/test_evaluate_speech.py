"""`mm evaluate --data FOLDER` reads speech as LibriSpeech publishes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.sampling.answers.questions import read_transcripts
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from tests.tasks.test_transcripts import TOKENS, make_whisper


def make_subset(folder: Path) -> Path:
    """Two chapters of two utterances each, laid out as LibriSpeech/test-clean."""
    for chapter, words in (("1089/134686", ("HE HOPED", "STUFF IT")), ("61/70968", ("HE BEGAN", "A"))):
        place = folder / chapter
        place.mkdir(parents=True)
        stem = chapter.replace("/", "-")
        for number in range(2):
            wave = 0.1 * np.sin(np.arange(8000) * 2 * np.pi * 220 * (number + 1) / 16000)
            soundfile.write(place / f"{stem}-{number:04}.flac", wave, 16000)
        lines = [f"{stem}-{number:04} {text}\n" for number, text in enumerate(words)]
        (place / f"{stem}.trans.txt").write_text("".join(lines))
    return folder


def test_speech_is_read_as_published_and_scored(tmp_path: Path) -> None:
    subset = make_subset(tmp_path / "LibriSpeech" / "test-clean")
    questions = read_transcripts(subset)
    assert [(question.id, question.expected, question.task) for question in questions] == [
        ("1089-134686-0000", "HE HOPED", "all"),
        ("1089-134686-0001", "STUFF IT", "all"),
        ("61-70968-0000", "HE BEGAN", "all"),
        ("61-70968-0001", "A", "all"),
    ]
    assert {question.task for question in read_transcripts(subset.parent)} == {"test-clean"}
    model = make_whisper(tmp_path / "model")
    compared: dict[str, Any] = {"metric": "wer", "ignore_case": True, "ignore_punctuation": True}
    asked = EvaluateRequest(str(model), data=subset, out=tmp_path / "out", max_new_tokens=TOKENS, **compared)
    found = evaluate.run(asked)
    assert (found.overall.n, found.overall.to_dict()["units"]) == (4, 7)  # words of all transcripts together
    assert [sample["expected"] for sample in found.samples] == [question.expected for question in questions]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    subset = make_subset(tmp_path / "dev")
    (subset / "61/70968/61-70968-0001.flac").unlink()
    with pytest.raises(DataError, match=r"1 of 4 utterances.*"):
        read_transcripts(subset)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"without transcripts"):
        read_transcripts(tmp_path / "empty")
