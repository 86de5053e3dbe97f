"""`mm evaluate --recogniser`: what a model says is heard by another, and wrong words are counted as elsewhere."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import jiwer
import pytest
from click.testing import CliRunner

from mindspeed_mm.cli.evaluate import command
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob, load_voice
from mindspeed_mm.fsdp.utils.media_files import wave_bytes
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.evaluate import spoken
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_speech_codec import VOICE, write_speaker
from tests.tasks.test_transcripts import make_whisper

ROWS = [
    {"id": "a", "task": "short", "text": "nine", "audio_codes": [[1, 2, 3, 4]]},
    {"id": "b", "task": "long", "text": "seven one two", "ref_audio": "voice.wav", "mood": "glad"},
    {"id": "c", "task": "long", "text": "two six", "ref_audio": ["voice.wav"], "ref_text": "one two"},
]
TOKENS = 36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that speaks, one that hears, and rows."""
    folder = tmp_path_factory.mktemp("spoken")
    write_speaker(folder / "speaks", talker_config={"spk_id": None})
    make_whisper(folder / "hears")
    (folder / "voice.wav").write_bytes(VOICE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def words_of(folder: Path, out: Path, *more: str) -> list[str]:
    return [str(folder / "speaks"), "--data", str(folder / "rows.jsonl"), "--recogniser", str(folder / "hears"),
            "--out", str(out), "--max-new-tokens", str(TOKENS), *more]  # fmt: skip


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("out") / "eval"
    told = CliRunner().invoke(command, words_of(folder, out), catch_exceptions=False)
    return out, json.loads((out / "results.json").read_text()), told.stdout


def test_words_are_counted_by_what_is_heard(folder: Path, results: tuple[Path, dict[str, Any], str]) -> None:
    out, found, told = results
    voice, hearing = load_voice(folder / "speaks"), load_generator(folder / "hears")
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for number, (row, sample) in enumerate(zip(ROWS, samples, strict=True), 1):
        reference = Reference(VOICE, "v", row.get("ref_text")) if "ref_audio" in row else None  # type: ignore[arg-type]
        job = SpeechJob(str(row["text"]), Sampling(TOKENS, seed=0).of_row(number), reference=reference)
        sound = wave_bytes(voice.speak(job).sound)
        assert (out / "sounds" / f"{number:06d}.wav").read_bytes() == sound
        question = ask("", [MediaItem("audio", sound)])
        media, greedy = hearing.encoder.media(Path()), Sampling(512, temperature=0)
        ((_, answer),) = next(hearing.answer([question], media, sampling=greedy, batch_size=1))
        assert (sample["id"], sample["question"], sample["expected"]) == (row["id"], row["text"], row["text"])
        assert sample["given"] == answer.text
    wrong = jiwer.process_words([s["expected"] for s in samples], [s["given"] for s in samples])
    assert found["overall"]["errors"] == wrong.substitutions + wrong.deletions + wrong.insertions
    assert found["overall"]["units"] == 6 and set(found["tasks"]) == {"short", "long"} and found["metric"] == "wer"
    assert found["recogniser"].endswith("/hears") and found["max_new_tokens"] == TOKENS
    assert "columns without effect on speech: mood" in told


def test_another_voice_is_compared_by_row(
    folder: Path, results: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    told = CliRunner().invoke(
        command, words_of(folder, tmp_path / "again", "--against", str(results[0])), catch_exceptions=False
    )
    assert "word error rate against the other model" in told.stdout
    assert json.loads((tmp_path / "again/results.json").read_text())["overall"] == results[1]["overall"]


def test_sounds_are_whole_files(results: tuple[Path, dict[str, Any], str]) -> None:
    for path in (results[0] / "sounds").iterdir():
        with wave.open(str(path)) as file:
            assert file.getframerate() == 24000 and file.getnframes() > 0


def test_bad_rows_are_told_before_anything_is_said(folder: Path, tmp_path: Path) -> None:
    bad = [
        {"text": ""},
        {"text": "x", "speaker": 7},
        {"text": "x", "ref_audio": "nowhere.wav"},
        {"text": "x", "ref_text": "y"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in bad))
    with pytest.raises(DataError, match=r"4 of 4 rows are bad(?s:.)*not a text to say(?s:.)*nowhere.wav"):
        spoken.read_lines(path, tmp_path, 5)
    path.write_text(json.dumps({"text": "x", "speaker": "nobody"}) + "\n")
    words = words_of(folder, tmp_path / "eval")
    words[2] = str(path)
    found = CliRunner().invoke(command, words)
    assert isinstance(found.exception, UsageError) and "no voice 'nobody'" in str(found.exception)
    assert not (tmp_path / "eval").exists()


def test_who_does_not_speak_or_hear(folder: Path, tmp_path: Path) -> None:
    text = str(make_tiny_qwen3(tmp_path / "text"))
    words = words_of(folder, tmp_path / "eval")
    for place, says in (
        (0, "answers in words, and does not speak. Leave out --recogniser"),
        (4, "the model hears nothing"),
    ):
        found = CliRunner().invoke(command, [*words[:place], text, *words[place + 1 :]])
        assert isinstance(found.exception, UsageError) and says in str(found.exception), found.exception
        assert not (tmp_path / "eval").exists()  # nothing was said
    for more in (["--lora", text], ["--judge", "http://x"], ["--plan", text], ["--loss"]):
        found = CliRunner().invoke(command, [*words, *more])
        assert isinstance(found.exception, UsageError), more
    found = CliRunner().invoke(command, [words[0], "--recogniser", words[4]])
    assert isinstance(found.exception, UsageError) and "no rows are given" in str(found.exception)
