"""Checks the numbers of a processor's files before anything divides by them: a fault of theirs would be blamed on the
first row whose picture is prepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_PIECES = frozenset({"patch_size", "temporal_patch_size", "merge_size", "spatial_merge_size"})
_LARGEST_PIECE = 4096
_SIZES = _PIECES | {
    *("size", "crop_size", "height", "width", "shortest_edge", "longest_edge", "min_pixels", "max_pixels"),
}
"""Whole numbers from 1, lists of them, or tables of them."""
_DIVISORS = frozenset({"rescale_factor", "image_std"})
"""Numbers other than 0, or lists of them."""
_NUMBERS = frozenset({"image_mean"})


def check_processor_settings(folder: Path) -> None:
    """Look through the files of a model folder's processors.

    Raises:
        ModelFolderError: A size is not a number from 1, or what pixels are divided by is 0 or no number.
    """
    for path in map(folder.joinpath, PROCESSOR_FILES):
        if not path.exists():
            continue
        for key, value, wanted in _faults(read_json_object(path, ModelFolderError)):
            raise ModelFolderError(
                f"{value!r:.40} is not {wanted}",
                where=str(path),
                key=key,
                way_out="Compare it with the original model's file.",
            )


def _faults(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it should be) of every number that cannot be used."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _faults(value, f"{section}{key}.")
            continue
        if value is None:
            continue
        numbers = value if isinstance(value, list) else [value]
        if key in _SIZES and not all(map(_is_size, numbers)):
            yield section + key, value, "a whole number from 1"
        elif key in _PIECES and max(numbers, default=1) > _LARGEST_PIECE:
            yield section + key, value, f"at most {_LARGEST_PIECE}"
        if key in _DIVISORS and not all(map(_is_divisor, numbers)):
            yield section + key, value, "a number other than 0"
        if key in _NUMBERS and not all(map(_is_number, numbers)):
            yield section + key, value, "a number, or a list of numbers"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(number: object) -> bool:
    return type(number) is int and number >= 1


def _is_divisor(number: object) -> bool:
    return _is_number(number) and number != 0
