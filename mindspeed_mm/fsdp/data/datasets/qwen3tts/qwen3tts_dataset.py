"""Texts and the codes of their speech: `dataset_type: qwen3tts`.

Text and codes stand beside each other in one sequence (arXiv:2601.15621, its published fine-tuning): every place has a
token of text and one of the first codebook, either of which may say that there is none.

    text   role  pad pad pad pad    bos  text …  eos  pad  pad …     pad
    codec        head …      voice  pad  pad …   pad  bos  frames …  eos

What generation goes on from is the same without the last place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from mindspeed_mm.core.batch import IGNORED_LABEL, NO_CODE, SPEAKER_CODE, Batch
from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, GenericCollator, register_collator
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader, located
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import TextOnlyPlugin
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, SampleSize
from mindspeed_mm.fsdp.data.data_utils.spoken_rows import FOLDER_KEY, SpokenRows, codes_of, in_rows
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig


_ROLE, _END = "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>assistant\n"


@data_register.register("qwen3tts")
class Qwen3TTSDataset(SpokenRows):
    """Rows of Qwen3-TTS's fine-tuning: `{"text": "hello", "audio_codes": [[17, 203, …], …], "ref_audio": "a.wav"}`.

    `audio_codes` has a frame of all codebooks each 80 ms. The voice is that of `ref_audio` where the model has a
    speaker encoder; a row may name one of the model's own voices (`speaker`) instead, or none. Other columns (`audio`,
    `language`) are not looked at.

    Args:
        basic_param: Which rows.
        preprocess_param: The model's folder.
        dataset_param: The whole section.

    Raises:
        DataError: Files are missing or broken.
        ModelFolderError: The folder is not one of Qwen3-TTS.
    """

    is_deterministic = True
    tokens_per_s = 12.5

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        super().__init__(basic_param, preprocess_param, dataset_param)
        self._config = _config_of(self.folder)
        self._is_beside = basic_param.dataset_dir is None
        folders = self._rows.folders
        root = Path(basic_param.dataset_dir or folders[0])
        limits = MediaLimits(audio_sampling_rate=RATE, allow_remote=basic_param.allow_remote_media)
        roots: list[str | Path] = list(basic_param.media_roots)
        if self._is_beside:
            roots += folders
        if root.is_file():
            root = root.parent
        self.media = MediaLoader(root, roots, limits)

    def item(self, index: int, epoch: int) -> EncodedSample:
        """Sample `index`, in every epoch the same.

        Raises:
            DataError: The row lacks text or codes, or has codes or a voice that the model does not know.
            TooLongError: It has more tokens than `cutoff_len`.
        """
        row, place = self._rows.row(index), str(self.place(index))
        made: Any = self._encoded(row, place)
        if row.get("ref_audio"):
            mel = self._spectrum(row, place, str(self._rows.folder(index).absolute()))
            made |= {"speaker_features": mel, "speaker_frames": np.array([len(mel)])}
        return made  # type: ignore[no-any-return]

    def measure(self, index: int) -> SampleSize:
        """Its tokens. The sound of a voice is not read."""
        return SampleSize(len(self._encoded(self._rows.row(index), str(self.place(index)))["input_ids"]), 0)

    @override
    def padding_collator(self, collate_param: CollateParam) -> Collator:
        return Qwen3TTSCollator(self.processor, TextOnlyPlugin(), collate_param)

    def settings(self) -> JsonObject:
        """Return the model's configuration, by which samples are laid out."""
        return {"config": repr(self._config.to_dict())}

    # --- one row ------------------------------------------------------------------------------------------------------

    def _encoded(self, row: Mapping[str, object], place: str) -> JsonObject:
        """All but the sound of its voice."""
        role, end = self.ids_of(_ROLE), self.ids_of(_END)
        # Tokenised as a whole and cut: words have other tokens behind a line break than alone.
        told = self.ids_of(f"{_ROLE}{self.text_of(row, 'text', place)}{_END}")
        codes = self._codes(row, place)
        made = sequence_of(self._config, role, told[len(role) : -len(end)], codes, self._voice(row, place))
        self.check_length(len(made.input_ids), place)
        return {
            "sample_id": place,
            "input_ids": made.input_ids,
            "labels": made.labels,
            "media": [],
            "shrunk": False,
            "codec_ids": made.codec_ids,
        }

    def _codes(self, row: Mapping[str, object], place: str) -> np.ndarray:
        """Return the codes of a row's speech, (frames, G) int64. Raises `DataError` for missing or unknown ones."""
        talker = self._config.talker_config
        sizes = [talker.vocab_size] + [talker.code_predictor_config.vocab_size] * (talker.num_code_groups - 1)
        return codes_of(row, place, sizes, "finetuning/prepare_data.py of Qwen3-TTS (Qwen3-TTS-Tokenizer-12Hz)")

    def _voice(self, row: Mapping[str, object], place: str) -> list[int]:
        """What stands for the voice."""
        if row.get("ref_audio"):
            if self._config.tts_model_type != "base":
                raise DataError(
                    f"a {self._config.tts_model_type} model hears no voices",
                    where=place,
                    key="ref_audio",
                    way_out="Train a Base model, or name one of the model's voices in `speaker`.",
                )
            return [SPEAKER_CODE]
        if not row.get("speaker"):
            return []
        known = getattr(self._config.talker_config, "spk_id", None) or {}
        if (name := str(row["speaker"]).lower()) not in known:
            raise DataError(
                f"'{row['speaker']}' is not a voice of this model ({', '.join(known) or 'it has none'})",
                where=place,
                key="speaker",
                way_out="Give one of them, or a sound in ref_audio.",
            )
        return [int(known[name])]

    def _spectrum(self, row: Mapping[str, object], place: str, folder: str) -> np.ndarray:
        """(frames, mels) of the voice."""
        assert self.media is not None
        given = row["ref_audio"]
        if isinstance(given, list):
            given = given[0]
        if self._is_beside:
            given = located(given, folder)
        clip = self.media.load_audio(given)
        if clip.seconds < 0.1:
            raise DataError(
                f"{clip.name} lasts {clip.seconds:.3f} s, too short to be a voice",
                where=place,
                key="ref_audio",
                way_out="Give some seconds of speech.",
            )
        return speaker_mel(clip.samples, self._config.speaker_encoder_config.mel_dim)


@register_collator("qwen3tts")
class Qwen3TTSCollator(GenericCollator):
    """Rows padded to the right; codes are padded with none."""

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """`codec_ids` as (B, L, G), and where frames and speakers stand."""
        batch = super().__call__(samples)
        coded = in_rows(batch)
        speakers = coded["codec_ids"][..., 0].flatten() == SPEAKER_CODE
        return batch | coded | {"speaker_places": speakers.nonzero().squeeze(1)}


def _config_of(folder: Path) -> Qwen3TTSConfig:
    from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig  # behind the tokenizer

    path = folder / "config.json"
    config = read_json_object(path, ModelFolderError)
    if config.get("model_type") != Qwen3TTSConfig.model_type:
        raise ModelFolderError(
            f"describes a {config.get('model_type')} model, not one of Qwen3-TTS", where=str(path), key=FOLDER_KEY
        )
    return Qwen3TTSConfig.from_dict(config)


@dataclass(frozen=True)
class SpokenSequence:
    """A sequence of L places."""

    input_ids: np.ndarray
    """(L,) int64 of text."""
    codec_ids: np.ndarray
    """(L, G) int64 of the codebooks."""
    labels: np.ndarray
    """(L,) int64 of the first codebook, not shifted."""


def sequence_of(
    config: Qwen3TTSConfig,
    role: Sequence[int],
    text: Sequence[int],
    codes: np.ndarray,
    voice: Sequence[int],
    language: int | None = None,
) -> SpokenSequence:
    """The sequence of one sample.

    Args:
        config: Of the model: the marks.
        role: Tokens that say whose turn it is, behind a turn with instructions if there is one.
        text: Tokens of what is said.
        codes: (frames, G).
        voice: What stands for the voice: `SPEAKER_CODE`, the first codebook's number of a known voice, or nothing.
        language: The first codebook's number of a language, as generation has it; None: it is heard in the text.
    """
    talker = config.talker_config
    if language is None:
        head = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    else:
        head = [talker.codec_think_id, talker.codec_think_bos_id, language, talker.codec_think_eos_id]
    head += voice
    silent = [talker.codec_pad_id] * (len(text) + 2)  # from the text's beginning to its end
    first = [NO_CODE] * len(role) + head + silent + [talker.codec_bos_id]
    speech = [*codes[:, 0].tolist(), talker.codec_eos_token_id]
    pads = [config.tts_pad_token_id]
    words = [*role, *pads * len(head), config.tts_bos_token_id, *text, config.tts_eos_token_id]
    words += pads * (1 + len(speech))
    codec_ids = np.full((len(words), codes.shape[1]), NO_CODE, dtype=np.int64)
    codec_ids[:, 0] = first + speech
    # The first codebook's column is written again, with the same numbers; the last place has the end alone.
    codec_ids[len(first) : -1] = codes
    labels = [IGNORED_LABEL] * len(first) + speech
    return SpokenSequence(np.array(words, dtype=np.int64), codec_ids, np.array(labels, dtype=np.int64))


RATE = 24000
"""Samples a second."""
_HIGHEST_HZ = 12000.0
_FLOOR, _LEAST_POWER = 1e-5, 1e-9


def speaker_mel(samples: np.ndarray, bands: int, size: int = 1024, hop: int = 256) -> np.ndarray:
    """Hann windows, reflected at both ends; Slaney's mel bands up to 12 kHz. The defaults are Qwen3-TTS's.

    Args:
        samples: (N,) of one channel at 24 kHz, more than (size - hop) / 2.
        bands: Number of mel bands.
        size: Samples of a window.
        hop: Samples from one window to the next.

    Returns:
        (frames, bands) float32.
    """
    border = (size - hop) // 2
    padded = np.pad(samples.astype(np.float64), border, mode="reflect")
    frames_FN = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    # (frames, size / 2 + 1)
    power_FK = np.abs(np.fft.rfft(frames_FN * window)) ** 2
    mel_FB = np.sqrt(power_FK + _LEAST_POWER) @ _bands(bands, size)
    return np.log(np.maximum(mel_FB, _FLOOR)).astype(np.float32)


@cache
def _bands(bands: int, size: int) -> np.ndarray:
    """Weights of triangular mel filters, (size / 2 + 1, bands), on Slaney's scale from 0 to `_HIGHEST_HZ`."""
    from transformers.audio_utils import mel_filter_bank  # seconds to import

    return mel_filter_bank(size // 2 + 1, bands, 0.0, _HIGHEST_HZ, RATE, norm="slaney", mel_scale="slaney")
