from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils import data_collator
from mindspeed_mm.fsdp.data.data_utils.data_collator import (
    DATA_COLLATOR,
    GenericCollator,
    build_collator,
    register_collator,
)
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.positions import TextPositions
from mindspeed_mm.fsdp.params.data_args import CollateParam, PreprocessParameters
from tests.fsdp.data.conftest import picture


def sample(length: int, trained: int, images: Sequence[Any] = (), name: str = "r:1") -> dict[str, Any]:
    ids = np.arange(10, 10 + length)
    labels = np.where(np.arange(length) >= length - trained, ids, -100)
    return {"sample_id": name, "input_ids": ids, "labels": labels, "media": list(images), "shrunk": False}


def collator(owner: Any, positions: Any = None, *, pairs: bool = False, **options: Any) -> Any:
    plugin = build_mm_plugin(owner, PreprocessParameters())
    return build_collator(owner, plugin, CollateParam(**options), positions=positions, pairs=pairs)


@pytest.mark.edge("U6")
@pytest.mark.parametrize(
    ("device", "given", "width"), [("cpu", None, 5), ("cuda", None, 8), ("cuda", 1, 5), ("cpu", 4, 8)]
)
def test_rows_are_padded_to_what_the_device_gains_by_unless_a_multiple_is_given(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, device: str, given: int | None, width: int
) -> None:
    monkeypatch.setattr(data_collator, "get_device_type", lambda: device)
    assert collator(tokenizer, pad_to_multiple_of=given)([sample(5, 2)])["input_ids"].shape == (1, width)


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
    collate = collator(processor, model_name="qwen3vl", pad_to_multiple_of=8)
    batch = collate([sample(5, 2, images[:2]), sample(4, 1), sample(3, 1, images[2:])])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6], [1, 4, 8]]
    assert torch.equal(batch["pixel_values"], plugin.collate(images)["pixel_values"])
    without = collate([sample(5, 2)])
    assert "pixel_values" not in without
    assert without["mm_token_type_ids"].tolist() == [[0] * 8]


def test_a_packed_row_keeps_its_documents_apart(tokenizer: Any) -> None:
    rows = [sample(3, 2), sample(1, 1, name="r:2"), sample(4, 1, name="r:3")]
    batch = collator(tokenizer, TextPositions(), model_name="llm_pretrain", pad_to_multiple_of=6)(rows)
    pad, no = tokenizer.pad_token_id, -100
    expected = {
        "input_ids": [[10, 11, 12, 10, 10, 11, 12, 13, pad, pad, pad, pad]],
        "labels": [[no, 11, 12, no, no, no, no, 13, no, no, no, no]],
        "shift_labels": [[11, 12, no, no, no, no, 13, no, no, no, no, no]],
        "position_ids": [[0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3]],
        "cu_seq_lens_q": [0, 3, 4, 8, 12],
        "cu_seq_lens_k": [0, 3, 4, 8, 12],
    }
    assert {name: batch[name].tolist() for name in expected} == expected
    assert (batch["max_length_q"], batch["max_length_k"], batch["pad_tokens"]) == (4, 4, 4)
    assert batch["sample_ids"] == ["r:1", "r:2", "r:3"]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert "attention_mask" not in batch
    full = collator(tokenizer, TextPositions(), pad_to_multiple_of=4)(rows)
    assert full["cu_seq_lens_q"].tolist() == [0, 3, 4, 8] and full["pad_tokens"] == 0


@pytest.mark.parametrize("packs", [False, True])
def test_weights_of_tokens_go_with_the_labels(tokenizer: Any, packs: bool) -> None:
    weighted = {**sample(4, 3), "loss_weights": np.array([0.0, 0.5, 2.0, 1.0], np.float32)}
    plain = sample(3, 1, name="r:2")
    positions = TextPositions() if packs else None
    batch = collator(tokenizer, positions, pad_to_multiple_of=4)([weighted, plain])
    assert batch["loss_weights"].flatten().tolist() == [0.5, 2.0, 1.0, 0, 0, 1, 0, 0]
    assert batch["loss_weights"].dtype == torch.float32
    assert ((batch["loss_weights"] > 0) == (batch["shift_labels"] != -100)).all()
    assert "loss_weights" not in collator(tokenizer, positions)([plain])


def test_whisper_predicts_with_its_decoder(tokenizer: Any) -> None:
    batch = collator(tokenizer, model_name="whisper", pad_to_multiple_of=4)([sample(4, 2)])
    assert batch["decoder_input_ids"].tolist() == [[10, 11, 12, 13]]
    assert batch["labels"].tolist() == batch["shift_labels"].tolist() == [[-100, 12, 13, -100]]
    assert not {"input_ids", "attention_mask"} & batch.keys()


def test_pairs_are_two_batches_in_one(processor: Any) -> None:
    plugin = build_mm_plugin(processor, PreprocessParameters())
    image = plugin.encode_image(picture())
    pairs = [
        {"sample_id": "p:1", "chosen": sample(5, 2, [image]), "rejected": sample(3, 1, [image])},
        {"sample_id": "p:2", "chosen": sample(4, 2), "rejected": sample(6, 1)},
    ]
    batch = collator(processor, pairs=True, pad_to_multiple_of=2)(pairs)
    assert batch["sample_ids"] == ["p:1", "p:2"]
    assert batch["pairs"] == 2 and batch["input_ids"].shape == (4, 6)
    assert batch["attention_mask"].sum(1).tolist() == [5, 4, 3, 6]
    assert batch["shift_labels"].tolist()[2] == [-100, 12, -100, -100, -100, -100]
    held = collator(processor)([pairs[0]["chosen"]])
    assert torch.equal(batch["pixel_values"], held["pixel_values"])
    assert "pixel_values" in batch["shared_media"]


def test_pairs_whose_answers_show_other_media_hold_all_of_it(processor: Any) -> None:
    plugin = build_mm_plugin(processor, PreprocessParameters())
    first, second = (plugin.encode_image(picture()) for _ in range(2))
    pair = {"sample_id": "p:1", "chosen": sample(5, 2, [first]), "rejected": sample(3, 1, [second])}
    batch = collator(processor, pairs=True)([pair])
    assert "shared_media" not in batch
    assert len(batch["pixel_values"]) == 2 * len(collator(processor)([pair["chosen"]])["pixel_values"])


def test_a_collator_from_outside_gets_the_answers_of_pairs_as_rows_with_their_media(processor: Any) -> None:
    @register_collator("counting-for-test", keys=["pictures"], packs=True)
    class Outside(GenericCollator):
        def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
            return super().__call__(samples) | {"pictures": torch.tensor([len(each["media"]) for each in samples])}

    image = build_mm_plugin(processor, PreprocessParameters()).encode_image(picture())
    answers = {"chosen": sample(5, 2, [image]), "rejected": sample(3, 1, [image])}
    pairs = [{"sample_id": f"p:{number}", **answers} for number in range(2)]
    batch = collator(processor, pairs=True, model_name="counting-for-test")(pairs)
    assert batch["pictures"].tolist() == [1, 1, 1, 1] and batch["pairs"] == 2 and "shared_media" not in batch
    assert batch["attention_mask"].sum(1).tolist() == [5, 5, 3, 3] and batch["sample_ids"] == ["p:0", "p:1"]
    expected = collator(processor)([pair[side] for side in ("chosen", "rejected") for pair in pairs])
    assert all(torch.equal(batch[key], expected[key]) for key in expected.keys() - {"sample_ids"})
    with pytest.raises(ConfigError, match="does not put samples into one row"):
        collator(processor, TextPositions(), pairs=True, model_name="counting-for-test")


@pytest.mark.parametrize("name", ["pairwise", "whisper", "unpacked-for-test"])
def test_a_collator_that_cannot_pack_says_so(tokenizer: Any, name: str) -> None:
    if name not in DATA_COLLATOR:
        register_collator(name)(type("Outside", (), {"__init__": lambda self, *_: None}))
    with pytest.raises(ConfigError, match="does not put samples into one row"):
        collator(tokenizer, TextPositions(), model_name=name, pairs=name == "pairwise")


def test_a_collator_from_outside_may_pack(tokenizer: Any) -> None:
    @register_collator("packing-for-test", packs=True)
    class Outside(GenericCollator):
        pass

    collate = collator(tokenizer, TextPositions(), model_name="packing-for-test", pad_to_multiple_of=8)
    batch = collate([sample(3, 1), sample(2, 1)])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]


def test_image_tokens_are_marked_and_padding_is_not(processor: Any) -> None:
    row = sample(3, 1)
    row["input_ids"][1] = processor.image_token_id
    batch = collator(processor, pad_to_multiple_of=8)([row])
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
    with pytest.raises(DataError, match=r"undocumented keys: \['spectrum'\]"):
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


@pytest.mark.parametrize(
    ("name", "pairs"),
    [(None, False), ("qwen2vl", False), *((name, True) for name in (None, "qwen2vl", "internvl", "qwen2vl_dpo"))],
)
def test_a_collator_of_any_name_takes_pairs_and_what_a_processor_brings(
    name: str | None, pairs: bool, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = build_mm_plugin(processor, PreprocessParameters())
    monkeypatch.setattr(plugin, "collate", lambda media: {"input_marks": torch.zeros(len(media))} if media else {})
    rows: list[Any] = [sample(3, 1, [plugin.encode_image(picture())])]
    if pairs:
        rows = [{"sample_id": "p:1", "chosen": rows[0], "rejected": rows[0]}]
    batch = build_collator(processor, plugin, CollateParam(model_name=name), pairs=pairs)(rows)
    assert "input_marks" in batch and batch.get("pairs") == (1 if pairs else None)
    assert len(batch["input_ids"]) == (2 if pairs else 1)


def test_names(tokenizer: Any) -> None:
    documented = {"qwen2vl", "qwen3vl", "qwen3omni", "qwen3asr", "internvl", "glm4v_moe", "step3_vl", "llm_pretrain"}
    assert documented | {"whisper", "pairwise"} <= set(DATA_COLLATOR.names())
    with pytest.raises(ConfigError, match="Did you mean 'qwen3vl'"):
        collator(tokenizer, model_name="qwen3v")
