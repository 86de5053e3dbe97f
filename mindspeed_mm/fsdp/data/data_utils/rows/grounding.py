"""Boxes of `objects` (ms-swift's rows), which fill `<ref-object>` and `<bbox>` in the texts of a row.

How a model writes a box is its family's: as ms-swift's templates have it (`replace_ref`, `replace_bbox`, `norm_bbox`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import Row, short
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, Boxes, MediaItem, Sample

COLUMN = "objects"
_FIELDS = frozenset({"ref", "bbox", "bbox_type", "image_id"})
_MARK = re.compile(r"<ref-object>|<bbox>")
_THOUSAND = 1000


def read_objects(row: Row, sample: Sample) -> Boxes | None:
    """The boxes of a row whose texts have marks for them; None where they have none.

    Raises:
        DataError: `objects` is of another shape, or has more or fewer entries than there are marks.
    """
    objects = row.get(COLUMN)
    if not objects:
        return None
    marks = [mark for text in _texts_of_sample(sample) for mark in _MARK.findall(text)]
    if not marks:
        return None
    where = str(sample.place)
    if not isinstance(objects, Mapping) or not objects.keys() <= _FIELDS:
        raise _wrong(f"{short(objects)} is not an object of {', '.join(sorted(_FIELDS))}", where)
    refs, boxes = objects.get("ref") or (), objects.get("bbox") or ()
    for name, found, mark in (("ref", refs, "<ref-object>"), ("bbox", boxes, "<bbox>")):
        if len(found) != marks.count(mark):
            raise _wrong(f"{marks.count(mark)} {mark} in the text, but {len(found)} in {name}", where)
    if not all(isinstance(ref, str) for ref in refs):
        raise _wrong(f"ref {short(refs)} are not texts", where)
    numbers = [_corners(box, where) for box in boxes]
    images = tuple(objects.get("image_id") or ()) or (0,) * len(numbers)
    kind = objects.get("bbox_type") or "real"
    if len(images) != len(numbers) or kind not in ("real", "norm1"):
        raise _wrong("image_id has a number for each box, and bbox_type is real or norm1", where)
    return Boxes(tuple(refs), tuple(numbers), images, kind == "norm1")


def _corners(box: Any, where: str) -> tuple[float, ...]:
    """A point, or a box from its upper left to its lower right corner."""
    is_box = isinstance(box, list | tuple) and len(box) in (2, 4)
    if not is_box or not all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in box):
        raise _wrong(f"{short(box)} is neither [x, y] nor [x1, y1, x2, y2]", where)
    if len(box) == 2:
        return tuple(map(float, box))
    xs, ys = sorted(map(float, box[::2])), sorted(map(float, box[1::2]))
    return (xs[0], ys[0], xs[1], ys[1])


def _wrong(what: str, where: str) -> DataError:
    return DataError(what, where=where, key=COLUMN, way_out=REPAIR)


# --- how models write them -------------------------------------------------------------------------------------------


class BoxStyle(NamedTuple):
    """How a family writes what `objects` names."""

    ref: str
    box: Callable[[Sequence[int]], str]
    marks: frozenset[str]
    """Special tokens in it."""
    is_of_thousand: bool
    """Coordinates run from 0 to 1000; otherwise in pixels of the picture as the model sees it."""


def _points(box: Sequence[int]) -> str:
    return ",".join(f"({x},{y})" for x, y in zip(box[::2], box[1::2], strict=True))


def _qwen(box: Sequence[int]) -> str:
    return f"<|box_start|>{_points(box)}<|box_end|>"


def _internvl(box: Sequence[int]) -> str:
    return f"<box>[{list(box)}]</box>"


_QWEN_REF = "<|object_ref_start|>{}<|object_ref_end|>"
_QWEN_MARKS = frozenset({"<|box_start|>", "<|box_end|>", "<|object_ref_start|>", "<|object_ref_end|>"})
_INTERNVL_MARKS = frozenset({"<box>", "</box>", "<ref>", "</ref>"})
STYLES: dict[str, BoxStyle] = {
    "Qwen2VLProcessor": BoxStyle(_QWEN_REF, _qwen, _QWEN_MARKS, is_of_thousand=True),
    "Qwen2_5_VLProcessor": BoxStyle(_QWEN_REF, _qwen, _QWEN_MARKS, is_of_thousand=False),
    "Qwen2_5OmniProcessor": BoxStyle(_QWEN_REF, _qwen, _QWEN_MARKS, is_of_thousand=False),
    "Qwen3VLProcessor": BoxStyle(_QWEN_REF, _qwen, _QWEN_MARKS, is_of_thousand=True),
    "Qwen3OmniMoeProcessor": BoxStyle(_QWEN_REF, _qwen, _QWEN_MARKS, is_of_thousand=True),
    "InternVLProcessor": BoxStyle("<ref>{}</ref>", _internvl, _INTERNVL_MARKS, is_of_thousand=True),
}
"""Class of a processor → how its models write boxes."""

Size = tuple[int, int]
"""Height and width."""


def with_objects(sample: Sample, style_name: str, sizes_of: Callable[[MediaItem], tuple[Size, Size]]) -> Sample:
    """The sample with its marks filled; as it is where it has none.

    Args:
        sample: A converted row.
        style_name: Class of the model's processor.
        sizes_of: A picture → the sizes of its file, and of what the model sees.

    Raises:
        DataError: It is not known how the model writes boxes, or a box lies in no picture of the row.
    """
    rejected = sample.rejected and with_objects(sample.rejected, style_name, sizes_of)
    if sample.objects is None:
        if rejected is sample.rejected:
            return sample
        return replace(sample, rejected=rejected)
    style = STYLES.get(style_name)
    where = str(sample.place)
    if style is None:
        raise DataError(
            f"how the models of {style_name} write boxes is not known",
            where=where,
            key=COLUMN,
            way_out="Write the boxes into the text as the model is to say them, and take the column out.",
        )
    pictures = [item for item in sample.media if item.kind == "image"]
    boxes = []
    for box, number in zip(sample.objects.boxes, sample.objects.images, strict=True):
        if not (isinstance(number, int) and 0 <= number < len(pictures)):
            raise _wrong(f"a box lies in picture {number!r}, and the row has {len(pictures)}", where)
        of_file, seen = sizes_of(pictures[number])
        scale = (1, 1) if sample.objects.is_relative else of_file
        to = (_THOUSAND, _THOUSAND) if style.is_of_thousand else seen
        boxes.append(style.box([round(n / scale[1 - i % 2] * to[1 - i % 2]) for i, n in enumerate(box)]))
    return _filled(sample, map(style.ref.format, sample.objects.refs), iter(boxes), rejected, style.marks)


def _filled(
    sample: Sample, refs: Iterator[str], boxes: Iterator[str], rejected: Sample | None, marks: frozenset[str]
) -> Sample:
    def fill(text: str) -> str:
        return _MARK.sub(lambda mark: next(boxes if mark[0] == "<bbox>" else refs), text)

    messages = []
    for message in sample.messages:
        content = message["content"]
        if isinstance(content, str):
            content = fill(content)
        else:
            content = [part | {"text": fill(part["text"])} if part["type"] == "text" else part for part in content]
        messages.append({**message, "content": content})
    return replace(sample, messages=messages, objects=None, rejected=rejected, box_marks=marks)


def _texts_of_sample(sample: Sample) -> Iterator[str]:
    for message in sample.messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")
