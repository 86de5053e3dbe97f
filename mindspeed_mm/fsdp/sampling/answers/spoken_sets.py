"""Speech with transcripts as LibriSpeech is published: FLAC files beside a `*.trans.txt` of each chapter."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, RowLocation, Sample
from mindspeed_mm.fsdp.sampling.answers.questions import DEFAULT_TASK, SHOWN_PROBLEMS, Question

_SOUND_ENDING = ".flac"


def read_transcripts(folder: Path) -> list[Question]:
    """Every utterance of a folder: the sound alone is shown, its transcript is the expected answer. Utterances are
    counted by the subset that they lie in (`test-clean`), where the folder holds subsets.

    Args:
        folder: Of one subset, or of several.

    Raises:
        DataError: There is no transcript, a line is not an id with words, or a sound is missing.
    """
    files = sorted(folder.rglob("*.trans.txt"))
    if not files:
        raise DataError(
            "is a folder without transcripts (*.trans.txt)",
            where=str(folder),
            way_out="Give a file of rows, or a folder as LibriSpeech has them.",
        )
    questions: list[Question] = []
    problems: list[Problem] = []
    for file in files:
        subset = file.relative_to(folder).parts[:-3]
        for number, line in enumerate(_lines(file), 1):
            name, _, words = line.strip().partition(" ")
            sound = file.parent / f"{name}{_SOUND_ENDING}"
            if not words or not sound.is_file():
                what = f"'{sound.name}' not found" if words else "is not an utterance's id with its words"
                problems.append(Problem(what, where=f"{file}:{number}"))
                continue
            message = {"role": "user", "content": [{"type": "audio"}]}
            media = [MediaItem("audio", str(sound.absolute()))]
            sample = Sample(RowLocation(str(file), number), [message], [0.0], media)
            questions.append(Question(len(questions) + 1, name, "/".join(subset) or DEFAULT_TASK, sample, words))
    if problems:
        headline = f"{folder}: {len(problems)} of {len(problems) + len(questions)} utterances are bad"
        raise DataError(headline, problems=problems[:SHOWN_PROBLEMS])
    return questions


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        way_out = "Take the file as it is published."
        raise DataError(f"cannot be read: {error}", where=str(file), way_out=way_out) from error
