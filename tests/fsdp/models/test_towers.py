"""Towers of every family: each kind of media has one, and the smallest input of zeros runs all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.context.plan import resolve_context_plan
from mindspeed_mm.fsdp.models.structure.stages import find_cut_points
from mindspeed_mm.fsdp.models.structure.towers import (
    find_media_without_towers,
    find_towers,
    find_uncarried,
    handed_on,
)
from tests.helpers.llava_next import LLAVA_NEXT
from tests.helpers.packed_families import FAMILIES
from tests.helpers.packed_more_families import MORE

WITHOUT_TOWERS = {"molmo2": ["pixel_values", "pixel_values_videos"], "hrm_text prefixes": []}
"""Families with media whose models declare no tower that could run on zeros, and the keys that say so."""
EVERY = {**FAMILIES, **MORE, **LLAVA_NEXT}
WITH_MEDIA = {name: family for name, family in EVERY.items() if family.media and name not in WITHOUT_TOWERS}


def touched(model: Any) -> set[str]:
    """Names of the parameters outside the text model that got gradients."""
    names = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name for name in names if "language_model" not in name and "lm_head" not in name}


@pytest.mark.parametrize("name", WITH_MEDIA)
def test_zeros_run_what_media_run_and_add_nothing(name: str) -> None:
    family = WITH_MEDIA[name]
    model = family.build()
    towers = {tower.name: tower for tower in find_towers(model)}
    kinds = {kind.rstrip("0123456789") for kind in family.media}
    assert kinds <= towers.keys()
    sample = family.samples()[3]  # with every kind of media
    for kind in kinds:
        model.zero_grad(set_to_none=True)
        items = [item for item in sample["media"] if item.kind == kind]
        _features(model, kind, items[0].tensors).backward()
        expected = touched(model)
        model.zero_grad(set_to_none=True)
        fed = [tower for tower in towers.values() if tower.key in items[0].tensors]  # DeepSeek-VL of 7 B has two
        outputs = [output for tower in fed for output in tower.run_idle(model)]
        nothing = sum((output * 0).sum() for output in outputs)
        assert isinstance(nothing, torch.Tensor) and float(nothing.detach()) == 0.0
        nothing.backward()
        assert expected and touched(model) == expected
        assert not any(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)


def _features(model: Any, kind: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A sum over all that a tower hands to the text model for a real item."""

    given = [value for key, value in tensors.items() if key != "video_second_per_grid"]
    name = f"get_{kind}_features"  # of the model itself in the omni models of transformers 5.17
    run = getattr(model.model if hasattr(model.model, name) else model, name)
    return sum(out.sum() for out in handed_on(run(*given, return_dict=True)))


class Mixing(torch.nn.Module):
    """A text model as Llama 3.2 Vision's: its layers look at the pictures themselves."""

    def forward(self, input_ids: torch.Tensor, cross_attention_states: torch.Tensor | None = None) -> None:
        """Nothing is computed."""


def test_features_that_single_layers_read() -> None:
    """Later stages, and ranks with a part of the tokens, would go on without them."""
    granite, qwen = LLAVA_NEXT["granite4_vision"].build(), FAMILIES["qwen3_vl"].build()
    assert find_uncarried(granite.get_decoder()) == ["deepstack_features"]
    assert find_uncarried(Mixing()) == ["cross_attention_states"]
    assert find_uncarried(qwen.get_decoder()) == []
    assert find_cut_points(qwen) and resolve_context_plan(qwen, 1, 2)
    with pytest.raises(ConfigError, match="Granite4VisionTextModel read deepstack_features"):
        find_cut_points(granite)
    with pytest.raises(ConfigError, match="Granite4VisionTextModel read deepstack_features"):
        resolve_context_plan(granite, 1, 2)


@pytest.mark.parametrize("name", WITH_MEDIA)
def test_every_key_of_media_has_a_tower(name: str) -> None:
    assert find_media_without_towers(WITH_MEDIA[name].build()) == []


@pytest.mark.parametrize("name", WITHOUT_TOWERS)
def test_media_without_a_tower_are_told(name: str) -> None:
    model = EVERY[name].build()
    assert find_towers(model) == [] and find_media_without_towers(model) == WITHOUT_TOWERS[name]


def test_a_text_model_has_none() -> None:
    model = FAMILIES["qwen3"].build()
    assert find_towers(model) == find_media_without_towers(model) == []


def test_a_models_own_description_wins() -> None:
    model = MORE["mistral3"].build()
    model.get_towers = list
    assert find_towers(model) == []
    assert find_media_without_towers(model) == ["pixel_values"]


def test_llava_with_a_tower_for_images_of_any_size() -> None:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=4
        ),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    (tower,) = find_towers(transformers.LlavaForConditionalGeneration(config))
    assert max(output.numel() for output in tower.run_idle(transformers.LlavaForConditionalGeneration(config))) < 200
