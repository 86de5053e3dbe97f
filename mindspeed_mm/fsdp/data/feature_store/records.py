"""What is known of a row of the data besides its tensors: one line of `index.jsonl`, or of `skipped.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mindspeed_mm.core.media_geometry import MediaSize

TensorFacts = tuple[str, tuple[int, ...]]
"""dtype and shape, as JSON has them: `("float32", (16, 1, 8, 8))`."""


@dataclass(frozen=True)
class FeatureRecord:
    """A row that was encoded."""

    row: int
    """Number of the row in the data, from 0."""
    key: str
    """`content_key` of the row: the tensors' prefix, and the sample's id in training."""
    place: str
    """Where the row stands, `rows.jsonl:3`."""
    path: str
    """Path of the medium, as the row has it."""
    captions: tuple[str, ...]
    size: MediaSize
    """In pixels, as encoded."""
    fps: float = 0.0
    """Frames a second of the clip as encoded; 0 of a picture, and in sets of versions that did not note it."""
    shard: str = ""
    """File that holds its tensors."""
    tensors: Mapping[str, TensorFacts] = field(default_factory=dict)
    """Name without the key → dtype and shape: `latents`, `prompt_embeds/0` …"""
    said: str = ""
    """`GenerationRow.digest` of the row; empty in sets of versions that did not note it."""
    cut_captions: int = 0
    """Number of captions that are longer than what the text encoder reads."""
    repeats: int = 1
    """How often an epoch reads the row."""
    is_prior: bool = False
    """Whether the row preserves the prior."""
    scores: Sequence[float] = ()
    """Of the chosen and the rejected side of a preference pair, where the row has them."""
    medium: str = ""
    """Digest of the medium's file, 32 hex digits; like the next two empty in sets of versions that did not note it."""
    pixels: str = ""
    """What latents and conditions were made of: digest of the file, size, frames and views."""
    stem: str = ""
    """What the names of its own tensors begin with; empty: `key`."""
    media_stem: str = ""
    """The same of an older row whose latents and conditions are its own too; empty: it has its own."""
    caption_stems: Sequence[str] = ()
    """For each caption `<stem>/<number>` of an older row with the same caption, or empty; none: all are its own."""
    header: Sequence[Any] = ()
    """Height, width, frames and frames a second of the medium as stored; like the next empty in sets of versions that
    did not note it."""
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Role → kind of the further medium, and the same of it; of a sound its kind alone."""
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name without the key → file, and name in it, of the tensors that it shares with an older row."""

    @property
    def own_stem(self) -> str:
        """What the names of its own tensors begin with."""
        return self.stem or self.key

    @property
    def views(self) -> int:
        """How many views of the medium were encoded."""
        return 1 + sum(name.startswith("latents@") for name in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """A line of the index."""
        size = [self.size.frames, self.size.height, self.size.width]
        beside = [self.size.sound, self.size.pictures, self.size.lacks_video]
        while beside and not beside[-1]:  # versions before these knew frames, height and width alone
            beside.pop()
        # Not `asdict`, whose copies took most of the time of a large index.
        return {**vars(self), "size": [*size, *beside]}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> FeatureRecord:
        """What `to_json` gave.

        Raises:
            TypeError, ValueError, KeyError: It is not such a line.
        """
        content = {name: line[name] for name in _NAMES if name in line}
        content["captions"], content["size"] = tuple(line["captions"]), MediaSize(*line["size"])
        for name in ("scores", "caption_stems", "header"):
            content[name] = tuple(line.get(name, ()))
        for name in ("tensors", "places"):
            content[name] = {key: _as_pair(value) for key, value in line.get(name, {}).items()}
        return cls(**content)


_NAMES = tuple(entry.name for entry in fields(FeatureRecord))


def _as_pair(value: Sequence[Any]) -> tuple[str, Any]:
    """dtype and shape, or file and name in it; lists of JSON become tuples. Raises `ValueError` for anything else."""
    first, second = value
    return str(first), tuple(second) if isinstance(second, list) else str(second)


@dataclass(frozen=True)
class SkippedRow:
    """A row that could not be used."""

    row: int | None
    """None: it could not even be read, so it has no number among the others."""
    place: str
    path: str
    reason: str
    said: str = ""
    """As in `FeatureRecord`; empty too of a row that could not be read."""


def tensor_name(key: str, name: str, caption: int | None = None, *, view: int = 0) -> str:
    """`<key>/<name>`, for features of a caption `<key>/<name>/<its number>`, for views of a medium behind the first
    `<key>/<name>@<its number>`."""
    if view:
        name = f"{name}@{view}"
    if caption is not None:
        name = f"{name}/{caption}"
    return f"{key}/{name}"
