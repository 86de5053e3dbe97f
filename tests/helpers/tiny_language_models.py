"""Tokenizers and language models of generators' folders, tiny, of the real classes."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_generators import (
    CHARACTERS,
    seeded,
)

WIDTH = 16
"""Of the language models that read captions."""
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


CHAT = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


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


QWEN_VL_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    "pad_token_id": 0,
}
