"""Samples of known length for the tests of orders, and what a loader does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader, MMDataset, build_mm_dataloader
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize, TooLongError
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam


class Texts(MMDataset):
    """Sample i has `lengths[i]` tokens, all of them the number i.

    Args:
        lengths: Of each sample.
        patches: Of each sample.
        bad: Rows that encoding finds bad; measuring too where it is told so.
        basic: `basic_parameters`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        patches: Sequence[int] | None = None,
        bad: Sequence[int] = (),
        measuring_tells: bool = True,
        act: Callable[[int], None] = lambda i: None,
        **basic: Any,
    ) -> None:
        self.lengths, self.patches = list(lengths), list(patches or [0] * len(lengths))
        self.bad, self.measuring_tells, self.act = set(bad), measuring_tells, act
        self.basic_parameters = BasicParameters(**basic)
        self.max_bad_fraction = self.basic_parameters.max_bad_fraction
        self.on_bad_sample = self.basic_parameters.on_bad_sample
        self.truncation = self.basic_parameters.if_too_long
        self.measured: list[int] = []
        self.parts: list[Part] = [Part("a", 0, len(self.lengths))]

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, index: int) -> str:
        return str(index)

    def measure(self, index: int) -> SampleSize:
        self.measured.append(index)
        self.act(index)
        self._check(index, self.measuring_tells)
        return SampleSize(self.lengths[index], self.patches[index])

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._check(index, True)
        return {"input_ids": np.full(self.lengths[index], index)}

    def _check(self, index: int, tells: bool) -> None:
        if self.lengths[index] > self.basic_parameters.cutoff_len:
            raise TooLongError(f"{self.lengths[index]} tokens", where=str(index))
        if index in self.bad and tells:
            raise DataError(f"sample {index} is broken", where=f"rows.jsonl:{index}")

    def collate_fn(self, samples: Sequence[dict[str, Any]]) -> Batch:
        rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
        if self.basic_parameters.packs:
            ids = torch.cat(rows)[None]
            borders = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int32)
            return {"input_ids": ids, "shift_labels": ids.clone(), "cu_seq_lens_q": borders}
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        return {"input_ids": ids, "shift_labels": ids.clone()}


def mixed_lengths(count: int, most: int = 64, seed: int = 0) -> list[int]:
    """Log-normal lengths up to `most`."""
    return np.clip(np.random.default_rng(seed).lognormal(2.5, 0.8, count), 1, most).astype(int).tolist()


def parts_of(*sizes: int) -> list[Part]:
    """Parts called a, b, c … of so many rows each."""
    ends = np.cumsum(sizes).tolist()
    return [Part("abcdef"[n], end - size, end) for n, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def loader(
    dataset: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    accumulation: int = 1,
    micro: int = 1,
    position: DataPosition | None = None,
    seed: int = 5,
    **keys: Any,
) -> MMDataLoader:
    """A loader as the trainer builds it."""
    section = DataloaderParam(**{"num_workers": 0, "drop_last": False, **keys})
    return build_mm_dataloader(
        dataset,
        section,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        dp_rank=rank,
        dp_size=ranks,
        seed=seed,
        position=position,
    )


def steps_of_all(dataset: Any, steps: int, ranks: int = 1, **changes: Any) -> list[list[tuple[str, ...]]]:
    """For each step the samples of its micro-batches over all ranks, by accumulation and then by rank."""
    each = [list(islice(loader(dataset, rank=rank, ranks=ranks, **changes), steps)) for rank in range(ranks)]
    return [
        [tuple(batch["sample_ids"]) for turn in zip(*step, strict=True) for batch in turn]
        for step in zip(*each, strict=True)
    ]


def names_in(steps: Sequence[Sequence[tuple[str, ...]]]) -> list[int]:
    """Sample numbers in the order in which they are trained on."""
    return [int(name) for step in steps for batch in step for name in batch]
