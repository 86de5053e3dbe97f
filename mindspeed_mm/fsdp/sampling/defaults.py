"""What a sample gets for whatever its settings leave out: the one place that fills it in for `mm infer`, `mm serve`,
samples while training and DreamBooth.

Steps, guidance and frames are those of the release (`models/diffusion/generator_folder.py`), otherwise the defaults of
the pipeline's `__call__`. A run's samples have the size and the frame rate that it was trained on, if it names one.
Other heights and widths are left to `sampler.resolve_size`, since some pipelines know theirs only when they are loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import family_class
from mindspeed_mm.fsdp.params.data_args import DataArguments
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments

_RATE_ARGUMENT = "frame_rate"
"""What pipelines call the rate that they tell their transformer."""
_LAST_RESORT_FPS = 16.0
"""Of clips of a family that states no rate (an outside plugin)."""


def as_trained(data: DataArguments, sampling: SamplingArguments) -> SamplingArguments:
    """Settings with the frame rate, the sides and the number of frames that the media of a run were brought to, where
    they leave them open. A run of several sizes (`buckets`, `max_pixels`) names none.

    Args:
        data: The `data` section of the run.
        sampling: Settings.
    """
    media, found = data.dataset_param.preprocess_parameters, dict[str, Any]()
    if sampling.height is None and sampling.width is None and media.get("height") and media.get("width"):
        found |= {"height": media["height"], "width": media["width"]}
    if sampling.num_frames is None and isinstance(media.get("num_frames"), int):
        found["num_frames"] = media["num_frames"]
    if sampling.fps is None and media.get("fps") is not None:
        found["fps"] = float(media["fps"])
    return sampling.model_copy(update=found)


def filled(adapter: DiffusionAdapter, sampling: SamplingArguments, key: str = "") -> SamplingArguments:
    """Settings with steps, guidance, frames and frame rate filled in. A guidance scale stays None where the release is
    guided by several numbers.

    Args:
        adapter: Of the folder.
        sampling: What a request or a configuration says.
        key: Of the settings, for messages.

    Raises:
        ConfigError: Neither the release nor the pipeline has a number of steps.
    """
    usage, own = adapter.usage, _pipeline_defaults(adapter)
    steps = usage.steps or own.get("num_inference_steps")
    if sampling.num_inference_steps is None and not isinstance(steps, int):
        raise ConfigError(
            f"{adapter.pipelines[adapter.task]} has no default number of steps",
            key=key_or_flag(key, "num_inference_steps", "--steps"),
            way_out="Set it.",
        )
    stated = adapter.usage.guidance
    if stated is None:
        stated = own.get(adapter.guidance_argument)
    scale = None
    if isinstance(stated, int | float):
        scale = float(stated)
    filling: JsonObject = {
        "num_inference_steps": steps,
        "guidance_scale": scale,
        "num_frames": _frames(adapter, own),
        "fps": usage.fps or own.get(_RATE_ARGUMENT) or _LAST_RESORT_FPS,
    }
    return sampling.model_copy(update={name: value for name, value in filling.items() if sampling[name] is None})


def key_or_flag(key: str, name: str, flag: str) -> str:
    """What to call a setting in messages: its key in a section of a YAML, or where there is none, its flag.

    Args:
        key: Of the settings, such as `training.sampling`; without a dot for those of a command.
        name: Of the setting.
        flag: That sets it on the command line.
    """
    if "." in key:
        return f"{key}.{name}"
    return flag


def _pipeline_defaults(adapter: DiffusionAdapter) -> JsonMapping:
    """Argument of the pipeline's `__call__` → its default, of those that have one."""
    parameters = inspect.signature(family_class(adapter, adapter.pipelines[adapter.task]).__call__).parameters
    return {name: each.default for name, each in parameters.items() if each.default not in (each.empty, None)}


def _frames(adapter: DiffusionAdapter, own: Mapping[str, Any]) -> int | None:
    if not adapter.geometry.is_video:
        return None
    return int(adapter.usage.frames or own.get(adapter.frames_argument) or 1)
