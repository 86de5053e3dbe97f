"""A plugin for processes that no test can patch: Qwen-Image-Edit without its pictures of a million pixels, which would
take minutes each in fp64."""

from __future__ import annotations

import functools

from mindspeed_mm.fsdp.models.qwen_image import modeling_qwen_image

_whole = getattr(modeling_qwen_image.fitted_size, "__wrapped__", modeling_qwen_image.fitted_size)


@functools.wraps(_whole)
def _small(width: int, height: int, area: int) -> tuple[int, int]:
    return _whole(width, height, area // 256)


modeling_qwen_image.fitted_size = _small
