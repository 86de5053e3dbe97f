"""Branch C: a data set of one's own. Sums are made up as they are asked for; no file is read.

Named in the YAML as `training.plugin: [examples/data/sums.py]` and `dataset_type: sums`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_mm.fsdp.data import MMDataset
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of
from mindspeed_mm.fsdp.utils.register import data_register

IGNORED = -100


class Sums(MMDataset):
    """`2 + 3 = 5`, of which the answer is trained. It need not derive from `MMDataset`, which has all that a data
    set may tell.

    Args:
        tokenizer: Of the model.
        numbers: From 0 up to, not with, this.
        count: How many samples.
        seed: Sample i is a function of (seed, i): every worker and every restart sees the same.
    """

    is_deterministic = True

    def __init__(self, tokenizer: Any, numbers: int, count: int, seed: int) -> None:
        self._tokenizer, self._numbers, self._count, self._seed = tokenizer, numbers, count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample: whatever `collate_fn` below can join."""
        draw = random.Random(f"{self._seed}/{index}")
        a, b = draw.randrange(self._numbers), draw.randrange(self._numbers)
        question = self._tokenizer(f"{a} + {b} = ", add_special_tokens=False)["input_ids"]
        answer = self._tokenizer(str(a + b), add_special_tokens=False)["input_ids"] + [self._tokenizer.eos_token_id]
        return {
            "input_ids": question + answer,
            "labels": [IGNORED] * len(question) + answer,
        }

    def place(self, index: int) -> str:
        """The name of a sample, in messages and in the batch."""
        return f"sums-{self._seed}:{index}"

    def collate_fn(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Samples → batch. It wins over `collate_param.model_name`; without it a built-in collator is taken."""
        length = max(len(sample["input_ids"]) for sample in samples)
        pad = self._tokenizer.pad_token_id

        def rows(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([sample[name] + [fill] * (length - len(sample[name])) for sample in samples])

        labels = rows("labels", IGNORED)
        return {
            "input_ids": rows("input_ids", pad),
            "attention_mask": torch.tensor(
                [[1] * len(s["input_ids"]) + [0] * (length - len(s["input_ids"])) for s in samples]
            ),
            "labels": labels,
            # What each token is to predict: the labels moved once to the left. The loss is taken from this.
            "shift_labels": torch.cat([labels[:, 1:], torch.full((len(samples), 1), IGNORED)], dim=1),
        }


@data_register.register("sums", keys={"numbers": 10})
def build(basic_param: Any, preprocess_param: Any, dataset_param: Any) -> tuple[Sums, Sums]:
    """The training and the validation data. `numbers` is a key of `dataset_param` from now on, 10 by default."""
    tokenizer = tokenizer_of(load_processor(preprocess_param.model_name_or_path))
    count = basic_param.max_samples or 10_000
    return Sums(tokenizer, dataset_param.numbers, count, seed=0), Sums(tokenizer, dataset_param.numbers, 100, seed=1)
