"""A sample that a generator has drawn, as it is kept between drawing, judging and training."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.fsdp.sampling.trajectories import SampleNoise, Trajectories

_THUMBNAIL_SIDE = 8


@dataclass
class FlowSample:
    """One sample of a rollout."""

    key: str
    """`rollout/prompt/member`: with the seed and the weights it decides everything else."""
    path: Trajectories | None = None
    """Its own row; None of a sample that was read from a file without: the same weights draw it again."""
    thumbnail: np.ndarray | None = None
    """Of its picture, once it was judged."""

    @property
    def rollout(self) -> int:
        """Number of the rollout that drew the sample, read from its key."""
        return int(self.key.partition("/")[0])

    def noise(self, seed: int, *, shares_start: bool) -> SampleNoise:
        """What chance decides of it."""
        prompt, _, member = self.key.rpartition("/")
        return SampleNoise(seed, prompt, int(member), shares_start)


# --- in a file --------------------------------------------------------------------------------------------------------


def packed_path(path: Trajectories) -> dict[str, Any]:
    """A trajectory as JSON takes it, to the bit."""
    record: dict[str, Any] = {"latents": _packed(path.latents)}
    for name, steps in path.by_step.items():
        record[name] = {}
        for index, tensor in steps.items():
            record[name][str(index)] = _packed(tensor)
    return record


def unpacked_path(record: Mapping[str, Any]) -> Trajectories:
    """Rebuild the trajectory that `packed_path` wrote, to the bit."""
    path = Trajectories(_unpacked(record["latents"]))
    for name, steps in path.by_step.items():
        for index, item in record[name].items():
            steps[int(index)] = _unpacked(item)
    return path


def _packed(tensor: torch.Tensor) -> list[Any]:
    array = tensor.contiguous().numpy()
    return [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode("ascii")]


def _unpacked(item: Sequence[Any]) -> torch.Tensor:
    dtype, shape, data = item
    array = np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape)
    return torch.from_numpy(array.copy())  # a buffer of bytes cannot be written into


# --- in the log -------------------------------------------------------------------------------------------------------


def thumbnail(picture: Image.Image | list[Image.Image], side: int = _THUMBNAIL_SIDE) -> np.ndarray:
    """(side²,) grey levels of a picture, or of a clip's middle frame."""
    frame: Image.Image = picture[len(picture) // 2] if isinstance(picture, list) else picture
    small = frame.convert("L").resize((side, side), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64).reshape(-1)


def diversity(thumbnails_GMD: np.ndarray) -> float:
    """Mean distance between two samples of one prompt, root mean square of grey levels: 0 when a policy draws the same
    picture again and again.

    Args:
        thumbnails_GMD: (groups, members, numbers).
    """
    members = thumbnails_GMD.shape[1]
    if members < 2:
        return 0.0
    one, other = np.triu_indices(members, k=1)
    gaps = thumbnails_GMD[:, one] - thumbnails_GMD[:, other]
    return float(np.sqrt(np.square(gaps).mean(axis=2)).mean())
