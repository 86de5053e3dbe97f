"""What VideoAlign's reward model is asked about a video, as its published code asks (KwaiVGI/VideoAlign, `data.py`,
`prompt_template.py` and `vision_process.py`): which frames it sees, the question around the caption, and its marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, read_json_object
from mindspeed_mm.fsdp.data.data_utils.data_collator import GenericCollator
from mindspeed_mm.fsdp.data.data_utils.decoding.video import VideoHeader
from mindspeed_mm.fsdp.data.data_utils.encode import EncodeOptions, SampleEncoder, build_tokens
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.sample import (
    EncodedSample,
    MediaItem,
    RowLocation,
    Sample,
    SampleSize,
    TooLongError,
)
from mindspeed_mm.fsdp.data.data_utils.template import build_template
from mindspeed_mm.fsdp.data.data_utils.training_view import view_processor
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

DIMENSIONS = ("VQ", "MQ", "TA")
"""Visual quality, motion quality, and how well text and video fit."""
MARKS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
"""The special tokens at which the model is read, in this order in the question."""
FOLDER_KEY = "data.dataset_param.preprocess_parameters.model_name_or_path"
_PAIR_OF_FRAMES, _LEAST_FRAMES, _MOST_FRAMES = 2, 4, 768
_ASKED = {"video_maxlen": _MOST_FRAMES, "video_fps": 2.0, "video_max_pixels": 200704, "video_min_pixels": 100352}
"""As published, where `preprocess_parameters` does not say."""
_WORDS = "{text_prompt}"


@cache
def question() -> str:
    """The published question, with a place for the caption."""
    return (Path(__file__).parent / "question.txt").read_text(encoding="utf-8")


def frame_numbers(frames: int, fps: float, wanted_fps: float) -> tuple[int, ...]:
    """Which frames the model sees: an even number, at `wanted_fps` as nearly as the limits let, from the first to the
    last.

    Args:
        frames: Of the video.
        fps: Of the video.
        wanted_fps: How many are seen a second.

    Raises:
        DataError: The video has a single frame.
    """
    most = min(_MOST_FRAMES, frames) // _PAIR_OF_FRAMES * _PAIR_OF_FRAMES
    count = min(max(frames / fps * wanted_fps, _LEAST_FRAMES), most)
    count = round(count / _PAIR_OF_FRAMES) * _PAIR_OF_FRAMES
    if count < _PAIR_OF_FRAMES:
        raise DataError(f"the video has {frames} frame, and 2 are needed", way_out="Drop the row.")
    return tuple(torch.linspace(0, frames - 1, count).round().long().tolist())


def _picked(video: VideoHeader, wanted_fps: float) -> tuple[int, ...]:
    return frame_numbers(video.frames, video.fps, wanted_fps)


class VideoQuestions:
    """Encodes and joins what the model is asked about videos.

    Args:
        folder: Of the model: configuration, processor, tokenizer.
        preprocess: Frames a second and sizes of frames; others than the published ones where given.
        basic: `cutoff_len` and the chat template.
        root: Folder that relative paths of videos start at.
        roots: Further folders with videos.

    Raises:
        ConfigError: The model's embedding has no rows for the marks.
        ModelFolderError: The folder has no processor for videos.
    """

    def __init__(
        self,
        folder: Path,
        preprocess: PreprocessParameters,
        basic: BasicParameters,
        root: Path,
        roots: Sequence[str | Path] = (),
    ) -> None:
        asked: JsonObject = {name: value for name, value in _ASKED.items() if preprocess[name] is None}
        asked["add_special_tokens"] = tuple(dict.fromkeys((*preprocess.add_special_tokens, *MARKS)))
        self.preprocess, self._longest = preprocess.model_copy(update=asked), basic.cutoff_len
        self.processor = view_processor(folder, self.preprocess)
        self._marks: list[int] = tokenizer_of(self.processor).convert_tokens_to_ids(list(MARKS))
        if not set(MARKS) <= set(preprocess.add_special_tokens):  # else the model gets rows for them
            _check_rows(self._marks, folder)
        self.plugin = build_mm_plugin(self.processor, self.preprocess)
        self.template = build_template(self.processor, basic)
        limits = MediaLimits.of(self.preprocess, self.processor, allow_remote=basic.allow_remote_media)
        pick = partial(_picked, wanted_fps=self.preprocess.video_fps or _ASKED["video_fps"])
        limits = replace(limits, clip=replace(limits.clip, pick=pick))
        self.media = MediaLoader(root, roots, limits)
        tokens = build_tokens(self.processor, self.template, self.plugin, self.preprocess)
        end, options = tokenizer_of(self.processor).eos_token_id, EncodeOptions(basic.cutoff_len)
        self._encoder = SampleEncoder(tokens, end, self.template, self.plugin, self.media, options)

    def encode(self, video: object, caption: str, place: RowLocation) -> EncodedSample:
        """The question about a video, with `reward_places` (3,), the places of its marks, which alone have labels.

        Args:
            video: A path, bytes, or a list of frames, which are all seen.
            caption: What the video was made of.
            place: Of the row, for messages.

        Raises:
            DataError: The video is off, or the caption holds a mark.
            TooLongError: The question does not fit `cutoff_len`.
        """
        question = self._encoder.encode_question(self._sample(video, caption, place))
        ids = question.input_ids
        self._check_length(len(ids), place)
        places = np.flatnonzero(np.isin(ids, self._marks))
        assert ids[places].tolist() == self._marks
        labels = np.full_like(ids, IGNORED_LABEL)
        labels[places] = ids[places]
        sample: Any = {
            "sample_id": str(place),
            "input_ids": ids,
            "labels": labels,
            "media": question.media,
            "shrunk": False,
            "reward_places": places,
        }
        return sample  # type: ignore[no-any-return]

    def measure(self, video: object, caption: str, place: RowLocation) -> SampleSize:
        """The size of what `encode` gives, by the header of the video. Raises `DataError` as it does."""
        size = self._encoder.outline_question(self._sample(video, caption, place)).size
        self._check_length(size.tokens, place)
        return size

    def joined(self, samples: Sequence[EncodedSample], collate_param: CollateParam) -> Batch:
        """A batch of questions, right-padded, with `reward_places` (B, 3)."""
        batch = GenericCollator(self.processor, self.plugin, collate_param)(samples)
        return batch | {"reward_places": batch["reward_places"].view(len(samples), -1)}

    def settings(self) -> JsonObject:
        """Return what shapes the questions, for the fingerprint of a data set."""
        shaping = {"video_fps", "video_max_pixels", "video_min_pixels", "use_fast_tokenizer"}
        return self.preprocess.model_dump(mode="json", include=shaping) | {"template": self.template.source}

    def _sample(self, video: object, caption: str, place: RowLocation) -> Sample:
        for mark in MARKS:
            if mark in caption:
                what = f"the caption holds {mark}, at which the model is read"
                raise DataError(what, where=str(place), key="prompt", way_out="Leave it out.")
        text = question().replace(_WORDS, caption)
        content = [{"type": "video"}, {"type": "text", "text": text}]
        media = [MediaItem("video", video)]
        turn = {"role": "user", "content": content}
        return Sample(place, messages=[turn], weights=[None], media=media, box_marks=frozenset(MARKS))

    def _check_length(self, length: int, place: RowLocation) -> None:
        if length > self._longest:
            error = TooLongError(
                f"the question has {length} tokens, more than cutoff_len {self._longest}",
                where=str(place),
                key="data.dataset_param.basic_parameters.cutoff_len",
                way_out="Raise it, or lower video_fps or video_max_pixels.",
            )
            error.tokens = length
            raise error


def _check_rows(marks: Sequence[int], folder: Path) -> None:
    """Raise `ConfigError` where a folder's embedding has no rows for the marks."""
    path = folder / "config.json"
    config: JsonMapping = read_json_object(path, ModelFolderError)
    rows = (config.get("text_config") or config).get("vocab_size", config.get("vocab_size"))
    if isinstance(rows, int) and max(marks) >= rows:
        raise ConfigError(
            f"the embedding has {rows} rows, and {', '.join(MARKS)} would have the numbers {marks[0]} to {marks[-1]}",
            where=str(path),
            key="model.add_special_tokens",
            way_out=f"Set [{', '.join(map(repr, MARKS))}].",
        )
