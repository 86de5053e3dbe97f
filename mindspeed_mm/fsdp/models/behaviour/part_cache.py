"""What a sequence of parts, texts and pictures, keeps of itself while a model goes on with it."""

from __future__ import annotations

import torch


class KeyValues:
    """Keys and values of the tokens that a sequence goes on from, layer by layer: (1, heads, tokens, D)."""

    def __init__(self) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.position = 0
        """The position of the next token."""

    def copy(self) -> KeyValues:
        """The same, to go on in another way."""
        other = KeyValues()
        other.layers, other.position = list(self.layers), self.position
        return other
