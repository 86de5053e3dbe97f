"""Makes preference pairs of the digits' reading task: the right answer, and one in which a digit is wrong.

python examples/digits_dpo/make_pairs.py runs/digits runs/digits_dpo
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def make_pairs(rows: Path, pairs: Path, seed: int) -> int:
    """Write a pair for each row that reads digits; returns how many.

    Args:
        rows: JSONL of `examples/digits/make_digits.py`.
        pairs: JSONL with `messages`, `images`, `chosen` and `rejected`.
        seed: Decides which digit is wrong, and how.
    """
    draw = random.Random(seed)
    lines = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["task"] != "reading":
            continue
        *messages, chosen = row["messages"]
        digits = chosen["content"].split()
        place = draw.randrange(len(digits))
        digits[place] = draw.choice([each for each in "0123456789" if each != digits[place]])
        rejected = {**chosen, "content": " ".join(digits)}
        kept = {"id": row["id"], "messages": messages, "images": row["images"]}
        lines.append(json.dumps(kept | {"chosen": chosen, "rejected": rejected}))
    pairs.parent.mkdir(parents=True, exist_ok=True)
    pairs.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def main(digits: str = "runs/digits", out: str = "runs/digits_dpo") -> None:
    """Write training and validation pairs."""
    for seed, name in enumerate(("train", "validation")):
        count = make_pairs(Path(digits, "data", f"{name}.jsonl"), Path(out, "data", f"{name}.jsonl"), seed)
        print(f"{name}: {count:,} pairs")


if __name__ == "__main__":
    main(*sys.argv[1:])
