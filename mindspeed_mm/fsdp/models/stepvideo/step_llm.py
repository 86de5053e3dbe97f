"""Step-LLM, Step-Video's first text encoder, and its tokenizer.

A decoder without a last norm or a head. Positions are a bias of −m·√(i − j) for a query i and a key j before it, m as
in ALiBi (arXiv 2108.12409, section 3). Facts: the technical report (arXiv 2502.10248, section 3.2), `text_encoder/` of
stepfun-ai/Step-Video-T2V, and MindSpeed-MM's `stepllm_text_encoder.py` for the bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import JsonObject

_RELEASED: JsonObject = {
    "hidden_size": 6144, "ffn_hidden_size": 16896, "num_layers": 48, "num_attention_heads": 48,
    "num_attention_groups": 8, "padded_vocab_size": 65536, "layernorm_epsilon": 1e-5,
}  # fmt: skip
_MULTIPLE = 256
"""Widths between the projections are rounded up to it."""
_BOS, _EOS = 1, 2


class StepLLMConfig(PreTrainedConfig):
    """Sizes, under the names of the released file.

    Args:
        settings: Those left out are the released ones.
    """

    model_type = "step_llm"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**_RELEASED | settings)


class StepLLMNorm(nn.Module):
    """RMS norm, computed in fp32 at least.

    Args:
        width: Features.
        eps: Added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Of the same shape and type."""
        exact = states.to(torch.promote_types(states.dtype, torch.float32))
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._eps)
        return normed.to(states.dtype) * self.weight


class StepLLMAttention(nn.Module):
    """Grouped-query attention: `wqkv` makes all queries, then each group's key and value.

    Args:
        config: Sizes.
    """

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self._rows = (width, 2 * self.head_dim * config.num_attention_groups)
        self.wqkv = nn.Linear(width, sum(self._rows), bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """(B, L, D); the bias is (heads, L, L)."""
        queries, shared = self.wqkv(states).split(self._rows, dim=-1)
        query = queries.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, L, head width)
        # (B, groups, L, 2 · head width): the key of each group stands before its value.
        key, value = shared.unflatten(-1, (-1, 2 * self.head_dim)).transpose(1, 2).chunk(2, dim=-1)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype), enable_gqa=True)
        made: torch.Tensor = self.wo(seen.transpose(1, 2).flatten(2))
        return made


class StepLLMProjections(nn.Module):
    """SwiGLU: the gate's half of `w1` comes first.

    Args:
        config: Sizes.
    """

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        between = math.ceil(config.ffn_hidden_size / _MULTIPLE) * _MULTIPLE
        self.w1 = nn.Linear(config.hidden_size, 2 * between, bias=False)
        self.w2 = nn.Linear(between, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(B, L, D), each token for itself."""
        gate, up = self.w1(states).chunk(2, dim=-1)
        made: torch.Tensor = self.w2(F.silu(gate) * up)
        return made


class StepLLMBlock(nn.Module):
    """One layer.

    Args:
        config: Sizes.
    """

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = StepLLMAttention(config), StepLLMProjections(config)
        self.attention_norm = StepLLMNorm(config.hidden_size, config.layernorm_epsilon)
        self.ffn_norm = StepLLMNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(self, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """(B, L, D); the bias is as of attention."""
        states = states + self.attention(self.attention_norm(states), bias)
        made: torch.Tensor = states + self.feed_forward(self.ffn_norm(states))
        return made


class StepLLMModel(PreTrainedModel):
    """Features of captions. Later tokens are not seen, so that padding behind a caption changes nothing of it.

    Args:
        config: Sizes.
    """

    config_class = StepLLMConfig
    _no_split_modules = ["StepLLMBlock"]

    def __init__(self, config: StepLLMConfig) -> None:
        super().__init__(config)
        words = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.tok_embeddings = nn.ModuleDict({"word_embeddings": words})
        layers = nn.ModuleList(StepLLMBlock(config) for _ in range(config.num_layers))
        self.transformer = nn.ModuleDict({"layers": layers})
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> BaseModelOutput:
        """`last_hidden_state` (B, L, D) of tokens (B, L)."""
        states = self.tok_embeddings["word_embeddings"](input_ids)
        bias = position_bias(input_ids.shape[1], self.config.num_attention_heads, input_ids.device)
        for layer in self.transformer["layers"]:
            states = layer(states, bias)
        return BaseModelOutput(last_hidden_state=states)


def position_bias(length: int, heads: int, device: torch.device) -> torch.Tensor:
    """(heads, length, length) fp32: −m·√(i − j), and −∞ where a key is later than its query. The slopes m of a number
    of heads that is no power of two are those of the power below, then every other one of the power above."""
    below = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (number + 1) / below) for number in range(below)]
    slopes += [2 ** (-4 * (2 * number + 1) / below) for number in range(heads - below)]
    places = torch.arange(length, device=device)
    distance = (places[:, None] - places[None]).float()
    bias = -distance.clamp(min=0).sqrt() * torch.tensor(slopes, device=device)[:, None, None]
    return bias.masked_fill(distance < 0, -torch.inf)


class StepChatTokenizer:
    """Words of Step-LLM by its SentencePiece model, between BOS and EOS; EOS is the padding, too.

    Args:
        folder: With `step1_chat_tokenizer.model`.

    Raises:
        MachineError: The package sentencepiece is not installed.
    """

    file = "step1_chat_tokenizer.model"

    def __init__(self, folder: Path) -> None:
        try:
            import sentencepiece  # of this tokenizer alone
        except ImportError as error:
            raise MachineError(
                "Step-Video's tokenizer is a SentencePiece model, and the package sentencepiece is not installed",
                way_out="pip install sentencepiece; or train on features that were made elsewhere.",
            ) from error
        self._path = folder / self.file
        self._words = sentencepiece.SentencePieceProcessor(model_file=str(self._path))

    @classmethod
    def from_pretrained(cls, folder: str, **_: Any) -> StepChatTokenizer:
        """Read a folder. Other arguments, those of transformers' tokenizers, have no effect."""
        return cls(Path(folder))

    def save_pretrained(self, folder: str, **_: Any) -> None:
        """Write it, as pipelines write their parts."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / self.file).write_bytes(self._path.read_bytes())

    def __call__(self, text: Sequence[str], max_length: int | None = None, **_: object) -> BatchEncoding:
        """`input_ids` of each text, cut to `max_length` with its EOS."""
        rows: list[list[int]] = []
        for each in text:
            words = list(self._words.encode(each))
            if max_length is not None:
                words = words[: max_length - 2]  # BOS and EOS count, too
            rows.append([_BOS, *words, _EOS])
        return BatchEncoding({"input_ids": rows})
