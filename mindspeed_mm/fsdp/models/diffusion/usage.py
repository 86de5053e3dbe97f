"""How released generators are used: what a sample gets for whatever a request leaves out.

The rule: what a request leaves out is the default of the pipeline's `__call__`. A `ReleaseUse` states where that is not
right for a release: distilled releases (few steps, no guidance), releases that share the pipeline of an older one, and
the frame rate of clips, which pipelines do not know. A release is recognised by settings in its folder, never by the
folder's name; a folder that fits no entry is used by the rule. Releases whose folders differ in weights alone cannot be
told apart (Stable Diffusion 3.5 Large Turbo, LTX-Video distilled): their steps and guidance have to be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

INDEX = "index"
"""Stands for `model_index.json` in the settings of `ReleaseUse.holds`."""
GIVEN: Any = ...
"""A value of `ReleaseUse.holds`: anything but null."""


@dataclass(frozen=True)
class ReleaseUse:
    """One entry. None: no entry says otherwise, so the pipeline's default counts."""

    release: str = ""
    """Name of the release; empty: all folders of the family."""
    holds: Mapping[str, Any] = field(default_factory=dict)
    """What the folder of the release holds: `component.setting` → value, for instance `scheduler.shift`; `index.name`
    is of `model_index.json`."""
    steps: int | None = None
    """Denoising steps."""
    guidance: float | Mapping[str, float] | None = None
    """Guidance scale; or, where it is several numbers, these arguments of the pipeline (empty: its own defaults)."""
    text_tokens: int | None = None
    """Length that captions are padded to and cut at."""
    fps: float | None = None
    """Frames per second of the clips that the release makes."""
    frames: int | None = None
    """Frames of a clip."""
    size: tuple[int, int] | None = None
    """Height and width in pixels."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline."""


def usage_of(table: Iterable[ReleaseUse], setting: Callable[[str, str], Any]) -> ReleaseUse:
    """The entries that fit a folder as one; of two that say something of the same, the later counts.

    Args:
        table: Of the family.
        setting: (component, setting) → its value in the folder, None where it has none.
    """
    found = ReleaseUse()
    for entry in table:
        if all(_is_held(setting(*name.split(".", 1)), value) for name, value in entry.holds.items()):
            said = {each.name: getattr(entry, each.name) for each in fields(entry)}
            found = replace(found, **{name: value for name, value in said.items() if value not in (None, "")})
    return found


def _is_held(found: Any, value: Any) -> bool:
    return found is not None and (value is GIVEN or bool(found == value))
