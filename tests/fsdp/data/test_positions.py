"""Whose rule counts positions, and which media of a batch are a sample's. That the rules are the models' own is shown
by `tests/fsdp/models/test_packed_rows.py`, where models count for themselves what is compared with.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.positions import (
    MEDIA_OF,
    RopeIndexPositions,
    TextPositions,
    build_positions,
    find_rope_index,
    in_one_form,
    inputs_of_samples,
)


def test_text_counts_from_zero(text_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    for folder in (text_folder, tmp_path):  # a tokenizer may lie in a folder of its own
        rule = build_positions(folder, tokenizer)
        assert isinstance(rule, TextPositions)
        assert rule(np.array([5, 6, 7]), {}).tolist() == [[0, 1, 2]]


def test_media_are_counted_by_the_models_class(vlm_folder: Path, processor: Any) -> None:
    rule = build_positions(vlm_folder, processor)
    assert isinstance(rule, RopeIndexPositions)
    assert rule.reads == {"image_grid_thw", "video_grid_thw"}
    start, image, end = (processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _MARKS)
    ids = np.array([5, start, *[image] * 6, end, 7])
    marks = (ids == image).astype(np.int32)
    rows = rule(ids, {"mm_token_type_ids": marks, "image_grid_thw": torch.tensor([[1, 4, 6]])})
    assert rows.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert rule(np.array([5, 6]), {}).tolist() == [[0, 1]] * 4


def test_tokens_of_media_that_are_not_there_are_told(vlm_folder: Path, processor: Any) -> None:
    """The model's own code says no more than that None is no iterator."""
    rule = build_positions(vlm_folder, processor)
    image = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids = np.array([5, *[image] * 6, 7])
    marks = (ids == image).astype(np.int32)
    short = {"mm_token_type_ids": marks, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    for inputs, told in (({"mm_token_type_ids": marks}, "none"), (short, "image_grid_thw of 1")):
        with pytest.raises(DataError, match=rf"tokens of media do not fit its media \({told}\)"):
            rule(ids, inputs)


_MARKS = ("vision_start", "image_pad", "vision_end")


def test_a_processor_without_its_model_cannot_tell(processor: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        build_positions(tmp_path, processor)


def test_encoder_decoders_do_not_pack(tokenizer: Any, tmp_path: Path) -> None:
    transformers.WhisperConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"encoder-decoder.*LengthGroupedSampler"):
        build_positions(tmp_path, tokenizer)


def test_a_rule_that_asks_for_more_is_refused() -> None:
    config = transformers.GlmImageConfig(architectures=["GlmImageForConditionalGeneration"])
    owner = find_rope_index(config)
    assert owner is not None
    with pytest.raises(ConfigError, match="images_per_sample"):
        RopeIndexPositions(owner, config)


def sample(*kinds: str, **arrays: Any) -> dict[str, Any]:
    return {"sample_id": "r:1", "media": [SimpleNamespace(kind=kind) for kind in kinds], **arrays}


def test_each_sample_gets_its_media() -> None:
    samples = [sample("image", "video"), sample(), sample("audio", "image", "image")]
    media = {
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4], [1, 6, 6]]),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
        "feature_attention_mask": torch.ones(1, 5),
        "pixel_values": torch.zeros(99, 3),
    }
    first, second, third = inputs_of_samples(samples, media, MEDIA_OF)
    assert first["image_grid_thw"].tolist() == [[1, 2, 2]] and first["video_grid_thw"].tolist() == [[2, 2, 2]]
    assert second == {}
    assert third["image_grid_thw"].tolist() == [[1, 4, 4], [1, 6, 6]] and len(third["feature_attention_mask"]) == 1
    assert "pixel_values" not in first


def test_sound_of_videos_counts_where_it_comes_with_them() -> None:
    samples = [sample("video"), sample("audio", "video")]
    media = {"feature_attention_mask": torch.arange(3)[:, None], "use_audio_in_video": True}
    found = inputs_of_samples(samples, media, MEDIA_OF)
    assert [inputs["feature_attention_mask"].flatten().tolist() for inputs in found] == [[0], [1, 2]]
    assert all(inputs["use_audio_in_video"] for inputs in found)


def test_arrays_that_samples_bring_themselves_stay_theirs() -> None:
    samples = [sample(image_grid_thw=torch.tensor([[1, 2, 2]])), sample()]
    found = inputs_of_samples(samples, {"image_grid_thw": torch.tensor([[1, 2, 2]])}, MEDIA_OF)
    assert found[0]["image_grid_thw"].tolist() == [[1, 2, 2]] and found[1] == {}


def test_rows_that_are_nobodys_are_told() -> None:
    with pytest.raises(DataError, match="has 2 rows"):
        inputs_of_samples([sample("image")], {"image_grid_thw": torch.zeros(2, 3)}, MEDIA_OF)


def test_rows_that_positions_do_not_look_at_may_be_any_number() -> None:
    """AudioFlamingo 3 hears a sound in windows, each of which is a row; its positions count text alone."""
    media = {"input_features_mask": torch.ones(3, 5)}
    assert inputs_of_samples([sample("audio")], media, TextPositions.reads) == [{}]


def test_whole_numbers_and_others_join() -> None:
    bits = torch.tensor([[0.5]]).view(torch.int32)
    joined = torch.cat(in_one_form([torch.tensor([[3]]), bits]), dim=1)
    assert joined.view(torch.float32).tolist() == [[3.0, 0.5]]
    assert in_one_form([torch.tensor([[3]])])[0].dtype == torch.int64
