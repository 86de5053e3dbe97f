"""The floor: a bare PyTorch loop over batches that lie ready. No data work, no logging, no checkpoints.

`python -m benchmarks.bare_loop MODEL BATCHES STEPS [--preload] [--labelled-rows]` prints one JSON line: time, work and
loss of each step. With `--preload` all batches are in memory before the first step; without it each is read when it is
due. With `--labelled-rows` the output head computes the logits of tokens that have a label, and of no others.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import Qwen3VLForConditionalGeneration  # noqa: E402

from benchmarks.digits import LEARNING_RATE, counts  # noqa: E402


def loss_of(model: Any, batch: dict[str, torch.Tensor], labelled_rows: bool) -> torch.Tensor:
    """The model's own loss; or the same from the rows of hidden states that have a label."""
    if not labelled_rows:
        return model(**batch, use_cache=False).loss
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten()
    rows = (targets != -100).nonzero().squeeze(1)
    return F.cross_entropy(model.lm_head(hidden.flatten(0, 1).index_select(0, rows)), targets[rows])


def main(model_folder: Path, batches_folder: Path, steps: int, preload: bool, labelled_rows: bool) -> None:
    """Train and print."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    files = [batches_folder / f"{step:04d}.safetensors" for step in range(1, steps + 1)]
    batches = [load_file(file) for file in files] if preload else map(load_file, files)
    records = []
    for batch in batches:
        loss = loss_of(model, batch, labelled_rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        records.append({"loss": loss.item(), "time": time.time()})
    print(json.dumps([record | counts(load_file(file)) for record, file in zip(records, files, strict=True)]))


if __name__ == "__main__":
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    main(*folders, int(sys.argv[3]), "--preload" in sys.argv, "--labelled-rows" in sys.argv)
