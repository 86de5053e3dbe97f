"""The peer: TRL's DPOTrainer and GRPOTrainer on the same rows and the same weights.

`python -m benchmarks.trl_trainers dpo|grpo MODEL ROWS STEPS BATCH OUT` prints one JSON line: time and loss of each
step, and for GRPO the mean length of answers. What is not at TRL's defaults is what the other side does, too: fp32,
nothing computed twice, the same batch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

import datasets  # noqa: E402
import transformers  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.posttraining import ANSWER_TOKENS, BETA, GROUP, LEARNING_RATE  # noqa: E402


class Clock(transformers.TrainerCallback):
    """Notes when each step ended, and what was logged of it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note it."""
        self.times.append(time.time())

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Keep it."""
        self.logs.append(logs)


def common(steps: int, batch: int, out: Path) -> dict[str, Any]:
    """Arguments of both."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": batch,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "dataloader_num_workers": 2,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "beta": BETA,
    }


def rows_of(file: Path, method: str) -> datasets.Dataset:
    """As TRL's documentation writes rows with pictures."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        question, chosen = row["messages"][0]["content"].replace("<image>", ""), row["chosen"]["content"]
        kept = {"prompt": [{"role": "user", "content": question}], "images": row["images"]}
        if method == "dpo":
            rejected = row["rejected"]["content"]
            kept["chosen"] = [{"role": "assistant", "content": chosen}]
            kept["rejected"] = [{"role": "assistant", "content": rejected}]
        else:
            kept["solution"] = chosen
        rows.append(kept)
    return datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))


def right(completions: list[list[dict[str, str]]], solution: list[str], **_: Any) -> list[float]:
    """1 for a right answer."""
    return [float(turns[0]["content"].strip() == answer) for turns, answer in zip(completions, solution, strict=True)]


def main(method: str, model_folder: Path, rows: Path, steps: int, batch: int, out: Path) -> None:
    """Train and print."""
    clock = Clock()
    settings = common(steps, batch, out)
    if method == "grpo":
        answers = {"num_generations": GROUP, "max_completion_length": ANSWER_TOKENS, "temperature": 1.0}
        settings |= answers | {"loss_type": "dapo", "beta": 0.0, "dataloader_num_workers": 0}
    given = {
        "model": transformers.Qwen3VLForConditionalGeneration.from_pretrained(model_folder),
        "train_dataset": rows_of(rows, method),
        "processing_class": transformers.AutoProcessor.from_pretrained(model_folder),
        "callbacks": [clock],
    }
    if method == "dpo":
        trainer = DPOTrainer(args=DPOConfig(**settings), **given)
    else:
        trainer = GRPOTrainer(args=GRPOConfig(**settings), reward_funcs=right, **given)
    trainer.train()
    logs = [each for each in clock.logs if "loss" in each]
    report = [
        {"time": when, "loss": log["loss"], "answer_tokens": log.get("completions/mean_length")}
        for when, log in zip(clock.times, logs, strict=True)
    ]
    print(json.dumps(report))


if __name__ == "__main__":
    name, model, data, count, size, scratch = sys.argv[1:]
    main(name, Path(model), Path(data), int(count), int(size), Path(scratch))
