"""Generated and real samples in folders: pictures and clips, their frames, and their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from mindspeed_mm.core.artifacts import DRAWN_MANIFEST, SAMPLES_MANIFEST, read_jsonl
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, probe_video, read_clip
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader

PICTURES, CLIPS = (".png", ".jpg", ".jpeg", ".webp"), (".mp4",)

Samples = Mapping[str, Path]
"""Name within the folder, without its ending → file."""


def find_samples(folder: Path, key: str) -> dict[str, Path]:
    """Pictures and clips of a folder and of those in it, by name.

    Args:
        folder: Where they are.
        key: The option that names it.

    Raises:
        UsageError: It is no folder, or has none, or has two of one name.
    """
    endings = (*PICTURES, *CLIPS)
    found: dict[str, Path] = {}
    if folder.is_dir():
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() not in endings:
                continue
            # without the ending: a PNG here and the JPEG of the same name there are a pair
            name = str(path.relative_to(folder).with_suffix(""))
            if name in found:
                what = f"holds {found[name].name} and {path.name}, which differ in their endings alone"
                way_out = "Rename one of them, or take it away: samples are told apart by their names."
                raise UsageError(what, where=str(path.parent), key=key, way_out=way_out)
            found[name] = path
    if not found:
        what = f"is not a folder with pictures or clips ({', '.join(endings)})"
        raise UsageError(what, where=str(folder), key=key, way_out="Name the folder that they are in.")
    return found


def is_clip(path: Path) -> bool:
    """Return whether a sample is a clip, by the ending of its file name."""
    return path.suffix.lower() in CLIPS


def frames_of(path: Path) -> np.ndarray:
    """The frames of a clip, or a picture as its only one: (T, H, W, 3), RGB, uint8.

    Raises:
        DataError: It cannot be read.
    """
    media = MediaLoader(path.parent)
    if not is_clip(path):
        return np.asarray(media.load_image(path.name))[None]
    with media.open(path.name) as file:
        frames = probe_video(file, str(path)).frames
        file.seek(0)
        clip_CTHW = read_clip(file, frames, ClipSampling(), np.asarray, str(path))
    return clip_CTHW.transpose(1, 2, 3, 0)


def rate_of(path: Path) -> float:
    """Frames a second of a clip."""
    with MediaLoader(path.parent).open(path.name) as file:
        return float(probe_video(file, str(path)).fps)


def as_values(frames_THW3: np.ndarray) -> torch.Tensor:
    """Frames as (T, 3, H, W) from 0 to 1."""
    return torch.from_numpy(frames_THW3.copy()).permute(0, 3, 1, 2) / 255.0


def prompts_of(folder: Path, samples: Samples) -> dict[str, str]:
    """Name → prompt, of samples that a manifest beside them tells of."""
    names = {path.resolve(): name for name, path in samples.items()}
    found = {}
    for entry_folder, entry in _entries(folder):
        name = names.get((entry_folder / str(entry.get("file", ""))).resolve())
        prompt = entry.get("prompt")
        if name is not None and isinstance(prompt, str):
            found[name] = prompt
    return found


def _entries(folder: Path) -> Iterator[tuple[Path, dict[str, object]]]:
    """Lines of all manifests, with the folder that their files are relative to."""
    for kind in (SAMPLES_MANIFEST, DRAWN_MANIFEST):
        for manifest in sorted(folder.rglob(kind)):
            for entry in read_jsonl(manifest):
                yield manifest.parent, entry
