"""Where the tokens stand that a picture is drawn from: one grid of frames, rows and columns, for latents and for states
of the language model (unified MSRoPE, arXiv:2603.09877, section 3.1.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def latent_positions(grids: Sequence[tuple[int, int]], scale: float) -> torch.Tensor:
    """(tokens, 3) frames, rows and columns of a sample's latents: each picture is a frame, whose rows
    and columns count from the middle.

    Args:
        grids: Rows and columns of the picture that is drawn, then of those that are given.
        scale: `video_position_scale_factor`.
    """
    return torch.cat([_grid(rows, columns, frame, scale) for frame, (rows, columns) in enumerate(grids)])


def state_positions(latents: torch.Tensor, seen: Sequence[bool], side: int, scale: float) -> torch.Tensor:
    """(states, 3) of a sample's states, which count on from the largest number of its latents. Those of a picture that
    is seen stand on a grid of their own, which is stretched to 1 / `scale` of its size.

    Args:
        latents: As of `latent_positions`.
        seen: Of each state, whether it is of a picture that is seen.
        side: Tokens along a side of such a picture.
        scale: `vlm_cond_position_scale_factor`.
    """
    at, place = int(latents.max()) + 1, 0
    found: list[torch.Tensor] = []
    picture = _grid(side, side, 0, scale)
    while place < len(seen):
        # A state of text: the same number on all three axes.
        block = torch.full((1, 3), float(at))
        if seen[place]:
            # A picture goes on along time alone: its rows and columns stay around 0.
            block = picture + torch.tensor([float(at), 0.0, 0.0])
        found.append(block)
        # The next number is behind the largest of the block on any axis, as in M-RoPE.
        at, place = int(block.max()) + 1, place + len(block)
    return torch.cat(found)


def _grid(rows: int, columns: int, frame: int, scale: float) -> torch.Tensor:
    sides = [_from_the_middle(count, scale) for count in (rows, columns)]
    down, across = torch.meshgrid(*sides, indexing="ij")
    # (rows, columns, 3) → (rows · columns, 3), row by row, as latents are packed.
    return torch.stack([torch.full_like(down, float(frame)), down, across], dim=-1).flatten(0, 1)


def _from_the_middle(count: int, scale: float) -> torch.Tensor:
    """−⌈n/2⌉ … ⌊n/2⌋ − 1; with a scale the same number of places between the ends of a side of 1 / scale of it."""
    before, behind = count - count // 2, count // 2
    places = torch.arange(-before, behind, dtype=torch.float32)
    if scale == 1.0 or count < 2:
        return places
    low, high = -int(before / scale), int(behind / scale) - 1
    return low + (places + before) * (high - low) / (count - 1)
