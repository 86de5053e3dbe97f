"""Says how many drawn digits the judges of `examples/digits_flux` recognise.

Run `python examples/digits_flux_grpo/judge.py FOLDER` on what `mm infer` has written.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "digits_flux"))

from judge_digits import read_pictures
from judges import digit_of, read_manifest, stacked, train_judges
from scans import load_scans, split_scans


def shares(folder: Path) -> dict[str, float]:
    """Judge → share of the samples in which it sees the digit of the prompt."""
    entries = read_manifest(folder)
    judges = train_judges(*stacked(split_scans(load_scans())["judge"]))
    meant = [digit_of(entry["prompt"]) for entry in entries]
    return {name: score.accuracy for name, score in judges.scores(read_pictures(folder, entries), meant).items()}


if __name__ == "__main__":
    for judge, share in shares(Path(sys.argv[1])).items():
        print(f"{judge} {share:.1%}")
