"""Pictures of any size as rows of tokens: squares of pixels or latents, and their places in a table of places."""

from __future__ import annotations

import torch


def patchified(planes: torch.Tensor, side: int) -> torch.Tensor:
    """(C, h · side, w · side) → (h · w, side² · C): the numbers of a token run over rows, columns, channels."""
    channels, height, width = planes.shape
    squares = planes.view(channels, height // side, side, width // side, side)
    return squares.permute(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


def unpatchified(tokens: torch.Tensor, height: int, width: int, side: int) -> torch.Tensor:
    """Invert `patchified`: (h · w, side² · C) → (C, h · side, w · side).

    Args:
        tokens: Of one picture.
        height: h.
        width: w.
        side: Of a square.
    """
    squares = tokens.view(height, width, side, side, -1)
    return squares.permute(4, 0, 2, 1, 3).reshape(-1, height * side, width * side)


def places_of(rows: int, columns: int, per_side: int) -> torch.Tensor:
    """(rows · columns,) int64 places of a picture's tokens in a square table with `per_side` of them along a side."""
    return (torch.arange(rows)[:, None] * per_side + torch.arange(columns)).flatten()
