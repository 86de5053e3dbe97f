"""Where the forward pass of a family of generators is cut when a sample is spread over ranks. Data: the families hold
it, context parallelism reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

Entry = TypeVar("Entry")
Along = tuple[str, int]
"""A stream of tokens, and the dimension of a tensor that runs along it."""
Streams = tuple[str, ...]
IMAGE, TEXT, BOTH = "image", "text", "text and image"
"""Names of streams: tokens of the picture or video, those of the caption, and both where they are one sequence before
the blocks begin. A family may have others."""


@dataclass(frozen=True)
class SamplePlan:
    """Names of arguments and modules, and along which stream of tokens their tensors run.

    A tensor is cut where it is still whole: the first one named of a stream says how long that is. An argument that is
    a tuple has one entry for all of its tensors, or one for each. Patterns are module patterns.
    """

    attention: Mapping[str, Streams]
    """Attention modules → what attends to itself there, in the order in which the module puts it together. Any other
    attention (to a caption that every rank has) is computed as ever."""
    blocks: Mapping[str, Mapping[str, Along | tuple[Along, ...]]] = field(default_factory=dict)
    """Blocks → arguments that are cut in front of each of them."""
    inputs: Mapping[str, Along | tuple[Along, ...]] = field(default_factory=dict)
    """Arguments of the model's forward that are cut."""
    rejoined: Mapping[str, Along] = field(default_factory=dict)
    """Modules inside, or lists of modules for their last one, whose output is put together for others to go on with."""
    gathered: tuple[tuple[str, Along], ...] = (("proj_out", (IMAGE, 1)),)
    """Modules whose output is put together at the end: all ranks go on with it alike, without parameters."""

    @property
    def is_of_images_alone(self) -> bool:
        """Whether captions are attended to, and never spread."""
        return all(streams == (IMAGE,) for streams in self.attention.values())

    def inside(self, parts: Iterable[str]) -> SamplePlan:
        """The plan of several equal models that stand side by side in one, under these names."""
        names = tuple(parts)
        return replace(
            self,
            attention=_in_each(names, self.attention),
            blocks=_in_each(names, self.blocks),
            rejoined=_in_each(names, self.rejoined),
            gathered=tuple(_in_each(names, dict(self.gathered)).items()),
        )


def _in_each(parts: Iterable[str], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries of a plan by the names that modules have in each of several parts."""
    found = {}
    for part in parts:
        for name, entry in entries.items():
            found[f"{part}.{name}"] = entry
    return found
