"""Features that others laid out. The older layout: one `.pt` file a row, and `data.jsonl` that names it in `file`.
Lightricks' trainer: folders of `.pt` files; the files of a clip have the same name.

A file of the older layout holds `video` (the latents, normalised), `prompt_ids` (text features in spite of the name; a
list of them when there are several text encoders), `prompt_mask` (1 on real tokens) and, for image-to-video,
`i2v_vae_feature` (a mask of four channels, then the condition's latents) and `i2v_clip_feature`. Which weights made
them, it does not say.

Of Lightricks' folders `latents` holds those of the pictures (`latents` (C, T, H, W) or (T · H · W, C), normalised;
`num_frames`, `height`, `width` of them; `fps`), `conditions` what the connectors are given of the caption,
`audio_latents` those of the sound (`latents` (C, L, M) or (L, C · M), normalised). Captions, and which weights made all
this, they do not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import CheckpointError, DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, parse_json
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.feature_store.feature_file import FeatureRecord
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
        self._files = [_legacy_row(number, line, folder) for number, line in _lines(folder / LIST_FILE)]
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

    def _load(self, index: int) -> JsonObject:
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


def load_table(path: Path) -> JsonObject:
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


def _legacy_row(number: int, line: bytes, folder: Path) -> tuple[str, tuple[str, ...]]:
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


def _caption(row: JsonMapping) -> str:
    """Of several the older tool took one, and did not say which."""
    for name in _CAPTION_COLUMNS:
        if name in row:
            if isinstance(row[name], str):
                return row[name]
            return ""
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


def _text_features(content: JsonMapping) -> dict[str, torch.Tensor]:
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


_INNER = ".precomputed"
_OLDER_NAMES = ("latent_", "condition_")
"""Files were once called `latent_0.pt` and `condition_0.pt`."""
_NO_CAPTION = "(not stored)"
_AUDIO = "audio_latents"


@dataclass(frozen=True)
class PrecomputedLayout:
    """Names of the folders, and what files leave out."""

    latents: str = "latents"
    conditions: str = "conditions"
    audio: str = "audio_latents"
    fps: float = 24.0
    """Of clips whose files do not say."""


class PrecomputedFeatures(UnmarkedFeatures):
    """Features of Lightricks' trainer. Clips that lack one of their files are left out, as there.

    Args:
        folder: Holds the folders of the layout, or `.precomputed` with them.
        adapter: The configured family.
        layout: Names.

    Raises:
        DataError: A folder is missing, no clip has all of its files, or the latents are not for this model.
    """

    def __init__(self, folder: Path, adapter: DiffusionAdapter, layout: PrecomputedLayout) -> None:
        self.folder = folder / _INNER if (folder / _INNER).is_dir() else folder
        self._adapter, self._layout = adapter, layout
        self._names = self._find()

    def __len__(self) -> int:
        return len(self._names)

    @cached_property
    def records(self) -> Sequence[FeatureRecord]:
        """By name. Sizes stand in the files alone: each is opened once."""
        return [self._record(number, name) for number, name in enumerate(self._names)]

    def read(self, index: int, caption_index: int, view: int = 0) -> dict[str, torch.Tensor]:
        """Features of a clip; there is one caption, and one view of the medium."""
        name = self._names[index]
        text = self._adapter.text_of_connectors(load_table(self._conditions(name)), str(self._conditions(name)))
        features = {"latents": self._pictures(name)[0], **text}
        if self._adapter.sound:
            features[_AUDIO] = self._sound(name)
        return features

    def _find(self) -> list[Path]:
        needed = [self._layout.latents, self._layout.conditions]
        if self._adapter.sound:
            needed.append(self._layout.audio)
        for name in needed:
            if not (self.folder / name).is_dir():
                raise DataError(
                    "the folder is missing",
                    where=str(self.folder / name),
                    way_out="Name the folder that holds it in dataset_dir; without sound, set model.task: t2v.",
                )
        root = self.folder / self._layout.latents
        whole = []
        for path in sorted(root.rglob("*.pt")):
            clip = path.relative_to(root)
            has_sound = not self._adapter.sound or (self.folder / self._layout.audio / clip).is_file()
            if has_sound and self._conditions(clip).is_file():
                whole.append(clip)
        if not whole:
            raise DataError(f"no clip has a file in each of {', '.join(needed)}", where=str(self.folder))
        return whole

    def _conditions(self, name: Path) -> Path:
        path = self.folder / self._layout.conditions / name
        older, called = _OLDER_NAMES
        if path.is_file() or not name.name.startswith(older):
            return path
        return path.with_name(called + name.name.removeprefix(older))

    def _record(self, number: int, name: Path) -> FeatureRecord:
        latents, fps = self._pictures(name)
        geometry, sound = self._adapter.geometry, self._adapter.sound
        height, width = latents.shape[-2] * geometry.spatial_ratio, latents.shape[-1] * geometry.spatial_ratio
        heard = self._sound(name).shape[1] if sound else 0
        size = MediaSize(geometry.frames(tuple(latents.shape)), height, width, heard)
        key = blake2b(name.as_posix().encode(), digest_size=16).hexdigest()
        return FeatureRecord(number, key, f"{self._layout.latents}/{name}", str(name), (_NO_CAPTION,), size, fps)

    def _pictures(self, name: Path) -> tuple[torch.Tensor, float]:
        """Latents (C, T, H, W), and frames a second."""
        path = self.folder / self._layout.latents / name
        content = load_table(path)
        latents = _tensor(content, path)
        try:
            if latents.dim() == 2:
                sides = [int(content[side]) for side in ("num_frames", "height", "width")]
                latents = latents.reshape(*sides, latents.shape[-1]).permute(3, 0, 1, 2)
            fps = float(content.get("fps") or self._layout.fps)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"num_frames, height, width or fps are off: {error}", where=str(path)) from error
        if latents.dim() != 4 or latents.shape[0] != self._adapter.geometry.latent_channels:
            _refuse(latents, f"({self._adapter.geometry.latent_channels}, frames, height, width)", path)
        return latents, fps

    def _sound(self, name: Path) -> torch.Tensor:
        """Return a clip's latents of sound, (C, L, M). Raises `DataError` for another shape."""
        assert self._adapter.sound is not None
        path = self.folder / self._layout.audio / name
        latents = _tensor(load_table(path), path)
        channels, _, bins = self._adapter.sound.latent_shape(1)
        if latents.dim() == 2 and latents.shape[1] == channels * bins:
            latents = latents.reshape(-1, channels, bins).transpose(0, 1)
        if latents.dim() != 3 or (latents.shape[0], latents.shape[2]) != (channels, bins):
            _refuse(latents, f"({channels}, positions, {bins})", path)
        return latents


def _tensor(content: Mapping[str, object], path: Path) -> torch.Tensor:
    latents = content.get("latents")
    if not isinstance(latents, torch.Tensor) or not latents.is_floating_point():
        raise DataError("holds no latents under 'latents'", where=str(path))
    return latents


def _refuse(latents: torch.Tensor, wanted: str, path: Path) -> None:
    raise DataError(
        f"'latents' has shape {tuple(latents.shape)}, the model takes {wanted}",
        where=str(path),
        key="model.model_name_or_path",
        way_out="These features are for another model.",
    )
