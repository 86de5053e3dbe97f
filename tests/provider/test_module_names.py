"""The names by which files mean parts of a model are those of the models of transformers and diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.provider.module_names import FAMILIES, ModuleNames, names_of, patterns_of
from tests.helpers.packed_families import FAMILIES as FIRST
from tests.helpers.packed_more_families import MORE
from tests.helpers.tiny_deepseek_vl2 import make_tiny_deepseek_vl2

TINY = {**FIRST, **MORE}
OF_TEST = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v_moe",
    "internvl": "internvl",
    "mistral3": "mistral3",
    "qwen2_5_omni": "omni",
    "qwen3_omni_moe": "qwen3_omni",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "llama": "llama",
}
"""Family → the case of its tiny model."""


def tiny(family: str, folder: Path) -> nn.Module:
    if family == "deepseek_vl_v2":
        make_tiny_deepseek_vl2(folder / "model")
        return ModelHub.build(ModelArguments(model_name_or_path=str(folder / "model")))
    with torch.device("meta"):
        model: nn.Module = TINY[OF_TEST[family]].build()
    if "omni" in family and not hasattr(model.model, "language_model"):
        pytest.skip("an older transformers names the parts of Omni models otherwise")
    return model


def parts(names: ModuleNames) -> list[str]:
    listed = [*names.vision_parts, *names.projector, *names.head, f"{names.layers}.{{*}}", names.decoder]
    tower = [names.vision, f"{names.vision_layers}.{{*}}"] if names.vision else []
    return [part for part in (*listed, *tower, names.audio) if part]


@pytest.mark.parametrize("family", [*OF_TEST, "deepseek_vl_v2"])
def test_every_part_is_in_the_model(tmp_path: Path, family: str) -> None:
    names, model = FAMILIES[family], tiny(family, tmp_path)
    known = [name for name, _ in model.named_modules()]
    for part in parts(names):
        assert resolve_patterns([part], known, key=part)
    roles = ("text_decoder.embedding", "text_decoder.decoder.final_layernorm", "text_decoder.rotary_pos_emb")
    for role in roles if family != "deepseek_vl_v2" else roles[:2]:  # rotary embeddings lie in its layers
        (pattern,) = patterns_of(role, names)
        assert pattern in known


@pytest.mark.parametrize("family", [family for family in OF_TEST if FAMILIES[family].vision])
def test_tower_and_projector_are_all_that_sees(tmp_path: Path, family: str) -> None:
    """What `freeze` of both parts means is every parameter of the tower, and nothing of the language model."""
    names, model = FAMILIES[family], tiny(family, tmp_path)
    known = [name for name, _ in model.named_modules()]
    inside = resolve_patterns([*names.vision_parts, *names.projector], known, key="freeze")
    frozen = {name for name, _ in model.named_parameters() if any(name.startswith(f"{part}.") for part in inside)}
    outside = (names.of_decoder(""), *(f"{head}." for head in names.head), f"{names.audio}." if names.audio else "-")
    seeing = {name for name, _ in model.named_parameters() if not name.startswith(outside)}
    assert frozen == seeing != set()


def test_a_generator_s_layers(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, num_layers=2, ffn_dim=8, text_dim=8, freq_dim=8
        )
    known = [name for name, _ in model.named_modules()]
    names = FAMILIES["wan"]
    assert patterns_of("predictor.blocks.{*}", names) == ["blocks.{*}"]
    assert patterns_of("predictor.head", names) == ["proj_out"]
    assert resolve_patterns(["blocks.{*}", "proj_out"], known, key="x") == ["blocks.0", "blocks.1", "proj_out"]
    assert names_of({}, "wandit") is names


@pytest.mark.parametrize(
    ("written", "pattern"),
    [
        ("text_decoder.decoder.layers.{0-3}", "model.language_model.layers.{0-3}"),
        ("image_encoder", "model.visual"),
        ("image_encoder.encoder.blocks.layers.{*}", "model.visual.blocks.{*}"),
        ("language_model.layers.{*}", "model.language_model.layers.{*}"),
        ("visual.blocks.{*}", "model.visual.blocks.{*}"),
        ("model.visual.blocks.{*}", "model.visual.blocks.{*}"),
        ("megatron.core.transformer.transformer_layer.TransformerLayer", "model.language_model.layers.{*}"),
        ("transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextDecoderLayer", "model.language_model.layers.{*}"),
        ("transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionBlock", "model.visual.blocks.{*}"),
        ("mindspeed_mm.models.vision.vision_model.VisionModel", "model.visual"),
        ("megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding",
         "model.language_model.rotary_emb"),
        ("megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding",
         "model.language_model.embed_tokens"),
        ("my.own.name", "my.own.name"),
    ],
)  # fmt: skip
def test_what_files_write(written: str, pattern: str) -> None:
    assert patterns_of(written, names_of({"model_type": "qwen3_vl"})) == [pattern]
    assert patterns_of(written, None) == [written]


@pytest.mark.parametrize(
    ("model_id", "written", "pattern"),
    [
        ("InternVL3", "vision_model.encoder.layers.{*}", "model.vision_tower.encoder.layer.{*}"),
        ("InternVL2.5", "vision_model.embeddings", "model.vision_tower.embeddings"),
        ("internvl", "language_model.model.layers.{0-3}", "model.language_model.layers.{0-3}"),
        ("internvl_chat", "mlp1", "model.multi_modal_projector"),
        ("vace", "predictor.wan_dit.blocks.{*}", "blocks.{*}"),
        ("vace", "predictor.vace_dit.vace_blocks.{*}", "vace_blocks.{*}"),
        ("hunyuanvideo15dit", "predictor.double_blocks.{*}", "transformer_blocks.{*}"),
    ],
)
def test_names_of_the_original_code(model_id: str, written: str, pattern: str) -> None:
    assert patterns_of(written, names_of({}, model_id)) == [pattern]


def test_projectors_of_several_modules() -> None:
    names = names_of({"model_type": "qwen3_vl"})
    assert patterns_of("image_encoder.projector", names) == [
        "model.visual.merger",
        "model.visual.deepstack_merger_list",
    ]
