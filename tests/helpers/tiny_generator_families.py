"""Folders of every family of generators in diffusers' layout, small enough for a test: pipelines, transformers, VAEs,
text encoders and tokenizers are those of the real classes, only the sizes are tiny."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_generators import (
    CHARACTERS,
    FLUX_VAE,
    TEXT_WIDTH,
    WAN_VAE,
    clip_text_config,
    clip_tokenizer,
    make_tiny_flux,
    make_tiny_wan,
    seeded,
    t5_config,
    t5_tokenizer,
)

WIDTH = 16
"""Of the language models that read captions."""
_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


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


# --- tokenizers and language models -----------------------------------------------------------------------------------


def character_tokenizer(prefix: str = "", count: int = 0, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character, unknown ones included, padded on the right.

    Args:
        prefix: Text that is cut into exactly `count` tokens, for pipelines that cut so many from the front.
        count: As above.
        template: Chat template.
    """
    special = ["<pad>", "<unk>", "<eos>"]
    vocab = {token: number for number, token in enumerate([*special, *CHARACTERS, " ", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    length = -(-len(prefix) // count) if count else 1
    pieces = [prefix[start : start + length] for start in range(0, len(prefix), length)] if count else []
    while len(pieces) < count:  # the last ones are halved until there are as many as asked for
        longest = max(range(len(pieces)), key=lambda at: len(pieces[at]))
        piece = pieces[longest]
        pieces[longest : longest + 1] = [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in dict.fromkeys(pieces)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        padding_side="right",
        chat_template=template,
        model_max_length=4096,
    )


def gemma(tokenizer: Any, seed: int) -> Any:
    """A tiny Gemma 2."""
    from transformers import Gemma2Config, Gemma2Model

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
    config = Gemma2Config(vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=24, pad_token_id=0, **sizes)
    return seeded(lambda: Gemma2Model(config), seed)


def qwen3(tokenizer: Any, seed: int, layers: int, name: str) -> Any:
    """A tiny Qwen3 of a class."""
    import transformers

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": layers}
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=24, pad_token_id=0, **sizes
    )
    return seeded(lambda: getattr(transformers, name)(config), seed)


_QWEN_VL_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    "pad_token_id": 0,
}


# --- text to image ----------------------------------------------------------------------------------------------------


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
        scheduler=DPMSolverMultistepScheduler(**_FLOW),
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

    ours, theirs = modeling_qwen_image.fitted_size, pipeline_qwenimage_edit.calculate_dimensions
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
        chat_template=_CHAT,
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
    text = {**_QWEN_VL_TEXT, "vocab_size": len(tokenizer)}
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


_CHAT = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def _flux2(folder: Path) -> None:
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )

    tokenizer = character_tokenizer(template=_CHAT)
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


def _z_image(folder: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer = character_tokenizer(template=_CHAT)
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


# --- text to video ----------------------------------------------------------------------------------------------------


def _wan2_2(folder: Path) -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    make_tiny_wan(folder)
    whole = WanPipeline.from_pretrained(folder, local_files_only=True)
    second = seeded(lambda: WanTransformer3DModel.from_config(whole.transformer.config), 9)
    WanPipeline(**{**whole.components, "transformer_2": second}, boundary_ratio=0.75).save_pretrained(folder)


def _wan2_2_5b(folder: Path) -> None:
    from diffusers import AutoencoderKLWan, WanPipeline

    make_tiny_wan(folder, in_channels=6, out_channels=6)
    whole = WanPipeline.from_pretrained(folder, local_files_only=True)
    vae = {
        **WAN_VAE, "z_dim": 6, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12,
        "decoder_base_dim": 4, "temperal_downsample": [False, True, True], "scale_factor_spatial": 16,
        "latents_mean": [0.1, -0.2, 0.3, 0.0, -0.1, 0.2], "latents_std": [1.5, 0.7, 2.0, 1.1, 0.8, 1.0],
    }  # fmt: skip
    parts = {**whole.components, "vae": seeded(lambda: AutoencoderKLWan(**vae), 1)}
    WanPipeline(**parts, expand_timesteps=True).save_pretrained(folder)


def _cogvideox(
    folder: Path, pipeline: str = "CogVideoXPipeline", invert_scale_latents: bool = False, **changes: Any
) -> None:
    import diffusers
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
    from transformers import T5EncoderModel

    t5 = t5_tokenizer()
    vae = {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
        "temporal_compression_ratio": 4, "scaling_factor": 0.7, "invert_scale_latents": invert_scale_latents,
    }  # fmt: skip
    transformer = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 4,
        "text_embed_dim": TEXT_WIDTH, "num_layers": 2, "sample_width": 6, "sample_height": 4, "sample_frames": 9,
        "patch_size": 2, "max_text_seq_length": 24, "use_rotary_positional_embeddings": True, **changes,
    }  # fmt: skip
    v_steps = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "snr_shift_scale": 3.0}
    getattr(diffusers, pipeline)(
        tokenizer=t5,
        text_encoder=seeded(lambda: T5EncoderModel(t5_config(t5)), 0),
        vae=seeded(lambda: AutoencoderKLCogVideoX(**vae), 1),
        transformer=seeded(lambda: CogVideoXTransformer3DModel(**transformer).float(), 2),
        scheduler=CogVideoXDDIMScheduler(timestep_spacing="trailing", set_alpha_to_one=True, **v_steps),
    ).save_pretrained(folder)


def _hunyuan_video(folder: Path) -> None:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextModel, LlamaConfig, LlamaModel

    template = inspect.signature(HunyuanVideoPipeline.encode_prompt).parameters["prompt_template"].default
    tokenizer = character_tokenizer(template["template"].partition("{}")[0], template["crop_start"])
    clip = clip_tokenizer()
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    llama = LlamaConfig(vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=24, pad_token_id=0, **sizes)
    vae = {
        "latent_channels": 4, "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1,
        "norm_num_groups": 4,
    }  # fmt: skip
    transformer = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
        "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "text_embed_dim": WIDTH,
        "pooled_projection_dim": 24, "rope_axes_dim": (2, 4, 4), "guidance_embeds": True,
    }  # fmt: skip
    HunyuanVideoPipeline(
        text_encoder=seeded(lambda: LlamaModel(llama), 0),
        tokenizer=tokenizer,
        transformer=seeded(lambda: HunyuanVideoTransformer3DModel(**transformer), 1),
        vae=seeded(lambda: AutoencoderKLHunyuanVideo(**vae), 2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=seeded(lambda: CLIPTextModel(clip_text_config(clip)), 3),
        tokenizer_2=clip,
    ).save_pretrained(folder)


def _llava_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Cuts the template as Llama's does where the pipeline counts: the picture is the sixth token, the caption's first
    one the 104th, and four stand before what the assistant says."""
    text = template.partition("<image>")[2].partition("<|eot_id|>")[0]
    marks = (
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<image>",
        "sys",
        "tem",
        "user",
        "assistant",
        "\n\n",
    )
    tokenizer = character_tokenizer()
    long = text[: 1 - (103 - 6 - 6)]  # one token; the rest of the text has one for each character
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (long, *marks)])
    assert len(tokenizer(template.partition("{}")[0])["input_ids"]) == 103
    return tokenizer


def _hunyuan_video_i2v(folder: Path, condition: str) -> None:
    from diffusers import HunyuanVideoImageToVideoPipeline, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    template = inspect.signature(HunyuanVideoImageToVideoPipeline.encode_prompt).parameters["prompt_template"].default
    tokenizer = _llava_tokenizer(template["template"])
    _hunyuan_video(folder)
    parts = HunyuanVideoPipeline.from_pretrained(folder, local_files_only=True).components
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 3}
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=24,
        pad_token_id=0,
        num_key_value_heads=1,
        **sizes,
    )
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, image_size=24, patch_size=1, projection_dim=8, **sizes
    )
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    llava = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=image_token, pad_token_id=0, image_seq_length=576
    )
    concat = condition == "latent_concat"
    changes = {"in_channels": 9 if concat else 4, "image_condition_type": condition, "guidance_embeds": not concat}
    config = {**parts["transformer"].config, **changes}
    shutil.rmtree(folder)
    HunyuanVideoImageToVideoPipeline(
        **{
            **parts,
            "text_encoder": seeded(lambda: LlavaForConditionalGeneration(llava), 0),
            "tokenizer": tokenizer,
            "transformer": seeded(lambda: HunyuanVideoTransformer3DModel.from_config(config), 1),
        },
        image_processor=CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}),
    ).save_pretrained(folder)


def _hunyuan_video_1_5_i2v(folder: Path) -> None:
    from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    _hunyuan_video_1_5(folder)
    parts = HunyuanVideo15Pipeline.from_pretrained(folder, local_files_only=True).components
    parts["transformer"].register_to_config(task_type="i2v")
    vision = SiglipVisionConfig(
        hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    shutil.rmtree(folder)
    HunyuanVideo15ImageToVideoPipeline(
        **parts,
        image_encoder=seeded(lambda: SiglipVisionModel(vision), 5),
        feature_extractor=SiglipImageProcessor(size={"height": 16, "width": 16}),
    ).save_pretrained(folder)


def _hunyuan_video_1_5(folder: Path) -> None:
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, T5EncoderModel
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    encode = HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    before = inspect.signature(encode).parameters["system_message"].default
    tokenizer = character_tokenizer(before, 108, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    text = Qwen2_5_VLTextConfig(**{**_QWEN_VL_TEXT, "vocab_size": len(tokenizer)})
    bytes_, glyphs = ByT5Tokenizer(), t5_config(t5_tokenizer())
    glyphs.vocab_size = len(bytes_)
    vae = {
        "latent_channels": 4, "block_out_channels": (8, 8, 8), "layers_per_block": 1, "spatial_compression_ratio": 4,
        "temporal_compression_ratio": 2,
    }  # fmt: skip
    transformer = {
        "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "num_refiner_layers": 1, "text_embed_dim": WIDTH, "text_embed_2_dim": TEXT_WIDTH, "image_embed_dim": 12,
        "rope_axes_dim": (2, 2, 4), "target_size": 16, "task_type": "t2v",
    }  # fmt: skip
    HunyuanVideo15Pipeline(
        text_encoder=seeded(lambda: Qwen2_5_VLTextModel(text), 0),
        tokenizer=tokenizer,
        transformer=seeded(lambda: HunyuanVideo15Transformer3DModel(**transformer), 1),
        vae=seeded(lambda: AutoencoderKLHunyuanVideo15(**vae), 2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=seeded(lambda: T5EncoderModel(glyphs), 3),
        tokenizer_2=bytes_,
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    ).save_pretrained(folder)


def _ltx_video(folder: Path) -> None:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )
    from transformers import T5EncoderModel

    t5 = t5_tokenizer()
    settings = {
        "latent_channels": 8, "block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4,
        "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5,
        "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True, True, False, False), "upsample_residual": (False,) * 4,
        "upsample_factor": (1,) * 4, "patch_size": 1, "scaling_factor": 0.9,
    }  # fmt: skip
    vae = seeded(lambda: AutoencoderKLLTXVideo(**settings), 1)
    with torch.no_grad():
        vae.latents_mean.copy_(torch.linspace(-0.3, 0.4, 8))
        vae.latents_std.copy_(torch.linspace(0.5, 2.0, 8))
    transformer = {
        "in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8,
        "cross_attention_dim": 32, "num_layers": 2, "caption_channels": TEXT_WIDTH,
    }  # fmt: skip
    dynamic = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **dynamic),
        vae=vae,
        text_encoder=seeded(lambda: T5EncoderModel(t5_config(t5)), 2),
        tokenizer=t5,
        transformer=seeded(lambda: LTXVideoTransformer3DModel(**transformer), 3),
    ).save_pretrained(folder)


def _sana_video(folder: Path) -> None:
    from diffusers import AutoencoderKLWan, DPMSolverMultistepScheduler, SanaVideoPipeline, SanaVideoTransformer3DModel

    tokenizer = character_tokenizer()
    transformer = {
        "in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24,
        "caption_channels": WIDTH, "rope_max_seq_len": 32,
    }  # fmt: skip
    SanaVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma(tokenizer, 0),
        vae=seeded(lambda: AutoencoderKLWan(**WAN_VAE), 1),
        transformer=seeded(lambda: SanaVideoTransformer3DModel(**transformer), 2),
        scheduler=DPMSolverMultistepScheduler(**_FLOW),
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
    "z_image": TinyFamily(_z_image, guidance=0.0),
    "wan": TinyFamily(make_tiny_wan, frames=5),
    "wan2_2": TinyFamily(_wan2_2, frames=5),
    "wan2_2_5b": TinyFamily(_wan2_2_5b, side=32, frames=5),
    "wan2_2_5b_ti2v": TinyFamily(_wan2_2_5b, side=32, frames=5, task="ti2v", given_frames=1),
    "cogvideox": TinyFamily(_cogvideox, side=32, frames=5),
    "cogvideox_1_5": TinyFamily(lambda folder: _cogvideox(folder, patch_size_t=2, patch_bias=False), 32, frames=9),
    "cogvideox_i2v": TinyFamily(
        lambda folder: _cogvideox(
            folder,
            _COGVIDEOX_I2V,
            in_channels=8,
            use_learned_positional_embeddings=True,
            sample_width=4,
            sample_frames=5,
        ),
        side=32,
        frames=5,
    ),
    "cogvideox_1_5_i2v": TinyFamily(
        lambda folder: _cogvideox(
            folder, _COGVIDEOX_I2V, True, in_channels=8, patch_size_t=2, patch_bias=False, ofs_embed_dim=4
        ),
        side=32,
        frames=9,
    ),
    "hunyuan_video": TinyFamily(_hunyuan_video, frames=5, guidance=3.5),
    "hunyuan_video_1_5": TinyFamily(_hunyuan_video_1_5, frames=5),
    "hunyuan_video_i2v": TinyFamily(lambda folder: _hunyuan_video_i2v(folder, "latent_concat"), frames=9),
    "hunyuan_video_i2v_replace": TinyFamily(
        lambda folder: _hunyuan_video_i2v(folder, "token_replace"), frames=5, guidance=3.5, given_frames=1
    ),
    "hunyuan_video_1_5_i2v": TinyFamily(_hunyuan_video_1_5_i2v, frames=5),
    "ltx_video": TinyFamily(_ltx_video, side=32, frames=5),
    "ltx_video_i2v": TinyFamily(_ltx_video, side=32, frames=5, task="i2v", given_frames=1),
    "sana_video": TinyFamily(_sana_video, side=32, frames=5, settings={"use_resolution_binning": False}),
}
"""Case of `tests/families/test_generators.py` → how to make it."""
