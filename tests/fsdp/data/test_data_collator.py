from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.data_collator import DATA_COLLATOR, build_collator, register_collator
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.params.data_args import CollateParam, PreprocessParameters
from tests.fsdp.data.conftest import picture


def sample(length: int, trained: int, images: Sequence[Any] = (), name: str = "r:1") -> dict[str, Any]:
    ids = np.arange(10, 10 + length)
    labels = np.where(np.arange(length) >= length - trained, ids, -100)
    return {"sample_id": name, "input_ids": ids, "labels": labels, "media": list(images), "shrunk": False}


def collator(owner: Any, **options: Any) -> Any:
    return build_collator(owner, build_mm_plugin(owner, PreprocessParameters()), CollateParam(**options))


def test_text_batch_is_padded_right_and_shifted_once(tokenizer: Any) -> None:
    batch = collator(tokenizer, model_name="llm_pretrain", pad_to_multiple_of=4)(
        [sample(5, 2), sample(3, 3, name="r:2")]
    )
    pad, no = tokenizer.pad_token_id, -100
    expected = {
        "input_ids": [[10, 11, 12, 13, 14, pad, pad, pad], [10, 11, 12, pad, pad, pad, pad, pad]],
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]],
        "labels": [[no, no, no, 13, 14, no, no, no], [10, 11, 12, no, no, no, no, no]],
        "shift_labels": [[no, no, 13, 14, no, no, no, no], [11, 12, no, no, no, no, no, no]],
    }
    assert {name: batch[name].tolist() for name in expected} == expected
    assert batch["sample_ids"] == ["r:1", "r:2"]
    assert batch.keys() == expected.keys() | {"sample_ids"}
    assert all(batch[name].dtype == torch.int64 for name in expected)


@pytest.mark.parametrize(("multiple", "width"), [(1, 5), (5, 5), (8, 8)])
def test_rows_are_no_longer_than_asked(tokenizer: Any, multiple: int, width: int) -> None:
    assert collator(tokenizer, pad_to_multiple_of=multiple)([sample(5, 2)])["input_ids"].shape == (1, width)


def test_media_of_all_rows_are_joined_in_order(processor: Any) -> None:
    plugin = build_mm_plugin(processor, PreprocessParameters())
    images = [plugin.encode_image(picture(32 + 16 * i, 32, seed=i)) for i in range(3)]
    collate = collator(processor, model_name="qwen3vl")
    batch = collate([sample(5, 2, images[:2]), sample(4, 1), sample(3, 1, images[2:])])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6], [1, 4, 8]]
    assert torch.equal(batch["pixel_values"], plugin.collate(images)["pixel_values"])
    without = collate([sample(5, 2)])
    assert "pixel_values" not in without
    assert without["mm_token_type_ids"].tolist() == [[0] * 8]


def test_image_tokens_are_marked_and_padding_is_not(processor: Any) -> None:
    row = sample(3, 1)
    row["input_ids"][1] = processor.image_token_id
    batch = collator(processor)([row])
    assert batch["mm_token_type_ids"].tolist() == [[0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch["mm_token_type_ids"].dtype == torch.int32


def test_samples_of_a_plugin_may_bring_lists_and_further_tensors(processor: Any) -> None:
    rows = [
        {"sample_id": str(i), "input_ids": [1, 2, 3], "labels": [-100, 2, 3], "pixel_values": torch.full((2, 4), i)}
        for i in range(2)
    ]
    batch = collator(processor)(rows)
    assert batch["pixel_values"].tolist() == [[0.0] * 4] * 2 + [[1.0] * 4] * 2
    assert batch["shift_labels"][0].tolist()[:3] == [2, 3, -100]
    with pytest.raises(DataError, match=r"undocumented \['spectrum'\]"):
        collator(processor)([{**rows[0], "spectrum": torch.zeros(1)}])


def test_collators_come_from_outside_and_declare_their_keys(tokenizer: Any) -> None:
    @register_collator("collator-for-test", keys=["spectrum"])
    class Outside:
        def __init__(self, processor: Any, plugin: Any, collate_param: Any) -> None:
            self.surprise = False

        def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
            batch = {"shift_labels": torch.zeros(1), "sample_ids": ["a"], "spectrum": torch.zeros(1)}
            return {**batch, "surprise": 1} if samples else batch

    collate = collator(tokenizer, model_name="collator-for-test")
    assert "spectrum" in collate([])
    with pytest.raises(DataError, match="surprise"):
        collate([1])


def test_names(tokenizer: Any) -> None:
    assert {"qwen2vl", "qwen3vl", "llm_pretrain"} <= set(DATA_COLLATOR.names())
    with pytest.raises(ConfigError, match="Did you mean 'qwen3vl'"):
        collator(tokenizer, model_name="qwen3v")
