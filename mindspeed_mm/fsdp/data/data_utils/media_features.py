"""What a plugin for media makes and must be able to do: the contract between loading, rendering and batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.fsdp.data.data_utils.sample import MediaKind


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """One picture, video or sound, encoded."""

    kind: MediaKind
    token_ids: np.ndarray
    """(T,) int64, what takes the place of the item's placeholder token. Empty where the model has no placeholder."""
    tensors: dict[str, Any]
    """What the plugin's `collate` joins."""
    text: str | None = None
    """Where the replacement is not a run of special tokens (times of frames, line breaks): the text that takes the
    place of the placeholder's text before tokenisation, for its tokens depend on their neighbours. `token_ids` are
    then those of the text on its own."""


class Placeholder(NamedTuple):
    """What a chat template writes for an item."""

    token_id: int
    text: str


class ItemSize(NamedTuple):
    """What an item will be, known from its file's header."""

    tokens: int
    """The length of `MediaFeatures.token_ids`."""
    patches: int
    """Work of the encoder: patches of pictures and frames, frames of spectra."""
    text: str | None = None
    """As `MediaFeatures.text`."""


class MediaPlugin(Protocol):
    """Encodes the media of one kind of processor."""

    placeholders: Mapping[str, Placeholder]
    """Kind of media → what the chat template writes for an item; kinds that the model does not take are missing."""

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """Encode an RGB picture. Raises `DataError` for a size that the processor refuses."""

    def encode_video(self, clip: Any) -> MediaFeatures:
        """Encode a `VideoClip`."""

    def encode_audio(self, sound: Any) -> MediaFeatures:
        """Encode an `AudioClip`."""

    def measure(self, kind: MediaKind, header: Any) -> ItemSize | None:
        """The size that encoding would give, from what `MediaLoader.probe` read; None: encode it to know.

        Raises:
            DataError: Encoding would refuse it.
        """

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, torch.Tensor]:
        """Join the tensors of a batch's media, in order, under the names that the model's `forward` takes."""

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Further inputs of the model with one number a token, of one sample (L,): `mm_token_type_ids` or the like."""
