"""The workload: the digits example with random weights on disk, and the batches that `mm train` will see, written out.

`python -m benchmarks.digits FOLDER STEPS BATCH` makes it. It is a process of its own, so that who measures stays small.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes

BATCH_SIZE = 16
SEED = 42
LEARNING_RATE = 1e-3

CONFIG = """\
model:
  model_name_or_path: {folder}/model
data:
  dataset_param:
    attr: {{messages: messages, role_tag: role, content_tag: content, user_tag: user, assistant_tag: assistant}}
    basic_parameters: {{dataset: {folder}/data/train.jsonl, dataset_dir: {folder}/data}}
  dataloader_param: {{num_workers: 2}}
training: {{lr: {lr}, micro_batch_size: {batch}, seed: {seed}}}
"""


@dataclass(frozen=True)
class Workload:
    """A folder with `model`, `data`, `run.yaml` and `batches/NNNN.safetensors`."""

    folder: Path

    @property
    def model(self) -> Path:
        """Model folder with weights."""
        return self.folder / "model"

    @property
    def config(self) -> Path:
        """What `mm train` is given."""
        return self.folder / "run.yaml"

    @property
    def batches(self) -> Path:
        """One file a step, and `index.json`."""
        return self.folder / "batches"

    def index(self) -> list[dict[str, Any]]:
        """What each step holds: text positions, patches, tokens, label tokens, rows of the data set."""
        return json.loads((self.batches / "index.json").read_text(encoding="utf-8"))


def prepare(folder: Path, steps: int, batch_size: int = BATCH_SIZE) -> Workload:
    """Make the workload, once in a folder, with at least `steps` batches."""
    workload = Workload(folder)
    if not (workload.batches / "index.json").exists() or len(workload.index()) < steps:
        print(f"  making the digits data and {steps} batches of {batch_size}", flush=True)
        processes.run(
            [sys.executable, "-m", "benchmarks.digits", str(folder), str(steps), str(batch_size)], timeout_s=300
        )
    return workload


def main(folder: Path, steps: int, batch_size: int) -> None:
    """Write all of it."""
    from mindspeed_mm.quickstart.make_digits import make_digits

    make_digits(folder)
    write_weights(folder / "model")
    config = CONFIG.format(folder=folder, lr=LEARNING_RATE, batch=batch_size, seed=SEED)
    (folder / "run.yaml").write_text(config, encoding="utf-8")
    write_batches(Workload(folder), steps)


def write_weights(model_folder: Path) -> None:
    """Random weights, the same each time: every contender loads the same file."""
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(SEED)
    Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(model_folder)).save_pretrained(model_folder)


def write_batches(workload: Workload, steps: int) -> None:
    """Write the first batches of our own data loader, in this process and in the order of a run."""
    from safetensors.torch import save_file

    from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
    from mindspeed_mm.fsdp.params.loader import load_config

    arguments = load_config(workload.config, ["data.dataloader_param.num_workers=0"]).arguments
    dataset, _ = build_mm_dataset(arguments.data.dataset_param, seed=arguments.training.seed)
    loader = build_mm_dataloader(
        dataset,
        arguments.data.dataloader_param,
        micro_batch_size=arguments.training.micro_batch_size,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=arguments.training.seed,
    )
    row_of = {str(dataset.place(row)): row for row in range(len(dataset))}
    workload.batches.mkdir(exist_ok=True)
    index = []
    for step, [batch] in zip(range(1, steps + 1), loader, strict=False):
        index.append(counts(batch) | {"rows": [row_of[sample_id] for sample_id in batch["sample_ids"]]})
        tensors = {name: value for name, value in batch.items() if name not in ("shift_labels", "sample_ids")}
        save_file(tensors, workload.batches / f"{step:04d}.safetensors")
    (workload.batches / "index.json").write_text(json.dumps(index), encoding="utf-8")


def counts(batch: dict[str, Any]) -> dict[str, int]:
    """How much work a batch is."""
    return {
        "positions": batch["input_ids"].numel(),
        "patches": len(batch["pixel_values"]),
        "tokens": int(batch["attention_mask"].sum()),
        "label_tokens": int((batch["labels"] != -100).sum()),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
