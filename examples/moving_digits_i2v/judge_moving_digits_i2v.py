"""Judges what the moving_digits_i2v example has drawn: does the digit that was given move, and where it was asked to?

Run `python examples/moving_digits_i2v/judge_moving_digits_i2v.py [FOLDER]` (default `runs/moving_digits_i2v`) after
`mm infer`. It reads `FOLDER/samples`, writes `FOLDER/run/eval` for `mm report` and `FOLDER/result.png`, and ends with
exit code 1 below the goal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from centred_clips import caption, draw_clip  # first: it finds the others
from clips import DIRECTIONS, FRAMES, direction_of
from judge_moving_digits import read_clips, train_window_judges, windows_of, write_strips
from judges import Distances, Judges, read_manifest, run_judge, verdict, write_results
from PIL import Image
from scans import NAMES, Scan, load_scans, split_scans

from mindspeed_mm.fsdp.sampling.answers.scoring import score

SHOWN_CLIPS = 12
GOAL = 0.9
"""Share of clips that must be right in each way."""


def judge_clips(judges: Judges, clips: np.ndarray, given: Sequence[Scan], ways: Sequence[str]) -> dict[str, np.ndarray]:
    """What is right of each clip, (n,) bool.

    Args:
        judges: Of windows around digits.
        clips: (n, 5, 16, 16) uint8.
        given: The scan in each first frame.
        ways: What was asked of each.
    """
    meant = np.array([scan.digit for scan in given])[:, None]
    right = {
        f"{name}, the given digit in every frame": (found.reshape(-1, FRAMES) == meant).all(axis=1)
        for name, found in judges.digits(windows_of(clips)).items()
    }
    # Not just some seven: of all scans that were given, the last frame is most like the one of this clip.
    indices = np.array([scan.index for scan in given])
    last, scans = (
        windows_of(clips[:, -1:]),
        windows_of(np.stack([draw_clip(scan.picture, "left")[:1] for scan in given])),
    )
    apart = np.square(last[:, None].astype(float) - scans[None].astype(float)).sum(axis=(2, 3))
    right["the very scan in the last frame"] = indices[apart.argmin(axis=1)] == indices
    right["direction of motion"] = np.array([direction_of(clip) == way for clip, way in zip(clips, ways, strict=True)])
    return right


def judge(folder: Path) -> int:
    """Score the samples, write the results, print them; returns the exit code.

    Args:
        folder: Of the example.
    """
    entries, scans, splits = read_manifest(folder / "samples"), load_scans(), split_scans(load_scans())
    given = [scans[int(Path(entry["image"]).stem)] for entry in entries]
    ways = [entry["prompt"].split()[-1] for entry in entries]
    clips = read_clips(folder / "samples", entries)
    judges = train_window_judges(splits["judge"])
    real = np.stack([draw_clip(scan.picture, way) for scan, way in zip(given, ways, strict=True)])
    for name, outcomes in judge_clips(judges, real, given, ways).items():
        print(f"on clips of the real scans: {name} {score(outcomes.tolist())}")
    right = judge_clips(judges, clips, given, ways)
    scores = {name: score(outcomes.tolist()) for name, outcomes in right.items()}
    training, held_out = (
        windows_of(np.stack([draw_clip(scan.picture, "left")[:1] for scan in splits[name]]))
        for name in ("train", "validation")
    )
    distances = Distances.to_nearest(training, windows_of(clips), held_out)
    strips = write_strips(folder / "samples", clips, entries)
    samples = [
        {
            "id": Path(entry["file"]).stem,
            "task": way,
            "image": strip,
            "question": entry["prompt"],
            "expected": f"a {NAMES[scan.digit]}: {caption(way)}",
            "given": ", ".join(f"wrong: {name}" for name in right if not right[name][i]) or "as asked",
            "correct": all(outcomes[i] for outcomes in right.values()),
        }
        for i, (entry, strip, scan, way) in enumerate(zip(entries, strips, given, ways, strict=True))
    ]
    write_results(folder, scores, samples, distances)
    write_picture(folder, strips)
    return verdict(scores, distances, GOAL)


def write_picture(folder: Path, strips: Sequence[str]) -> None:
    """`result.png`: clips of some first frames, side by side by way, enlarged."""
    ways = len(DIRECTIONS)
    step = max(1, len(strips) // SHOWN_CLIPS // ways) * ways  # whole groups of the same first frame
    shown = [name for start in range(0, len(strips), step) for name in strips[start : start + ways]]
    opened = [np.asarray(Image.open(folder / "samples" / name)) for name in shown[:SHOWN_CLIPS]]
    framed = [np.pad(strip, ((0, 2), (0, 4)), constant_values=255) for strip in opened]
    sheet = Image.fromarray(
        np.concatenate([np.concatenate(framed[i : i + ways], 1) for i in range(0, len(framed), ways)])
    )
    sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(folder / "result.png")


if __name__ == "__main__":
    sys.exit(run_judge(judge, "runs/moving_digits_i2v"))
