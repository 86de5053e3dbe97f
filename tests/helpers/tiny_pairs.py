"""A run on preference pairs that is small enough for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.tiny_run import WORDS, make_rows, make_tiny_run

PAIRS: dict[str, Any] = {
    "dataset_type": "huggingface",
    "attr": {
        "formatting": "sharegpt", "messages": "messages", "images": "images", "role_tag": "role",
        "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "ranking": True, "chosen": "chosen", "rejected": "rejected",
    },
}  # fmt: skip
"""Where a row of `make_pairs` keeps what."""


def make_pairs(folder: Path, count: int = 24, images: Sequence[int] = (1, 0, 2)) -> Path:
    """Rows of `make_rows`, each with a second answer of another length; returns the JSONL."""
    path = make_rows(folder, count, images=images)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for index, row in enumerate(rows):
        *row["messages"], chosen = row["messages"]
        worse = " ".join(WORDS[(index + place) % len(WORDS)] for place in range(index % 4 + 1)) + " thing"
        row |= {"chosen": chosen, "rejected": {**chosen, "content": worse}}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_tiny_pairs(folder: Path, images: Sequence[int] = (1, 0, 2), **sections: dict[str, Any]) -> Path:
    """Model, pairs and `run.yaml` of DPO in `folder`; returns the YAML's path. `sections` as of `tiny_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_pairs(folder, images=images)
    basic = {"dataset": str(rows), "dataset_dir": str(folder), "stage": "rm"}
    loader = {"num_workers": 0, "shuffle": True}
    data = {"dataset_param": PAIRS | {"basic_parameters": basic}, "dataloader_param": loader}
    given = {"data": data, "posttrain": {"method": "dpo"}} | sections
    return make_tiny_run(folder, **given)
