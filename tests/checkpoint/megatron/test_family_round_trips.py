"""Each family from the hub's layout into Megatron's, divided anew again and again, and back: every bit is there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.keymap import check_used_once
from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor, LazyTensor
from mindspeed_mm.checkpoint.megatron.families import FAMILIES, family_of
from mindspeed_mm.checkpoint.megatron.family import MegatronModel
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout, Stages
from mindspeed_mm.checkpoint.megatron.sharding import divide, join
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError
from tests.helpers.megatron_models import LANGUAGE_MODELS, NAMES, save_tiny

TEXT: dict[str, Stages] = {
    "pp1": ((5,),),
    "pp2": ((2, 3),),
    "pp4 uneven": ((2, 1, 1, 1),),
    "pp4 without text first": ((0, 1, 2, 2),),
    "pp2 text alone last": ((0, 5),),
    "pp2 vpp2": ((1, 1), (2, 1)),
    "pp4 vpp2 without text in the first chunk": ((0, 0, 0, 1), (1, 1, 1, 1)),
}
COVER = (
    ("pp1", 1, 1, False),
    ("pp2", 2, 2, False),
    ("pp4 uneven", 4, 1, False),
    ("pp2 text alone last", 2, 1, False),
    ("pp2 vpp2", 1, 2, False),
    ("pp4 vpp2 without text in the first chunk", 4, 2, True),
    ("pp4 without text first", 2, 2, True),
    ("pp1", 4, 2, False),
)
"""Pipeline, tensor ranks, expert ranks, whether the pictures' tower is spread over places."""


def layout_of(model: MegatronModel, pipeline: str, tp: int, ep: int, spread: bool) -> MegatronLayout:
    text = TEXT[pipeline]
    layers = {"text": text}
    for tower, depth in model.depths.items():
        if tower != "text":
            layers[tower] = tower_stages(text, depth, spread)
    return MegatronLayout(layers, tp=tp, ep=ep if model.experts else 1)


def tower_stages(text: Stages, depth: int, spread: bool) -> Stages:
    """On the first place, or one layer there and the others on the second."""
    stages = len(text[0])
    counts = [1, depth - 1] if spread and stages > 1 else [depth]
    counts += [0] * (len(text) * stages - len(counts))
    return tuple(tuple(counts[i : i + stages]) for i in range(0, len(counts), stages))


def written(tensor: LazyTensor) -> HeldTensor:
    """As if a file held it."""
    return HeldTensor(tensor.read().clone())


def pass_through(layouts: Iterator[MegatronLayout], model: MegatronModel, folder: Path) -> None:
    """From the hub into one layout after the other, and at last back."""
    with open_weights(folder) as stored:
        steps = model.key_map.steps(stored)
        whole = {key: tensor for step in steps for key, tensor in step.targets.items()}
        check_used_once(steps, stored, whole)
        for layout in layouts:
            layout.check(model.depths, model.experts)
            shards = divide(whole, model, layout)
            files = {
                rank: {chunk: {key: written(t) for key, t in of.items()} for chunk, of in chunks.items()}
                for rank, chunks in shards.items()
            }
            joined = join(files, model, layout)
            assert joined.keys() == whole.keys(), layout
            whole = {key: written(tensor) for key, tensor in joined.items()}
        steps = model.key_map.inverse.steps(whole)
        hub = {key: tensor for step in steps for key, tensor in step.targets.items()}
        check_used_once(steps, whole, stored)
        for key, tensor in hub.items():
            assert torch.equal(tensor.read(), stored[key].read()), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


REPEATS = set(LANGUAGE_MODELS) - {"qwen3_moe", "deepseek_v3"}
"""Models whose division is that of another one."""


@pytest.mark.edge("BN15")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in REPEATS else n for n in NAMES])
def test_a_model_passes_through_every_kind_of_layout_and_loses_nothing(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    config = json.loads((folder / "config.json").read_text())
    model = family_of(config).model(config)
    pass_through((layout_of(model, *row) for row in COVER), model, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_passes_through_every_combination_of_layouts(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    config = json.loads((folder / "config.json").read_text())
    model = family_of(config).model(config)
    expert_ranks = (1, 2) if model.experts else (1,)
    product = itertools.product(TEXT, (1, 2, 4), expert_ranks, (False, True))
    pass_through((layout_of(model, *row) for row in product), model, folder)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_canonical_checkpoint_keeps_projections_apart_and_loses_nothing(
    name: str, saved: Callable[[str], Path]
) -> None:
    folder = saved(name)
    config = json.loads((folder / "config.json").read_text())
    model = family_of(config).model(config, canonical=True)
    pass_through((layout_of(model, *row) for row in COVER), model, folder)
    with open_weights(folder) as stored:
        made = {key for step in model.key_map.steps(stored) for key in step.targets}
    at = "text_decoder.decoder.layers.0."
    assert {f"{at}self_attention.{part}_proj.bias" for part in "qkv"} <= made
    assert {f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"} <= made
    assert not any("linear_qkv" in key for key in made if key.startswith("text_decoder."))


def test_parts_of_a_larger_model_are_left_to_the_original_folder(saved: Callable[[str], Path]) -> None:
    folder = saved("qwen2_5_omni")
    thinker = json.loads((folder / "config.json").read_text())
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
    model = family_of(config).model(config)
    assert model.not_carried == ("talker.", "token2wav.")
    with open_weights(folder) as stored:
        hub = {f"thinker.{key}": tensor for key, tensor in stored.items()}
        steps = model.key_map.steps(hub)
    check_used_once(steps, hub, [key for step in steps for key in step.targets])


def test_a_model_of_no_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelFolderError, match=r"'gpt2'.*not known[\s\S]*qwen2_vl"):
        family_of({"model_type": "gpt2"})


def test_every_model_type_belongs_to_one_family() -> None:
    types = [kind for family in FAMILIES for kind in family.model_types]
    assert len(types) == len(set(types))


def test_tensor_ranks_that_would_tear_a_group_of_heads_are_refused(saved: Callable[[str], Path]) -> None:
    folder = saved("qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    model = family_of(config).model(config)
    layout = layout_of(model, "pp1", 8, 1, False)
    with open_weights(folder) as stored:
        whole = {key: tensor for step in model.key_map.steps(stored) for key, tensor in step.targets.items()}
        with pytest.raises(ModelFolderError, match="tensor parallelism of 8"):
            divide(whole, model, layout)
