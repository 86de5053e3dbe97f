"""The peer: transformers' own Trainer on the same rows in the same order, the processor at work in its collator.

`python -m benchmarks.hf_trainer MODEL DATA INDEX STEPS BATCH OUT` prints one JSON line: time, work, loss of each step.
All else is at the Trainer's defaults, two data workers apart.
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
from PIL import Image  # noqa: E402
from transformers import (  # noqa: E402
    AutoProcessor,
    Qwen3VLForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.digits import LEARNING_RATE, counts  # noqa: E402

IGNORED = -100


class ProcessorCollator:
    """Rows → a batch with labels on the answers, as a user of the Trainer writes it."""

    def __init__(self, processor: Any, data_folder: Path) -> None:
        self._processor = processor
        self._data_folder = data_folder
        encode = processor.tokenizer.encode
        self._header = encode("<|im_start|>assistant\n", add_special_tokens=False)
        self._end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Render, tokenise, cut images, mask."""
        texts = [self._processor.apply_chat_template(with_parts(row["messages"]), tokenize=False) for row in rows]
        images = [[Image.open(self._data_folder / name).convert("RGB") for name in row["images"]] for row in rows]
        # Rows are padded as ours are on the device: multiples of 8 tokens cost a CPU time and gain it nothing.
        multiple = 8 if torch.accelerator.is_available() else None
        batch = self._processor(
            text=texts,
            images=images,
            padding=True,
            pad_to_multiple_of=multiple,
            padding_side="right",
            return_tensors="pt",
        )
        batch["labels"] = torch.stack([self._labels(ids) for ids in batch["input_ids"]])
        return dict(batch)

    def _labels(self, ids: torch.Tensor) -> torch.Tensor:
        labels, tokens, length = torch.full_like(ids, IGNORED), ids.tolist(), len(self._header)
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == self._header:
                end = tokens.index(self._end, start + length) + 1
                labels[start + length : end] = ids[start + length : end]
        return labels


def with_parts(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Messages with `<image>` as a typed part, as the chat template reads them."""
    return [{"role": m["role"], "content": list(_parts(m["content"]))} for m in messages]


def _parts(content: str) -> Any:
    before, image, after = content.partition("<image>")
    if before:
        yield {"type": "text", "text": before}
    if image:
        yield {"type": "image"}
    if after:
        yield {"type": "text", "text": after}


class CountingTrainer(Trainer):
    """Keeps each step's batch and loss for the record; nothing is computed on them before the end."""

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.work.append({"batch": counts(inputs), "loss": loss})
        return loss


class Clock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note it."""
        self.times.append(time.time())


def main(model_folder: Path, data: Path, index_file: Path, steps: int, batch_size: int, out: Path) -> None:
    """Train and print."""
    lines = data.read_text(encoding="utf-8").splitlines()
    order = [row for step in json.loads(index_file.read_text())[:steps] for row in step["rows"]]
    clock = Clock()
    trainer = CountingTrainer(
        model=Qwen3VLForConditionalGeneration.from_pretrained(model_folder),
        args=TrainingArguments(
            output_dir=str(out),
            per_device_train_batch_size=batch_size,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            dataloader_num_workers=2,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[json.loads(lines[row]) for row in order],
        data_collator=ProcessorCollator(AutoProcessor.from_pretrained(model_folder), data.parent),
        callbacks=[clock],
    )
    trainer.work = []
    trainer.train()
    records = [
        {"time": when, **work["batch"], "loss": work["loss"].item()}
        for when, work in zip(clock.times, trainer.work, strict=True)
    ]
    print(json.dumps(records))


if __name__ == "__main__":
    model, rows, index, steps_asked, batch, scratch = sys.argv[1:]
    main(Path(model), Path(rows), Path(index), int(steps_asked), int(batch), Path(scratch))
