"""Judges what the moving_digits_wan example has drawn: is it the digit in every frame, and does it move as asked?

Run `python examples/moving_digits_wan/judge_moving_digits.py [FOLDER]` (default `runs/moving_digits_wan`) after
`mm infer`. It reads `FOLDER/samples`, writes `FOLDER/run/eval` for `mm report`, and ends with exit code 1 below the
goal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from clips import CANVAS, DIRECTIONS, FRAMES, caption, cut_out, direction_of, draw_clip  # first: finds the others
from judges import (
    Distances,
    Judges,
    digit_of,
    read_manifest,
    run_judge,
    train_judges,
    verdict,
    write_results,
)
from PIL import Image
from scans import NAMES, SIDE, Scan, generators_scans, load_scans, split_scans

from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, read_clip
from mindspeed_mm.fsdp.sampling.answers.scoring import score

JITTER = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
"""Windows around a digit may be a pixel off; the judges learn that."""


def read_clips(folder: Path, entries: list[dict[str, Any]]) -> np.ndarray:
    """(n, 5, 16, 16) uint8, grey."""
    clips = []
    for entry in entries:
        with (folder / entry["file"]).open("rb") as file:
            clips.append(read_clip(file, FRAMES, ClipSampling(), as_rgb, entry["file"])[0])
    return np.stack(clips)


def as_rgb(picture: Image.Image) -> np.ndarray:
    """(16, 16, 3) uint8."""
    return np.asarray(picture.convert("RGB"))


def train_window_judges(scans: list[Scan]) -> Judges:
    """Judges of windows that `cut_out` cuts, also of such as are a pixel off."""
    windows = [cut_out(np.pad(scan.picture, (CANVAS - SIDE) // 2)) for scan in scans]
    pictures = [np.roll(window, shift, axis=(0, 1)) for window in windows for shift in JITTER]
    return train_judges(np.stack(pictures), [scan.digit for scan in scans for _ in JITTER])


def windows_of(clips: np.ndarray) -> np.ndarray:
    """(n, 5, 16, 16) → (n · 5, 8, 8): the digit of every frame."""
    return np.stack([cut_out(frame) for clip in clips for frame in clip])


def judge_clips(judges: Judges, clips: np.ndarray, prompts: list[str]) -> dict[str, np.ndarray]:
    """What is right of each clip, (n,) bool: by each judge, the digit in all frames; the direction of motion."""
    meant = np.array([digit_of(prompt) for prompt in prompts])[:, None]
    found = judges.digits(windows_of(clips))
    right = {
        f"{name}, digit in every frame": (digits.reshape(-1, FRAMES) == meant).all(axis=1)
        for name, digits in found.items()
    }
    right["direction of motion"] = np.array(
        [direction_of(clip) == prompt.split()[-1] for clip, prompt in zip(clips, prompts, strict=True)]
    )
    return right


def judge(folder: Path) -> int:
    """Score the samples, write the results, print them; returns the exit code.

    Args:
        folder: Of the example.
    """
    entries = read_manifest(folder / "samples")
    clips, prompts = read_clips(folder / "samples", entries), [entry["prompt"] for entry in entries]
    splits = split_scans(load_scans())
    judges = train_window_judges(splits["judge"])
    for name, outcomes in judge_clips(judges, *real_clips(generators_scans(splits))).items():
        print(f"on clips of the generator's real scans: {name} {score(outcomes.tolist())}")
    right = judge_clips(judges, clips, prompts)
    scores = {name: score(outcomes.tolist()) for name, outcomes in right.items()}
    training = windows_of(real_clips(splits["train"])[0][:, :1])
    held_out = windows_of(real_clips(splits["judge"])[0][:, :1])
    distances = Distances.to_nearest(training, windows_of(clips), held_out)
    strips = write_strips(folder / "samples", clips, entries)
    write_results(folder, scores, describe(entries, strips, right), distances)
    return verdict(scores, distances)


def real_clips(scans: list[Scan]) -> tuple[np.ndarray, list[str]]:
    """Clips of scans, in turn left and right, and their captions."""
    directions = [list(DIRECTIONS)[number % len(DIRECTIONS)] for number in range(len(scans))]
    clips = [draw_clip(scan.picture, direction) for scan, direction in zip(scans, directions, strict=True)]
    return np.stack(clips), [caption(scan.digit, way) for scan, way in zip(scans, directions, strict=True)]


def write_strips(samples: Path, clips: np.ndarray, entries: list[dict[str, Any]]) -> list[str]:
    """The frames of each clip side by side, for the report; returns their names."""
    (samples / "strips").mkdir(exist_ok=True)
    names = [f"strips/{Path(entry['file']).stem}.png" for entry in entries]
    for name, clip in zip(names, clips, strict=True):
        framed = np.pad(clip, ((0, 0), (0, 0), (0, 1)), constant_values=128)
        Image.fromarray(np.concatenate(list(framed), axis=1)).save(samples / name)
    return names


def describe(entries: list[dict[str, Any]], strips: list[str], right: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """One entry a clip for the report; right when everything is."""
    samples = []
    for i, (entry, strip) in enumerate(zip(entries, strips, strict=True)):
        wrong = [name for name, outcomes in right.items() if not outcomes[i]]
        samples.append(
            {
                "id": Path(entry["file"]).stem,
                "task": NAMES[digit_of(entry["prompt"])],
                "image": strip,
                "question": entry["prompt"],
                "expected": entry["prompt"],
                "given": f"wrong: {', '.join(wrong)}" if wrong else entry["prompt"],
                "correct": not wrong,
            }
        )
    return samples


if __name__ == "__main__":
    sys.exit(run_judge(judge, "runs/moving_digits_wan"))
