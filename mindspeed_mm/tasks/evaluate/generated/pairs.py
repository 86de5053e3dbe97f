"""Likeness of generated and real samples of the same names: PSNR and SSIM, and LPIPS by the package of its authors."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import DataError, MachineError, UsageError
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.evaluate.generated.measures import Measured, mean_of, psnr, ssim
from mindspeed_mm.tasks.evaluate.generated.samples import as_values, frames_of

Pair = tuple[Path, Path]
"""Generated and real."""
_TRUNKS = {"alex": (64, 3, 11, 11), "vgg": (64, 3, 3, 3), "squeeze": (64, 3, 3, 3)}
"""Network of LPIPS → shape of its first weights."""


class Lpips:
    """Learned perceptual distance (Zhang et al. 2018, arXiv 1801.03924), version 0.1 of its authors' package `lpips`.

    The package brings the weights of its linear layers. Those of the network below are torchvision's, which it would
    download; here they come from a file.

    Args:
        weights: File of torchvision's AlexNet, VGG-16 or SqueezeNet 1.1, as it is published.

    Raises:
        MachineError: The package is not installed.
        CheckpointError: The file is missing or broken.
        UsageError: It holds none of these.
    """

    def __init__(self, weights: Path) -> None:
        prepare_for_transformers()
        try:
            import lpips
        except ImportError as error:
            way_out = "Install the extra: pip install 'mindspeed-mm[eval]'."
            raise MachineError("the package lpips is not installed", key="--lpips", way_out=way_out) from error
        state = load_weights(weights)
        self.network = _network_of(state, weights)
        # It prints what it loads, and asks torchvision for the network in a way that is deprecated.
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._model: Any = lpips.LPIPS(net=self.network, pnet_rand=True)
        self._model.net.load_state_dict({name: state[_published(name)] for name in self._model.net.state_dict()})
        self._model.to(current_device())

    @torch.inference_mode()
    def distance(self, a_T3HW: torch.Tensor, b_T3HW: torch.Tensor) -> float:
        """Mean over frames, of values from 0 to 1.

        Raises:
            ValueError: The pictures are too small for the network.
        """
        try:
            frames = [self._of_frames(a, b) for a, b in zip(a_T3HW, b_T3HW, strict=True)]
        except RuntimeError as error:
            size = f"{a_T3HW.shape[-1]}×{a_T3HW.shape[-2]}"
            raise ValueError(f"has {size} pixels, too few for LPIPS by {self.network}") from error
        return float(np.mean(frames))

    def _of_frames(self, a_3HW: torch.Tensor, b_3HW: torch.Tensor) -> float:
        device = current_device()
        a_13HW, b_13HW = a_3HW[None].float().to(device), b_3HW[None].float().to(device)
        return float(self._model(a_13HW, b_13HW, normalize=True))


def _network_of(state: object, weights: Path) -> str:
    if isinstance(state, dict) and isinstance(state.get("features.0.weight"), torch.Tensor):
        shape = tuple(state["features.0.weight"].shape)
        has_squeezing = "features.3.squeeze.weight" in state
        for network, expected in _TRUNKS.items():
            if shape == expected and has_squeezing == (network == "squeeze"):
                return network
    what = "holds none of torchvision's AlexNet, VGG-16 and SqueezeNet 1.1"
    way_out = "Take a file such as alexnet-owt-7be5be79.pth."
    raise UsageError(what, where=str(weights), key="--lpips", way_out=way_out)


def _published(name: str) -> str:
    """lpips' name of a weight, `slice2.3.weight`, as torchvision has it: `features.3.weight`."""
    return re.sub(r"^slice\d+\.", "features.", name)


def likeness(pairs: Sequence[Pair], lpips: Lpips | None) -> dict[str, Measured]:
    """PSNR and SSIM, and LPIPS with its model; of clips frame by frame.

    Raises:
        DataError: A sample cannot be read, or the two of a pair are not of the same size.
    """
    found: dict[str, list[float]] = {"PSNR": [], "SSIM": []}
    if lpips is not None:
        found[f"LPIPS ({lpips.network})"] = []
    for own, real in pairs:
        for values, value in zip(found.values(), _of_pair(own, real, lpips), strict=True):
            values.append(value)
    psnr_of_pairs = found.pop("PSNR")
    return {"PSNR": _mean_psnr(psnr_of_pairs)} | {name: mean_of(values) for name, values in found.items()}


def _mean_psnr(values: Sequence[float]) -> Measured:
    """The mean of the pairs that differ, and how many do not: theirs is infinite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) == len(values):
        return mean_of(values)
    mean: Measured = {"value": None, "n": 0}
    if finite:
        mean = mean_of(finite)
    return mean | {"identical": len(values) - len(finite)}


def _of_pair(own: Path, real: Path, lpips: Lpips | None) -> list[float]:
    a_T3HW, b_T3HW = as_values(frames_of(own)), as_values(frames_of(real))
    try:
        if a_T3HW.shape != b_T3HW.shape:
            raise ValueError(f"has {_size(a_T3HW)}, and '{real}' {_size(b_T3HW)}")
        frames = list(zip(a_T3HW, b_T3HW, strict=True))
        values = []
        for measure in (psnr, ssim):
            values.append(float(np.mean([measure(a, b) for a, b in frames])))
        if lpips is not None:
            values.append(lpips.distance(a_T3HW, b_T3HW))
        return values
    except ValueError as error:
        raise DataError(str(error), where=str(own), way_out="Make samples of the same size.") from error


def _size(frames_T3HW: torch.Tensor) -> str:
    frames, _, height, width = frames_T3HW.shape
    pixels = f"{width}×{height} pixels"
    if frames == 1:
        return pixels
    return f"{frames} frames of {pixels}"
