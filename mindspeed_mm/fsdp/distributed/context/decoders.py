"""The decoder of a language model, and what in its configuration a spread sequence cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEYS = "parallel.ring_attention_size · parallel.ulysses_parallel_size"


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that takes token embeddings through the layers. A model whose code predictor goes on from the state in
    front of each frame of speech (`code_loss_factor`), or whose pictures say what their own labels are
    (`tells_pictures`), has none that other ranks could take a part of.

    Raises:
        ConfigError: The model does not name one, or its attention is not behind transformers' interface.
    """
    decoder = decoder_of(model)
    is_joined = attribute_at(model, "code_loss_factor", 0.0) or attribute_at(model, "tells_pictures", False)
    if decoder is not None and attribute_at(decoder, "_supports_attention_backend", False) and not is_joined:
        return decoder
    raise ConfigError(
        f"{type(model).__name__} has no decoder whose attention can be exchanged",
        key=KEYS,
        way_out="Set both sizes to 1: the model class must name its decoder (get_decoder) and call transformers' "
        "attention interface (_supports_attention_backend).",
    )


def context_problems(config: PreTrainedConfig) -> list[Problem]:
    """What in a decoder's configuration a spread sequence cannot do. Pure; it needs attributes only."""
    problems = []
    others = set(attribute_at(config, "layer_types", ())) - {"full_attention", "sliding_attention"}
    if others:
        problems.append(f"layers of type {', '.join(sorted(others))}: only softmax attention goes over ranks")
    dropout = attribute_at(config, "attention_dropout", 0.0)
    if dropout:
        problems.append(f"attention_dropout is {dropout}: it would be drawn differently on each rank")
    chunk = attribute_at(config, "attention_chunk_size")
    if chunk is not None:
        problems.append(f"attention_chunk_size is {chunk}: attention across ranks has no chunks")
    return [Problem(what, key=KEYS, way_out="Set both sizes to 1.") for what in problems]
