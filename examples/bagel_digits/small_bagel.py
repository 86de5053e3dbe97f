"""A folder of BAGEL with 1.5 M parameters and no weights: configuration, tokenizer, and a VAE that leaves pixels as
they are.

A picture of 8×8 pixels is 4 tokens, seen or drawn. Training starts from scratch (`model.train_from_scratch: true`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()  # its models import torchvision, which may be built for another torch

import torch  # noqa: E402
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from mindspeed_mm.fsdp.models.bagel.configuration_bagel import BagelConfig  # noqa: E402
from mindspeed_mm.fsdp.models.bagel.modeling_bagel import BagelForConditionalGeneration  # noqa: E402
from mindspeed_mm.fsdp.models.diffusion.identity_vae import IdentityVAE  # noqa: E402
from mindspeed_mm.fsdp.models.diffusion.picture_vae import DIFFUSERS_FOLDER  # noqa: E402

SIDE, SQUARE = 8, 4
"""Pixels along a picture, and along one of its tokens, seen or drawn."""
PAD, UNKNOWN, END = "<|endoftext|>", "<unk>", "<|im_end|>"
MARKS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>")
MEAN, DEVIATION = 0.0, 0.84
"""Of pixels on both papers, in −1..1."""


def write_model_folder(folder: Path, texts: Sequence[str]) -> int:
    """Write the folder.

    Args:
        folder: Where.
        texts: What is said; each of their words is a token.

    Returns:
        The model's number of parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    values = config_values(len(tokenizer))
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    vae = IdentityVAE(latent_channels=1, shift_factor=MEAN, scaling_factor=1 / DEVIATION)
    vae.save_pretrained(folder / DIFFUSERS_FOLDER)
    with torch.device("meta"):
        model = BagelForConditionalGeneration(BagelConfig.from_dict(values))
    return sum(parameter.numel() for parameter in model.parameters())


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a word, in lower case; BAGEL's marks are tokens, too."""
    words = sorted({word for text in texts for word in text.lower().split()})
    vocabulary = {token: number for number, token in enumerate((PAD, UNKNOWN, END, *MARKS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=list(MARKS),
    )


def config_values(vocabulary: int) -> dict[str, Any]:
    """As the released config.json, in small: 4 layers with two sets of parameters, a tower of 2."""
    return {
        "model_type": BagelConfig.model_type,
        "architectures": [BagelForConditionalGeneration.__name__],
        "llm_config": {
            "model_type": "qwen2",
            "vocab_size": vocabulary,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.08,  # about one over the root of the width
        },
        "vit_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,  # as in the release, one more than there are
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": SQUARE,
        },
        "vae_config": {"z_channels": 1, "downsample": 1},
        "latent_patch_size": SQUARE,
        "max_latent_size": SIDE // SQUARE,
        "vit_max_num_patch_per_side": SIDE // SQUARE,
    }
