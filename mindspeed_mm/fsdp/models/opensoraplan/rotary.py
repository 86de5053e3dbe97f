"""Rotary positions in time, height and width: each turns a part of a head's width."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, (L, D) each in fp32 (fp64 in fp64)."""
_BASE = 10000.0


def thirds(head_width: int) -> tuple[int, int, int]:
    """Widths of the three axes in 1.3: equal ones. `head_width` is a multiple of 6."""
    return (head_width // 3,) * 3


def sixteenths(head_width: int) -> tuple[int, int, int]:
    """Widths of the three axes in 1.5: 4, 6 and 6 sixteenths. `head_width` is a multiple of 16."""
    unit = head_width // 16
    return 4 * unit, 6 * unit, 6 * unit


def rotary_tables(
    grid: Sequence[int], widths: Sequence[int], like: torch.Tensor, scales: Sequence[float] = (1.0, 1.0, 1.0)
) -> Tables:
    """Tables for the tokens of a grid, frames outermost (Su et al. 2021, arXiv 2104.09864, one axis at a time).

    Args:
        grid: Frames, height and width in tokens.
        widths: How much of a head each axis turns, even numbers.
        like: On the device of the tables; of fp64 where these should be.
        scales: What positions of each axis are divided by.
    """
    exact = torch.promote_types(like.dtype, torch.float32)
    parts = []
    for axis, (size, width, scale) in enumerate(zip(grid, widths, scales, strict=True)):
        steps = torch.arange(0, width, 2, device=like.device, dtype=exact) / width
        places = torch.arange(size, device=like.device, dtype=exact) / scale
        angles = torch.outer(places, _BASE**-steps).repeat(1, 2)
        shape = [1, 1, 1, width]  # angles vary along their own axis of the grid only
        shape[axis] = size
        parts.append(angles.view(shape).expand(*grid, width))
    angles = torch.cat(parts, dim=-1).flatten(0, 2)
    return angles.cos(), angles.sin()


def rotated(x_BLHD: torch.Tensor, tables: Tables, widths: Sequence[int]) -> torch.Tensor:
    """Queries or keys turned by their positions, in their own type."""
    cos, sin = (table[:, None] for table in tables)  # (L, 1, D): the same for each head
    turned = []
    for part in x_BLHD.split(list(widths), dim=-1):
        # The pairs that turn together are the halves of each axis's part, not neighbours.
        first, second = part.chunk(2, dim=-1)
        turned += [-second, first]
    return (x_BLHD * cos + torch.cat(turned, dim=-1) * sin).to(x_BLHD.dtype)
