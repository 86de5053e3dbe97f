"""Open-Sora Plan 1.3 and 1.5: their authors' names are those of diffusers' layout, MindSpeed-MM's are others; and their
WF-VAE.

Names: https://github.com/PKU-YuanGroup/Open-Sora-Plan, MindSpeed-MM's `OpenSoraPlanConverter`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, safetensors_files
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor, LazyTensor
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors, count, modules
from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.json_file import read_json_object

_HOME = "mindspeed_mm.fsdp.models.opensoraplan"
_KEPT = (
    "pos_embed.proj",
    "adaln_single.emb.timestep_embedder.linear_1",
    "adaln_single.emb.timestep_embedder.linear_2",
    "adaln_single.linear",
    "caption_projection.linear_1",
    "caption_projection.linear_2",
    "proj_out",
)
_OF_FRAMES = tuple(
    f"pos_embed_{name}.{layer}" for name in ("masked_hidden_states", "mask") for layer in ("0.proj", "1")
)
_IN_BLOCK = {
    **{f"self_atten.proj_{name}": f"attn1.to_{name}" for name in "qkv"},
    **{f"cross_atten.proj_{name}": f"attn2.to_{name}" for name in "qkv"},
    "self_atten.proj_out": "attn1.to_out.0",
    "cross_atten.proj_out": "attn2.to_out.0",
    "ff.net.0.proj": "ff.net.0.proj",
    "ff.net.2": "ff.net.2",
}
_BLOCK = "transformer_blocks.{n}."
_MM_BLOCK = "videodit_sparse_blocks.{n}."
_HEADS = 24


def _takes_frames(tensors: Tensors) -> bool:
    return "pos_embed_mask.1.weight" in tensors


def _config(tensors: Tensors, given: Json) -> Json:
    patches = tensors["pos_embed.proj.weight"].shape
    width, patch = patches[0], patches[2]
    # Shapes do not tell the heads; the released model has 24.
    heads = int(given.get("num_attention_heads") or given.get("num_heads") or _HEADS)
    config: Json = {
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": patches[1],
        "out_channels": tensors["proj_out.weight"].shape[0] // patch**2,
        "num_layers": count(tensors, "transformer_blocks."),
        "cross_attention_dim": width,
        "caption_channels": tensors["caption_projection.linear_1.weight"].shape[1],
        "patch_size": patch,
        "patch_size_t": 1,
        "activation_fn": "gelu-approximate",
        "sparse1d": True,
        "sparse_n": 4,
    }
    if _takes_frames(tensors):
        config |= {
            "_class_name": "OpenSoraInpaint_v1_3",
            "vae_scale_factor_t": tensors["pos_embed_mask.0.proj.weight"].shape[1],
        }
    return config


OPENSORAPLAN = GeneratorLayouts(
    name="Open-Sora Plan 1.3",
    class_name="OpenSoraT2V_v1_3",
    home=f"{_HOME}.transformer_1_3",
    marks={
        Naming.DIFFUSERS: (
            "adaln_single.linear.weight",
            "pos_embed.proj.weight",
            "transformer_blocks.0.attn1.to_q.weight",
            "caption_projection.linear_1.weight",
            "transformer_blocks.0.scale_shift_table",
        ),
        Naming.MM: ("adaln_single.linear.weight", "videodit_sparse_blocks.0.self_atten.proj_q.weight"),
    },
    original=(),
    mm=(
        *modules({name: name for name in _KEPT}),
        *(KeyRule(f"{name}.{{part}}", f"{name}.{{part}}") for name in _OF_FRAMES),
        *modules(_IN_BLOCK, _MM_BLOCK, _BLOCK),
        KeyRule(f"{_MM_BLOCK}scale_shift_table", f"{_BLOCK}scale_shift_table"),
        KeyRule("scale_shift_table", "scale_shift_table"),
    ),
    config=_config,
    version=lambda tensors: f"Open-Sora Plan v1.3 {'I2V' if _takes_frames(tensors) else 'T2V'}",
)

_STAGE_BLOCK = "transformer_blocks.{s}.{n}."
_IN_JOINT_BLOCK = {
    **{f"attn1.proj_{name}": f"attn1.to_{name}" for name in "qkv"},
    **{f"attn1.added_proj_{name}": f"attn1.add_{name}_proj" for name in "qkv"},
    "attn1.proj_out": "attn1.to_out.0",
    "attn1.added_proj_out": "attn1.to_add_out",
    **{f"attn1.norm_proj_{name}": f"attn1.norm_{name}" for name in "qk"},
    **{f"attn1.norm_added_proj_{name}": f"attn1.norm_added_{name}" for name in "qk"},
}
_KEPT_IN_JOINT_BLOCK = (
    *(f"norm{number}.{part}" for number in (1, 2) for part in ("linear", "norm", "norm_enc")),
    *(f"{name}.net.{layer}" for name in ("ff", "ff_enc") for layer in ("0.proj", "2")),
)
_KEPT_OF_1_5 = (
    "patch_embed.proj",
    *(
        f"time_text_embed.{name}.linear_{number}"
        for name in ("timestep_embedder", "text_embedder")
        for number in (1, 2)
    ),
    "caption_projection",
    "norm_final",
    "norm_out.linear",
    "norm_out.norm",
    "proj_out",
    "skip_norm_linear.{s}.1",
    "skip_norm_linear_enc.{s}.1",
)


def _joint_config(tensors: Tensors, given: Json) -> Json:
    patches = tensors["patch_embed.proj.weight"].shape
    width, patch = patches[0], patches[2]
    head = tensors["transformer_blocks.0.0.attn1.norm_q.weight"].shape[0]
    depths = [count(tensors, f"transformer_blocks.{stage}.") for stage in range(count(tensors, "transformer_blocks."))]
    half = len(depths) // 2
    return {
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": patches[1],
        "out_channels": tensors["proj_out.weight"].shape[0] // patch**2,
        "num_layers": depths,
        "sparse_n": [2 ** (half - abs(stage - half)) for stage in range(len(depths))],  # 1, 2, 4, 8, 4, 2, 1
        "double_ff": "transformer_blocks.0.0.ff_enc.net.2.weight" in tensors,
        "patch_size": patch,
        "caption_channels": tensors["caption_projection.weight"].shape[1],
        "pooled_projection_dim": tensors["time_text_embed.text_embedder.linear_1.weight"].shape[1],
        "timestep_embed_dim": tensors["norm_out.linear.weight"].shape[1],
        "skip_connection": "skip_norm_linear.0.1.weight" in tensors,
    }


OPENSORAPLAN_1_5 = GeneratorLayouts(
    name="Open-Sora Plan 1.5",
    class_name="OpenSoraT2V_v1_5",
    home=f"{_HOME}.transformer_1_5",
    marks={
        Naming.DIFFUSERS: ("time_text_embed.text_embedder.linear_1.weight", "transformer_blocks.0.0.attn1.to_q.weight"),
        Naming.MM: ("time_text_embed.text_embedder.linear_1.weight", "transformer_blocks.0.0.attn1.proj_q.weight"),
    },
    original=(),
    mm=(
        *modules({name: name for name in _KEPT_OF_1_5}),
        *modules(_IN_JOINT_BLOCK, _STAGE_BLOCK),
        *modules({name: name for name in _KEPT_IN_JOINT_BLOCK}, _STAGE_BLOCK),
    ),
    config=_joint_config,
    version=lambda tensors: "Open-Sora Plan v1.5 T2V",
)


# --- WF-VAE -----------------------------------------------------------------------------------------------------------

_CONSTANTS = "wavelet_transform_"
_SCALE = 0.18215
"""Of every channel of 1.3's VAE."""
_SCALES_OF_1_5 = [
    0.7031, 0.7109, 1.5391, 1.2969, 0.7109, 1.4141, 1.3828, 2.1719, 1.7266, 1.8281, 1.9141, 1.2031, 0.6875, 0.9609,
    1.6484, 1.1875, 1.5312, 1.1328, 0.8828, 0.6836, 0.8828, 0.9219, 1.6953, 1.4453, 1.5312, 0.6836, 0.7656, 0.8242,
    1.2344, 1.0312, 1.7266, 0.9492,
]  # fmt: skip
_SHIFTS_OF_1_5 = [
    -0.2129, 0.1226, 1.6328, 0.6211, -0.8750, 0.6172, -0.5703, 0.1348, -0.2178, -0.9375, 0.3184, 0.3281, -0.0544,
    -0.1826, -0.2812, 0.4355, 0.1621, -0.2578, 0.7148, -0.7422, -0.2295, -0.2324, -1.4922, 0.6328, 1.1250, -0.2578,
    -2.1094, 1.0391, 1.1797, -1.2422, -0.2988, -0.9570,
]  # fmt: skip
"""Of the channels of 1.5's VAE: examples/opensoraplan1.5/pretrain_model.json of MindSpeed-MM."""
_IN_TIME = {
    "l1_dowmsample_block": "Spatial2xTime2x3DDownsample",
    "l1_downsample_wavelet": "HaarWaveletTransform3D",
    "l1_upsample_block": "Spatial2xTime2x3DUpsample",
    "l1_upsample_wavelet": "InverseHaarWaveletTransform3D",
}


def convert_wf_vae(source: Path, target: Path, *, averaged: bool = True, stream: TextIO | None = None) -> Converted:
    """Write WF-VAE as the folder `vae/` of a model: config.json and safetensors.

    Args:
        source: `merged.ckpt` or `checkpoint.ckpt`; a config.json beside it is taken.
        target: The folder to write.
        averaged: Take the moving average of the weights where there is one.
        stream: Where progress is shown.

    Raises:
        CheckpointError: The file is damaged, or holds more than tensors and plain containers.
        ModelFolderError: It holds no WF-VAE, or one whose scale and shift nothing says.
        UsageError: The target is the name of a file.
    """
    if target.suffix in (".pt", ".pth", ".ckpt"):
        raise UsageError(
            "names a file, and the VAE is written as a folder: the run reads config.json and safetensors",
            where=str(target),
            key="cfg.target_path",
            way_out=f"Name the folder vae beside transformer, such as {target.parent / 'vae'}.",
        )
    held = {key: HeldTensor(value) for key, value in _vae_weights(source, averaged).items()}
    ledger = SourceLedger(held, source)
    tensors = ledger.tensors
    left_out = {key: "is a constant" for key in tensors if _CONSTANTS in key}
    kept: dict[str, LazyTensor] = {key: value for key, value in tensors.items() if key not in left_out}
    for key in ("encoder.conv_out.conv.weight", "encoder.down2.0.weight", "decoder.conv_in.conv.weight"):
        if key not in kept:
            raise ModelFolderError("holds no WF-VAE", where=str(source), key=key)
    config = _vae_config(kept, source)
    files, texts = safetensors_files(kept, MAX_SHARD_BYTES, "diffusion_pytorch_model")
    texts["config.json"] = json.dumps(config, indent=2) + "\n"
    plan = Conversion([source], [ledger], files, {"kind": "vae"}, left_out=left_out, texts=texts)
    return convert(plan, target, Writing(), stream=stream)


def _vae_weights(source: Path, averaged: bool) -> Mapping[str, torch.Tensor]:
    content: Any = load_weights(source)
    average = content.get("ema_state_dict") if isinstance(content, Mapping) else None
    if averaged and average:
        return {key.replace("module.", ""): value for key, value in average.items()}
    if isinstance(content, Mapping):
        # The trainer's files have a `state_dict`, and in it the generator beside its discriminator.
        content = content.get("state_dict", content)
        content = content.get("gen_model", content)
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ModelFolderError("holds no tensors by name", where=str(source))
    return content


def _vae_config(tensors: Tensors, source: Path) -> Json:
    beside = source.parent / "config.json"
    if beside.is_file():
        return {**read_json_object(beside, ModelFolderError), "_class_name": "WFVAEModel"}
    # The encoder gives a mean and a variance of each latent.
    latents = tensors["encoder.conv_out.conv.weight"].shape[0] // 2
    base = tensors["encoder.down1.0.weight"].shape[0]
    # 3 colours in 8 bands of a wavelet over time, too; over the picture alone they are 4.
    in_time = tensors["encoder.connect_l1.weight"].shape[1] == 24
    scale, shift = [_SCALE] * latents, [0.0] * latents
    if in_time:
        if latents != len(_SCALES_OF_1_5):
            raise ModelFolderError(
                f"is a VAE of 8 frames to a latent frame with {latents} channels, and nothing beside it says its scale",
                where=str(source),
                way_out=f"Put its config.json at {beside}.",
            )
        scale, shift = _SCALES_OF_1_5, _SHIFTS_OF_1_5
    return {
        **(_IN_TIME if in_time else {}),
        "_class_name": "WFVAEModel",
        "latent_dim": latents,
        "base_channels": base,
        "encoder_num_resblocks": _blocks_of_stack(tensors, "encoder.down1"),
        "encoder_energy_flow_hidden_size": tensors["encoder.connect_l1.weight"].shape[0],
        "decoder_num_resblocks": _blocks_of_stack(tensors, "decoder.up2"),
        "decoder_energy_flow_hidden_size": tensors["decoder.connect_l1.0.norm1.norm.weight"].shape[0],
        "connect_res_layer_num": len({key.split(".")[2] for key in tensors if key.startswith("decoder.connect_l1.")})
        - 1,
        "norm_type": "layernorm",
        "t_interpolation": "trilinear",
        "use_attention": "encoder.mid.1.q.conv.weight" in tensors,
        "scale": scale,
        "shift": shift,
    }


def _blocks_of_stack(tensors: Tensors, stack: str) -> int:
    """Blocks of a stack at one size: the encoder's stand behind a convolution, the decoder's before an upsampling."""
    found = {int(match[1]) for key in tensors if (match := re.match(rf"{stack}\.(\d+)\.norm1", key))}
    return len(found) - stack.startswith("decoder")
