"""Relative paths of media start at the folder of their rows, where the configuration does not say where media are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_mm.fsdp.data.data_utils.media import names_file
from mindspeed_mm.fsdp.data.data_utils.sample import Sample


def with_media_beside(sample: Sample, folder: str) -> Sample:
    """The sample with relative paths of media written out: those that exist in `folder`, else those that exist in the
    working directory, which rows of older tools start from; what is in neither is missing in `folder`."""
    media = [item._replace(source=located(item.source, folder)) for item in sample.media]
    rejected = sample.rejected and with_media_beside(sample.rejected, folder)
    return replace(sample, media=media, rejected=rejected)


def located(source: Any, folder: str) -> Any:
    """A source of a medium with its path, if it has a relative one, written out."""
    if isinstance(source, Mapping):
        has_bytes = source.get("bytes") is not None
        return source if has_bytes else {**source, "path": located(source.get("path"), folder)}
    if isinstance(source, list | tuple | np.ndarray):
        return [located(frame, folder) for frame in source]
    if not isinstance(source, str) or os.path.isabs(source) or not names_file(source):  # noqa: PTH117 (thousands a second)
        return source
    path = os.path.join(folder, source)  # noqa: PTH118
    if os.path.exists(path) or not os.path.exists(source):  # noqa: PTH110
        return path
    return os.path.abspath(source)  # noqa: PTH100
