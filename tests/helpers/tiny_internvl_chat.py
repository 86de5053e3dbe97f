"""A tiny folder of InternVL in its original layout, written by hand and without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_deepseek_vl2 import value_of
from tests.helpers.tiny_processors import byte_tokenizer

WIDTH, INNER, PATCH, TILE = 24, 36, 4, 16
"""Of the tower: features, those between the layers of an MLP, pixels of a patch and of a tile."""
HIDDEN, DENSE, HEADS, GROUPS, EXPERT, EXPERTS = 32, 40, 4, 2, 24, 4
SPECIAL = {
    "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "start": "<|im_start|>",
    "first": "<img>", "last": "</img>", "context": "<IMG_CONTEXT>",
}  # fmt: skip
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
"""As the folders have it: of texts alone."""
TEXT = {
    "hidden_size": HIDDEN, "intermediate_size": DENSE, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}  # fmt: skip
"""Language model → its settings: of InternVL3, and of InternVL3.5 30B."""


def make_tiny_internvl_chat(folder: Path, kind: str = "qwen2", *, large: bool = False) -> dict[str, torch.Tensor]:
    """Write the folder; the tensors that it holds, by their released names. `large`: the tower is the 78B's, with norms
    of queries and keys and without their biases."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer(SPECIAL, TEMPLATE)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    vision = {
        "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": PATCH,
        "image_size": TILE, "qkv_bias": not large, "qk_normalization": large, "layer_norm_eps": 1e-6,
        "norm_type": "rms_norm" if large else "layer_norm", "hidden_act": "gelu", "drop_path_rate": 0.1,
        "initializer_factor": 0.1,
    }  # fmt: skip
    names = ("InternVLChatConfig", "InternVLChatModel", "InternVLChatModel")
    config = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "template": "internvl2_5",
        "auto_map": dict(zip(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), names, strict=True)),
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": TILE, "min_dynamic_patch": 1,
        "max_dynamic_patch": 4, "ps_version": "v2", "select_layer": -1, "use_thumbnail": True,
        "torch_dtype": "float32", "vision_config": vision,
        "llm_config": TEXT | KINDS[kind] | {"vocab_size": len(tokenizer)},
    }  # fmt: skip
    pixels = {
        "crop_size": TILE, "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3, "size": TILE,
        "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "modeling_internvl_chat.py").write_text("raise RuntimeError('never run')\n")
    shapes = released_shapes(kind, large, len(tokenizer))
    tensors = {name: value_of(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def released_shapes(kind: str, large: bool, words: int) -> dict[str, tuple[int, ...]]:
    """Every name of a release with its shape, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (1, 1, WIDTH),
        "vision_model.embeddings.position_embedding": (1, 1 + (TILE // PATCH) ** 2, WIDTH),
        "vision_model.embeddings.patch_embedding.weight": (WIDTH, 3, PATCH, PATCH),
        "vision_model.embeddings.patch_embedding.bias": (WIDTH,),
        "mlp1.0.weight": (4 * WIDTH,),
        "mlp1.0.bias": (4 * WIDTH,),
        "language_model.model.embed_tokens.weight": (words, HIDDEN),
        "language_model.model.norm.weight": (HIDDEN,),
        "language_model.lm_head.weight": (words, HIDDEN),
    }

    def linear(name: str, out: int, inner: int, *, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, inner)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    linear("mlp1.1", HIDDEN, 4 * WIDTH)
    linear("mlp1.3", HIDDEN, HIDDEN)
    for block in (f"vision_model.encoder.layers.{number}" for number in range(2)):
        linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH, bias=not large)
        linear(f"{block}.attn.proj", WIDTH, WIDTH)
        linear(f"{block}.mlp.fc1", INNER, WIDTH)
        linear(f"{block}.mlp.fc2", WIDTH, INNER)
        norms = ["norm1.weight", "norm2.weight", "ls1", "ls2"]
        norms += ["attn.q_norm.weight", "attn.k_norm.weight"] if large else ["norm1.bias", "norm2.bias"]
        shapes |= {f"{block}.{name}": (WIDTH,) for name in norms}
    width = HIDDEN // HEADS
    for layer in (f"language_model.model.layers.{number}" for number in range(2)):
        for name, out in (("q", HIDDEN), ("k", GROUPS * width), ("v", GROUPS * width)):
            linear(f"{layer}.self_attn.{name}_proj", out, HIDDEN, bias=kind == "qwen2")
        linear(f"{layer}.self_attn.o_proj", HIDDEN, HIDDEN, bias=False)
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        parts = {f"{layer}.mlp.": DENSE}
        if kind == "qwen3_moe":
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (width,) for name in "qk"}
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            parts = {f"{layer}.mlp.experts.{number}.": EXPERT for number in range(EXPERTS)}
        for part, inner in parts.items():
            linear(f"{part}gate_proj", inner, HIDDEN, bias=False)
            linear(f"{part}up_proj", inner, HIDDEN, bias=False)
            linear(f"{part}down_proj", HIDDEN, inner, bias=False)
    return shapes
