"""Further families that are to keep packed samples apart, beside those of `packed_families`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.helpers.packed_families import (
    AUDIO,
    AUDIO_START,
    DELTA,
    EXPERTS,
    HEADS,
    IMAGE,
    PATCH,
    PATCH_IDS,
    QWEN2_MEDIA,
    QWEN_IMAGES,
    QWEN_VISION,
    ROPE3,
    SLIDING,
    TEXT,
    TOWER,
    VIDEO,
    VISION,
    VISION_END,
    VISION_START,
    WINDOW,
    Family,
    Item,
    image_of,
    of,
    sound,
    timed,
    vl,
)

IMAGES = {"image": image_of(16, 16), "image2": image_of(16, 16)}
FOUR_TOKENS_OF_32 = {"image": image_of(32, 4), "image2": image_of(32, 4)}
FOUR_TOKENS = {"image": image_of(16, 4), "image2": image_of(16, 4)}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
TEXT_OF = {"model_type": "qwen2", **TEXT}
LLAMA = {"model_type": "llama", **TEXT}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}


def small_patches(tokens: int, channels: int = 3) -> Callable[[torch.Generator], Item]:
    """Of Kimi-K2.5: patches (P, 3, p, p) of a picture of 4 × 4, merged by squares."""

    def make(draw: torch.Generator) -> Item:
        pixels = torch.randn(16, channels, PATCH, PATCH, generator=draw).double()
        ids = [VISION_START, *[IMAGE] * tokens, VISION_END]
        return ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}

    return make


def pixtral(draw: torch.Generator) -> Item:
    """Of Mistral3: pictures with their sizes."""
    pixels = torch.randn(1, 3, 16, 16, generator=draw).double()
    return [*[IMAGE] * 4, VISION_END], {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]])}


def gemma4_image(draw: torch.Generator) -> Item:
    """Flat patches with the place of each."""
    side = 4
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).reshape(1, -1, 2)
    pixels = torch.rand(1, side * side, 3 * PATCH * PATCH, generator=draw).double()
    return [VISION_START, *[IMAGE] * 4, VISION_END], {"pixel_values": pixels, "image_position_ids": places}


def lfm2_image(draw: torch.Generator) -> Item:
    """Flat patches of a picture of 4 × 4, padded to the most that a picture may have; squares of four are one token."""
    pixels = torch.zeros(1, 20, 3 * PATCH * PATCH, dtype=torch.float64)
    pixels[:, :16] = torch.randn(1, 16, 3 * PATCH * PATCH, generator=draw).double()
    real = (torch.arange(20) < 16).int()[None]
    tensors = {"pixel_values": pixels, "spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": real}
    return [VISION_START, *[IMAGE] * 4, VISION_END], tensors


def prefix(_: torch.Generator) -> Item:
    """Tokens that see each other both ways, without a medium."""
    return [*[IMAGE] * 5], {}


def molmo2_image(draw: torch.Generator) -> Item:
    """A crop of 2 × 2 patches, pooled to one token each; the numbers of patches count through all pictures of a batch,
    which the first picture's are alone."""
    pixels = torch.randn(1, 4, 3 * PATCH * PATCH, generator=draw).double()
    pooling = torch.arange(4)[:, None]
    ids = [VISION_START, *[IMAGE] * 4, VISION_END]
    return ids, {"pixel_values": pixels, "image_token_pooling": pooling, "image_grids": torch.tensor([[2, 2, 0, 0]])}


LFM2 = TEXT | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MOLMO2 = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
GLM_ROPE = {"rope_parameters": ROPE3 | {"partial_rotary_factor": 1.0}}
GLM_VISION = VISION | {"out_hidden_size": 32, "image_size": 16}
GLM_IDS = {"image_start_token_id": VISION_START, "image_end_token_id": VISION_END}
OMNI3 = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
    "n_window": 50, "n_window_infer": 100, "output_dim": 32, "downsample_hidden_size": 8,
}  # fmt: skip
OMNI3_MEDIA = {
    **QWEN_IMAGES,
    "video": timed(QWEN2_MEDIA["video"], 0.5),
    "audio": sound(100, 13),
    "audio2": sound(61, 8),
}

MORE: dict[str, Family] = {
    "hrm_text": Family(
        of("HrmTextConfig", **HEADS | {"num_key_value_heads": 4, "num_hidden_layers": 1}), "HrmTextForCausalLM"
    ),
    "hrm_text prefixes": Family(
        of("HrmTextConfig", **HEADS | {"num_key_value_heads": 4, "num_hidden_layers": 1}),
        "HrmTextForCausalLM", {"image": prefix}, "token_type_ids",
    ),
    "molmo2": Family(
        of(
            "Molmo2Config", image_patch_id=IMAGE,
            text_config=HEADS | {"additional_vocab_size": 8, "rope_parameters": PLAIN_ROPE},
            vision_config=MOLMO2 | {"num_hidden_layers": 2, "image_size": [8, 8], "patch_size": PATCH},
            adapter_config=MOLMO2 | {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
        ),
        "Molmo2ForConditionalGeneration", {"image": molmo2_image}, "mm_token_type_ids",
    ),
    "olmo_hybrid": Family(
        of("OlmoHybridConfig", **HEADS, **{k: v for k, v in DELTA.items() if "head_dim" in k or k == "layer_types"}),
        "OlmoHybridForCausalLM",
    ),
    "lfm2": Family(of("Lfm2Config", **LFM2), "Lfm2ForCausalLM"),
    "lfm2_moe": Family(
        of("Lfm2MoeConfig", **LFM2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1),
        "Lfm2MoeForCausalLM",
    ),
    "lfm2_vl": Family(
        of(
            "Lfm2VlConfig", text_config={"model_type": "lfm2", **LFM2}, image_token_id=IMAGE, projector_hidden_size=32,
            vision_config=TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        ),
        "Lfm2VlForConditionalGeneration", {"image": lfm2_image, "image2": lfm2_image},
    ),
    "mimo_v2_flash": Family(
        of(
            "MiMoV2FlashConfig", **TEXT, **SLIDING, **ROUTED, head_dim=8, v_head_dim=6,
            mlp_layer_types=["dense", "sparse"],
        ),
        "MiMoV2FlashForCausalLM",
    ),
    "deepseek_v3": Family(
        of("DeepseekV3Config", **TEXT | {"num_key_value_heads": 4}, **ROUTED, **MLA, first_k_dense_replace=1),
        "DeepseekV3ForCausalLM",
    ),
    "bailing_hybrid": Family(
        of(
            "BailingHybridConfig", **TEXT | {"num_key_value_heads": 4}, **MLA, num_local_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1,
            head_dim=8, layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        ),
        "BailingHybridForCausalLM",
    ),
    "internvl": Family(
        vl("InternVLConfig", TEXT_OF, TOWER | {"image_size": [16, 16], "patch_size": [4, 4]}, image_seq_length=4),
        "InternVLForConditionalGeneration", FOUR_TOKENS,
    ),
    "internvl qwen3_moe": Family(
        vl(
            "InternVLConfig", {"model_type": "qwen3_moe", **HEADS, **EXPERTS},
            TOWER | {"image_size": [16, 16], "patch_size": [4, 4]}, image_seq_length=4,
        ),
        "InternVLForConditionalGeneration", FOUR_TOKENS,
    ),
    "glm4v": Family(
        vl("Glm4vConfig", TEXT | GLM_ROPE, GLM_VISION, **GLM_IDS),
        "Glm4vForConditionalGeneration", QWEN_IMAGES, "mm_token_type_ids",
    ),
    "glm4v_moe": Family(
        vl(
            "Glm4vMoeConfig", HEADS | ROUTED | GLM_ROPE | {"first_k_dense_replace": 1, "n_shared_experts": 1},
            GLM_VISION, **GLM_IDS,
        ),
        "Glm4vMoeForConditionalGeneration", QWEN_IMAGES, "mm_token_type_ids",
    ),
    "llava": Family(
        of(
            "LlavaConfig", text_config=LLAMA, vision_config={"model_type": "clip_vision_model", **TOWER},
            image_token_index=IMAGE, image_seq_length=16, vision_feature_layer=-1,
        ),
        "LlavaForConditionalGeneration", IMAGES,
    ),
    "deepseek_vl": Family(
        of("DeepseekVLConfig", text_config=LLAMA, vision_config=SIGLIP, image_token_id=IMAGE),
        "DeepseekVLForConditionalGeneration", IMAGES,
    ),
    "deepseek_vl_hybrid": Family(
        of(
            "DeepseekVLHybridConfig", text_config=LLAMA, vision_config=SIGLIP, image_token_id=IMAGE,
            high_res_vision_config={
                "model_type": "sam_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 24, "patch_size": 4, "window_size": 4, "output_channels": 16, "global_attn_indexes": [1],
            },
        ),
        "DeepseekVLHybridForConditionalGeneration",
        {"image": image_of(16, 16, high_res_pixel_values=partial(torch.ones, 1, 3, 24, 24, dtype=torch.float64))},
    ),
    "janus": Family(
        of(
            "JanusConfig", text_config=LLAMA, image_token_id=IMAGE,
            vision_config=TOWER | {"num_image_tokens": 16, "projection_dim": 32},
            vq_config={
                "embed_dim": 8, "num_embeddings": 32, "latent_channels": 32, "base_channels": 32,
                "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": 32, "image_token_embed_dim": 32,
            },
        ),
        "JanusForConditionalGeneration", IMAGES,
    ),
    "kimi_k25": Family(
        vl(
            "Kimi_K25Config",
            {
                "model_type": "deepseek_v3", **TEXT, "num_key_value_heads": 4, **ROUTED, **MLA,
                "first_k_dense_replace": 1,
            },
            {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "patch_size": PATCH, "pos_emb_height": 8, "pos_emb_width": 8,
            },
            projection_hidden_size=32,
        ),
        "Kimi_K25ForConditionalGeneration", {"image": small_patches(4), "image2": small_patches(4)},
    ),
    "mistral3": Family(
        of(
            "Mistral3Config", text_config={"model_type": "mistral", **HEADS, "sliding_window": WINDOW},
            vision_config={
                "model_type": "pixtral", **TOWER, "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            image_token_index=IMAGE, spatial_merge_size=2,
        ),
        "Mistral3ForConditionalGeneration", {"image": pixtral, "image2": pixtral},
    ),
    "gemma3": Family(
        of(
            "Gemma3Config", text_config={**HEADS, **SLIDING, "query_pre_attn_scalar": 8}, vision_config=SIGLIP,
            mm_tokens_per_image=4, boi_token_index=VISION_START, eoi_token_index=VISION_END, image_token_index=IMAGE,
        ),
        "Gemma3ForConditionalGeneration", FOUR_TOKENS, "token_type_ids",
    ),
    "gemma4": Family(
        of(
            "Gemma4Config",
            text_config={
                **HEADS, **SLIDING, "global_head_dim": 8, "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 256, "use_bidirectional_attention": "vision",
            },
            vision_config={
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 16, "patch_size": PATCH, "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            audio_config=None, image_token_id=IMAGE, boi_token_id=VISION_START, eoi_token_id=VISION_END,
            video_token_id=VIDEO, audio_token_id=AUDIO,
        ),
        "Gemma4ForConditionalGeneration", {"image": gemma4_image, "image2": gemma4_image}, "mm_token_type_ids",
    ),
    "qwen3_omni": Family(
        of(
            "Qwen3OmniMoeThinkerConfig", text_config=HEADS | EXPERTS | {"rope_parameters": ROPE3},
            vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0, 1]}, audio_config=OMNI3,
            audio_token_id=AUDIO, audio_start_token_id=AUDIO_START, **PATCH_IDS, position_id_per_seconds=13,
        ),
        "Qwen3OmniMoeThinkerForConditionalGeneration", OMNI3_MEDIA,
    ),
    "qwen3_asr": Family(
        of(
            "Qwen3ASRConfig", text_config={"model_type": "qwen3", **HEADS},
            audio_config={"model_type": "qwen3_asr_encoder", **OMNI3}, audio_token_id=AUDIO, pad_token_id=0,
            timestamp_token_id=250, eos_token_id=1,
        ),
        "Qwen3ASRForConditionalGeneration",
        {"audio": sound(100, 13, "input_features_mask"), "audio2": sound(61, 8, "input_features_mask")},
    ),
    "chameleon": Family(
        of(
            "ChameleonConfig", **TEXT, swin_norm=False, vocabulary_map={"<image>": IMAGE, "IMGIMGA": 210},
            vq_config={
                "embed_dim": 8, "num_embeddings": 32, "latent_channels": 32, "base_channels": 32,
                "channel_multiplier": [1, 1], "num_res_blocks": 1, "resolution": 16,
            },
        ),
        "ChameleonForConditionalGeneration",
    ),
    "step3p7": Family(
        of(
            "Step3p7Config", image_token_id=IMAGE,
            text_config={
                **HEADS, **SLIDING, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "share_expert_dim": 24, "mlp_layer_types": ["dense", "sparse"],
            },
            vision_config=TOWER | {"image_size": 32, "max_position_embeddings": 64, "mlp_ratio": 2.0},
        ),
        "Step3p7ForConditionalGeneration", FOUR_TOKENS_OF_32,
    ),
    "minimax_m3_vl": Family(
        of(
            "MiniMaxM3VLConfig", image_token_index=IMAGE, video_token_index=VIDEO, projector_hidden_size=32,
            text_config={
                **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 64,
                "shared_intermediate_size": 24, "rotary_dim": 4, "mlp_layer_types": ["dense", "sparse"],
                "index_n_heads": 2, "index_head_dim": 8,
            },
            vision_config={
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "patch_size": PATCH, "image_size": 32,
            },
        ),
        "MiniMaxM3SparseForConditionalGeneration", QWEN_IMAGES,
    ),
    "deepseek_ocr2 text": Family(
        of(
            "DeepseekOcr2Config", image_token_id=IMAGE,
            text_config={
                **TEXT, "num_key_value_heads": 4, **ROUTED, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
                "mlp_layer_types": ["dense", "sparse"],
            },
            vision_config={
                "sam_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64},
                "encoder_config": TEXT,
            },
        ),
        "DeepseekOcr2ForConditionalGeneration",
    ),
}  # fmt: skip
"""Name → family."""
