"""The fast paths give what the processors of transformers give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import (
    ProcessorPlugin,
    QwenVLPlugin,
    TextOnlyPlugin,
    build_mm_plugin,
    register_mm_plugin,
)
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from tests.fsdp.data.conftest import picture

SIZES = [(32, 32), (48, 32), (16, 80), (100, 37), (7, 9), (300, 200), (1, 1)]


@pytest.fixture
def plugin(processor: Any) -> Any:
    return build_mm_plugin(processor, PreprocessParameters())


def test_patches_equal_the_processors_to_the_bit(processor: Any, plugin: Any) -> None:
    assert isinstance(plugin, QwenVLPlugin)
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    expected = processor.image_processor(images, return_tensors="pt")
    features = [plugin.encode_image(image) for image in images]
    found = plugin.collate(features)
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert found["pixel_values"].dtype == expected["pixel_values"].dtype
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    for i, image in enumerate(features):
        text = processor.replace_image_token({"image_grid_thw": expected["image_grid_thw"]}, i)
        assert image.token_ids.tolist() == processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_general_plugin_gives_the_same(processor: Any, plugin: Any) -> None:
    general = ProcessorPlugin(processor)
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES[:4])]
    ours, theirs = ([p.encode_image(image) for image in images] for p in (plugin, general))
    assert [f.token_ids.tolist() for f in ours] == [f.token_ids.tolist() for f in theirs]
    one, other = plugin.collate(ours), general.collate(theirs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_configuration_narrows_the_processors_limits(processor: Any) -> None:
    def tokens(**limits: int) -> int:
        plugin = build_mm_plugin(processor, PreprocessParameters(**limits))
        return len(plugin.encode_image(picture(48, 48)).token_ids)

    assert tokens() == 9
    assert tokens(image_max_pixels=32 * 32) == 4
    assert tokens(image_min_pixels=64 * 64) == 16
    assert tokens(image_max_pixels=10**9) == 9
    with pytest.raises(ConfigError, match="at least 3000 and at most 1024"):
        tokens(image_max_pixels=1024, image_min_pixels=3000)


def test_sizes_that_the_processor_refuses_are_an_error_of_the_row(processor: Any, plugin: Any) -> None:
    for candidate in (plugin, ProcessorPlugin(processor)):
        with pytest.raises(DataError, match="10000"):
            candidate.encode_image(picture(1, 10000))


def test_batches_without_images_have_no_image_keys(processor: Any, plugin: Any) -> None:
    assert plugin.collate([]) == {}
    assert ProcessorPlugin(processor).collate([]) == {}


def test_text_models_refuse_images(tokenizer: Any) -> None:
    plugin = build_mm_plugin(tokenizer, PreprocessParameters())
    assert isinstance(plugin, TextOnlyPlugin)
    with pytest.raises(DataError, match="text only"):
        plugin.encode_image(picture())


def test_plugins_come_from_outside_by_the_processors_name(processor: Any) -> None:
    class SomeProcessor:
        tokenizer = processor.tokenizer

    with pytest.raises(AttributeError):
        build_mm_plugin(SomeProcessor(), PreprocessParameters())

    @register_mm_plugin("SomeProcessor")
    class Plugin:
        def __init__(self, processor: Any, preprocess: Any) -> None:
            self.pixels = preprocess.image_max_pixels

    assert build_mm_plugin(SomeProcessor(), PreprocessParameters(image_max_pixels=7)).pixels == 7
