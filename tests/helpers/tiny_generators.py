"""Folders of image and video generators in diffusers' layout, small enough for a test and made without a download:
pipelines, transformers, VAEs, text encoders and tokenizers are those of the real classes, only the sizes are tiny.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers.made_once import made_once

prepare_for_transformers()

import diffusers  # noqa: E402
from diffusers import (  # noqa: E402  (the guard comes first)
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from transformers import (  # noqa: E402
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from mindspeed_mm.fsdp.models.diffusion.identity_vae import IdentityVAE  # noqa: E402

TEXT_TOKENS = 24
"""Length that captions are padded to: `model_max_length` of the T5 and UMT5 tokenizers."""
TEXT_WIDTH = 32
CLIP_WIDTH = 24
IMAGE_WIDTH = 20

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'-"


@made_once
def make_tiny_flux(
    folder: Path, *, identity_vae: bool = False, seed: int = 0, pipeline: str = "FluxPipeline", **transformer: Any
) -> Path:
    """A FLUX.1 folder: 1 + 1 blocks, a VAE that halves the sides, or none (pixels are latents).

    Height and width are multiples of 4, with `identity_vae` of 2.

    Args:
        folder: Where to write; made when absent.
        identity_vae: Train in pixel space.
        seed: Of the random weights.
        pipeline: diffusers' class, of the same components.
        transformer: Settings of the transformer to change, e.g. `guidance_embeds=True`.
    """
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    vae: Any = seeded(lambda: IdentityVAE() if identity_vae else AutoencoderKL(**FLUX_VAE), seed)
    sizes = {**_FLUX, "in_channels": 4 * vae.config.latent_channels, **transformer}
    getattr(diffusers, pipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=vae,
        text_encoder=seeded(lambda: CLIPTextModel(clip_text_config(tokenizer)), seed + 1),
        tokenizer=tokenizer,
        text_encoder_2=seeded(lambda: T5EncoderModel(t5_config(tokenizer_2)), seed + 2),
        tokenizer_2=tokenizer_2,
        transformer=seeded(lambda: FluxTransformer2DModel(**sizes), seed + 3),
    ).save_pretrained(folder)
    return folder


@made_once
def make_tiny_wan(
    folder: Path, *, task: str = "t2v", identity_vae: bool = False, seed: int = 0, **transformer: Any
) -> Path:
    """A Wan2.1 folder: 2 blocks, a VAE of 4×8×8 with 16 channels, or none (pixels are latents).

    Height and width are multiples of 16; frames 4k+1, with `identity_vae` any number.

    Args:
        folder: Where to write; made when absent.
        task: `t2v`, `i2v` with an image encoder, or `vace`.
        identity_vae: Train in pixel space.
        seed: Of the random weights.
        transformer: Settings of the transformer to change, e.g. `num_layers=3`.
    """
    tokenizer = t5_tokenizer()
    vae: Any = seeded(lambda: IdentityVAE(video=True) if identity_vae else AutoencoderKLWan(**WAN_VAE), seed)
    parts: dict[str, Any] = {
        "vae": vae,
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "tokenizer": tokenizer,
        "text_encoder": seeded(lambda: UMT5EncoderModel(UMT5Config(**_t5(tokenizer))), seed + 1),
    }
    channels = vae.config.z_dim
    sizes = {**_WAN, "in_channels": channels, "out_channels": channels}
    if task == "i2v":
        sizes |= {"in_channels": 2 * channels + vae.config.scale_factor_temporal}
        sizes |= {"image_dim": IMAGE_WIDTH, "added_kv_proj_dim": _WAN_WIDTH}
        parts["image_encoder"] = seeded(lambda: CLIPVisionModel(CLIPVisionConfig(**_CLIP_VISION)), seed + 2)
        parts["image_processor"] = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pipelines = {"i2v": WanImageToVideoPipeline, "vace": WanVACEPipeline}
    model = WanVACETransformer3DModel if task == "vace" else WanTransformer3DModel
    parts["transformer"] = seeded(lambda: model(**{**sizes, **transformer}), seed + 3)
    pipelines.get(task, WanPipeline)(**parts).save_pretrained(folder)
    return folder


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-pair encoding without a merge: one token a character."""
    tokens = [*CHARACTERS, *(f"{each}</w>" for each in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    """T5's unigram model over single characters."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = [*special, ("▁", -2.0), *((each, -3.0) for each in CHARACTERS)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=TEXT_TOKENS)


_FLUX: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "pooled_projection_dim": CLIP_WIDTH,
    "axes_dims_rope": (4, 6, 6),
}

FLUX_VAE: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
}

_WAN_WIDTH = 24
_WAN: dict[str, Any] = {
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": _WAN_WIDTH // 12,
    "ffn_dim": 32,
    "freq_dim": 16,
    "text_dim": TEXT_WIDTH,
    "rope_max_seq_len": 32,
}

WAN_VAE: dict[str, Any] = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "z_dim": 16}

_CLIP_VISION: dict[str, Any] = {
    "hidden_size": IMAGE_WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "projection_dim": 16,
}


def clip_text_config(tokenizer: CLIPTokenizer, **changes: Any) -> CLIPTextConfig:
    """Of a tiny CLIP text encoder for this tokenizer."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": CLIP_WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextConfig(**{"vocab_size": len(tokenizer), "max_position_embeddings": 77, **sizes, **ids, **changes})


def t5_config(tokenizer: T5Tokenizer) -> T5Config:
    """Of a tiny T5 encoder for this tokenizer."""
    return T5Config(**_t5(tokenizer))


def _t5(tokenizer: T5Tokenizer) -> dict[str, Any]:
    sizes = {"d_model": TEXT_WIDTH, "d_ff": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": len(tokenizer), "is_gated_act": True, "feed_forward_proj": "gated-gelu", **sizes, **ids}


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """What a function makes under a seed of its own, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()
