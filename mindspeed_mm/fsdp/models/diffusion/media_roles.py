"""Media that a sample has beside the one that is learned: what a task is conditioned on."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed_mm.core.json_file import JsonMapping, JsonObject

TARGET = "target"
"""The medium that is learned."""


@dataclass(frozen=True)
class MediaRole:
    """One medium of a sample, brought to the size of the target and cut as the target is."""

    name: str
    """As `DiffusionAdapter.encode_conditions` is given it."""
    columns: tuple[str, ...]
    """Where a row may name it, in this order."""
    frames: Literal["one", "all", "sound"]
    """A picture, as many frames as the target has, or the sound of these frames."""
    prompt: str
    """Field of a prompt, and option of `mm infer`, that names it for sampling."""
    argument: str
    """Argument of the pipeline."""
    frame_of_target: int | None = None
    """Which frame of the target stands in where a row names none; None: every row names one."""
    is_trained: bool = True
    """False: of sampling alone, as the video that v2v begins with."""
    is_optional: bool = False
    """Whether rows and prompts may have none."""
    instead: str = ""
    """Of an optional one, the role that there must be where it is not given; empty: there need be none."""
    describes: str = ""
    """The role without which this one says nothing, as a mask without the video that it is of."""
    is_white_by_default: bool = False
    """Whether an optional one is white throughout where a row names none."""
    repeats_still: bool = False
    """Whether a still picture stands for as many frames as the target has."""
    is_whole: bool = False
    """A further picture: scaled into the size of the target, with white around it, instead of cut to it. Its argument
    of the pipeline is a list of all pictures for it."""

    @property
    def batch_key(self) -> str:
        """Of its pixels, (B, 3, T, H, W) uint8, or of its sound, (B, channels, samples) float32."""
        if self.frames == "sound":
            return self.name
        return f"pixels_{self.name}"


def numbered(role: MediaRole, numbers: range) -> tuple[MediaRole, ...]:
    """Roles of further pictures, which a row may have: in columns such as `source_2`, or in a list under `source`."""
    further = []
    for number in numbers:
        columns = tuple(f"{column}_{number}" for column in role.columns)
        name, prompt = f"{role.name}_{number}", f"{role.prompt}_{number}"
        further.append(replace(role, name=name, columns=columns, prompt=prompt, is_optional=True, is_whole=True))
    return tuple(further)


def unfit(roles: Sequence[MediaRole], given: Collection[str]) -> tuple[MediaRole, str] | None:
    """A role that a row or prompt has to name, or must not name alone, and the one that would do; None: all is well.

    Args:
        roles: Of the task.
        given: Names of the roles that are there.
    """
    for role in roles:
        is_given = role.name in given
        if not is_given and role.instead and role.instead not in given:
            return role, role.instead
        if is_given and role.describes and role.describes not in given:
            return role, role.describes
    return None


def spread_lists(row: JsonMapping, named: Mapping[str, tuple[str, ...]]) -> JsonObject:
    """A row or prompt whose lists of several pictures stand in numbered fields.

    Args:
        row: As it is written.
        named: Field → names of its first, second … picture.

    Raises:
        ValueError: A list is longer than there are names for it; its argument is the field.
    """
    spread = dict(row)
    for field, names in named.items():
        given = spread.get(field)
        if not isinstance(given, list) or not given:
            continue
        if len(given) > len(names):
            raise ValueError(field)
        spread |= dict(zip(names, spread.pop(field), strict=False))
    return spread


FIRST_FRAME = MediaRole("first_frame", ("first_frame", "first_image"), "one", "image", "image", frame_of_target=0)
LAST_FRAME = MediaRole("last_frame", ("last_frame", "last_image"), "one", "last_image", "last_image", -1)
_SOURCES = ("source", "source_image", "input_image", "edit_image")
SOURCE_PICTURE = MediaRole("source", (*_SOURCES, "control_path", "control_path_0"), "one", "image", "image")
FURTHER_SOURCES = tuple(
    replace(role, columns=(*role.columns, f"control_path_{number}"))
    for number, role in enumerate(numbered(replace(SOURCE_PICTURE, columns=_SOURCES), range(2, 4)), 1)
)
"""musubi-tuner's tables count `control_path_0`, `control_path_1` …"""
MASK_OF_PICTURE = MediaRole("mask", ("mask", "mask_image"), "one", "mask", "mask_image")
PICTURE_AROUND_MASK = MediaRole("source", _SOURCES, "one", "image", "image", frame_of_target=0)
SOURCE_VIDEO = MediaRole("source", ("source", "source_video"), "all", "video", "video", is_trained=False)
CONTROL_VIDEO = MediaRole(
    "control",
    ("control", "control_video", "src_video", "control_path", "source"),
    "all",
    "control",
    "video",
    is_optional=True,
    instead="reference",
)
MASK_OF_VIDEO = MediaRole(
    "mask",
    ("mask", "mask_video", "src_video_mask"),
    "all",
    "mask",
    "mask",
    is_optional=True,
    describes="control",
    is_white_by_default=True,
    repeats_still=True,
)
_REFERENCE = MediaRole(
    "reference",
    ("reference", "reference_image", "src_ref_images"),
    "one",
    "reference",
    "reference_images",
    is_optional=True,
    is_whole=True,
)
REFERENCES = (_REFERENCE, *numbered(_REFERENCE, range(2, 4)))
REJECTED = MediaRole("rejected", ("file_rejected", "rejected", "path_rejected"), "all", "", "")
"""The side of a preference pair that is thought less of; no family asks for it, and every one learns from it."""
REJECTED_LATENTS = "rejected_latents"
"""Where a batch has the latents of it."""
SOUND = MediaRole("sound", ("audio", "sound", "audio_path"), "sound", "sound", "sound", frame_of_target=0)
"""The target's own track, unless a row names a file of sound; never asked for in sampling."""
_IN_ROWS = (
    FIRST_FRAME, LAST_FRAME, SOURCE_PICTURE, *FURTHER_SOURCES, MASK_OF_PICTURE, CONTROL_VIDEO, MASK_OF_VIDEO,
    *REFERENCES, SOUND,
)  # fmt: skip
ROLE_COLUMNS = frozenset(itertools.chain.from_iterable(role.columns for role in _IN_ROWS))
"""Columns of rows that some task reads a medium from."""
