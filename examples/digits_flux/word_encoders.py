"""Text encoders of a few words for tiny generators: the classes of the released models, random and frozen.

A generator only needs captions told apart, and features of unit size learn fastest. So the weights keep the size of
what they are given, special tokens and positions are zero, and words keep their own directions: pooled features of two
digits have a cosine of 0.4 on average, where the usual initialisation gives 0.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()  # its models import torchvision, which may be built for another torch

import torch  # noqa: E402
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors  # noqa: E402
from torch import nn  # noqa: E402
from transformers import (  # noqa: E402
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

WIDTH = 64
SPECIAL_TOKENS = ("<pad>", "</s>", "<s>", "<unk>")
_PAD, _END, _START = range(3)


def build_tokenizer(words: Sequence[str], length: int, *, starts: bool) -> PreTrainedTokenizerFast:
    """One token a word.

    Args:
        words: The vocabulary, besides special tokens.
        length: Tokens of a caption, `</s>` included: what extraction, training and sampling pad to.
        starts: Put `<s>` before a caption.
    """
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if starts else "$A </s>", special_tokens=[("</s>", _END), ("<s>", _START)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        model_max_length=length,
    )


def build_clip(tokenizer: PreTrainedTokenizerFast) -> CLIPTextModel:
    """CLIP's text model, one layer: what FLUX.1 takes the pooled features from."""
    return randomised(
        CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=1,
                num_attention_heads=4,
                max_position_embeddings=tokenizer.model_max_length,
                bos_token_id=_START,
                eos_token_id=_END,
                pad_token_id=_PAD,
            )
        )
    )


def build_t5(tokenizer: PreTrainedTokenizerFast) -> T5EncoderModel:
    """T5's encoder, one layer: features of each token for FLUX.1."""
    return randomised(T5EncoderModel(T5Config(**_t5_sizes(tokenizer))))


def build_umt5(tokenizer: PreTrainedTokenizerFast) -> UMT5EncoderModel:
    """UMT5's encoder, one layer: features of each token for Wan."""
    return randomised(UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer))))


def _t5_sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": WIDTH,
        "d_kv": 16,
        "d_ff": 2 * WIDTH,
        "num_layers": 1,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": _PAD,
        "eos_token_id": _END,
    }


@torch.no_grad()
def randomised(model: nn.Module, seed: int = 0) -> Any:
    """Draw the weights as the head of this page says, and freeze them."""
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight") or "norm" in name.rsplit(".", 2)[-2]:
            continue
        if name.endswith(".bias") or "position_embedding" in name:
            weight.zero_()
        elif "relative_attention_bias" in name:
            weight.normal_(generator=random)
        elif weight.shape[0] == model.config.vocab_size:
            weight.normal_(generator=random)[: _START + 1] = 0
        else:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=random)
    return model.eval().requires_grad_(False)
