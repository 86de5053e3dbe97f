"""What there is to tell of a sample of a generator before it is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.sample import MediaKind
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader


@dataclass(frozen=True)
class SampleDescription:
    """Medium, captions and size of a sample."""

    source: str | bytes
    """Path of the medium, or its bytes."""
    captions: tuple[str, ...]
    drawn: int
    """Number of the caption that the first epoch takes."""
    size: MediaSize
    """That it is trained in: its bucket."""
    header: MediaHeader | None = None
    """Header of the medium as stored; None of features that do not note it."""
    is_video: bool = False
    further: tuple[tuple[str, MediaKind, str | bytes], ...] = ()
    """Other media that the row names: role, kind, and path or bytes."""
    contradiction: str = ""
    """What the row declares falsely of its medium, where that does not change its size."""
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """What features note of the further media instead: role → kind, height, width, frames and frames a second."""
