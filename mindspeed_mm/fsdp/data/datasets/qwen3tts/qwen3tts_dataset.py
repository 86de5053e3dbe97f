"""Texts and the codes of their speech: `dataset_type: qwen3tts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from mindspeed_mm.core.batch import SPEAKER_CODE, Batch
from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, GenericCollator, register_collator
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader, located
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import TextOnlyPlugin
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, SampleSize
from mindspeed_mm.fsdp.data.data_utils.spoken_rows import FOLDER_KEY, SpokenRows, codes_of, in_rows
from mindspeed_mm.fsdp.data.datasets.qwen3tts.layout import sequence_of
from mindspeed_mm.fsdp.data.datasets.qwen3tts.speaker_mel import RATE, speaker_mel
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

if TYPE_CHECKING:  # an annotation only: this imports transformers' models
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
        roots = (*basic_param.media_roots, *(folders if self._is_beside else ()))
        self.media = MediaLoader(root.parent if root.is_file() else root, roots, limits)

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

    def settings(self) -> dict[str, Any]:
        """Return the model's configuration, by which samples are laid out."""
        return {"config": repr(self._config.to_dict())}

    # --- one row ------------------------------------------------------------------------------------------------------

    def _encoded(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        """All but the sound of its voice."""
        role, end = self.ids_of(_ROLE), self.ids_of(_END)
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

    def _codes(self, row: dict[str, Any], place: str) -> np.ndarray:
        """Return the codes of a row's speech, (frames, G) int64. Raises `DataError` for missing or unknown ones."""
        talker = self._config.talker_config
        sizes = [talker.vocab_size] + [talker.code_predictor_config.vocab_size] * (talker.num_code_groups - 1)
        return codes_of(row, place, sizes, "finetuning/prepare_data.py of Qwen3-TTS (Qwen3-TTS-Tokenizer-12Hz)")

    def _voice(self, row: dict[str, Any], place: str) -> list[int]:
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

    def _spectrum(self, row: dict[str, Any], place: str, folder: str) -> np.ndarray:
        """(frames, mels) of the voice."""
        assert self.media is not None
        given = row["ref_audio"]
        given = given[0] if isinstance(given, list) else given
        clip = self.media.load_audio(located(given, folder) if self._is_beside else given)
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
