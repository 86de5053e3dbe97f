"""The reward of VideoAlign's model (VideoReward, arXiv:2501.13918) in a local folder: how good a clip looks and moves,
and how well it fits its prompt."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.data_utils.training_view import with_view
from mindspeed_mm.fsdp.data.datasets.rewardvideo.video_questions import DIMENSIONS, VideoQuestions, frame_numbers
from mindspeed_mm.fsdp.loss.objectives import ModelInputs
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.posttrain_rewards.pictures import rate_of
from mindspeed_mm.fsdp.posttrain_rewards.registry import KEY, Row, reward_register

if TYPE_CHECKING:
    from torch import nn

OVERALL = dict.fromkeys(DIMENSIONS, 1.0)
"""The weights of the published overall score."""
_SETTINGS = f"{KEY}.settings"
_CLASS = "Qwen2VLRewardModelBT"
_LONGEST = 65536
"""Tokens of a question: more than 768 frames of the published size have."""


class VideoScorer:
    """Scores of videos in each dimension.

    Args:
        path: Folder of the reward model: what `mm-convert VideoAlignConverter released_to_hf` or `mm export` wrote.
        norm: Bring scores to mean 0 and deviation 1 over the published videos, by `reward_norm` of config.json.
        norm_param: Other means and deviations: `{VQ_mean, VQ_std, …}`.
        batch_size: Videos that are looked at together.
        dtype: Of the weights.
        device: Where the model works; between two calls it is on the host.
        preprocess: How videos are seen, where not as training saw them.
        root: Folder that relative paths of videos start at.

    Raises:
        ModelFolderError: The folder is of another model, or names no means and deviations.
        ConfigError: `norm_param` lacks one, a deviation is not above 0, or `batch_size` is not.
    """

    def __init__(
        self,
        path: str,
        norm: bool = True,
        norm_param: Mapping[str, float] | None = None,
        batch_size: int = 1,
        dtype: str = "bfloat16",
        device: str = "cpu",
        preprocess: PreprocessParameters | None = None,
        root: str | Path = ".",
    ) -> None:
        self._folder, self._batch_size, self._device = Path(path), batch_size, device
        self._dtype, self._root = getattr(torch, dtype), Path(root)
        if batch_size < 1:
            raise ConfigError(f"{batch_size} is below 1", key=f"{_SETTINGS}.batch_size", way_out="Set 1 or more.")
        where = self._folder / "config.json"
        config = read_json_object(where, ModelFolderError, key=f"{_SETTINGS}.path")
        if _CLASS not in (config.get("architectures") or ()):
            raise ModelFolderError(
                f"is not VideoAlign's model: architectures does not name {_CLASS}",
                where=str(where),
                key=f"{_SETTINGS}.path",
                way_out="Make its folder: mm-convert VideoAlignConverter released_to_hf.",
            )
        self._norm = None
        if norm:
            given = config.get("reward_norm") if norm_param is None else norm_param
            self._norm = _means_and_deviations(given, str(where))
        self._preprocess = preprocess or PreprocessParameters()

    def scores(self, videos: Sequence[object], captions: Sequence[str]) -> list[dict[str, float]]:
        """VQ, MQ and TA of each video, in order.

        Args:
            videos: Paths or bytes of files, or lists of frames that are all seen.
            captions: What they were made of.

        Raises:
            DataError: A video or a caption is off.
        """
        found: list[dict[str, float]] = []
        self._model.to(self._device)
        try:
            for first in range(0, len(videos), self._batch_size):
                taken = slice(first, first + self._batch_size)
                found += self._scored(videos[taken], captions[taken], first)
        finally:
            self._model.to("cpu")
        return found

    @torch.inference_mode()
    def _scored(self, videos: Sequence[object], captions: Sequence[str], first: int) -> list[dict[str, float]]:
        samples = []
        for number, (video, caption) in enumerate(zip(videos, captions, strict=True), first + 1):
            samples.append(self._questions.encode(video, caption, RowLocation("video", number)))
        inputs = self._inputs(self._questions.joined(samples, CollateParam()))
        on_device: JsonObject = {}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                value = value.to(self._device, self._dtype if value.is_floating_point() else None)
            on_device[name] = value
        rewards = self._model(**on_device).rewards.double().cpu().tolist()
        return [self._named(row) for row in rewards]

    def _named(self, row: Sequence[float]) -> dict[str, float]:
        named = dict(zip(DIMENSIONS, row, strict=True))
        if self._norm is not None:
            for name, (mean, deviation) in self._norm.items():
                named[name] = (named[name] - mean) / deviation
        return named

    @cached_property
    def _model(self) -> nn.Module:
        from mindspeed_mm.fsdp.models.modelhub import ModelHub  # seconds

        arguments = ModelArguments(model_id="videoalign", model_name_or_path=str(self._folder))
        model = ModelHub.build(arguments, param_dtype=torch.float64 if self._dtype == torch.float64 else torch.float32)
        ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
        return model.to(self._dtype).eval()

    @cached_property
    def _inputs(self) -> ModelInputs:
        return ModelInputs(self._model)

    @cached_property
    def _questions(self) -> VideoQuestions:
        param = with_view(DatasetParam(preprocess_parameters=self._preprocess), self._folder)
        basic = BasicParameters(cutoff_len=_LONGEST)
        return VideoQuestions(self._folder, param.preprocess_parameters, basic, self._root)


@reward_register.register("videoalign")
class VideoAlignReward(VideoScorer):
    """The weighted sum of what VideoAlign's model thinks of a clip.

    Args:
        path: As of `VideoScorer`, like the others that are not told here.
        weights: Of the dimensions: `{VQ: 1, MQ: 1, TA: 1}`, the published overall score.
        fps: Frames a second of the clips that are judged, where they do not say it themselves: those of a generator in
            training do not.
        norm: As of `VideoScorer`.
        norm_param: As of `VideoScorer`.
        batch_size: As of `VideoScorer`.
        dtype: As of `VideoScorer`.
        device: As of `VideoScorer`.
    """

    def __init__(
        self,
        path: str,
        weights: Mapping[str, float] | None = None,
        fps: float | None = None,
        norm: bool = True,
        norm_param: Mapping[str, float] | None = None,
        batch_size: int = 1,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ) -> None:
        super().__init__(path, norm, norm_param, batch_size, dtype, device)
        self._fps, self._weights = fps, dict(OVERALL if weights is None else weights)
        if fps is not None and not 0 < fps < math.inf:
            raise ConfigError(f"{fps} is no rate", key=f"{_SETTINGS}.fps", way_out="Set frames a second, above 0.")
        if unknown := sorted(self._weights.keys() - set(DIMENSIONS)):
            what, way_out = f"'{unknown[0]}' is not one of {', '.join(DIMENSIONS)}", "Correct the name."
            raise ConfigError(what, key=f"{_SETTINGS}.weights", way_out=way_out)

    def __call__(self, prompts: Sequence[str], completions: Sequence[object], rows: Sequence[Row]) -> list[float]:
        """One score a clip, in order.

        Raises:
            DataError: A sample is a picture.
            ConfigError: The rate of a clip is not known.
        """
        clips = [self._seen(completion) for completion in completions]
        found = self.scores(clips, prompts)
        return [sum(weight * row[name] for name, weight in self._weights.items()) for row in found]

    def _seen(self, completion: object) -> list[bytes]:
        """The frames that the model looks at, as PNG, which loses nothing."""
        if not isinstance(completion, list | tuple):
            way_out = "It judges clips alone: take pickscore or hps_v2 for pictures."
            raise DataError("the sample is a picture", key=KEY, way_out=way_out)
        rate, wanted = rate_of(completion) or self._fps, self._questions.preprocess.video_fps
        if rate is None:
            raise ConfigError(
                "is needed: clips do not say how fast they are shown",
                key=f"{_SETTINGS}.fps",
                way_out="Set the rate that clips are made for.",
            )
        assert wanted is not None
        numbers = frame_numbers(len(completion), rate, wanted)
        return [_as_png(completion[number]) for number in numbers]


def _as_png(picture: Any) -> bytes:
    stream = io.BytesIO()
    picture.convert("RGB").save(stream, format="PNG", compress_level=1)
    return stream.getvalue()


def _means_and_deviations(given: object, where: str) -> dict[str, tuple[float, float]]:
    """Dimension → mean and deviation."""
    key, way_out = f"{_SETTINGS}.norm_param", "Set norm: false, or norm_param with VQ_mean, VQ_std and so on."
    if not isinstance(given, Mapping):
        raise ModelFolderError("names no means and deviations: reward_norm", where=where, key=key, way_out=way_out)
    found = {}
    for name in DIMENSIONS:
        pair = [given.get(f"{name}_{kind}") for kind in ("mean", "std")]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in pair) or pair[1] <= 0:  # type: ignore[operator]
            raise ConfigError(f"{name}: {pair} are no mean and deviation", where=where, key=key, way_out=way_out)
        found[name] = (float(pair[0]), float(pair[1]))  # type: ignore[arg-type]
    return found
