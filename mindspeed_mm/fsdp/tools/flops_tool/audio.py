"""Positions of sounds in a batch, as the audio encoders of transformers cut them up."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch import nn

from mindspeed_mm.core.batch import Batch, first_of
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.utils.settings import setting_of

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
            tokens += self._pooled(each)
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
            frames = (frames - 1) // stride + 1
        return frames

    def _pooled(self, frames: int) -> int:
        positions = sum(self._chunks(frames))
        return positions if self.pool == 1 else (positions - self.pool) // self.pool + 1
