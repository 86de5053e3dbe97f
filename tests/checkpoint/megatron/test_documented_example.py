"""The documented interleaved pipeline: Qwen2-VL 7B, 32 and 28 layers over four stages of three chunks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor, LazyTensor
from mindspeed_mm.checkpoint.megatron.families.qwen2_vl import QWEN2_VL
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout, MegatronRank, parse_stages
from mindspeed_mm.checkpoint.megatron.sharding import join
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from tests.helpers.megatron_models import files_of, save_tiny

PICTURES, WORDS = "image_encoder.encoder.blocks.layers.", "text_decoder.decoder.layers."
LAYERS_OF_STAGE_AND_CHUNK = {  # as the document lists them: layers of pictures, layers of text
    (0, 0): (10, 0),
    (0, 1): (0, 4),
    (0, 2): (0, 4),
    (1, 0): (10, 0),
    (1, 1): (0, 4),
    (1, 2): (0, 3),
    (2, 0): (10, 0),
    (2, 1): (0, 4),
    (2, 2): (0, 2),
    (3, 0): (2, 1),
    (3, 1): (0, 4),
    (3, 2): (0, 2),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = save_tiny("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))
    found = json.loads((folder / "config.json").read_text())
    found["text_config"]["num_hidden_layers"], found["vision_config"]["depth"] = 28, 32
    return found | {"folder": str(folder)}


@pytest.fixture(scope="module")
def hub(config: dict) -> dict[str, LazyTensor]:
    """Layer 0 of the tiny model as often as the large one has layers; every tensor has a value of its own."""
    with open_weights(Path(config["folder"])) as stored:
        shapes = {key: tensor.shape for key, tensor in stored.items()}
    deep: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        if not (match := re.match(r"(model\.layers\.|visual\.blocks\.)(\d+)\.(.*)", key)):
            deep[key] = shape
        elif match[2] == "0":
            count = 28 if match[1].startswith("model") else 32
            deep |= {f"{match[1]}{n}.{match[3]}": shape for n in range(count)}
    return {key: HeldTensor(torch.full(shape, float(value))) for value, (key, shape) in enumerate(deep.items())}


def layout_of(pictures: list, words: list) -> MegatronLayout:
    return MegatronLayout(
        {"text": parse_stages(words, "llm_pp_layers"), "vision": parse_stages(pictures, "vit_pp_layers")}
    )


def test_the_documented_example_stands_where_the_document_says(config: dict, hub: dict[str, LazyTensor]) -> None:
    layout = layout_of([[10, 10, 10, 2], [0, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 1], [4, 4, 4, 4], [4, 3, 2, 2]])
    files = files_of(hub, QWEN2_VL, config, layout)
    assert sorted(files) == [f"mp_rank_00_00{stage}/model_optim_rng.pt" for stage in range(4)]
    ends = {}
    for (stage, chunk), counts in LAYERS_OF_STAGE_AND_CHUNK.items():
        names = files[f"mp_rank_00_00{stage}/model_optim_rng.pt"][f"model{chunk}"]
        for start, count in zip((PICTURES, WORDS), counts, strict=True):
            numbers = {int(name.removeprefix(start).partition(".")[0]) for name in names if name.startswith(start)}
            assert numbers == set(range(count)), (stage, chunk)
        if others := {name for name in names if not name.startswith((PICTURES, WORDS))}:
            ends[stage, chunk] = others
    assert ends == {
        (0, 0): {"image_encoder.encoder.patch_embed.proj.weight"},
        (3, 0): {
            *(f"image_encoder.projector.layernorm.{part}" for part in ("weight", "bias")),
            *(f"image_encoder.projector.encoder.linear_fc{i}.{part}" for i in (1, 2) for part in ("weight", "bias")),
            "text_decoder.embedding.word_embeddings.weight",
        },
        (3, 2): {"text_decoder.decoder.final_layernorm.weight", "text_decoder.output_layer.weight"},
    }
    # Stage 2, chunk 1: one layer is on stage 3's first chunk, four on stage 0 and four on stage 1 of this chunk.
    name, key = f"{WORDS}1.input_layernorm.weight", "model.layers.10.input_layernorm.weight"
    assert torch.equal(files["mp_rank_00_002/model_optim_rng.pt"]["model1"][name].read(), hub[key].read())
    name, key = f"{PICTURES}1.input_layernorm.weight", "visual.blocks.31.norm1.weight"
    assert torch.equal(files["mp_rank_00_003/model_optim_rng.pt"]["model0"][name].read(), hub[key].read())


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        ([[10, 10, 10, 2], [0] * 4, [0] * 4], [[0, 0, 0, 1], [4, 4, 4, 4], [4, 3, 2, 2]]),
        ([[10, 10, 10, 2], [0, 0, 0, 0]], [[0, 0, 0, 1], [9, 8, 5, 5]]),
        ([32, 0, 0, 0], [0, 10, 10, 8]),
    ],
)
def test_documented_divisions_lose_nothing(
    pictures: list, words: list, config: dict, hub: dict[str, LazyTensor]
) -> None:
    layout = layout_of(pictures, words)
    files = files_of(hub, QWEN2_VL, config, layout)
    shards = {MegatronRank(0, int(name[11:14]), 0): content for name, content in files.items()}
    model = QWEN2_VL.model(config)
    steps = model.key_map.inverse.steps(join(shards, model, layout))
    back = {key: tensor for step in steps for key, tensor in step.targets.items()}
    assert back.keys() == hub.keys()
    for key, tensor in back.items():
        assert torch.equal(tensor.read(), hub[key].read()), key
