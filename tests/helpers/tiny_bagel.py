"""A tiny folder of BAGEL as it is released: weights, a VAE in FLUX's layout, a tokenizer; with rows of every task."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import save_file

from tests.helpers.tiny_processors import byte_tokenizer
from tests.helpers.tiny_run import STEADY

PATCH, TOWER_SIDE = 4, 28
"""Pixels of a patch that is seen; of the largest picture."""
CHANNELS, DOWNSAMPLE, SQUARE, LATENT_SIDE = 4, 2, 2, 8
"""Of latents; pixels along a latent; latents along a token; tokens along the largest picture."""
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
MARKS = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>"]
SIZES = {"vit_max_image_size": 16, "vit_min_image_size": 4, "vae_max_image_size": 16, "vae_min_image_size": 4}
WIDTHS = (32, 32)
"""Channels of the VAE's levels."""


def tiny_config(vocabulary: int) -> dict[str, Any]:
    """As the released config.json, in small."""
    return {
        "model_type": "bagel",
        "architectures": ["BagelForConditionalGeneration"],
        "llm_config": {
            "model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e6,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        },
        "vit_config": {
            "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": TOWER_SIDE, "patch_size": PATCH,
        },
        "vae_config": {"z_channels": CHANNELS, "downsample": DOWNSAMPLE},
        "latent_patch_size": SQUARE, "max_latent_size": LATENT_SIDE,
        "vit_max_num_patch_per_side": TOWER_SIDE // PATCH, "timestep_shift": 2.0,
    }  # fmt: skip


def make_tiny_bagel(folder: Path) -> None:
    """Write the folder: weights large enough that every part shows in the result."""
    from mindspeed_mm.fsdp.models.bagel.configuration_bagel import BagelConfig
    from mindspeed_mm.fsdp.models.bagel.modeling_bagel import BagelForConditionalGeneration

    tokenizer = byte_tokenizer(SPECIAL, None)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(folder)
    values = tiny_config(len(tokenizer))
    model = BagelForConditionalGeneration(BagelConfig.from_dict(dict(values)))
    draw = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            level = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.data = level + torch.randn(parameter.shape, generator=draw) * (
                0.25 if parameter.dim() > 1 else 0.1
            )
    save_file(model.state_dict(), folder / "ema.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    shapes = dict(flux_shapes())
    save_file(
        {name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items()}, folder / "ae.safetensors"
    )


def flux_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names of FLUX's `ae.safetensors` with one block a level, and the shapes of a small one."""

    def conv(name: str, out: int, into: int, side: int = 3) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out, into, side, side)
        yield f"{name}.bias", (out,)

    def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    def block(name: str, into: int, out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from norm(f"{name}.norm1", into)
        yield from conv(f"{name}.conv1", out, into)
        yield from norm(f"{name}.norm2", out)
        yield from conv(f"{name}.conv2", out, out)
        if into != out:
            yield from conv(f"{name}.nin_shortcut", out, into, 1)

    def middle(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from block(f"{name}.mid.block_1", width, width)
        yield from norm(f"{name}.mid.attn_1.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            yield from conv(f"{name}.mid.attn_1.{part}", width, width, 1)
        yield from block(f"{name}.mid.block_2", width, width)

    yield from conv("encoder.conv_in", WIDTHS[0], 3)
    for level, width in enumerate(WIDTHS):
        yield from block(f"encoder.down.{level}.block.0", WIDTHS[max(level - 1, 0)], width)
        if level + 1 < len(WIDTHS):
            yield from conv(f"encoder.down.{level}.downsample.conv", width, width)
    yield from middle("encoder", WIDTHS[-1])
    yield from norm("encoder.norm_out", WIDTHS[-1])
    yield from conv("encoder.conv_out", 2 * CHANNELS, WIDTHS[-1])
    yield from conv("decoder.conv_in", WIDTHS[-1], CHANNELS)
    yield from middle("decoder", WIDTHS[-1])
    for level, width in enumerate(WIDTHS):
        above = WIDTHS[min(level + 1, len(WIDTHS) - 1)]
        for number in range(2):
            yield from block(f"decoder.up.{level}.block.{number}", width if number else above, width)
        if level:
            yield from conv(f"decoder.up.{level}.upsample.conv", width, width)
    yield from norm("decoder.norm_out", WIDTHS[0])
    yield from conv("decoder.conv_out", 3, WIDTHS[0])


def picture_bytes(number: int, width: int, height: int) -> bytes:
    """A PNG that tells itself from others."""
    pixels = bytes((7 * number + 13 * place + place // 29) % 256 for place in range(width * height * 3))
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG")
    return file.getvalue()


def write_rows(folder: Path) -> Path:
    """Four rows: a picture is drawn, one is read, one is edited, and one is drawn, spoken of and edited."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate([(8, 8), (12, 8), (8, 16), (10, 8)]):
        (folder / f"{number}.png").write_bytes(picture_bytes(number, width, height))

    def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": content, **more}

    rows = [
        {"messages": [turn("user", "Draw one."), turn("assistant", "<image>")], "images": ["1.png"]},
        {"messages": [turn("user", "<image>Which?"), turn("assistant", "three")], "images": ["3.png"]},
        {"messages": [turn("user", "<image>Turn."), turn("assistant", "so: <image>")], "images": ["0.png", "2.png"]},
        {
            "messages": [
                turn("user", "Draw."), turn("assistant", "<image>"), turn("user", "Like <image>?"),
                turn("assistant", "<image>done"),
            ],
            "images": ["1.png", "3.png", "2.png"],
        },
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


KEEP_ALL = {"text_cond_dropout_prob": 0.0, "vit_cond_dropout_prob": 0.0, "vae_cond_dropout_prob": 0.0}


@cache
def run_of(root: Path) -> Path:
    """A YAML with its model and rows below a folder."""
    (root / "model").mkdir()
    make_tiny_bagel(root / "model")
    rows = write_rows(root / "rows")
    config: dict[str, Any] = {
        "model": {"model_id": "bagel", "model_name_or_path": str(root / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "bagel",
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
