"""Patches of images and videos, and positions of sounds, in a batch, as the towers of transformers cut them up."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch, first_of
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.utils.model_parts import setting_of

# --- images and videos ------------------------------------------------------------------------------------------------


VisionLengths = Callable[[Batch], dict[str, list[int]]]
_GRIDS = ("image_grid_thw", "video_grid_thw")
_MARKERS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")


def side_of(config: object, *names: str) -> int | None:
    """The first of these settings that a tower has, each one number or one for every dimension, of which the first
    counts; None where it has none."""
    for name in names:
        sides = setting_of(config, Sequence, name)
        side = sides[0] if sides else setting_of(config, int, name)
        if side:
            return int(side)
    return None


def vision_lengths(model: nn.Module) -> VisionLengths | None:
    """How a model's vision tower divides what it sees.

    Returns:
        (batch) → patches of each image or frame, patches of each window, tokens that the decoder gets. None: the tower
        is several with patches of their own, and what each sees is not known.
    """
    config = setting_of(model.config, object, "vision_config")
    patch = side_of(config, "patch_size")
    if patch is None or hasattr(model.config, "high_res_vision_config"):
        return None
    markers: set[int] = set()
    for name in _MARKERS:
        token = setting_of(model.config, int, name)
        if token is not None:
            markers.add(token)
    # A token in front of the patches, which attention sees and no convolution makes.
    extra = int(any(name.endswith(("class_embedding", "cls_token")) for name, _ in model.named_parameters()))

    def lengths(batch: Batch) -> dict[str, list[int]]:
        """What the batch's pictures and clips are cut into: by their grids where it has them, else by their pixels."""
        if any(name in batch for name in _GRIDS):
            return _by_grids(batch, config, patch)
        if "pixel_values" not in batch and "pixel_values_videos" not in batch:
            return {}
        cuts = _by_pixels(batch, patch)
        patches = [each + extra for each in cuts]
        return {
            units.CUTS: cuts,
            units.PATCHES: patches,
            units.MEDIA: [_placeholders(batch, markers) or _handed_on(model, cuts)],
        }

    return lengths


def _by_grids(batch: Batch, config: object, patch: int) -> dict[str, list[int]]:
    """Qwen-VL, GLM-V, Kimi: attention stays in a frame, or in a window of it. MiMo-V2.5's patches see so many on either
    side of them: about as much work as in windows of as many that stand beside each other."""
    merge = side_of(config, "spatial_merge_size", "merge_kernel_size") or 1
    window_pixels = setting_of(config, int, "window_size")
    side, reach = 0, setting_of(config, int, "visual_token_window_size") or 0
    if window_pixels and not reach and hasattr(config, "fullatt_block_indexes"):
        side = window_pixels // merge // patch
    frames: list[int] = []
    windows: list[int] = []
    tokens = 0
    for name in _GRIDS:
        if name not in batch:
            continue
        for time, height, width in batch[name].tolist():
            frames += [height * width] * time
            tokens += time * height * width // merge**2
            if reach > 0:
                windows += _piece_lengths(height * width, 2 * reach + 1) * time
            elif side:
                windows += [*windows_of(height // merge, width // merge, side, merge)] * time
    return {units.CUTS: frames, units.PATCHES: frames, units.WINDOWS: windows, units.MEDIA: [tokens]}


def windows_of(height: int, width: int, side: int, merge: int) -> Iterable[int]:
    """Patches of each window of a frame; those at the borders are smaller.

    Args:
        height: Of the frame, in merged squares of patches.
        width: As above.
        side: Of a window, in merged squares.
        merge: Patches along a side of a square.
    """
    rows, columns = _piece_lengths(height, side), _piece_lengths(width, side)
    return [row * column * merge**2 for row, column in product(rows, columns)]


def _piece_lengths(whole: int, side: int) -> list[int]:
    """Lengths of the pieces of a side; the last one is what is left."""
    return [min(side, whole - start) for start in range(0, whole, side)]


def _by_pixels(batch: Batch, patch: int) -> list[int]:
    """Towers that take whole pictures, or patches with the place of each."""
    found: list[int] = []
    for name, places in (("pixel_values", "image_position_ids"), ("pixel_values_videos", "video_position_ids")):
        if name not in batch:
            continue
        shape = batch[name].shape
        if places in batch:
            found += (batch[places] >= 0).all(dim=-1).sum(dim=-1).reshape(-1).tolist()
        elif "spatial_shapes" in batch:  # flat patches, filled up to those of the largest picture
            found += batch["spatial_shapes"].prod(dim=-1).tolist()
        elif "image_sizes" in batch and len(shape) == 4:
            found += [(height // patch) * (width // patch) for height, width in batch["image_sizes"].tolist()]
        else:
            *counts, _, height, width = shape
            pictures = math.prod(counts)
            if name == "pixel_values" and len(counts) > 1:
                pictures = _filled_tiles(batch[name])
            found += [(height // patch) * (width // patch)] * pictures
    return found


def _filled_tiles(pixels: torch.Tensor) -> int:
    """Tiles of pictures (pictures, tiles, channels, height, width) without those of zeros, which fill up pictures of
    fewer tiles and which models leave out (LLaVA-NeXT, Idefics3). Some places of each tile are looked at."""
    height, width = pixels.shape[-2:]
    places = pixels[..., :: max(1, height // 8), :: max(1, width // 8)]
    tiles = (places != 0).flatten(2).any(dim=2).sum(dim=1)
    # A picture that is black everywhere, where pixels are not normalised.
    return int(tiles.where(tiles > 0, pixels.shape[1]).sum())


def _handed_on(model: nn.Module, cuts: Sequence[int]) -> int:
    """Tokens that the decoder gets of so many patches, by the settings of towers that join neighbours: so many of each
    picture (Gemma3), or squares of patches (InternVL, Idefics3, LFM2-VL, Granite 4 Vision)."""
    of_each = setting_of(model.config, int, "mm_tokens_per_image")
    if of_each is not None:
        return len(cuts) * of_each
    ratio = setting_of(model.config, float, "downsample_ratio")
    rate = setting_of(model.config, str, "downsample_rate")
    if rate is not None:  # Granite 4 Vision: "4/8" along each side
        ratio = float(Fraction(rate))
    if ratio is not None:
        return round(sum(cuts) * ratio**2)
    return sum(cuts) // (side_of(model.config, "downsample_factor", "scale_factor") or 1) ** 2


def _placeholders(batch: Batch, markers: set[int]) -> int:
    ids, marks = batch.get("input_ids"), batch.get("mm_token_type_ids")
    if not markers and marks is not None:  # a model that is told where its media stand
        return int((marks > 0).sum())
    if ids is None:
        return 0
    return sum(int((ids == marker).sum()) for marker in markers)


# --- sounds -----------------------------------------------------------------------------------------------------------


_MASKS = ("feature_attention_mask", "input_features_mask")


@dataclass(frozen=True)
class SoundLengths:
    """An audio encoder: convolutions over frames of a spectrum, then layers."""

    strides: tuple[int, ...]
    """Strides of the convolutions along time, in order."""
    names: tuple[str, ...]
    """Names of the convolutions' modules."""
    bins: tuple[int, ...]
    """Rows of a spectrum that are left behind each convolution; 1 for those that go over time alone."""
    chunk: int
    """Frames that are encoded by themselves; 0: all of them, padding included."""
    window: int
    """Frames that attention stays in; 0: a chunk, or everything."""
    pool: int
    """Positions that become one token."""

    @classmethod
    def of(cls, encoder: nn.Module) -> SoundLengths | None:
        """Read an encoder; None when it has no convolutions over a spectrum."""
        config = setting_of(encoder, object, "config")
        left = setting_of(config, int, "num_mel_bins")
        if left is None:
            return None
        names, strides, bins, pool = [], [], [], 1
        for name, module in encoder.named_modules():
            if isinstance(module, nn.AvgPool1d):
                # Encoders of Whisper's kind make one token of two positions.
                pool = 2
            if not isinstance(module, (nn.Conv1d, nn.Conv2d)):
                continue
            names.append(name)
            strides.append(module.stride[-1])
            if isinstance(module, nn.Conv2d):  # the spectrum is a picture, whose rows it makes fewer
                padding = 0 if isinstance(module.padding, str) else int(module.padding[0])
                left = (left + 2 * padding - module.kernel_size[0]) // module.stride[0] + 1
                bins.append(left)
            else:
                bins.append(1)
        if not names:
            return None
        return cls(
            strides=tuple(strides),
            names=tuple(names),
            bins=tuple(bins),
            chunk=2 * (setting_of(config, int, "n_window") or 0),
            window=setting_of(config, int, "n_window_infer") or 0,
            pool=pool,
        )

    def positions_of(self, name: str) -> float:
        """Places where a convolution is computed, for each position behind the last one."""
        place = self.names.index(name)
        return math.prod(self.strides[place + 1 :]) * self.bins[place]

    def is_behind(self, name: str) -> bool:
        """Whether a module of the encoder goes over tokens: its last projection, behind the pooling."""
        return self.pool > 1 and re.fullmatch(r"proj\d?(\..*)?", name) is not None

    def __call__(self, batch: Batch) -> dict[str, list[int]]:
        """Positions by windows of attention, and tokens."""
        if "input_features" not in batch:
            return {}
        features = batch["input_features"]
        mask = first_of(batch, _MASKS)
        if mask is None or not self.chunk:
            sounds = features.shape[0] if features.dim() > 2 else 1
            frames = [features.shape[-1]] * sounds
        else:
            frames = mask.sum(dim=-1).tolist()
        pieces: list[int] = []
        tokens = 0
        for each in frames:
            pieces += self._windows(each)
            positions = sum(self._chunks(each))
            if self.pool > 1:
                positions = (positions - self.pool) // self.pool + 1
            tokens += positions
        return {units.SOUND: pieces, units.SOUND_TOKENS: [tokens]}

    def _windows(self, frames: int) -> list[int]:
        chunks = self._chunks(frames)
        if not self.window or not self.chunk:
            return chunks
        most = max(1, self.window // self.chunk)
        return [sum(chunks[start : start + most]) for start in range(0, len(chunks), most)]

    def _chunks(self, frames: int) -> list[int]:
        """Return how many positions each chunk of a sound has behind the convolutions."""
        size = self.chunk or frames
        return [self._behind(min(size, frames - start)) for start in range(0, frames, size)]

    def _behind(self, frames: int) -> int:
        for stride in self.strides:
            # Padded so that a stride of 1 keeps the length.
            frames = (frames - 1) // stride + 1
        return frames
