"""Memory under the plans of the matrix (`plan_matrix.py`): what the fullest rank held, beside what was predicted.

The models are wider than the matrix' own, so that tensors outweigh counters, and all rows are alike: a prediction is of
one micro-batch.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from tests.helpers import tiny_models
from tests.helpers.distributed import run_ranks
from tests.helpers.measured_memory import measured
from tests.helpers.plan_matrix import PLANS, words_of
from tests.helpers.tiny_run import WORDS, make_tiny_run

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [0, 1],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_heads": 4,
    "out_hidden_size": 64,
    "depth": 4,
}
MAKERS = {"vlm": tiny_models.make_tiny_qwen3_vl, "vlm moe": tiny_models.make_tiny_qwen3_vl_moe}
"""Families of the matrix → their models."""
BATCH_LIMIT_S = 1500.0

Figures = dict[str, int]
"""`measured` and `predicted` peaks, and the same of `parameters`, of the rank that held most. Bytes."""


@cache
def peaks(root: str, family: str, ranks: int, plans: tuple[str, ...]) -> dict[str, Figures]:
    """Figures by plan, of plans that take so many ranks, in one start of the processes."""
    yaml = _make_run(Path(root) / family.replace(" ", "_"), family)
    by_rank = run_ranks(ranks, _measure, str(yaml), family, plans, timeout_s=BATCH_LIMIT_S)
    return {plan: _of_fullest([found[plan] for found in by_rank]) for plan in plans}


def _of_fullest(by_rank: list[Figures]) -> Figures:
    fullest = max(by_rank, key=lambda figures: figures["measured"])
    return by_rank[0] | fullest  # the prediction is the first rank's, and of the fullest one


def _measure(yaml: str, family: str, plans: tuple[str, ...]) -> dict[str, Figures]:
    found = {}
    for plan in plans:
        words = words_of(family, PLANS[plan])
        real = measured(Path(yaml), words)
        assert real.peak is not None
        found[plan] = {"measured": real.peak.total_bytes, "measured parameters": real.parameter_bytes}
        if os.environ["RANK"] == "0":
            arguments = load_with_plugins(Path(yaml), words).arguments
            predicted = forecast(arguments, real.batches[-1], world_size=PLANS[plan].ranks)
            found[plan] |= {"predicted": predicted.peak, "predicted parameters": predicted.parameters}
    return found


def _make_run(folder: Path, family: str) -> Path:
    from PIL import Image

    if (folder / "run.yaml").exists():
        return folder / "run.yaml"
    (folder / "images").mkdir(parents=True)
    Image.effect_noise((64, 64), 90).convert("RGB").save(folder / "images" / "0.png")
    answer = " ".join(WORDS[index % len(WORDS)] for index in range(40))
    messages = [{"role": "user", "content": "<image>Go."}, {"role": "assistant", "content": answer}]
    rows = [{"id": f"r{number}", "messages": messages, "images": ["images/0.png"]} for number in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with mock.patch.dict(tiny_models._VISION, VISION):
        MAKERS[family](folder / "model", **TEXT)
    return make_tiny_run(folder)
