"""The older layout of features: one `.pt` file a row, and `data.jsonl` that names it in `file`.

A file holds `video` (the latents, normalised), `prompt_ids` (text features in spite of the name; a list of them when
there are several text encoders), `prompt_mask` (1 on real tokens) and, for image-to-video, `i2v_vae_feature` (a mask of
four channels, then the condition's latents) and `i2v_clip_feature`. Which weights made them, it does not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import CheckpointError, DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.feature_store.records import FeatureRecord
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

LIST_FILE = "data.jsonl"

_CAPTION_COLUMNS = ("cap", "captions", "caption", "prompt", "text")
_WAY_OUT = "Make the features again with mm extract."


class UnmarkedFeatures:
    """Features that do not say what made them; `null_text` is None, for nobody stored the empty caption."""

    model_folder = ""
    components = None
    provenance = None
    skipped = None
    preprocessing = None
    null_text = None


class LegacyFeatureStore(UnmarkedFeatures):
    """Features of the older layout.

    Args:
        folder: Holds `data.jsonl`.
        adapter: The configured family.

    Raises:
        DataError: A line, or a file, is off, or the latents are not for this model.
    """

    def __init__(self, folder: Path, adapter: DiffusionAdapter) -> None:
        self.folder, self._geometry = folder, adapter.geometry
        self._files = [_row(number, line, folder) for number, line in _lines(folder / LIST_FILE)]
        _check_distinct(self._files, folder)

    def __len__(self) -> int:
        return len(self._files)

    @cached_property
    def records(self) -> Sequence[FeatureRecord]:
        """In the order of the list. Sizes stand in the files alone: each is opened once."""
        return [self._record(number) for number in range(len(self))]

    def read(self, index: int, caption_index: int, view: int = 0) -> dict[str, torch.Tensor]:
        """Features of a row; there is one caption, and one view of the medium."""
        content = self._load(index)
        features = {"latents": content["video"], **_text_features(content)}
        if content.get("i2v_vae_feature") is not None:
            features["condition_latents"] = content["i2v_vae_feature"][-self._geometry.latent_channels :]
        if content.get("i2v_clip_feature") is not None:
            features["image_embeds"] = content["i2v_clip_feature"]
        return features

    def _record(self, number: int) -> FeatureRecord:
        name, captions = self._files[number]
        latents = self._load(number)["video"]
        key = blake2b(json.dumps([name, captions]).encode(), digest_size=16).hexdigest()
        size = _pixel_size(latents, self._geometry, self.folder / name)
        return FeatureRecord(number, key, f"{LIST_FILE}:{number + 1}", name, captions, size)

    def _load(self, index: int) -> dict[str, Any]:
        path = self.folder / self._files[index][0]
        content = load_table(path)
        for name in ("video", "prompt_ids"):
            held = content.get(name)
            tensors = held if isinstance(held, list) and held else [held]
            if not all(map(_is_floating, tensors)):
                raise DataError(f"holds no features under '{name}'", where=str(path), way_out=_WAY_OUT)
        return content


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def load_table(path: Path) -> dict[str, Any]:
    """The table of tensors and numbers in a `.pt` file. Raises `DataError` when it holds none."""
    try:
        content = load_weights(path)
    except CheckpointError as error:
        raise DataError(error.problems[0].what, where=str(path), way_out=_WAY_OUT) from error
    if not isinstance(content, dict):
        raise DataError(f"holds a {type(content).__name__}, no table", where=str(path), way_out=_WAY_OUT)
    return content


def _lines(path: Path) -> list[tuple[int, bytes]]:
    return [(n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]


def _row(number: int, line: bytes, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Name of the `.pt` file, and the caption."""
    where = f"{folder / LIST_FILE}:{number}"
    try:
        content = parse_json(line)
        name = content["file"]
        path = (folder / name).resolve()
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("is not a JSON object with 'file'", where=where, way_out=_WAY_OUT) from error
    if not path.is_relative_to(folder.resolve()):
        raise DataError(f"'{name}' lies outside the folder of features", where=where)
    if not path.is_file():
        raise DataError(f"'{name}' is missing", where=where, way_out=_WAY_OUT)
    return name, (_caption(content),)


def _caption(row: Mapping[str, Any]) -> str:
    """Of several the older tool took one, and did not say which."""
    for name in _CAPTION_COLUMNS:
        if name in row:
            return row[name] if isinstance(row[name], str) else ""
    return ""


def _check_distinct(files: Sequence[tuple[str, tuple[str, ...]]], folder: Path) -> None:
    """The older tool named files after the medium alone: of media with the same name the last one is left."""
    seen: dict[str, int] = {}
    for number, (name, _) in enumerate(files, 1):
        if name in seen:
            raise DataError(
                f"rows {seen[name]} and {number} share the features in '{name}': one medium has replaced the other",
                where=str(folder / LIST_FILE),
                way_out="Drop one of the rows, or make the features again with mm extract.",
            )
        seen[name] = number


def _pixel_size(latents: torch.Tensor, geometry: MediaGeometry, path: Path) -> MediaSize:
    axes = 4 if geometry.is_video else 3
    if latents.dim() != axes or latents.shape[0] != geometry.latent_channels:
        wanted = f"{axes} axes, {geometry.latent_channels} channels first"
        raise DataError(
            f"'video' has shape {tuple(latents.shape)}, the model takes {wanted}",
            where=str(path),
            key="model.model_name_or_path",
            way_out="These features are for another model.",
        )
    frames = 1
    if geometry.is_video:
        frames = geometry.frames(tuple(latents.shape))
    height, width = latents.shape[-2:]
    return MediaSize(frames, height * geometry.spatial_ratio, width * geometry.spatial_ratio)


def _text_features(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Of a list, what has tokens is `prompt_embeds`, a single vector is `pooled_prompt_embeds`."""
    texts, masks = content["prompt_ids"], content.get("prompt_mask")
    if not isinstance(texts, list):
        texts, masks = [texts], [masks]
    features = {}
    for text, mask in zip(texts, masks or [None] * len(texts), strict=True):
        has_batch_axis = text.dim() == 3 or (text.dim() == 2 and text.shape[0] == 1)
        embeds = text[0] if has_batch_axis else text
        if embeds.dim() == 1:
            features["pooled_prompt_embeds"] = embeds
            continue
        if mask is not None:
            embeds = embeds[: int(mask.sum())]
        features["prompt_embeds"] = embeds
    return features
