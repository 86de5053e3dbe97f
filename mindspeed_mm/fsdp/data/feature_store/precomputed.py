"""Features as Lightricks' trainer lays them out: folders of `.pt` files; the files of a clip have the same name.

`latents` holds those of the pictures (`latents` (C, T, H, W) or (T · H · W, C), normalised; `num_frames`, `height`,
`width` of them; `fps`), `conditions` what the connectors are given of the caption, `audio_latents` those of the sound
(`latents` (C, L, M) or (L, C · M), normalised). Captions, and which weights made all this, they do not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.feature_store.legacy import UnmarkedFeatures, load_table
from mindspeed_mm.fsdp.data.feature_store.records import FeatureRecord
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

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


def _tensor(content: dict[str, Any], path: Path) -> torch.Tensor:
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
