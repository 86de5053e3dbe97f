"""Writes the reading rows of examples/digits beside their pictures: `reading_train.jsonl`, and `reading_test.jsonl` of
held-out scans.

Run `python examples/digits_grpo/make_prompts.py [DIGITS]` (default `runs/digits/data`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def make_prompts(digits: Path) -> dict[str, int]:
    """Write both files; returns how many rows they have."""
    counts = {}
    for split in ("train", "test"):
        lines = (digits / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["task"] == "reading"]
        name = f"reading_{split}.jsonl"
        (digits / name).write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        counts[name] = len(kept)
    return counts


def main() -> None:
    """Write the files and say what they are."""
    digits = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/digits/data")
    print(", ".join(f"{digits}/{name}: {count:,} rows" for name, count in make_prompts(digits).items()))


if __name__ == "__main__":
    main()
