"""Writes the example of spoken digits: clips of one digit each, rows for two tasks, and two tiny model folders.

Run `python examples/spoken_digits/make_spoken_digits.py [FOLDER]` (default `runs/spoken_digits`). The speech is
synthetic: eSpeak NG says it, which must be installed (`apt-get install espeak-ng`). Nothing is downloaded; the same
release of eSpeak NG writes the same bytes. A voice belongs to one split only: no test clip is of a voice trained on.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from tiny_listeners import WINDOW_S, write_question_answerer, write_recogniser

from mindspeed_mm.core.errors import MachineError, MMError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import read_audio

PROGRAM = "espeak-ng"
RATE = 16_000
SEED = 0
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland")
VOICES = {
    "train": (
        *("m1", "m2", "m4", "m5", "m7", "m8", "f1", "f2", "f4", "Andrea", "Annie", "Alex", "Michael", "Mike", "Lee"),
        *("boris", "david", "edward", "linda", "paul", "rob", "steph2"),
    ),
    "validation": ("m6", "f5"),
    "test": ("m3", "f3", "belinda", "benjamin", "robert", "victor"),
}
"""Variants of eSpeak NG: other throats for the same accents."""
ROUNDS = {"train": 11, "validation": 3, "test": 6}
"""How often each voice says each digit, each time in another accent, speed and pitch."""
SPEEDS = (140, 220)
"""Words a minute, from and to."""
PITCHES = (25, 75)
"""Of 0 to 99."""
SILENCE = 0.01
"""Samples below it, at both ends, are cut off."""

QUESTIONS = {
    "which": ("Which digit is said?", "Name the digit.", "What digit do you hear?"),
    "odd or even": ("Is the digit odd or even?", "Odd or even?", "Is an odd or an even digit said?"),
}


@dataclass(frozen=True)
class Clip:
    """What is said, and how."""

    name: str
    digit: int
    voice: str
    words_a_minute: int
    pitch: int

    @property
    def word(self) -> str:
        """The digit."""
        return WORDS[self.digit]


def plan_clips(split: str) -> Iterator[Clip]:
    """The clips of a split: each voice says each digit as often."""
    draw = random.Random(f"{SEED}/{split}")
    for variant in VOICES[split]:
        for turn in range(ROUNDS[split]):
            for digit in range(len(WORDS)):
                accent, speed, pitch = draw.choice(ACCENTS), draw.randint(*SPEEDS), draw.randint(*PITCHES)
                name = f"clips/{split}/{variant}-{turn:02d}-{digit}.wav"
                yield Clip(name, digit, f"{accent}+{variant}", speed, pitch)


def check_speaker() -> None:
    """Raise `MachineError` where eSpeak NG, or one of the voices, is missing."""
    way_out = "Install it: apt-get install espeak-ng, dnf install espeak-ng or brew install espeak-ng."
    if shutil.which(PROGRAM) is None:
        raise MachineError(f"'{PROGRAM}' is not installed; it says the digits of this example", way_out=way_out)
    listed = subprocess.run([PROGRAM, "--voices=variant"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"!v/(\S+)", listed))
    if missing := sorted({variant for variants in VOICES.values() for variant in variants} - known):
        # It would take its usual voice for those, without a word.
        raise MachineError(
            f"this release of '{PROGRAM}' lacks the voices {', '.join(missing)}",
            way_out="Install release 1.51 or newer.",
        )


def say(clip: Clip, folder: Path) -> None:
    """Write a clip as mono WAV of 16 kHz, without silence around it.

    Raises:
        ValueError: It is longer than the models hear.
    """
    path = folder / clip.name
    words = ["-v", clip.voice, "-s", str(clip.words_a_minute), "-p", str(clip.pitch), "-w", str(path), clip.word]
    subprocess.run([PROGRAM, *words], check=True)
    with path.open("rb") as file:
        samples = read_audio(file, RATE, clip.name).samples
    (loud,) = np.nonzero(np.abs(samples) > SILENCE)
    samples = samples[loud[0] : loud[-1] + 1]
    if len(samples) > RATE * WINDOW_S:
        raise ValueError(f"{clip} takes {len(samples) / RATE:.2f} s")
    soundfile.write(path, samples, RATE)


def transcript(clip: Clip) -> dict[str, Any]:
    """The row for a recogniser."""
    return row(f"{clip.name} transcript", "transcript", "<audio>", clip.word, clip)


def questions(clip: Clip, draw: random.Random) -> Iterator[dict[str, Any]]:
    """The rows for a model that is asked."""
    for task, answer in (("which", clip.word), ("odd or even", "odd" if clip.digit % 2 else "even")):
        yield row(f"{clip.name} {task}", task, "<audio>" + draw.choice(QUESTIONS[task]), answer, clip)


def row(name: str, task: str, asked: str, answer: str, clip: Clip) -> dict[str, Any]:
    """A conversation about a clip."""
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"id": name, "task": task, "messages": messages, "audios": [clip.name]}


def write_rows(path: Path, rows: Sequence[dict[str, Any]], draw: random.Random) -> int:
    """Write rows in a shuffled order; returns their number."""
    shuffled = draw.sample(rows, len(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in shuffled), encoding="utf-8")
    return len(shuffled)


def make_data(folder: Path) -> dict[str, tuple[int, int]]:
    """Write clips and rows; returns the numbers of transcripts and of questions of each split."""
    counts = {}
    for split in VOICES:
        clips, draw = list(plan_clips(split)), random.Random(f"{SEED}/rows/{split}")
        (folder / "clips" / split).mkdir(parents=True, exist_ok=True)
        for clip in clips:
            say(clip, folder)
        transcripts = write_rows(folder / f"transcripts/{split}.jsonl", [transcript(clip) for clip in clips], draw)
        asked = write_rows(
            folder / f"questions/{split}.jsonl", [each for clip in clips for each in questions(clip, draw)], draw
        )
        counts[split] = (transcripts, asked)
    return counts


def main() -> int:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/spoken_digits")
    try:
        check_speaker()
    except MMError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    for split, (transcripts, asked) in make_data(folder / "data").items():
        print(
            f"{folder}/data  {split}: {transcripts:,} transcripts, {asked:,} questions, of {len(VOICES[split])} voices"
        )
    texts = [text for asked in QUESTIONS.values() for text in asked] + ["user\n", "assistant\n", "odd", "even"]
    write_recogniser(folder / "whisper", WORDS)
    write_question_answerer(folder / "omni", [*texts, *WORDS])
    print(f"{folder}/whisper, {folder}/omni  tiny models, still without weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
