"""Rotary positions in time, height and width: each turns a third of a head's width."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, (L, D) each in fp32 (fp64 in fp64)."""
_BASE = 10000.0


def rotary_tables(
    grid: Sequence[int], head_width: int, like: torch.Tensor, scales: Sequence[float] = (1.0, 1.0, 1.0)
) -> Tables:
    """Tables for the tokens of a grid, frames outermost (Su et al. 2021, arXiv 2104.09864, one axis at a time).

    Args:
        grid: Frames, height and width in tokens.
        head_width: D, a multiple of 6.
        like: On the device of the tables; of fp64 where these should be.
        scales: What positions of each axis are divided by.
    """
    exact = torch.promote_types(like.dtype, torch.float32)
    width = head_width // 3
    steps = torch.arange(0, width, 2, device=like.device, dtype=exact) / width
    thirds = []
    for axis, (size, scale) in enumerate(zip(grid, scales, strict=True)):
        places = torch.arange(size, device=like.device, dtype=exact) / scale
        angles = torch.outer(places, _BASE**-steps).repeat(1, 2)
        shape = [1, 1, 1, width]
        shape[axis] = size
        thirds.append(angles.view(shape).expand(*grid, width))
    angles = torch.cat(thirds, dim=-1).flatten(0, 2)
    return angles.cos(), angles.sin()


def rotated(x_BLHD: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Queries or keys turned by their positions, in their own type."""
    cos, sin = (table[:, None] for table in tables)
    first, second = x_BLHD.unflatten(-1, (3, 2, -1)).unbind(-2)
    turned = torch.stack([-second, first], dim=-2).flatten(-3)
    return (x_BLHD * cos + turned * sin).to(x_BLHD.dtype)
