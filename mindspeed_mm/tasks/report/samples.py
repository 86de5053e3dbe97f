"""What a generator made while it was trained, as a grid: a prompt and what came of it round by round; and media for a
page: small enough, inside the page, moving where they moved."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mindspeed_mm.core.artifacts import RunFolder, read_jsonl
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, probe_video, read_clip
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader

if TYPE_CHECKING:
    from mindspeed_mm.tasks.report.data import Record

MOST_ROUNDS, MOST_PROMPTS, MOST_OF_EACH = 6, 20, 4
MOST_BYTES = 8_000_000
"""Maximum size of all samples of a run on the page; earlier rounds are left out first."""


@dataclass(frozen=True)
class Round:
    """Samples that a generator made at one step of its training."""

    step: int
    folder: Path
    entries: list[Record]


def read_rounds(run: Path) -> list[Round]:
    """The rounds of a run whose manifests stand, by step."""
    rounds = []
    for manifest in RunFolder(run).sample_manifests():
        entries = [entry for entry in read_jsonl(manifest) if {"number", "sample", "file", "step"} <= entry.keys()]
        if entries:
            rounds.append(Round(entries[0]["step"], manifest.parent, entries))
    return sorted(rounds, key=lambda each: each.step)


def sample_grid(rounds: Sequence[Round]) -> Record | None:
    """What the template shows: `steps`, and `rows` with a `prompt` and, of its `rounds`, steps with pictures; None when
    there is nothing."""
    if not rounds:
        return None
    prompts: dict[int, str] = {}
    for each in rounds:
        for entry in each.entries:
            prompts[entry["number"]] = str(entry.get("prompt", ""))
    numbers = sorted(prompts)[:MOST_PROMPTS]
    columns: list[tuple[int, dict[int, list[Shown]]]] = []
    left_bytes = MOST_BYTES
    # the newest first: earlier rounds are what is left out when the page is full
    for each in reversed(spread(rounds, MOST_ROUNDS)):
        shown = _pictures(each, numbers)
        for picture in chain.from_iterable(shown.values()):
            left_bytes -= len(picture["source"])
        if left_bytes < 0 and columns:
            break
        columns.insert(0, (each.step, shown))
    rows = []
    for number in numbers:
        cells = [(step, shown[number]) for step, shown in columns if number in shown]
        rows.append({"prompt": prompts[number], "rounds": cells})
    return {
        "steps": [step for step, _ in columns],
        "rows": rows,
        "rounds": len(rounds),
        "prompts": len(prompts),
    }


def spread(rounds: Sequence[Round], most: int) -> list[Round]:
    """At most so many, evenly over all, the last one among them and the first if there is room for two."""
    if len(rounds) <= most:
        return list(rounds)
    if most == 1:
        return [rounds[-1]]
    return [rounds[round(place * (len(rounds) - 1) / (most - 1))] for place in range(most)]


def _pictures(each: Round, numbers: Sequence[int]) -> dict[int, list[Shown]]:
    media = MediaLoader(each.folder)
    shown: dict[int, list[Shown]] = {}
    for entry in each.entries:
        if entry["number"] in numbers and len(shown.get(entry["number"], ())) < MOST_OF_EACH:
            shown.setdefault(entry["number"], []).append(show(str(entry["file"]), media))
    return shown


# --- media on a page --------------------------------------------------------------------------------------------------

PICTURE_PIXELS, CLIP_PIXELS = 256, 160
"""Longest sides shown."""
_SMALL_PIXELS = 72
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
    # (time, height, width, channels)
    images = [Image.fromarray(frame) for frame in clip_CTHW.transpose(1, 2, 3, 0)]
    return _clip(images, interval / header.fps)


def _picture(image: Image.Image) -> Shown:
    is_small = image.height <= _SMALL_PIXELS
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
    is_small = frames[0].height <= _SMALL_PIXELS
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
