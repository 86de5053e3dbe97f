"""The processor of Ming-Lite-Omni: pictures and videos as Qwen2-VL cuts them, sounds as log-mel spectra of Whisper or
of FunASR, and the tokens that stand for them between marks. It reads the released preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    BatchFeature,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    SequenceFeatureExtractor,
    WhisperFeatureExtractor,
)
from typing_extensions import override

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, read_json_object
from mindspeed_mm.fsdp.utils.fun_asr_features import log_mel

_FILE = "preprocessor_config.json"
_OF_PICTURES = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
_VIDEO_PIXELS = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28}
"""Of a frame, where the file has no `min_pixels_video` and `max_pixels_video`."""
_PATCHES = {"image": "<imagePatch>", "video": "<imagePatch>", "audio": "<audioPatch>"}
CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content -%}
{%- if part.type in ('image', 'video', 'audio') %}{{ '<' + part.type + '>' }}
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ '<role>HUMAN</role>' + show(message.content) }}
{%- elif message.role == 'assistant' %}{{ '<role>ASSISTANT</role>' + show(message.content) + eos_token }}
{%- elif message.role == 'system' %}{{ '<role>SYSTEM</role>' + show(message.content) }}
{%- else %}{{ '<role>OBSERVATION</role>' + show(message.content) }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif -%}
"""
"""The format of the published processor, which has no template. An answer ends with the token that ends it."""


class BailingMMImageProcessor(Qwen2VLImageProcessor):
    """Qwen2-VL's, by the name that released files have."""


class BailingMMAudioProcessor(SequenceFeatureExtractor):
    """Log-mel spectra: Whisper's of any length where the file has `whisper_frontend_args`, else FunASR's.

    Args:
        whisper_frontend_args: `n_mels`.
        wav_frontend_args: FunASR's: `n_mels`, `frame_length` and `frame_shift` in ms, and of frames that become one,
            how many these are (`lfr_m`) and how far they are moved (`lfr_n`).
        means: (features,) that are added to a frame; None: nothing is.
        scales: (features,) that it is multiplied by then.
        most_frames: Of a sound, where the model's encoder has places for so many only.
        kwargs: What every feature extractor has.
    """

    model_input_names = ["input_features", "input_features_mask"]

    def __init__(
        self,
        *,
        whisper_frontend_args: JsonMapping | None = None,
        wav_frontend_args: JsonMapping | None = None,
        means: Sequence[float] | None = None,
        scales: Sequence[float] | None = None,
        most_frames: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.whisper_frontend_args, self.wav_frontend_args = whisper_frontend_args, dict(wav_frontend_args or {})
        self.means, self.scales, self.most_frames = means, scales, most_frames
        super().__init__(**{"feature_size": 1, "sampling_rate": 16000, "padding_value": 0.0} | kwargs)

    def __call__(self, audio: object, sampling_rate: int = 16000, **kwargs: object) -> BatchFeature:
        """Spectra (sounds, frames, features), filled up with zeros, and where each sound is.

        Args:
            audio: One sound (samples,) of one channel, or several.
            sampling_rate: Samples a second.
            kwargs: What other processors are told; nothing of it has a meaning here.

        Raises:
            ValueError: The sound has another rate than 16 kHz, or is too short or too long for the encoder.
        """
        if sampling_rate != self.sampling_rate:
            raise ValueError(f"a sound of {sampling_rate} samples a second; the model takes {self.sampling_rate}")
        sounds = list(audio) if isinstance(audio, (list, tuple)) else [audio]
        frames = [torch.from_numpy(self._frames(np.asarray(sound, dtype=np.float32))) for sound in sounds]
        lengths = torch.tensor([len(each) for each in frames])
        if self.most_frames is not None and int(lengths.max()) > self.most_frames:
            raise ValueError(f"{int(lengths.max())} frames are more than the encoder's {self.most_frames}")
        features = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)
        mask = (torch.arange(features.shape[1]) < lengths[:, None]).long()
        return BatchFeature({"input_features": features, "input_features_mask": mask})

    def tokens(self, frames: int) -> int:
        """How many tokens stand for a sound of so many frames: two strides of two after Whisper's frames."""
        if self.whisper_frontend_args is None:
            return frames
        return ((frames - 1) // 2 + 2) // 2

    def _frames(self, samples: np.ndarray) -> np.ndarray:
        if self.whisper_frontend_args is not None:
            bands = self.whisper_frontend_args["n_mels"]
            of_whisper = WhisperFeatureExtractor(feature_size=bands, sampling_rate=self.sampling_rate)
            least = of_whisper.n_fft // 2 + 1  # half a window is mirrored at each border
            if len(samples) < least:
                raise ValueError(f"{len(samples)} samples are fewer than the {least} that a frame needs")
            made = of_whisper(
                samples, sampling_rate=self.sampling_rate, padding="do_not_pad", truncation=False, return_tensors="np"
            )
            return np.ascontiguousarray(made["input_features"][0].T)
        asked = self.wav_frontend_args
        times = {"frame_ms": asked.get("frame_length", 25), "shift_ms": asked.get("frame_shift", 10)}
        # Kaldi's features are of samples that count to 2 ** 15.
        bands = log_mel(samples * 2.0**15, rate=self.sampling_rate, bands=asked["n_mels"], **times)
        if not len(bands):
            raise ValueError(f"the sound is shorter than a frame of {times['frame_ms']} ms")
        joined, step = asked.get("lfr_m", 1), asked.get("lfr_n", 1)
        # (frames, lfr_m) numbers of bands: the middle one is the frame's own, borders are repeated.
        first = np.arange(0, len(bands), step)[:, None] + np.arange(joined) - (joined - 1) // 2
        frames = bands[first.clip(0, len(bands) - 1)].reshape(len(first), -1)
        if self.means is not None and self.scales is not None:
            frames = (frames + np.asarray(self.means)) * np.asarray(self.scales)
        return frames.astype(np.float32)


class BailingMMProcessor(ProcessorMixin):
    """Pictures, videos and sounds, and the tokens for them. Each stands between marks, behind which a picture and a
    video have a line break.

    Args:
        image_processor: Of pictures.
        video_processor: Of videos.
        feature_extractor: Of sounds.
        tokenizer: Of the language model.
        chat_template: Jinja text.

    Raises:
        ValueError: The tokenizer lacks a mark.
    """

    return_mm_token_type_ids = True

    def __init__(
        self,
        image_processor: Any = None,
        video_processor: Any = None,
        feature_extractor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
    ) -> None:
        known = tokenizer.get_vocab()
        marks = [mark for kind in _PATCHES for mark in (f"<{kind}>", f"</{kind}>")]
        for mark in (*marks, *_PATCHES.values()):
            if mark not in known:
                raise ValueError(f"the tokenizer has no token {mark}")
        self.image_token, self.video_token, self.audio_token = (f"<{kind}>" for kind in _PATCHES)
        self.image_token_id, self.video_token_id = known[self.image_token], known[self.video_token]
        self.audio_token_id = known[self.audio_token]
        super().__init__(
            image_processor, video_processor, feature_extractor, tokenizer, chat_template=chat_template or CHAT_TEMPLATE
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """The processor of a folder with tokenizer.json and preprocessor_config.json.

        Args:
            pretrained_model_name_or_path: The folder.
            kwargs: For the tokenizer.
        """
        folder = Path(pretrained_model_name_or_path)
        given = read_json_object(folder / _FILE, ModelFolderError)
        of_both = {name: given[name] for name in _OF_PICTURES if name in given}
        limits = {name: given[name] for name in ("min_pixels", "max_pixels") if name in given}
        of_frames = {name: given.get(f"{name}_video", most) for name, most in _VIDEO_PIXELS.items()}
        sounds = dict(given.get("wav_frontend_args") or {})
        means = scales = None
        if sounds.get("cmvn_file") and not given.get("whisper_frontend_args"):
            means, scales = read_mean_and_scale(folder / sounds["cmvn_file"])
        hears = BailingMMAudioProcessor(
            whisper_frontend_args=given.get("whisper_frontend_args"),
            wav_frontend_args=sounds,
            means=means,
            scales=scales,
            most_frames=_most_frames(folder / "config.json"),
        )
        options = {name: value for name, value in kwargs.items() if name not in ("trust_remote_code", "backend")}
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
        own = setting if isinstance(setting := tokenizer.chat_template, str) else None
        seen = BailingMMImageProcessor(**of_both, **limits)
        videos = Qwen2VLVideoProcessor(**of_both, **of_frames, cap_pixels_per_frame=False)
        return cls(seen, videos, hears, tokenizer, chat_template=own)

    @property
    @override
    def model_input_names(self) -> list[str]:
        seen = ["pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"]
        heard = ["input_features", "input_features_mask"]
        return ["input_ids", "attention_mask", "mm_token_type_ids", *seen, *heard]

    @override
    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: object) -> str:
        return self._written("image", image_inputs["image_grid_thw"][image_idx])

    @override
    def replace_video_token(self, video_inputs: dict[str, Any], video_idx: int, **kwargs: object) -> str:
        return self._written("video", video_inputs["video_grid_thw"][video_idx])

    @override
    def replace_audio_token(self, audio_inputs: dict[str, Any], audio_idx: int, **kwargs: object) -> str:
        frames = int(audio_inputs["input_features_mask"][audio_idx].sum())
        return f"<audio>{_PATCHES['audio'] * self.feature_extractor.tokens(frames)}</audio>"

    def _written(self, kind: str, grid: object) -> str:
        tokens = int(np.prod(np.asarray(grid))) // self.image_processor.merge_size**2
        return f"<{kind}>{_PATCHES[kind] * tokens}</{kind}>\n"

    def create_mm_token_type_ids(self, input_ids: Sequence[Any]) -> list[list[int]]:
        """1 for each token of a picture, 2 of a video, 3 of a sound, 0 for all others. Pictures and videos have the
        same token: the mark in front says which it is."""
        patch, heard = (self.tokenizer.convert_tokens_to_ids(_PATCHES[kind]) for kind in ("image", "audio"))
        found = []
        for row in input_ids:
            kinds, seen = [], 0
            for token in row if isinstance(row, list) else row.tolist():
                seen = {self.image_token_id: 1, self.video_token_id: 2}.get(token, seen)
                if token == patch:
                    kinds.append(seen)
                else:
                    kinds.append(3 * (token == heard))
            found.append(kinds)
        return found


def _most_frames(path: Path) -> int | None:
    """Two for each place of Whisper's encoder in config.json; None where there is no such file or encoder."""
    if not path.is_file():
        return None
    hears = read_json_object(path, ModelFolderError).get("audio_config") or {}
    places = (hears.get("whisper_encoder_config") or {}).get("n_ctx")
    if places is None:
        return None
    return 2 * int(places)


def read_mean_and_scale(path: Path) -> tuple[list[float], list[float]]:
    """What Kaldi's text form of a network adds to features, and multiplies them by (`am.mvn`).

    Raises:
        ModelFolderError: The file is missing, or is not of this form.
    """
    found: dict[str, list[float]] = {}
    try:
        name = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words and words[0] in ("<AddShift>", "<Rescale>"):
                name = words[0]
            elif name and words and words[0] == "<LearnRateCoef>":
                found[name] = [float(word) for word in words[3:-1]]  # <LearnRateCoef> 0 [ numbers ]
                name = ""
        return found["<AddShift>"], found["<Rescale>"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelFolderError(
            f"means and scales of sounds cannot be read: {error}", where=str(path), way_out="Copy the released file."
        ) from error
