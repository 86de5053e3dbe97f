"""Rewards of pictures that need no model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from mindspeed_mm.fsdp.posttrain_rewards.registry import Row, reward_register


@reward_register.register("jpeg_size")
def jpeg_size(
    prompts: Sequence[str], completions: Sequence[Any], rows: Sequence[Row], *, quality: int = 95, sign: int = -1
) -> list[float]:
    """±kilobytes of the picture as JPEG, of a clip its frames on average: −1 rewards what compresses well, 1 what does
    not (DDPO, arXiv:2305.13301, section 5.1)."""

    def of(picture: Any) -> float:
        stream = io.BytesIO()
        picture.convert("RGB").save(stream, format="JPEG", quality=quality)
        return sign * stream.tell() / 1000

    clips = [each if isinstance(each, list | tuple) else [each] for each in completions]
    return [sum(map(of, frames)) / len(frames) for frames in clips]
