"""The names of generators in the authors' files, in MindSpeed-MM and in diffusers lead to one another bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.original.families import GENERATORS, recognise_generator
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Naming, from_diffusers, to_diffusers
from mindspeed_mm.core.errors import ModelFolderError
from tests.helpers.generator_weights import TRANSFORMERS, lazy, narrow_weights, outline, read, same

import diffusers.loaders.single_file_utils as single_file  # isort: skip  (after the helper's guard)

OF_DIFFUSERS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "Wan": single_file.convert_wan_transformer_to_diffusers,
    "Wan I2V": single_file.convert_wan_transformer_to_diffusers,
    "VACE": single_file.convert_wan_transformer_to_diffusers,
    "HunyuanVideo": single_file.convert_hunyuan_video_transformer_to_diffusers,
    "LTX-Video": single_file.convert_ltx_transformer_checkpoint_to_diffusers,
    "LTX-2": single_file.convert_ltx2_transformer_to_diffusers,
    "FLUX.1": single_file.convert_flux_transformer_checkpoint_to_diffusers,
    "FLUX.2": single_file.convert_flux2_transformer_checkpoint_to_diffusers,
}
"""What diffusers itself reads the authors' single files with."""


def family(case: str) -> GeneratorLayouts:
    """Of a case."""
    return next(found for found in GENERATORS if found.name == case.removesuffix(" I2V"))


@pytest.mark.parametrize("case", OF_DIFFUSERS)
def test_diffusers_own_function_reads_the_authors_names_that_we_write(case: str) -> None:
    weights = narrow_weights(case)
    original = from_diffusers(lazy(weights), family(case), Naming.ORIGINAL)
    assert set(original) != set(weights)
    same(OF_DIFFUSERS[case](read(original)), weights)


@pytest.mark.parametrize("naming", Naming)
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_names_lead_there_and_back_and_are_recognised(case: str, naming: Naming) -> None:
    weights, found = narrow_weights(case), family(case)
    if naming is Naming.MM and not found.mm:
        pytest.skip("MindSpeed-MM trains diffusers' own model")
    there = read(from_diffusers(lazy(weights), found, naming))
    assert recognise_generator(there) == (found, naming)
    same(read(to_diffusers(lazy(there), found, naming)), weights)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_the_configuration_is_told_by_the_shapes(case: str) -> None:
    model, found = outline(case), family(case)
    told = found.config(lazy(model.state_dict()), {"num_heads": 2})
    expected = {key: model.config[key] for key in told if key in model.config}
    for key in ("sample_width", "use_rotary_positional_embeddings", "rope_type"):  # choices that shapes do not show
        told.pop(key, None)
        expected.pop(key, None)
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in expected.items()} == told


def test_a_cogvideox_layer_computed_by_hand() -> None:
    """The order of the authors' modulation: shift, scale, gate before attention and before the projections, of the
    video and then of the text; diffusers' script puts chunks 0 to 2 and 6 to 8 into norm1, the others into norm2."""
    weights = narrow_weights("CogVideoX")
    original = read(from_diffusers(lazy(weights), family("CogVideoX"), Naming.ORIGINAL))
    start = "model.diffusion_model."
    for part in ("weight", "bias"):
        norm1 = weights[f"transformer_blocks.1.norm1.linear.{part}"].chunk(6)
        norm2 = weights[f"transformer_blocks.1.norm2.linear.{part}"].chunk(6)
        by_hand = torch.cat([*norm1[:3], *norm2[:3], *norm1[3:], *norm2[3:]])
        assert torch.equal(original[f"{start}mixins.adaln_layer.adaLN_modulations.1.1.{part}"], by_hand)
        qkv = torch.cat([weights[f"transformer_blocks.1.attn1.to_{name}.{part}"] for name in "qkv"])
        assert torch.equal(original[f"{start}transformer.layers.1.attention.query_key_value.{part}"], qkv)
    by_name = {
        "mixins.adaln_layer.query_layernorm_list.0.weight": "transformer_blocks.0.attn1.norm_q.weight",
        "mixins.adaln_layer.key_layernorm_list.0.bias": "transformer_blocks.0.attn1.norm_k.bias",
        "transformer.layers.1.attention.dense.weight": "transformer_blocks.1.attn1.to_out.0.weight",
        "transformer.layers.1.input_layernorm.weight": "transformer_blocks.1.norm1.norm.weight",
        "transformer.layers.1.post_attention_layernorm.bias": "transformer_blocks.1.norm2.norm.bias",
        "transformer.layers.1.mlp.dense_h_to_4h.weight": "transformer_blocks.1.ff.net.0.proj.weight",
        "transformer.layers.1.mlp.dense_4h_to_h.weight": "transformer_blocks.1.ff.net.2.weight",
        "transformer.final_layernorm.weight": "norm_final.weight",
        "time_embed.2.weight": "time_embedding.linear_2.weight",
        "mixins.patch_embed.proj.weight": "patch_embed.proj.weight",
        "mixins.patch_embed.text_proj.bias": "patch_embed.text_proj.bias",
        "mixins.final_layer.norm_final.weight": "norm_out.norm.weight",
        "mixins.final_layer.adaLN_modulation.1.weight": "norm_out.linear.weight",
        "mixins.final_layer.linear.weight": "proj_out.weight",
    }
    assert all(torch.equal(original[start + old], weights[new]) for old, new in by_name.items())
    assert len(original) == 16 + 2 * 18


def test_hunyuan_video_1_5_computed_by_hand() -> None:
    weights = narrow_weights("HunyuanVideo 1.5")
    original = read(from_diffusers(lazy(weights), family("HunyuanVideo 1.5"), Naming.ORIGINAL))
    scale, shift = weights["norm_out.linear.weight"].chunk(2)
    assert torch.equal(original["final_layer.adaLN_modulation.1.weight"], torch.cat([shift, scale]))
    refiner = "context_embedder.token_refiner.refiner_blocks.1."
    qkv = torch.cat([weights[f"{refiner}attn.to_{name}.weight"] for name in "qkv"])
    assert torch.equal(original["txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight"], qkv)
    by_name = {
        "time_in.mlp.2.bias": "time_embed.timestep_embedder.linear_2.bias",
        "txt_in.t_embedder.mlp.0.weight": "context_embedder.time_text_embed.timestep_embedder.linear_1.weight",
        "txt_in.c_embedder.linear_2.weight": "context_embedder.time_text_embed.text_embedder.linear_2.weight",
        "txt_in.individual_token_refiner.blocks.0.mlp.fc2.bias": (
            "context_embedder.token_refiner.refiner_blocks.0.ff.net.2.bias"
        ),
        "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.weight": (
            "context_embedder.token_refiner.refiner_blocks.0.norm_out.linear.weight"
        ),
        "byt5_in.layernorm.weight": "context_embedder_2.norm.weight",
        "byt5_in.fc3.weight": "context_embedder_2.linear_3.weight",
        "vision_in.proj.3.weight": "image_embedder.linear_2.weight",
        "vision_in.proj.4.bias": "image_embedder.norm_out.bias",
        "cond_type_embedding.weight": "cond_type_embed.weight",
        "double_blocks.1.img_mod.linear.weight": "transformer_blocks.1.norm1.linear.weight",
        "double_blocks.1.txt_mod.linear.bias": "transformer_blocks.1.norm1_context.linear.bias",
        "double_blocks.1.img_attn_k.weight": "transformer_blocks.1.attn.to_k.weight",
        "double_blocks.1.txt_attn_v.weight": "transformer_blocks.1.attn.add_v_proj.weight",
        "double_blocks.1.txt_attn_q_norm.weight": "transformer_blocks.1.attn.norm_added_q.weight",
        "double_blocks.1.txt_attn_proj.weight": "transformer_blocks.1.attn.to_add_out.weight",
        "double_blocks.1.txt_mlp.fc1.weight": "transformer_blocks.1.ff_context.net.0.proj.weight",
    }
    assert all(torch.equal(original[old], weights[new]) for old, new in by_name.items())


def test_mindspeed_mm_names_computed_by_hand() -> None:
    wan = narrow_weights("Wan I2V")
    found = read(from_diffusers(lazy(wan), family("Wan I2V"), Naming.MM))
    by_name = {
        "blocks.0.self_attn.proj_q.weight": "blocks.0.attn1.to_q.weight",
        "blocks.0.self_attn.q_norm.weight": "blocks.0.attn1.norm_q.weight",
        "blocks.0.self_attn.proj_out.bias": "blocks.0.attn1.to_out.0.bias",
        "blocks.0.cross_attn.proj_v.weight": "blocks.0.attn2.to_v.weight",
        "blocks.0.cross_attn.k_img.weight": "blocks.0.attn2.add_k_proj.weight",
        "blocks.0.cross_attn.k_norm_img.weight": "blocks.0.attn2.norm_added_k.weight",
        "blocks.0.norm3.weight": "blocks.0.norm2.weight",
        "blocks.0.ffn.0.weight": "blocks.0.ffn.net.0.proj.weight",
        "blocks.0.ffn.2.weight": "blocks.0.ffn.net.2.weight",
        "blocks.0.modulation": "blocks.0.scale_shift_table",
        "head.modulation": "scale_shift_table",
        "head.head.weight": "proj_out.weight",
        "text_embedding.linear_1.weight": "condition_embedder.text_embedder.linear_1.weight",
        "time_embedding.2.bias": "condition_embedder.time_embedder.linear_2.bias",
        "time_projection.1.weight": "condition_embedder.time_proj.weight",
        "img_emb.proj.3.weight": "condition_embedder.image_embedder.ff.net.2.weight",
        "patch_embedding.weight": "patch_embedding.weight",
    }
    assert all(torch.equal(found[old], wan[new]) for old, new in by_name.items())
    hunyuan = narrow_weights("HunyuanVideo")
    found = read(from_diffusers(lazy(hunyuan), family("HunyuanVideo"), Naming.MM))
    single = "single_transformer_blocks.1."
    qkv = torch.cat([hunyuan[f"{single}attn.to_{name}.weight"] for name in "qkv"])
    assert torch.equal(found["single_blocks.1.linear1_qkv.weight"], qkv)
    assert torch.equal(found["single_blocks.1.linear1_mlp.weight"], hunyuan[f"{single}proj_mlp.weight"])
    time = "time_text_embed.timestep_embedder.linear_2.weight"
    assert torch.equal(found["time_in.time_embed.2.weight"], hunyuan[time])
    vace = narrow_weights("VACE")
    found = read(from_diffusers(lazy(vace), family("VACE"), Naming.MM))
    control = {
        "vace_dit.vace_blocks.1.after_proj.weight": "vace_blocks.1.proj_out.weight",
        "vace_dit.vace_blocks.0.before_proj.bias": "vace_blocks.0.proj_in.bias",
        "vace_dit.vace_blocks.1.wan_dit_block.self_attn.proj_k.weight": "vace_blocks.1.attn1.to_k.weight",
        "vace_dit.vace_blocks.1.wan_dit_block.modulation": "vace_blocks.1.scale_shift_table",
        "vace_dit.vace_patch_embedding.weight": "vace_patch_embedding.weight",
        "wan_dit.blocks.3.norm3.weight": "blocks.3.norm2.weight",
    }
    assert all(torch.equal(found[old], vace[new]) for old, new in control.items())


def test_a_wrong_map_is_refused_and_the_key_named() -> None:
    wan, weights = family("Wan"), narrow_weights("Wan")
    rules = [KeyRule("blocks.{n}.ffn.1.{part}", r.targets) if "ffn.2" in r.sources[0] else r for r in wan.original]
    wrong = replace(wan, original=tuple(rules))
    original = from_diffusers(lazy(weights), wan, Naming.ORIGINAL)
    with pytest.raises(ModelFolderError, match=r"blocks\.0\.ffn\.2\.weight.*is not used"):
        to_diffusers(original, wrong, Naming.ORIGINAL)


def test_a_part_of_a_fused_layer_that_is_missing_is_named() -> None:
    weights = narrow_weights("FLUX.1")
    del weights["transformer_blocks.0.attn.to_k.weight"]
    with pytest.raises(ModelFolderError, match=r"attn\.to_k\.\{part\}"):
        from_diffusers(lazy(weights), family("FLUX.1"), Naming.ORIGINAL)


def test_what_is_no_part_of_the_transformer_is_left_out() -> None:
    weights = narrow_weights("LTX-Video")
    file = read(from_diffusers(lazy(weights), family("LTX-Video"), Naming.ORIGINAL))
    assert all(key.startswith("model.diffusion_model.") for key in file)
    file["vae.encoder.conv_in.conv.weight"] = torch.zeros(1)
    assert recognise_generator(file) == (family("LTX-Video"), Naming.ORIGINAL)
    same(read(to_diffusers(lazy(file), family("LTX-Video"), Naming.ORIGINAL)), weights)
