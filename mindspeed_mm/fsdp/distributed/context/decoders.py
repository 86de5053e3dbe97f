"""The decoder of a language model, and what in its configuration a spread sequence cannot do."""

from __future__ import annotations

from typing import Any

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem

KEYS = "parallel.ring_attention_size · parallel.ulysses_parallel_size"


def find_decoder(model: nn.Module) -> Any:
    """The module that takes token embeddings through the layers. A model whose code predictor goes on from the state in
    front of each frame of speech (`code_loss_factor`), or whose pictures say what their own labels are
    (`tells_pictures`), has none that other ranks could take a part of.

    Raises:
        ConfigError: The model does not name one, or its attention is not behind transformers' interface.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    is_joined = bool(getattr(model, "code_loss_factor", 0.0) or getattr(model, "tells_pictures", False))
    if isinstance(decoder, nn.Module) and getattr(decoder, "_supports_attention_backend", False) and not is_joined:
        return decoder
    raise ConfigError(
        f"{type(model).__name__} has no decoder whose attention can be exchanged",
        key=KEYS,
        way_out="Set both sizes to 1: the model class must name its decoder (get_decoder) and call transformers' "
        "attention interface (_supports_attention_backend).",
    )


def context_problems(config: Any) -> list[Problem]:
    """What in a decoder's configuration a spread sequence cannot do. Pure; it needs attributes only."""
    problems = []
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        problems.append(f"layers of type {', '.join(sorted(others))}: only softmax attention goes over ranks")
    if dropout := getattr(config, "attention_dropout", 0.0):
        problems.append(f"attention_dropout is {dropout}: it would be drawn differently on each rank")
    if (chunk := getattr(config, "attention_chunk_size", None)) is not None:
        problems.append(f"attention_chunk_size is {chunk}: attention across ranks has no chunks")
    return [Problem(what, key=KEYS, way_out="Set both sizes to 1.") for what in problems]
