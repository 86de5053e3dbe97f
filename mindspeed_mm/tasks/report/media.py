"""Pictures and clips for a report: small enough for a page, inside the page, moving where they moved."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, probe_video, read_clip
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader

PICTURE_PIXELS, CLIP_PIXELS = 256, 160
"""Longest sides shown."""
SMALL_PIXELS = 72
"""Pictures up to this height are shown larger than they are, with sharp pixels and without loss."""
MOST_FRAMES = 24

Shown = dict[str, Any]
"""`name`, and `source` (a data URI) with `small`; or an empty `source` and what is the `trouble`."""


def show(name: str, media: MediaLoader) -> Shown:
    """A picture or a clip by its name; what is wrong with it when it cannot be read."""
    try:
        image = load(name, media)
    except DataError as error:
        return {"name": name, "source": "", "trouble": error.problems[0].what}
    return {"name": name, **image}


def load(name: str, media: MediaLoader) -> Shown:
    """As `show`. Raises `DataError` when the file cannot be read."""
    if PurePath(name).suffix.lower() != ".mp4":
        return _picture(media.load_image(name))
    with media.open(name) as file:
        header = probe_video(file, name)
        interval = math.ceil(header.frames / MOST_FRAMES)
        frames = (header.frames - 1) // interval + 1
        file.seek(0)
        clip_CTHW = read_clip(file, frames, ClipSampling(frame_interval=interval), np.asarray, name)
    images = [Image.fromarray(frame) for frame in clip_CTHW.transpose(1, 2, 3, 0)]
    return _clip(images, interval / header.fps)


def _picture(image: Image.Image) -> Shown:
    is_small = image.height <= SMALL_PIXELS
    image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    data = io.BytesIO()
    if is_small:
        kind = "png"
        image.save(data, kind, optimize=True)
    else:
        kind = "jpeg"
        image.save(data, kind, optimize=True, quality=80)
    return {"source": _uri(kind, data), "small": is_small}


def _clip(frames: Sequence[Image.Image], seconds_each: float) -> Shown:
    """An animated WebP that begins again at its end."""
    is_small = frames[0].height <= SMALL_PIXELS
    for frame in frames:
        frame.thumbnail((CLIP_PIXELS, CLIP_PIXELS))
    data = io.BytesIO()
    frames[0].save(
        data,
        "webp",
        save_all=True,
        append_images=frames[1:],
        duration=max(1, round(1000 * seconds_each)),
        loop=0,
        lossless=is_small,
        quality=60,
    )
    return {"source": _uri("webp", data), "small": is_small}


def _uri(kind: str, data: io.BytesIO) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"
