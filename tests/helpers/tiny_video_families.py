"""Folders of the families that make videos, in diffusers' layout and small enough for a test."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_generators import (
    TEXT_WIDTH,
    WAN_VAE,
    clip_text_config,
    clip_tokenizer,
    make_tiny_wan,
    seeded,
    t5_config,
    t5_tokenizer,
)
from tests.helpers.tiny_language_models import FLOW, QWEN_VL_TEXT, WIDTH, character_tokenizer, gemma


def make_tiny_wan2_2(folder: Path) -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    make_tiny_wan(folder)
    whole = WanPipeline.from_pretrained(folder, local_files_only=True)
    second = seeded(lambda: WanTransformer3DModel.from_config(whole.transformer.config), 9)
    WanPipeline(**{**whole.components, "transformer_2": second}, boundary_ratio=0.75).save_pretrained(folder)


def make_tiny_wan2_2_i2v(folder: Path) -> None:
    """As released without an image encoder: the first frame is a condition alone."""
    from diffusers import WanImageToVideoPipeline, WanTransformer3DModel

    make_tiny_wan(folder, task="i2v", image_dim=None, added_kv_proj_dim=None)
    whole = WanImageToVideoPipeline.from_pretrained(folder, local_files_only=True)
    second = seeded(lambda: WanTransformer3DModel.from_config(whole.transformer.config), 9)
    parts = {**whole.components, "transformer_2": second, "image_encoder": None, "image_processor": None}
    shutil.rmtree(folder)
    WanImageToVideoPipeline(**parts, boundary_ratio=0.82).save_pretrained(folder)


def make_tiny_wan2_2_5b(folder: Path) -> None:
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


def make_tiny_cogvideox(
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


def make_tiny_hunyuan_video(folder: Path) -> None:
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


def make_tiny_hunyuan_video_i2v(folder: Path, condition: str) -> None:
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
    make_tiny_hunyuan_video(folder)
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


def make_tiny_hunyuan_video_1_5_i2v(folder: Path) -> None:
    from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    make_tiny_hunyuan_video_1_5(folder)
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


def make_tiny_hunyuan_video_1_5(folder: Path) -> None:
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
    text = Qwen2_5_VLTextConfig(**{**QWEN_VL_TEXT, "vocab_size": len(tokenizer)})
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


def make_tiny_ltx_video(folder: Path) -> None:
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


def make_tiny_ltx2(folder: Path, *, is_2_3: bool = False, **changes: Any) -> None:
    """LTX-2, or 2.3: gated attention, modulated captions, projections of captions in the connectors. `changes` are of
    the transformer."""
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        FlowMatchEulerDiscreteScheduler,
        LTX2Pipeline,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokenizer = character_tokenizer()
    tokenizer.model_max_length = 32
    text = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    gemma3 = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    seen = {
        "latent_channels": 8, "block_out_channels": (4, 8, 16, 32), "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4, "scaling_factor": 0.9,
        "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
    }  # fmt: skip
    heard = {
        "base_channels": 8, "ch_mult": (1, 1, 1), "num_res_blocks": 1, "latent_channels": 2, "mel_bins": 16,
        "resolution": 64,
    }  # fmt: skip
    vae = seeded(lambda: AutoencoderKLLTX2Video(**seen), 1)
    audio_vae = seeded(lambda: AutoencoderKLLTX2Audio(**heard), 2)
    with torch.no_grad():
        for each in (vae, audio_vae):
            each.latents_mean.copy_(torch.linspace(-0.3, 0.4, 8))
            each.latents_std.copy_(torch.linspace(0.5, 2.0, 8))
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "cross_attention_dim": 24}
    sounds = {"num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
    registers = {"num_attention_heads": 2, "attention_head_dim": WIDTH // 2, "num_layers": 1}
    registers |= {"num_learnable_registers": 16}
    newer: dict[str, Any] = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True}
    newer |= {"audio_cross_attn_mod": True, "use_prompt_embeddings": False, "perturbed_attn": True}
    own = {"attention_head_dim": 12}, {"attention_head_dim": 8}
    connectors = {
        "caption_channels": WIDTH, "text_proj_in_factor": 3, "rope_type": "split",
        **{f"video_connector_{k}": v for k, v in {**registers, **(own[0] if is_2_3 else {})}.items()},
        **{f"audio_connector_{k}": v for k, v in {**registers, **(own[1] if is_2_3 else {})}.items()},
    }  # fmt: skip
    if is_2_3:
        connectors |= {"per_modality_projections": True, "video_hidden_dim": 24, "audio_hidden_dim": 16}
    transformer = {
        "in_channels": 8, "out_channels": 8, "audio_in_channels": 8, "audio_out_channels": 8, "num_layers": 2,
        "caption_channels": WIDTH, "rope_type": "split", **sizes, **{f"audio_{k}": v for k, v in sounds.items()},
        **(newer if is_2_3 else {}), **changes,
    }  # fmt: skip
    vocoder = {
        "in_channels": 32, "hidden_channels": 8, "upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2],
        "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]], "output_sampling_rate": 8000,
    }  # fmt: skip
    dynamic = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **dynamic),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=seeded(lambda: Gemma3ForConditionalGeneration(gemma3), 3),
        tokenizer=tokenizer,
        connectors=seeded(lambda: LTX2TextConnectors(**connectors), 4),
        transformer=seeded(lambda: LTX2VideoTransformer3DModel(**transformer), 5),
        vocoder=seeded(lambda: LTX2Vocoder(**vocoder), 6),
    ).save_pretrained(folder)


def make_tiny_sana_video(folder: Path) -> None:
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
        scheduler=DPMSolverMultistepScheduler(**FLOW),
    ).save_pretrained(folder)
