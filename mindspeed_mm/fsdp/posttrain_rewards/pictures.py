"""Rewards of pictures that need no model, and what is looked at of clips."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from mindspeed_mm.fsdp.posttrain_rewards.registry import Row, reward_register


@reward_register.register("jpeg_size")
def jpeg_size(
    prompts: Sequence[str], completions: Sequence[object], rows: Sequence[Row], *, quality: int = 95, sign: int = -1
) -> list[float]:
    """±kilobytes of the picture as JPEG, of a clip its frames on average: −1 rewards what compresses well, 1 what does
    not (DDPO, arXiv:2305.13301, section 5.1)."""

    def of(picture: Any) -> float:
        stream = io.BytesIO()
        picture.convert("RGB").save(stream, format="JPEG", quality=quality)
        return sign * stream.tell() / 1000

    return [sum(map(of, frames)) / len(frames) for frames in map(frames_of, completions)]


class ClipFrames(list[Any]):
    """All frames of a clip whose rate is known.

    Args:
        frames: PIL pictures.
        fps: Frames a second.
    """

    def __init__(self, frames: Iterable[object], fps: float) -> None:
        super().__init__(frames)
        self.fps = fps


def rate_of(completion: object) -> float | None:
    """Frames a second of a clip; None where it does not say."""
    if isinstance(completion, ClipFrames):
        return completion.fps
    return None


def frames_of(completion: object, most: int | None = None) -> list[Any]:
    """A picture alone, or frames of a clip: at most so many, the middles of equal parts."""
    if not isinstance(completion, list | tuple):
        return [completion]
    taken = len(completion) if most is None else min(len(completion), most)
    return [completion[int((place + 0.5) * len(completion) / taken)] for place in range(taken)]
