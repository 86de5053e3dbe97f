"""The base of a user's own models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn


class MultiModalModule(nn.Module):
    """A module with a configuration, as MindSpeed-MM's models are. Sharding changes it in place and wraps nothing, so
    that `model.module.module`, which reaches through wrappers elsewhere, is the model itself.

    Args:
        config: Anything; kept as `config`.
        share_embeddings_and_output_weights: Kept for code that asks.
    """

    def __init__(self, config: Any = None, share_embeddings_and_output_weights: bool = True) -> None:
        super().__init__()
        self.config = config
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.input_tensor: torch.Tensor | None = None

    @property
    def module(self) -> Self:
        """The model itself, for code that reaches through a wrapper's `module`."""
        return self

    def set_input_tensor(self, input_tensor: torch.Tensor | Sequence[torch.Tensor] | None) -> None:
        """Keep a tensor as `input_tensor`, for code that calls it between stages; the engine's stages do not."""
        is_several = isinstance(input_tensor, (list, tuple))
        self.input_tensor = input_tensor[0] if is_several and input_tensor else input_tensor  # type: ignore[assignment, index]

    def build_layer(self, config: object, layer_number: int) -> nn.Module:
        """Layer `layer_number` of the model; override it where a model builds its layers one by one."""
        raise NotImplementedError(f"{type(self).__name__}.build_layer")

    def _get_num_layers(self) -> int:
        """Number of layers: the configuration's `num_layers`, or its `num_hidden_layers`."""
        for name in ("num_layers", "num_hidden_layers"):
            if (number := getattr(self.config, name, None)) is not None:
                return int(number)
        raise AttributeError(f"the configuration of {type(self).__name__} has no num_layers")

    def _get_layer(self, layer_number: int) -> nn.Module:
        """Layer `layer_number`, of the attribute `layers`."""
        layers: Any = self.layers
        found: nn.Module = layers[layer_number]
        return found
