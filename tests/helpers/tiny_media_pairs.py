"""A generator's run on preference pairs that is small enough for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_generator_run import make_tiny_generator_run

PAIRS = ("posttrain.method=dpo", "data.dataset_param.basic_parameters.stage=rm")
LORA = ("training.lora.enable=true", "training.lora.rank=2")


def make_tiny_media_pairs(folder: Path, **sections: dict[str, Any]) -> Path:
    """A FLUX run whose rows have a rejected side and scores; returns the YAML, which `PAIRS` makes one on pairs."""
    path = make_tiny_generator_run(folder, **sections)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    for at, row in enumerate(rows):
        row |= {"file_rejected": rows[(at + 1) % len(rows)]["path"], "score": 0.8, "score_rejected": 0.1 * (at % 4)}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
