"""Two classifiers that judge what a generator draws; they have learned from scans that it never saw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scans import NAMES, SIDE, Scan

from mindspeed_mm.core.artifacts import read_jsonl
from mindspeed_mm.core.errors import DataError, MMError
from mindspeed_mm.fsdp.sampling.answers.scored import Evaluation, write_evaluation
from mindspeed_mm.fsdp.sampling.answers.scoring import Score, score

GOAL = 0.95
"""Share that each judge must find right."""
LIKENESS = (0.8, 1.25)
"""Bounds of the mean distance to the nearest training scan, as a share of real held-out scans': copies lie below."""


@dataclass(frozen=True)
class Judges:
    """Classifiers of (n, 8, 8) uint8 pictures by name."""

    classifiers: dict[str, Any]

    def digits(self, pictures: np.ndarray) -> dict[str, np.ndarray]:
        """What each judge sees: (n,) digits by its name."""
        return {name: judge.predict(as_features(pictures)) for name, judge in self.classifiers.items()}

    def scores(self, pictures: np.ndarray, digits: Sequence[int]) -> dict[str, Score]:
        """How often each judge sees the digits that are meant."""
        return {name: score((found == np.array(digits)).tolist()) for name, found in self.digits(pictures).items()}


def train_judges(pictures: np.ndarray, digits: Sequence[int]) -> Judges:
    """A support-vector machine and a perceptron, a second or two.

    Args:
        pictures: (n, 8, 8) uint8.
        digits: What they show.
    """
    from sklearn.neural_network import MLPClassifier  # seconds, and only judging needs them
    from sklearn.svm import SVC

    classifiers = {
        "SVC": SVC(C=10),
        "MLP": MLPClassifier((256,), alpha=0.1, learning_rate_init=3e-3, max_iter=1000, random_state=0),
    }
    return Judges({name: judge.fit(as_features(pictures), digits) for name, judge in classifiers.items()})


def as_features(pictures: np.ndarray) -> np.ndarray:
    """(n, 8, 8) uint8 → (n, 64) in 0..1."""
    return pictures.reshape(-1, SIDE * SIDE) / 255


def stacked(scans: Sequence[Scan]) -> tuple[np.ndarray, list[int]]:
    """Pictures (n, 8, 8) and digits of scans."""
    return np.stack([scan.picture for scan in scans]), [scan.digit for scan in scans]


@dataclass(frozen=True)
class Distances:
    """Mean distances to the nearest training scan: what was generated, and real scans that were held out."""

    generated: float
    real: float

    @classmethod
    def to_nearest(cls, training: np.ndarray, generated: np.ndarray, held_out: np.ndarray) -> Distances:
        """Of pictures (n, 8, 8) uint8 each."""
        return cls(*(float(distances_to_nearest(pictures, training).mean()) for pictures in (generated, held_out)))

    def __str__(self) -> str:
        return f"{self.generated:.2f} generated, {self.real:.2f} real and held out"


def distances_to_nearest(pictures: np.ndarray, training: np.ndarray) -> np.ndarray:
    """(n,) Euclidean distances, ink from 0 to 1, to the nearest of the training pictures."""
    a, b = as_features(pictures), as_features(training)
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.sqrt(squares.min(axis=1).clip(0))


def read_manifest(samples: Path) -> list[dict[str, Any]]:
    """Lines of what `mm infer` has made.

    Raises:
        DataError: There is none.
    """
    entries = read_jsonl(samples / "manifest.jsonl") if samples.is_dir() else []
    if not entries:
        raise DataError("there are no samples", where=str(samples), way_out="Make some with mm infer.")
    return entries


def digit_of(prompt: str) -> int:
    """The digit that a caption names."""
    return next(NAMES.index(word) for word in prompt.split() if word in NAMES)


def write_results(
    folder: Path,
    scores: dict[str, Score],
    samples: list[dict[str, Any]],
    distances: Distances,
    media_dir: str = "samples",
) -> None:
    """Write `run/eval/`, which `mm report` shows.

    Args:
        folder: Of the example, with `run` and `samples`.
        scores: By what was judged.
        samples: One entry each, with the keys of an evaluation's samples.
        distances: To the nearest training scan.
        media_dir: Where their pictures lie, in the folder.
    """
    facts = {
        "media_dir": str((folder / media_dir).absolute()),
        "distance_to_nearest_training_scan": {"generated": distances.generated, "real held-out": distances.real},
    }
    overall = score(sample["correct"] for sample in samples)
    (folder / "run" / "eval").mkdir(parents=True, exist_ok=True)
    write_evaluation(Evaluation(scores, overall, facts, samples), folder / "run" / "eval")


def verdict(scores: dict[str, Score], distances: Distances, goal: float = GOAL) -> int:
    """Print what was found, and what is below the goal; returns the exit code."""
    for name, each in scores.items():
        print(f"generated: {name} {each}")
    print(f"distance to the nearest training scan: {distances}")
    problems = [f"{name} below {goal:.0%}" for name, each in scores.items() if each.accuracy < goal]
    if not LIKENESS[0] <= distances.generated / distances.real <= LIKENESS[1]:
        problems.append(f"the distance is not {LIKENESS[0]} to {LIKENESS[1]} times that of real scans")
    for problem in problems:
        print(f"goal missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def run_judge(judge: Callable[[Path], int], default_folder: str) -> int:
    """A judge as a program, with the folder of the example as its argument."""
    try:
        return judge(Path(sys.argv[1] if len(sys.argv) > 1 else default_folder))
    except MMError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
