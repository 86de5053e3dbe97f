"""A tiny folder of Ming-Lite-Omni 1.5 with what draws in it, as it is released: names and shapes are written out by
hand, after the published code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_ming import HIDDEN, make_tiny_ming

HEADS, HEAD_DIM, LAYERS, PATCH, CHANNELS, PLACES = 2, 8, 2, 2, 4, 8
ROW, WHOLE, INNER = 24, 12, 20
"""Features of a condition behind the MLP, of the condition as a whole, and inside the MLP."""
DUAL = (0,)
SIDES = (2, 4)
"""Of the squares of learned tokens."""
WIDTH, QUERY_HEADS, WIDE, FLOORS = 24, 2, 28, 2
"""Of the connector: features, heads, inner features, layers."""
TRANSFORMER = {
    "_class_name": "SD3Transformer2DModel", "sample_size": PLACES, "patch_size": PATCH, "in_channels": CHANNELS,
    "num_layers": LAYERS, "num_refiner_layers": 2, "attention_head_dim": HEAD_DIM, "num_attention_heads": HEADS,
    "joint_attention_dim": ROW, "caption_projection_dim": HEADS * HEAD_DIM, "pooled_projection_dim": WHOLE,
    "out_channels": CHANNELS, "pos_embed_max_size": PLACES, "dual_attention_layers": list(DUAL), "qk_norm": "rms_norm",
    "vae_ref_channel_cat": False,
}  # fmt: skip
VAE = {
    "in_channels": 3, "out_channels": 3, "latent_channels": CHANNELS, "block_out_channels": [4, 4],
    "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2, "norm_num_groups": 2,
    "layers_per_block": 1, "scaling_factor": 1.5, "shift_factor": 0.0625, "use_quant_conv": False,
    "use_post_quant_conv": False,
}  # fmt: skip
CONNECTOR = {
    "hidden_size": WIDTH, "intermediate_size": WIDE, "num_hidden_layers": FLOORS, "num_attention_heads": QUERY_HEADS,
    "num_key_value_heads": 1, "vocab_size": 8, "max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
SHIFT = 3.0
Shapes = dict[str, tuple[int, ...]]


def transformer_shapes(
    width: int = HEADS * HEAD_DIM,
    head: int = HEAD_DIM,
    layers: int = LAYERS,
    channels: int = CHANNELS,
    places: int = PLACES,
    row: int = ROW,
    whole: int = WHOLE,
    dual: tuple[int, ...] = DUAL,
    *,
    normed: bool = True,
) -> Shapes:
    """Of the released folder `transformer`."""
    shapes: Shapes = {}

    def linear(name: str, out: int, inner: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inner), (out,)

    def attention(name: str, *, joins: bool = False, ends: bool = False, normed: bool = normed) -> None:
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            linear(f"{name}.{part}", width, width)
        if joins:
            for part in ("add_q_proj", "add_k_proj", "add_v_proj"):
                linear(f"{name}.{part}", width, width)
            if not ends:
                linear(f"{name}.to_add_out", width, width)
        for part in ("norm_q", "norm_k", *(("norm_added_q", "norm_added_k") if joins else ())) if normed else ():
            shapes[f"{name}.{part}.weight"] = (head,)

    def feed_forward(name: str) -> None:
        linear(f"{name}.net.0.proj", 4 * width, width)
        linear(f"{name}.net.2", width, 4 * width)

    for name in ("pos_embed", "ref_pos_embed"):
        shapes[f"{name}.pos_embed"] = (1, places**2, width)
        shapes[f"{name}.proj.weight"], shapes[f"{name}.proj.bias"] = (width, channels, PATCH, PATCH), (width,)
    for name, inner in (("timestep_embedder", 256), ("text_embedder", whole)):
        linear(f"time_text_embed.{name}.linear_1", width, inner)
        linear(f"time_text_embed.{name}.linear_2", width, width)
    linear("context_embedder", width, row)
    for name in ("noise_refiner", "ref_image_refiner"):
        for number in range(2):
            linear(f"{name}.{number}.norm1.linear", 6 * width, width)
            attention(f"{name}.{number}.attn", normed=False)
            feed_forward(f"{name}.{number}.ff")
    for number in range(layers):
        block, ends = f"transformer_blocks.{number}", number == layers - 1
        linear(f"{block}.norm1.linear", (9 if number in dual else 6) * width, width)
        linear(f"{block}.norm1_context.linear", (2 if ends else 6) * width, width)
        attention(f"{block}.attn", joins=True, ends=ends)
        if number in dual:
            attention(f"{block}.attn2")
        feed_forward(f"{block}.ff")
        if not ends:
            feed_forward(f"{block}.ff_context")
    linear("norm_out.linear", 2 * width, width)
    linear("proj_out", PATCH**2 * channels, width)
    return shapes


def mlp_shapes(
    hidden: int = HIDDEN, inner: int = INNER, row: int = ROW, sides: tuple[int, ...] = SIDES, width: int = WIDTH
) -> Shapes:
    """Of the released folder `mlp`."""
    shapes: Shapes = {f"query_tokens_dict.{side}x{side}": (side**2, hidden) for side in sides}
    for name, out, given in (
        ("mlp.fc1", inner, hidden), ("mlp.fc2", row, inner), ("proj_in", width, hidden), ("proj_out", hidden, width),
    ):  # fmt: skip
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, given), (out,)
    for name, features in (("mlp.layer_norm1", inner), ("mlp.layer_norm2", row)):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (features,)
    return shapes


def connector_shapes() -> Shapes:
    """Of the released folder `connector`."""
    shapes: Shapes = {"model.embed_tokens.weight": (8, WIDTH), "lm_head.weight": (8, WIDTH)}
    shapes["model.norm.weight"] = (WIDTH,)
    head = WIDTH // QUERY_HEADS
    for layer in (f"model.layers.{number}" for number in range(FLOORS)):
        for name, out, given in (
            ("self_attn.q_proj", WIDTH, WIDTH), ("self_attn.k_proj", head, WIDTH), ("self_attn.v_proj", head, WIDTH),
            ("self_attn.o_proj", WIDTH, WIDTH), ("mlp.gate_proj", WIDE, WIDTH), ("mlp.up_proj", WIDE, WIDTH),
            ("mlp.down_proj", WIDTH, WIDE),
        ):  # fmt: skip
            shapes[f"{layer}.{name}.weight"] = (out, given)
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                shapes[f"{layer}.{name}.bias"] = (out,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (WIDTH,)
    return shapes


def make_release(folder: Path) -> None:
    """Write the released folder."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    make_tiny_ming(folder)
    _write(folder / "transformer/diffusion_pytorch_model.safetensors", transformer_shapes())
    (folder / "transformer/config.json").write_text(json.dumps(TRANSFORMER))
    _write(folder / "mlp/model.safetensors", mlp_shapes())
    _write(folder / "connector/model.safetensors", connector_shapes())
    connector = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "float32", **CONNECTOR}
    (folder / "connector/config.json").write_text(json.dumps(connector))
    torch.manual_seed(5)
    AutoencoderKL(**VAE).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")


def make_tiny_ming_draw(folder: Path) -> None:
    """Write a folder that trains, beside the release that it is made of, `NAME.release`. The language model sees 4 by 4
    tokens of a picture instead of 24 by 24."""
    from mindspeed_mm.checkpoint.original.ming import draws_of_release

    release = folder.with_name(f"{folder.name}.release")
    make_release(release)
    draws_of_release(release, folder)
    path = folder / "tokenizer/preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"min_pixels": 1024, "max_pixels": 1024}))


def _write(path: Path, shapes: Shapes) -> None:
    path.parent.mkdir(parents=True)
    save_file({name: _value(name, shape) for name, shape in shapes.items()}, path, metadata={"format": "pt"})


def _value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Norms are near one, and matrices shrink nothing to where differences cannot be seen."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))
    is_norm = "norm" in name and name.endswith(".weight") and len(shape) == 1
    return drawn * 0.2 + 1 if is_norm else drawn * 0.3
