"""What a plain collator leaves out is made of what it gives, or named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataloader
from mindspeed_mm.fsdp.data.dataloader.fetch import completed
from mindspeed_mm.fsdp.params.data_args import DataloaderParam

pytestmark = pytest.mark.edge("R6")


class Rows:
    """A plugin's data set: row i is i, i+1, i+2, the first not trained."""

    def __init__(self, collate_fn: Any) -> None:
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 3)
        return {"input_ids": ids, "labels": torch.cat([torch.tensor([-100]), ids[1:]])}


def batches(dataset: Any, **changes: Any) -> list[dict[str, Any]]:
    section = DataloaderParam(num_workers=0, shuffle=False, **changes)
    split = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 1}
    return [batch for step in islice(build_mm_dataloader(dataset, section, **split), 3) for batch in step]


@pytest.mark.edge("R12")
def test_torchs_own_collate_is_enough() -> None:
    first, second, _ = batches(Rows(default_collate))
    assert first["shift_labels"].tolist() == [[1, 2, -100], [2, 3, -100]]
    assert (first["sample_ids"], second["sample_ids"]) == (["0", "1"], ["2", "3"])
    assert set(first) == {"input_ids", "labels", "shift_labels", "sample_ids"}


@pytest.mark.edge("R12")
def test_a_sample_reaches_the_collator_as_the_data_set_gave_it() -> None:
    seen: list[Sequence[Any]] = []

    def collate(samples: Sequence[Any]) -> Any:
        seen.append(samples)
        return default_collate(samples)

    batches(Rows(collate))
    assert all(set(sample) == {"input_ids", "labels"} for samples in seen for sample in samples)


def test_names_and_shifted_labels_that_a_collator_gives_are_kept() -> None:
    given = {"labels": torch.ones(1, 3, dtype=torch.long), "shift_labels": torch.zeros(1, 3), "sample_ids": ["own"]}
    found = completed(given, ["0"])
    assert (found["sample_ids"], found["shift_labels"].tolist()) == (["own"], [[0, 0, 0]])


def test_a_collator_may_give_the_same_batch_again() -> None:
    batch = {"labels": torch.ones(1, 3, dtype=torch.long)}
    assert [completed(batch, [name])["sample_ids"] for name in "ab"] == [["a"], ["b"]]


@pytest.mark.parametrize(
    "borders",
    [{"cu_seq_lens_q": torch.tensor([0, 3, 5], dtype=torch.int32)}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}],
    ids=["cu_seq_lens_q", "position_ids"],
)
def test_no_document_predicts_the_next_one(borders: dict[str, torch.Tensor]) -> None:
    batch = completed(BatchEncoding({"labels": torch.tensor([[10, 11, 12, 20, 21]]), **borders}), ["0", "1"])
    assert batch["shift_labels"].tolist() == [[11, 12, -100, 21, -100]]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": torch.ones(1, 2)}, "neither labels nor shift_labels; its keys are 'input_ids'"),
        ({"labels": [[1, 2]]}, "labels are a list, not whole numbers of shape"),
        ({"labels": torch.ones(2)}, r"labels are a tensor \(2,\) of torch.float32"),
        ([1, 2], "the collator gave a list, a batch is a dict"),
    ],
)
def test_what_cannot_be_completed_is_named(batch: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        batches(Rows(lambda samples: batch))
