"""How clips move and whether they hold together, by the definitions of VBench (Huang et al. 2024, arXiv 2311.17982)
where it has one; the models are those that are given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.evaluate.generated.measures import Measured, mean_of
from mindspeed_mm.tasks.evaluate.generated.samples import frames_of, rate_of

_FLOWS_PER_S, _ITERATIONS = 8, 20
_FASTEST_SHARE = 0.05
_FAST_PIXELS, _FAST_SIDE = 6.0, 256.0
_MOVING_PAIRS, _MOVING_FRAMES = 4, 16.0


def temporal_flickering(frames_THW3: np.ndarray) -> float:
    """VBench's: 1 minus the mean absolute change between neighbours, values from 0 to 1. A still clip has 1.

    Raises:
        ValueError: There is one frame only.
    """
    if len(frames_THW3) < 2:
        raise ValueError("has one frame, and no motion")
    changes = np.abs(np.diff(frames_THW3.astype(np.float64), axis=0))
    return 1 - float(changes.mean()) / 255


def linear_smoothness(frames_THW3: np.ndarray) -> float:
    """1 minus the mean absolute distance of each inner frame from the mean of its neighbours, values from 0 to 1: what
    VBench's motion smoothness is with linear interpolation in the place of its model, over all inner frames.

    Raises:
        ValueError: There are fewer than three frames.
    """
    if len(frames_THW3) < 3:
        raise ValueError("has fewer than three frames")
    bends = np.abs(np.diff(frames_THW3.astype(np.float64), n=2, axis=0)) / 2
    return 1 - float(bends.mean()) / 255


def consistency(features_TF: torch.Tensor) -> tuple[float, int]:
    """VBench's, which it calls that of the subject with DINO's features and that of the background with CLIP's: of each
    frame after the first the mean of its cosines to the frame before and to the first, none below 0.

    Returns:
        The mean over those frames, and how many they are.
    """
    units_TF = F.normalize(features_TF.double(), dim=-1)
    later = units_TF[1:]
    to_previous = (later * units_TF[:-1]).sum(-1).clamp(min=0)
    to_first = (later @ units_TF[0]).clamp(min=0)
    return float(((to_previous + to_first) / 2).mean()), len(later)


def consistency_of(features: Sequence[torch.Tensor]) -> Measured:
    """Over all clips; each counts by its frames, as in VBench."""
    values, frames = [], []
    for features_TF in features:
        value, number = consistency(features_TF)
        values.append(value)
        frames.append(number)
    return mean_of(values, frames)


def motion_of(clips: Sequence[Path]) -> dict[str, Measured]:
    """Measures of frames alone.

    Raises:
        DataError: A clip cannot be read, or is too short.
    """
    found: dict[str, list[float]] = {"temporal flickering": [], "linear smoothness": []}
    for clip in clips:
        frames = frames_of(clip)
        try:
            found["temporal flickering"].append(temporal_flickering(frames))
            found["linear smoothness"].append(linear_smoothness(frames))
        except ValueError as error:
            raise DataError(str(error), where=str(clip), way_out="Measure longer clips.") from error
    return {name: mean_of(values) for name, values in found.items()}


class Flow:
    """Optical flow by torchvision's RAFT (Teed and Deng 2020, arXiv 2003.12039).

    Args:
        weights: File of torchvision's `raft_large`, as it is published.

    Raises:
        CheckpointError: The file is missing or broken.
        UsageError: It holds other weights.
    """

    def __init__(self, weights: Path) -> None:
        prepare_for_transformers()
        from torchvision.models.optical_flow import raft_large  # a second

        self._model: Any = raft_large(weights=None)
        try:
            self._model.load_state_dict(load_weights(weights))
        except (RuntimeError, TypeError, AttributeError) as error:
            way_out = "Take a file such as raft_large_C_T_V2-ff5fadd5.pth."
            what = "holds no weights of torchvision's raft_large"
            raise UsageError(what, where=str(weights), key="--flow", way_out=way_out) from error
        self._model.to(current_device()).eval()

    @torch.inference_mode()
    def speeds(self, frames_T3HW: torch.Tensor) -> list[float]:
        """Of each frame but the last: pixels to the next one, mean of the fastest 5 % of all places.

        Args:
            frames_T3HW: Values from 0 to 255.

        Raises:
            ValueError: The frames are smaller than the model takes.
        """
        # From -1 to 1, with borders repeated until both sides are multiples of 8.
        frames_T3HW = F.pad(frames_T3HW / 127.5 - 1, _borders(*frames_T3HW.shape[-2:]), mode="replicate")
        found = []
        for before, after in pairwise(frames_T3HW):
            # of all iterations the last; (2, height, width): pixels to the right and down
            flow_2HW = self._model(before[None], after[None], num_flow_updates=_ITERATIONS)[-1][0]
            speeds = flow_2HW.norm(dim=0).flatten()
            fastest = speeds.topk(int(len(speeds) * _FASTEST_SHARE)).values
            found.append(float(fastest.mean()))
        return found


def _borders(height: int, width: int) -> tuple[int, int, int, int]:
    more_high, more_wide = -height % 8, -width % 8
    return more_wide // 2, more_wide - more_wide // 2, more_high // 2, more_high - more_high // 2


def moves(speeds: Sequence[float], height: int, width: int) -> bool:
    """VBench's rule of a dynamic clip: enough of its frames move faster than 6 pixels at a shorter side of 256."""
    bar = _FAST_PIXELS * min(height, width) / _FAST_SIDE
    needed = round(_MOVING_PAIRS * (len(speeds) + 1) / _MOVING_FRAMES)
    fast = sum(speed > bar for speed in speeds)
    return bool(speeds) and fast >= needed


def flow_of(clips: Sequence[Path], flow: Flow) -> dict[str, Measured]:
    """Speed of the fastest places, and the share of clips that move; about eight frames a second are looked at.

    Raises:
        DataError: A clip cannot be read, or is too small.
    """
    speeds, dynamic = [], []
    for clip in clips:
        every = max(1, round(rate_of(clip) / _FLOWS_PER_S))
        frames = frames_of(clip)[::every]
        frames_T3HW = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).float().to(current_device())
        try:
            own = flow.speeds(frames_T3HW)
        except ValueError as error:
            what, way_out = f"is too small for RAFT: {error}", "Leave --flow out, or make larger clips."
            raise DataError(what, where=str(clip), key="--flow", way_out=way_out) from error
        speeds.append(float(np.mean(own)) if own else 0.0)
        dynamic.append(float(moves(own, *frames.shape[1:3])))
    return {"optical flow, pixels": mean_of(speeds), "dynamic degree": mean_of(dynamic)}
