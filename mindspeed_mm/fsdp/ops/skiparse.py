"""Skiparse attention: tokens are dealt out to sets of equal size, and each attends to the tokens of its own set
(Open-Sora Plan, arXiv 2412.00131, section 2.2). Layers alternate between two ways of dealing, so that after two of them
every token has met every other.

Shapes: B rows, L tokens, n sets, G tokens of a set, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Queries, keys and values (B, L, H, D), and a mask that broadcasts to (B, H, L, L) or None → (B, L, H, D)."""


@dataclass(frozen=True)
class SkiparseSets:
    """Which tokens attend to each other.

    Token i is in set `i % n`, or with `in_runs` in set `(i // n) % n`: n neighbours are together, and then n · (n − 1)
    tokens are skipped. Sets are filled up to equal size with zeros that nothing sees.
    """

    sets: int
    """n; 1: every token sees every other."""
    in_runs: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` for less than one set."""
        if self.sets < 1:
            raise ValueError(f"sparse_n is {self.sets}: tokens are dealt to one set at least")

    @property
    def period(self) -> int:
        """Tokens after which the dealing begins again: lengths are filled up to a multiple of it."""
        if self.in_runs:
            return self.sets**2
        return self.sets

    def deal(self, x_BL: torch.Tensor) -> torch.Tensor:
        """(B, L, …) → (B · n, G, …); zeros stand for the tokens that lack."""
        length = x_BL.shape[1]
        x_BL = F.pad(x_BL, [0, 0] * (x_BL.dim() - 2) + [0, -length % self.period])
        if self.in_runs:
            x = x_BL.unflatten(1, (-1, self.sets, self.sets)).transpose(1, 2)  # rounds, sets, runs → sets first
            return x.flatten(2, 3).flatten(0, 1)
        return x_BL.unflatten(1, (-1, self.sets)).transpose(1, 2).flatten(0, 1)

    def collect(self, x_SG: torch.Tensor, length: int) -> torch.Tensor:
        """Invert `deal`: (B · n, G, …) → (B, L, …) of the first `length` tokens."""
        x = x_SG.unflatten(0, (-1, self.sets))
        if self.in_runs:
            x = x.unflatten(2, (-1, self.sets)).transpose(1, 2).flatten(1, 3)
        else:
            x = x.transpose(1, 2).flatten(1, 2)
        return x[:, :length]

    def shown(self, length: int, key_mask_BL: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """Which keys the tokens of each set see, (B · n, 1, 1, G) bool; None: all. A set in which all are hidden sees
        itself, so that no row of scores is empty; nothing reads what comes out.

        Args:
            length: L.
            key_mask_BL: (B, L) bool: False hides a key; None hides none.
            like: (B, …), on the device of the mask that is made.
        """
        if key_mask_BL is None:
            if length % self.period == 0:
                return None
            key_mask_BL = torch.ones(like.shape[0], length, dtype=torch.bool, device=like.device)
        shown = self.deal(key_mask_BL)
        return (shown | ~shown.any(dim=1, keepdim=True))[:, None, None]


def skiparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sets: SkiparseSets,
    attend: Attend,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each token to those of its set, (B, L, H, D): a kernel is called once, with n times as many rows
    that are an n-th as long, for an n-th of the work.

    Args:
        query: (B, L, H, D), all tokens of a sample in their order.
        key: Of the same shape.
        value: Of the same shape.
        sets: How tokens are dealt.
        attend: The kernel.
        key_mask: (B, L) bool: False hides a key from everyone.
    """
    length = query.shape[1]
    if sets.sets == 1:
        return attend(query, key, value, None if key_mask is None else key_mask[:, None, None])
    mask = sets.shown(length, key_mask, query)
    return sets.collect(attend(sets.deal(query), sets.deal(key), sets.deal(value), mask), length)


def joint_skiparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    told: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sets: SkiparseSets,
    attend: Attend,
    told_mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of video tokens to their set and to a caption, which is in every set. Tokens of the caption attend in
    each set, and get the mean over the sets. Returns (B, L, H, D) of the video and (B, S, H, D) of the caption.

    Args:
        query: (B, L, H, D) of the video.
        key: Of the same shape.
        value: Of the same shape.
        told: Queries, keys and values of the caption, (B, S, H, D).
        sets: How tokens of the video are dealt.
        attend: The kernel.
        told_mask: (B, S) bool: False hides a token of the caption from everyone.
        key_mask: (B, L) bool: the same of the video.
    """
    length, text = query.shape[1], told[0].shape[1]
    each = sets.sets
    joined = []
    for of_video, of_text in zip((query, key, value), told, strict=True):
        dealt = sets.deal(of_video) if each > 1 else of_video
        joined.append(torch.cat([dealt, of_text.repeat_interleave(each, dim=0)], dim=1))
    seen = sets.shown(length, key_mask, query)
    mask = None
    if seen is not None or told_mask is not None:
        rows, size = len(joined[0]), joined[0].shape[1] - text
        if seen is None:
            seen = torch.ones(rows, 1, 1, size, dtype=torch.bool, device=query.device)
        if told_mask is None:
            told_mask = torch.ones(len(query), text, dtype=torch.bool, device=query.device)
        mask = torch.cat([seen, told_mask.repeat_interleave(each, dim=0)[:, None, None]], dim=-1)
    made = attend(joined[0], joined[1], joined[2], mask)
    video, caption = made.split([made.shape[1] - text, text], dim=1)
    return sets.collect(video, length) if each > 1 else video, caption.unflatten(0, (-1, each)).mean(dim=1)
