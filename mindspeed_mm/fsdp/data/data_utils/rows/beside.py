"""Media that lie beside the file of their rows, where the configuration does not say where media are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_mm.fsdp.data.data_utils.sample import Sample


def with_media_beside(sample: Sample, folder: str) -> Sample:
    """The sample with those relative paths of media that exist in `folder` written out; the others stay."""
    media = [item._replace(source=_located(item.source, folder)) for item in sample.media]
    rejected = sample.rejected and with_media_beside(sample.rejected, folder)
    return replace(sample, media=media, rejected=rejected)


def _located(source: Any, folder: str) -> Any:
    if isinstance(source, Mapping):
        has_bytes = source.get("bytes") is not None
        return source if has_bytes else {**source, "path": _located(source.get("path"), folder)}
    if isinstance(source, list | tuple | np.ndarray):
        return [_located(frame, folder) for frame in source]
    if not isinstance(source, str):
        return source
    path = os.path.join(folder, source)  # noqa: PTH118 (thousands a second)
    try:
        return path if os.path.exists(path) else source  # noqa: PTH110
    except ValueError:  # no path but base64 text, or a name with a null character
        return source
