"""The families of generators, and the one that finds which family and layout some weights are."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_mm.checkpoint.original.cogvideox import COGVIDEOX
from mindspeed_mm.checkpoint.original.flux import FLUX, FLUX_2
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Naming, without_wrappers
from mindspeed_mm.checkpoint.original.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO_1_5
from mindspeed_mm.checkpoint.original.ltx import LTX, LTX_2
from mindspeed_mm.checkpoint.original.opensoraplan import OPENSORAPLAN, OPENSORAPLAN_1_5
from mindspeed_mm.checkpoint.original.stepvideo import STEP_VIDEO
from mindspeed_mm.checkpoint.original.wan import VACE, WAN
from mindspeed_mm.core.errors import ModelFolderError

GENERATORS = (
    VACE,
    WAN,
    HUNYUAN_VIDEO_1_5,
    HUNYUAN_VIDEO,
    COGVIDEOX,
    LTX_2,
    LTX,
    FLUX_2,
    FLUX,
    OPENSORAPLAN,
    OPENSORAPLAN_1_5,
    STEP_VIDEO,
)
"""A family stands before those whose marks it has too."""


def recognise_generator(keys: Iterable[str]) -> tuple[GeneratorLayouts, Naming] | None:
    """Whose weights these are, and under whose names; None: of no family here.

    Args:
        keys: Of the stored tensors.
    """
    # Marks have no wrappers before them.
    names = set(map(without_wrappers, keys))
    for family in GENERATORS:
        for naming, marks in family.marks.items():
            if names.issuperset(marks):
                return family, naming
    return None


def generator_of(keys: Iterable[str], where: str) -> tuple[GeneratorLayouts, Naming]:
    """As `recognise_generator`.

    Raises:
        ModelFolderError: The weights are of no family here.
    """
    keys = list(keys)
    found = recognise_generator(keys)
    if found is None:
        known = ", ".join(family.name for family in GENERATORS)
        raise ModelFolderError(
            f"holds {len(keys)} tensors ({', '.join(sorted(keys)[:2])} …) that are none of {known}",
            where=where,
            way_out="Name the folder or file that holds the transformer's weights. Another layout needs a converter "
            "of your own: docs/conversion.md.",
        )
    return found
