"""A tiny folder of InternVL-U as the converter of the released folder writes it, and one as it is released; with rows
of every task."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from safetensors.torch import save_file

from tests.helpers.tiny_bagel import picture_bytes
from tests.helpers.tiny_processors import byte_tokenizer
from tests.helpers.tiny_run import STEADY

SEEN_PIXELS, PATCH, SEEN_SIDE = 8, 2, 2
"""Pixels along a side of a picture that is seen, and of its patches; tokens along its side."""
CHANNELS, DOWNSAMPLE = 4, 4
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
SIZES = {"vae_min_pixels": 64, "vae_max_pixels": 256, "vae_max_image_size": 32}
KEEP_ALL = {"text_cond_dropout_prob": 0.0, "all_cond_dropout_prob": 0.0}
OWN_TOKENS = ("</box>", "<box>", "<IMG_CONTEXT>", "</img>", "<img>", "</quad>", "<quad>", "</ref>", "<ref>",
              "<img_uncond>")  # fmt: skip


def tiny_configs(vocabulary: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """config.json of `vlm` and of `generation_decoder`, and processor_config.json, in small."""
    vlm = {
        "model_type": "internvlu_chat", "architectures": ["InternVLUChatModel"], "ps_version": "v2",
        "select_layer": -1, "downsample_ratio": 0.5, "template": "qwen2_5-chat-v3",
        "llm_config": {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": vocabulary, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "rope_theta": 1e6, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "intern_vit_6b", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": SEEN_PIXELS, "patch_size": PATCH, "qkv_bias": True,
            "qk_normalization": False, "norm_type": "layer_norm",
        },
    }  # fmt: skip
    head = {
        "model_type": "internvlu_generation_decoder", "decoder_projector_type": "identity", "input_hidden_size": 64,
        "output_hidden_size": 64, "vlm_select_layer": [-1, -2], "flow_shift": 3.0, "max_sequence_length": 768,
        "video_position_scale_factor": 1.0, "vlm_cond_position_scale_factor": 0.5,
        "decoder_config": {
            "patch_size": 2, "in_channels": 4 * CHANNELS, "out_channels": CHANNELS, "num_layers": 2,
            "attention_head_dim": 12, "num_attention_heads": 2, "joint_attention_dim": 64, "axes_dims_rope": [4, 4, 4],
        },
    }  # fmt: skip
    processor = {
        "image_seq_length": SEEN_SIDE**2,
        "image_processor_kwargs": {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        "image_gen_processor_class": "InternVLUDynamicResGenerationImageProcessor",
        "image_gen_processor_kwargs": {"min_dynamic_patch": 1, "max_dynamic_patch": 4, "max_length": 32},
    }
    return vlm, head, processor


def make_tiny_release(folder: Path) -> None:
    """Write the folder as it is released: weights large enough that every part shows in the result."""
    tokenizer = byte_tokenizer(SPECIAL, None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *OWN_TOKENS]})
    tokenizer.save_pretrained(folder / "processor")
    vlm, head, processor = tiny_configs(len(tokenizer))
    components = {"vlm": ["internvlu.vlm", "InternVLUChatModel"], "processor": ["internvlu", "InternVLUProcessor"]}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "InternVLUPipeline", **components}))
    (folder / "processor" / "processor_config.json").write_text(json.dumps(processor))
    draw = torch.Generator().manual_seed(5)
    for part, config, shapes in (("vlm", vlm, vlm_shapes(vlm)), ("generation_decoder", head, head_shapes(head))):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
        tensors = {}
        for name, shape in shapes.items():
            level = 1.0 if "norm" in name and name.endswith("weight") and len(shape) == 1 else 0.0
            if name.endswith(("ls1", "ls2")):
                level = 0.5
            tensors[name] = level + torch.randn(shape, generator=draw) * (0.25 if len(shape) > 1 else 0.1)
        save_file(tensors, folder / part / "model.safetensors", metadata={"format": "pt"})
    write_vae(folder / "vae")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DPMSolverMultistepScheduler"}')


def write_vae(folder: Path) -> None:
    """Qwen-Image's VAE, in small."""
    from diffusers import AutoencoderKLQwenImage

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vae = AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 2.0, 0.5, 1.0],
        )
    vae.save_pretrained(folder)


def vlm_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Released names and shapes of `vlm`, by its published modules."""
    vision, language = config["vision_config"], config["llm_config"]
    v, h, tower = vision["hidden_size"], language["hidden_size"], "vision_model.embeddings"
    places = (vision["image_size"] // vision["patch_size"]) ** 2 + 1
    found: dict[str, tuple[int, ...]] = {
        f"{tower}.class_embedding": (1, 1, v),
        f"{tower}.position_embedding": (1, places, v),
        f"{tower}.patch_embedding.weight": (v, 3, vision["patch_size"], vision["patch_size"]),
        f"{tower}.patch_embedding.bias": (v,),
    }
    for layer in range(vision["num_hidden_layers"]):
        own, wide = f"vision_model.encoder.layers.{layer}", vision["intermediate_size"]
        found |= {f"{own}.ls1": (v,), f"{own}.ls2": (v,)}
        for name, shape in (("attn.qkv", (3 * v, v)), ("attn.proj", (v, v)), ("mlp.fc1", (wide, v)),
                            ("mlp.fc2", (v, wide)), ("norm1", (v,)), ("norm2", (v,))):  # fmt: skip
            found |= {f"{own}.{name}.weight": shape, f"{own}.{name}.bias": shape[:1]}
    for name, shape in (("0", (4 * v,)), ("1", (h, 4 * v)), ("3", (h, h))):
        found |= {f"mlp1.{name}.weight": shape, f"mlp1.{name}.bias": shape[:1]}
    found["special_token_embedding.weight"] = (len(OWN_TOKENS), h)
    heads, groups = (language[f"num_{kind}_heads"] * language["head_dim"] for kind in ("attention", "key_value"))
    found["language_model.model.embed_tokens.weight"] = (language["vocab_size"], h)
    for layer in range(language["num_hidden_layers"]):
        own, wide = f"language_model.model.layers.{layer}", language["intermediate_size"]
        attention = {"q_proj": (heads, h), "k_proj": (groups, h), "v_proj": (groups, h), "o_proj": (h, heads),
                     "q_norm": (language["head_dim"],), "k_norm": (language["head_dim"],)}  # fmt: skip
        found |= {f"{own}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        found |= {f"{own}.mlp.{name}_proj.weight": (wide, h) for name in ("gate", "up")}
        found[f"{own}.mlp.down_proj.weight"] = (h, wide)
        found |= {f"{own}.{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
    return found | {"language_model.model.norm.weight": (h,),
                    "language_model.lm_head.weight": (language["vocab_size"], h)}  # fmt: skip


def head_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Released names and shapes of `generation_decoder`, by its published modules."""
    sizes = config["decoder_config"]
    e, states = sizes["attention_head_dim"], sizes["joint_attention_dim"]
    d, found = sizes["num_attention_heads"] * e, dict[str, tuple[int, ...]]()
    linears = [("time_text_embed.timestep_embedder.linear_1", d, 256),
               ("time_text_embed.timestep_embedder.linear_2", d, d),
               ("img_in", d, sizes["in_channels"]), ("txt_in", d, states), ("norm_out.linear", 2 * d, d),
               ("proj_out", sizes["patch_size"] ** 2 * sizes["out_channels"], d)]  # fmt: skip
    for block in range(sizes["num_layers"]):
        own = f"transformer_blocks.{block}"
        for name in ("to_q", "add_q_proj"):
            linears.append((f"{own}.attn.{name}", 2 * d, d))
        for name in ("to_k", "to_v", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"):
            linears.append((f"{own}.attn.{name}", d, d))
        for stream in ("img", "txt"):
            linears += [(f"{own}.{stream}_mod.1", 6 * d, d), (f"{own}.{stream}_mlp.net.0.proj", 4 * d, d),
                        (f"{own}.{stream}_mlp.net.2", d, 4 * d)]  # fmt: skip
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            found[f"decoder.{own}.attn.{name}.weight"] = (e,)
    for name, out, into in linears:
        found |= {f"decoder.{name}.weight": (out, into), f"decoder.{name}.bias": (out,)}
    return found | {"decoder.txt_norm.weight": (states,), "encoder_padding_token": (states,)}


def write_rows(folder: Path) -> Path:
    """Four rows: a picture is drawn, one is read, one is edited, and one is drawn behind a thought."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate([(8, 8), (16, 8), (8, 16), (10, 8)]):
        (folder / f"{number}.png").write_bytes(picture_bytes(number, width, height))

    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    rows = [
        {"messages": [turn("user", "draw one"), turn("assistant", "<image>")], "images": ["1.png"]},
        {"messages": [turn("user", "<image>Which?"), turn("assistant", "three"), turn("user", "and now?"),
                      turn("assistant", "four")], "images": ["3.png"]},
        {"messages": [turn("user", "<image>turn it"), turn("assistant", "<image>")], "images": ["0.png", "2.png"]},
        {"messages": [turn("user", "Draw four."), turn("assistant", "so: <image>")], "images": ["3.png"]},
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@cache
def run_of(root: Path) -> Path:
    """A YAML with its model and rows below a folder, and the released folder beside them."""
    from mindspeed_mm.cli.mm_convert import run as convert

    make_tiny_release(root / "released")
    convert(["InternVLUConverter", "hf_to_mm", f"--cfg.source_path={root / 'released'}",
             f"--cfg.target_path={root / 'model'}"])  # fmt: skip
    values = json.loads((root / "model" / "config.json").read_text(encoding="utf-8"))
    assert values["vae_config"] == {"z_channels": CHANNELS, "downsample": DOWNSAMPLE}
    rows = write_rows(root / "rows")
    config: dict[str, Any] = {
        "model": {"model_id": "internvlu", "model_name_or_path": str(root / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "internvlu",
                "basic_parameters": {"dataset": str(rows), "dataset_dir": str(rows.parent), **KEEP_ALL},
                "preprocess_parameters": dict(SIZES),
            },
            "dataloader_param": {"num_workers": 0, "shuffle": False},
        },
        "parallel": {},
        "training": {"lr": 1e-3, "micro_batch_size": 2, "train_iters": 2, "seed": 7, "clip_grad": 0.5,
                     "adam_fused": False, **STEADY},
    }  # fmt: skip
    with (root / "run.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return root / "run.yaml"
