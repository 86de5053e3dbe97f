"""Folders of every family of generators in diffusers' layout, small enough for a test: pipelines, transformers, VAEs,
text encoders and tokenizers are those of the real classes, only the sizes are tiny."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import AddedToken

from tests.helpers.tiny_generators import (
    FLUX_VAE,
    TEXT_WIDTH,
    clip_text_config,
    clip_tokenizer,
    make_tiny_flux,
    make_tiny_wan,
    seeded,
    t5_config,
    t5_tokenizer,
)
from tests.helpers.tiny_language_models import CHAT, FLOW, QWEN_VL_TEXT, WIDTH, character_tokenizer, gemma, qwen3
from tests.helpers.tiny_opensoraplan import make_tiny_opensoraplan, make_tiny_opensoraplan_1_5
from tests.helpers.tiny_video_families import (
    make_tiny_cogvideox,
    make_tiny_hunyuan_video,
    make_tiny_hunyuan_video_1_5,
    make_tiny_hunyuan_video_1_5_i2v,
    make_tiny_hunyuan_video_i2v,
    make_tiny_ltx_video,
    make_tiny_sana_video,
    make_tiny_wan2_2,
    make_tiny_wan2_2_5b,
    make_tiny_wan2_2_i2v,
)


@dataclass(frozen=True)
class TinyFamily:
    """One family, or one release of it."""

    make: Callable[[Path], Any]
    """Writes the model folder."""
    side: int = 16
    """Pixels along a side of its media."""
    frames: int = 1
    guidance: float = 1.0
    """Scale that a pipeline is called with: 1 where it would guide, the trained one where it is an input."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline that switch its own sizes off."""
    task: str | None = None
    """What is trained, where it is not the first that the folder is for."""
    given_frames: int = 0
    """Latent frames that the model is given without noise, and learns nothing of."""


def _image_vae(seed: int, **changes: Any) -> Any:
    from diffusers import AutoencoderKL

    return seeded(lambda: AutoencoderKL(**{**FLUX_VAE, **changes}), seed)


def _sd3(folder: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    config = clip_text_config(clip, hidden_size=12, projection_dim=12, num_hidden_layers=2)
    transformer = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32,
        "joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": 24, "pos_embed_max_size": 16,
    }  # fmt: skip
    StableDiffusion3Pipeline(
        transformer=seeded(lambda: SD3Transformer2DModel(**transformer), 0),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(1),
        text_encoder=seeded(lambda: CLIPTextModelWithProjection(config), 2),
        tokenizer=clip,
        text_encoder_2=seeded(lambda: CLIPTextModelWithProjection(config), 3),
        tokenizer_2=clip,
        text_encoder_3=seeded(lambda: T5EncoderModel(t5_config(t5)), 4),
        tokenizer_3=t5,
    ).save_pretrained(folder)


def _sana(folder: Path) -> None:
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    sides = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in {
            "block_types": ("ResBlock", "EfficientViTBlock"),
            "block_out_channels": (8, 8),
            "qkv_multiscales": ((), (5,)),
            "layers_per_block": (1, 1),
        }.items()
    }
    vae = {"latent_channels": 4, "attention_head_dim": 2, "scaling_factor": 0.41407, "downsample_block_type": "conv"}
    transformer = {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
        "caption_channels": WIDTH, "sample_size": 32, "patch_size": 1, "timestep_scale": 0.5,
    }  # fmt: skip
    tokenizer = character_tokenizer()
    SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma(tokenizer, 0),
        vae=seeded(lambda: AutoencoderDC(**vae, **sides, upsample_block_type="interpolate"), 1),
        transformer=seeded(lambda: SanaTransformer2DModel(**transformer), 2),
        scheduler=DPMSolverMultistepScheduler(**FLOW),
    ).save_pretrained(folder)


def _lumina2(folder: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    transformer = {
        "sample_size": 8, "in_channels": 4, "hidden_size": 16, "num_layers": 2, "num_refiner_layers": 1,
        "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 2, 2),
        "cap_feat_dim": WIDTH,
    }  # fmt: skip
    tokenizer = character_tokenizer()
    Lumina2Pipeline(
        transformer=seeded(lambda: Lumina2Transformer2DModel(**transformer), 0),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=_image_vae(1),
        text_encoder=gemma(tokenizer, 2),
        tokenizer=tokenizer,
    ).save_pretrained(folder)


@contextmanager
def smaller_pictures() -> Iterator[None]:
    """Qwen-Image-Edit without its pictures of a million pixels: of a 256th of them, in its pipelines and here."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    from mindspeed_mm.fsdp.models.qwen_image import modeling_qwen_image

    # Where the plugin of that name was imported before, it has done so for this process.
    ours = getattr(modeling_qwen_image.fitted_size, "__wrapped__", modeling_qwen_image.fitted_size)
    theirs = pipeline_qwenimage_edit.calculate_dimensions
    also_theirs = pipeline_qwenimage_edit_plus.calculate_dimensions
    with (
        mock.patch.object(modeling_qwen_image, "fitted_size", lambda *size: ours(*size[:2], size[2] // 256)),
        mock.patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda a, r: theirs(a / 256, r)),
        mock.patch.object(pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda a, r: also_theirs(a / 256, r)),
    ):
        yield


def _qwen_image_edit(folder: Path, name: str) -> None:
    import diffusers
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    kind = getattr(diffusers, name)
    template = kind(*[None] * 6).prompt_template_encode
    tokenizer = character_tokenizer(template.partition("{}")[0].partition("<|vision_start|>")[0], 64)
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in _SIGHT.values()])
    tokens = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in _SIGHT.items()}
    patches = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    area = {"shortest_edge": 256, "longest_edge": 64 * 64}
    _qwen_image(folder, tokenizer, **{f"{name}_token_id": number for name, number in tokens.items()})
    whole = diffusers.QwenImagePipeline.from_pretrained(folder, local_files_only=True)
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=area, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=area, **patches),
        chat_template=CHAT,
    )
    shutil.rmtree(folder)
    kind(**whole.components, processor=processor).save_pretrained(folder)


_SIGHT = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


def _qwen_image(folder: Path, tokenizer: Any = None, **tokens: int) -> None:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    before = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    )
    tokenizer = tokenizer or character_tokenizer(before, 34)
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": WIDTH, "intermediate_size": 16,
        "patch_size": 8, "window_size": 32, "fullatt_block_indexes": [0],
    }  # fmt: skip
    text = {**QWEN_VL_TEXT, "vocab_size": len(tokenizer)}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    vae = {
        "base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 2.0, 1.1],
    }  # fmt: skip
    transformer = {
        "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": WIDTH, "axes_dims_rope": (8, 4, 4),
    }  # fmt: skip
    dynamic = {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **dynamic),
        vae=seeded(lambda: AutoencoderKLQwenImage(**vae), 1),
        text_encoder=seeded(lambda: Qwen2_5_VLForConditionalGeneration(config), 2),
        tokenizer=tokenizer,
        transformer=seeded(lambda: QwenImageTransformer2DModel(**transformer), 3),
    ).save_pretrained(folder)


def _flux2(folder: Path) -> None:
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )

    tokenizer = character_tokenizer(template=CHAT)
    settings = {name: value for name, value in FLUX_VAE.items() if not name.endswith("_factor")}
    vae = seeded(lambda: AutoencoderKLFlux2(**settings), 1)
    with torch.no_grad():
        vae.bn.running_mean.copy_(torch.linspace(-0.3, 0.4, len(vae.bn.running_mean)))
        vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, len(vae.bn.running_var)))
    transformer = {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 3 * WIDTH, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False,
    }  # fmt: skip
    Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=qwen3(tokenizer, 2, 28, "Qwen3ForCausalLM"),
        tokenizer=tokenizer,
        transformer=seeded(lambda: Flux2Transformer2DModel(**transformer), 3),
    ).save_pretrained(folder)


def _flux2_dev(folder: Path) -> None:
    from diffusers import Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessor, PixtralProcessor

    template = (
        "{% for message in messages %}[{{ message.role }}]"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    tokenizer = character_tokenizer(template=template)
    marks = (SYSTEM_MESSAGE, "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(size={"longest_edge": 32}, patch_size=8),
        tokenizer=tokenizer,
        patch_size=8,
        chat_template=template,
    )
    heads = {"num_attention_heads": 2, "head_dim": 8}
    text = {
        "model_type": "mistral", "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 24,
        "num_hidden_layers": 30, "num_key_value_heads": 1, "pad_token_id": 0, **heads,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 32,
        "patch_size": 8, **heads,
    }  # fmt: skip
    mistral = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=tokenizer.convert_tokens_to_ids("[IMG]")
    )
    _flux2(folder)
    parts = Flux2KleinPipeline.from_pretrained(folder, local_files_only=True).components
    config = {**parts["transformer"].config, "guidance_embeds": True}
    shutil.rmtree(folder)
    Flux2Pipeline(
        scheduler=parts["scheduler"],
        vae=parts["vae"],
        text_encoder=seeded(lambda: Mistral3ForConditionalGeneration(mistral), 2),
        tokenizer=processor,
        transformer=seeded(lambda: Flux2Transformer2DModel.from_config(config), 3),
    ).save_pretrained(folder)


def _z_image(folder: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer = character_tokenizer(template=CHAT)
    transformer = {
        "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
        "cap_feat_dim": WIDTH, "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32],
    }  # fmt: skip
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(1),
        text_encoder=qwen3(tokenizer, 2, 3, "Qwen3Model"),
        tokenizer=tokenizer,
        transformer=seeded(lambda: ZImageTransformer2DModel(**transformer), 3),
    ).save_pretrained(folder)


_COGVIDEOX_I2V = "CogVideoXImageToVideoPipeline"

FAMILIES: dict[str, TinyFamily] = {
    "flux": TinyFamily(make_tiny_flux),
    "sd3": TinyFamily(_sd3),
    "sana": TinyFamily(_sana, side=32, settings={"use_resolution_binning": False}),
    "lumina2": TinyFamily(_lumina2),
    "qwen_image": TinyFamily(_qwen_image),
    "qwen_image_edit": TinyFamily(lambda folder: _qwen_image_edit(folder, "QwenImageEditPipeline")),
    "qwen_image_edit_plus": TinyFamily(lambda folder: _qwen_image_edit(folder, "QwenImageEditPlusPipeline")),
    "flux2": TinyFamily(_flux2),
    "flux2_dev": TinyFamily(_flux2_dev, guidance=3.5),
    "z_image": TinyFamily(_z_image, guidance=0.0),
    "wan": TinyFamily(make_tiny_wan, frames=5),
    "wan_i2v": TinyFamily(lambda folder: make_tiny_wan(folder, task="i2v"), frames=5),
    "wan2_2": TinyFamily(make_tiny_wan2_2, frames=5),
    "wan2_2_i2v": TinyFamily(make_tiny_wan2_2_i2v, frames=5),
    "wan2_2_5b": TinyFamily(make_tiny_wan2_2_5b, side=32, frames=5),
    "wan2_2_5b_ti2v": TinyFamily(make_tiny_wan2_2_5b, side=32, frames=5, task="ti2v", given_frames=1),
    "cogvideox": TinyFamily(make_tiny_cogvideox, side=32, frames=9),
    "cogvideox_1_5": TinyFamily(
        lambda folder: make_tiny_cogvideox(folder, patch_size_t=2, patch_bias=False), 32, frames=9
    ),
    "cogvideox_i2v": TinyFamily(
        lambda folder: make_tiny_cogvideox(
            folder,
            _COGVIDEOX_I2V,
            in_channels=8,
            use_learned_positional_embeddings=True,
            sample_width=4,
            sample_frames=9,
        ),
        side=32,
        frames=9,
    ),
    "cogvideox_1_5_i2v": TinyFamily(
        lambda folder: make_tiny_cogvideox(
            folder, _COGVIDEOX_I2V, True, in_channels=8, patch_size_t=2, patch_bias=False, ofs_embed_dim=4
        ),
        side=32,
        frames=9,
    ),
    "hunyuan_video": TinyFamily(make_tiny_hunyuan_video, frames=5, guidance=3.5),
    "hunyuan_video_1_5": TinyFamily(make_tiny_hunyuan_video_1_5, frames=5),
    "hunyuan_video_i2v": TinyFamily(lambda folder: make_tiny_hunyuan_video_i2v(folder, "latent_concat"), frames=9),
    "hunyuan_video_i2v_replace": TinyFamily(
        lambda folder: make_tiny_hunyuan_video_i2v(folder, "token_replace"), frames=5, guidance=3.5, given_frames=1
    ),
    "hunyuan_video_1_5_i2v": TinyFamily(make_tiny_hunyuan_video_1_5_i2v, frames=5),
    "ltx_video": TinyFamily(make_tiny_ltx_video, side=32, frames=5),
    "ltx_video_i2v": TinyFamily(make_tiny_ltx_video, side=32, frames=5, task="i2v", given_frames=1),
    "opensoraplan": TinyFamily(make_tiny_opensoraplan, side=32, frames=5),
    "opensoraplan_i2v": TinyFamily(lambda folder: make_tiny_opensoraplan(folder, "i2v"), side=32, frames=5),
    "opensoraplan_1_5": TinyFamily(make_tiny_opensoraplan_1_5, side=32, frames=9),
    "sana_video": TinyFamily(make_tiny_sana_video, side=32, frames=5, settings={"use_resolution_binning": False}),
}
"""Case of `tests/families/test_generators.py` → how to make it."""
