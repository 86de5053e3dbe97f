"""A checkpoint in Megatron's layout: divided as computed by hand, and back to the bit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mindspeed_mm.checkpoint.megatron.families.qwen2_vl import QWEN2_5_VL
from mindspeed_mm.checkpoint.megatron.folder import read_divided, renamed_to_hub
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from tests.helpers.megatron_models import files_of

H, HEADS, GROUPS, LAYERS, DEPTH = 32, 4, 2, 5, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL as transformers saves it."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": H,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "num_hidden_layers": LAYERS,
            "intermediate_size": 48,
            "vocab_size": 250,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 16,
            "num_heads": 4,
            "depth": DEPTH,
            "intermediate_size": 24,
            "out_hidden_size": H,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    path = tmp_path_factory.mktemp("qwen2_5_vl")
    model.save_pretrained(path)
    return path


def write(folder: Path, target: Path, layout: MegatronLayout) -> None:
    """Write the files with torch alone."""
    with open_weights(folder) as stored:
        files = files_of(stored, QWEN2_5_VL, json.loads((folder / "config.json").read_text()), layout)
        for name, content in files.items():
            path = target / name
            path.parent.mkdir(parents=True)
            state = {key: {k: t.read().clone() for k, t in tensors.items()} for key, tensors in content.items()}
            torch.save({**state, "checkpoint_version": 3.0, "args": argparse.Namespace(seed=1)}, path)


LAYOUTS = {
    "one": MegatronLayout({"text": ((5,),), "vision": ((3,),)}),
    "tp2": MegatronLayout({"text": ((5,),), "vision": ((3,),)}, tp=2),
    "tp2 pp2, tower on its own stage": MegatronLayout({"text": ((0, 5),), "vision": ((3, 0),)}, tp=2),
    "pp4 uneven": MegatronLayout({"text": ((0, 1, 2, 2),), "vision": ((3, 0, 0, 0),)}),
    "pp2 vpp2": MegatronLayout({"text": ((0, 1), (2, 2)), "vision": ((2, 1), (0, 0))}, vocabulary_multiple=16),
    "tp2, tower whole": MegatronLayout({"text": ((5,),), "vision": ((3,),)}, tp=2, tp_of_tower={"vision": 1}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_divided_comes_back_to_the_bit(name: str, folder: Path, tmp_path: Path) -> None:
    write(folder, tmp_path, LAYOUTS[name])
    config = json.loads((folder / "config.json").read_text())
    told = LAYOUTS[name] if LAYOUTS[name].tp_of_tower else None
    found = read_divided(tmp_path, QWEN2_5_VL, config, told)
    tensors, layout = renamed_to_hub(found.whole(), found.model), found.layout
    assert (layout.layers, layout.tp) == (LAYOUTS[name].layers, LAYOUTS[name].tp)
    expected = load_file(folder / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor.read(), expected[key]), key
