"""Open-Sora Plan 1.3: its authors' names are those of diffusers' layout, MindSpeed-MM's are others; and its WF-VAE.

Names: https://github.com/PKU-YuanGroup/Open-Sora-Plan (`opensora/models/diffusion/opensora_v1_3`), MindSpeed-MM's
`OpenSoraPlanConverter`.
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

_HOME = "mindspeed_mm.fsdp.models.opensoraplan.transformer_1_3"
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
    home=_HOME,
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


# --- WF-VAE -----------------------------------------------------------------------------------------------------------

_CONSTANTS = "wavelet_transform_"
_SCALE = 0.18215
"""Of every channel of 1.3's VAE. Those of 1.5's are in its config.json."""


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
        content = content.get("state_dict", content)
        content = content.get("gen_model", content)
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ModelFolderError("holds no tensors by name", where=str(source))
    return content


def _vae_config(tensors: Tensors, source: Path) -> Json:
    beside = source.parent / "config.json"
    if beside.is_file():
        return {**read_json_object(beside, ModelFolderError), "_class_name": "WFVAEModel"}
    latents = tensors["encoder.conv_out.conv.weight"].shape[0] // 2
    base = tensors["encoder.down1.0.weight"].shape[0]
    in_time = tensors["encoder.connect_l1.weight"].shape[1] == 24
    if in_time:
        raise ModelFolderError(
            "is the VAE of 1.5, and nothing beside it says its scale and shift",
            where=str(source),
            way_out=f"Put its config.json at {beside}.",
        )
    return {
        "_class_name": "WFVAEModel",
        "latent_dim": latents,
        "base_channels": base,
        "encoder_num_resblocks": _blocks(tensors, "encoder.down1"),
        "encoder_energy_flow_hidden_size": tensors["encoder.connect_l1.weight"].shape[0],
        "decoder_num_resblocks": _blocks(tensors, "decoder.up2"),
        "decoder_energy_flow_hidden_size": tensors["decoder.connect_l1.0.norm1.norm.weight"].shape[0],
        "connect_res_layer_num": len({key.split(".")[2] for key in tensors if key.startswith("decoder.connect_l1.")})
        - 1,
        "norm_type": "layernorm",
        "t_interpolation": "trilinear",
        "use_attention": "encoder.mid.1.q.conv.weight" in tensors,
        "scale": [_SCALE] * latents,
        "shift": [0.0] * latents,
    }


def _blocks(tensors: Tensors, stack: str) -> int:
    """Blocks of a stack at one size: the encoder's stand behind a convolution, the decoder's before an upsampling."""
    found = {int(match[1]) for key in tensors if (match := re.match(rf"{stack}\.(\d+)\.norm1", key))}
    return len(found) - stack.startswith("decoder")
