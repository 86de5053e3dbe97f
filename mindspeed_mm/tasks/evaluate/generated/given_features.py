"""Features of pictures that somebody else has computed, such as Inception's, for FID and KID as papers have them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from mindspeed_mm.core.errors import DataError

_FEWEST = 2
"""Rows that a covariance and an unbiased estimate take."""


def read_features(path: Path, key: str) -> torch.Tensor:
    """The array of a `.npy` file, or the only one of a `.npz` file: a row for each picture, (N, F), in fp64.

    Args:
        path: The file. Nothing is unpickled.
        key: The option that names it.

    Raises:
        DataError: It is no such file, has another shape, fewer than two rows, or numbers that are not finite.
    """
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            with found:
                (found,) = (found[name] for name in found.files)
        features_NF = torch.from_numpy(found.astype(np.float64, casting="safe"))
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        what = "is not a file of one array of numbers"
        raise DataError(what, where=str(path), key=key, way_out="Write one with numpy.save.") from error
    if features_NF.ndim != 2 or len(features_NF) < _FEWEST or not features_NF.isfinite().all():
        shape = "×".join(map(str, features_NF.shape))
        what = f"holds an array of {shape}; features are finite numbers, a row for each of two pictures or more"
        raise DataError(what, where=str(path), key=key, way_out="Write such an array with numpy.save.")
    return features_NF


def read_pair(own: Path, real: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of generated and of real pictures, (N, F) and (M, F).

    Raises:
        DataError: A file is none of features, or they are of different widths.
    """
    a_NF, b_MF = read_features(own, "--features"), read_features(real, "--reference-features")
    if a_NF.shape[1] != b_MF.shape[1]:
        what = f"has features of width {b_MF.shape[1]}, and '{own}' of {a_NF.shape[1]}"
        raise DataError(what, where=str(real), key="--reference-features", way_out="Compute both with one model.")
    return a_NF, b_MF
