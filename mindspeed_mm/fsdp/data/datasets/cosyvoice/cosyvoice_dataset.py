"""Texts and the speech tokens that say them: `dataset_type: cosyvoice`, for CosyVoice3's language model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, build_collator
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import TextOnlyPlugin
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, SampleSize
from mindspeed_mm.fsdp.data.data_utils.spoken_rows import FOLDER_KEY, SpokenRows
from mindspeed_mm.fsdp.data.datasets.cosyvoice.sequences import SpeechRows
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

_SHARE_KEY = "data.dataset_param.basic_parameters.mixed_share"
MIXED_SHARE = 0.5
"""Default share of the samples: that of CosyVoice's own training."""
_RATIO_KEY = "data.dataset_param.preprocess_parameters.mix_ratio"


@data_register.register("cosyvoice")
class CosyVoiceDataset(SpokenRows):
    """Rows of JSONL, parquet or CSV: `{"text": "hello", "speech_token": [17, 4093, …], "instruct": "Speak softly."}`.

    The columns are those of CosyVoice's own recipes, whose parquet files are read as they are; others are not looked
    at. An instruction is optional, and the text of it is never trained.

    Args:
        basic_param: Which rows; `mixed_share` of the samples let text and speech take turns.
        preprocess_param: The model's folder, with its tokenizer; `mix_ratio`.
        dataset_param: The whole section.

    Raises:
        DataError: Files are missing or broken.
        ConfigError: The share or the ratio cannot be used, or rows are streamed.
        ModelFolderError: The folder is not one of CosyVoice3.
    """

    tokens_per_s = 25

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        super().__init__(basic_param, preprocess_param, dataset_param)
        self._speech = _speech_rows(self.folder, preprocess_param.get("mix_ratio"))
        self._share = _share(basic_param.get("mixed_share"))
        self._seed = 0

    def item(self, index: int, epoch: int) -> EncodedSample:
        """Sample `index`; whether text and speech take turns in it is drawn for each epoch.

        Raises:
            DataError: The row lacks text or speech, or has tokens that the codec does not.
            TooLongError: It has more tokens than `cutoff_len`.
        """
        row, place = self._rows.row(index), str(self.place(index))
        text, speech = self.ids_of(self.text_of(row, "text", place)), self._codes(row, place)
        prompt: list[int] = []
        if row.get("instruct"):
            prompt = self.ids_of(self.text_of(row, "instruct", place))
        drawn = random.Random(derive_seed("mixed", self._seed, epoch, index)).random()
        mixes = drawn < self._share and self._speech.can_mix(text, speech)
        layout = self._speech.mixed if mixes else self._speech.whole
        tokens = layout(prompt, text, speech)
        ids, labels = tokens.arrays()
        self.check_length(len(ids), place)
        return {"sample_id": place, "input_ids": ids, "labels": labels, "media": [], "shrunk": False}

    def measure(self, index: int) -> SampleSize:
        """Its tokens: as many, whether text and speech take turns or not."""
        return SampleSize(len(self[index]["input_ids"]), 0)

    def draw_captions(self, seed: int) -> None:
        """Draw with this seed, `training.seed`, from now on."""
        self._seed = seed

    @override
    def padding_collator(self, collate_param: CollateParam) -> Collator:
        return build_collator(self.processor, TextOnlyPlugin(), collate_param)

    def settings(self) -> dict[str, Any]:
        """The share of samples in which text and speech take turns, and where rows of speech begin."""
        return {"mixed_share": self._share, "speech": repr(self._speech)}

    # --- one row ------------------------------------------------------------------------------------------------------

    def _codes(self, row: dict[str, Any], place: str) -> list[int]:
        given = row.get("speech_token")
        try:
            codes = np.asarray([] if given is None else given)
        except ValueError:  # lists of unequal lengths
            codes = np.asarray([])
        if codes.ndim != 1 or not len(codes) or not np.issubdtype(codes.dtype, np.integer):
            raise DataError(
                "there are no speech tokens",
                where=place,
                key="speech_token",
                way_out="Give a list of numbers, as CosyVoice's tools/extract_speech_token.py makes it of a sound.",
            )
        if codes.min() < 0 or codes.max() >= self._speech.codec_rows:
            raise DataError(
                f"speech tokens go from {codes.min()} to {codes.max()}, those of the codec from 0 to "
                f"{self._speech.codec_rows - 1}",
                where=place,
                key="speech_token",
                way_out="Extract them with the codec of this model.",
            )
        return list(map(int, codes))


def _speech_rows(folder: Path, mix_ratio: Any) -> SpeechRows:
    path = folder / "config.json"
    config = read_json_object(path, ModelFolderError)
    text_rows, codec_rows = (config.get("llm_config") or {}).get("vocab_size"), config.get("speech_token_size")
    if not isinstance(text_rows, int) or not isinstance(codec_rows, int):
        raise ModelFolderError(
            "has no llm_config.vocab_size and speech_token_size: it is not a folder of CosyVoice3's language model",
            where=str(path),
            key=FOLDER_KEY,
        )
    ratio = mix_ratio or config.get("mix_ratio") or [5, 15]
    if not isinstance(ratio, list) or len(ratio) != 2 or not all(isinstance(n, int) and n > 0 for n in ratio):
        raise ConfigError(
            f"{ratio} are not two numbers of tokens", key=_RATIO_KEY, way_out="Give text and speech: [5, 15]."
        )
    return SpeechRows(text_rows, codec_rows, *ratio)


def _share(given: Any) -> float:
    share = MIXED_SHARE if given is None else given
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"{share!r} is not a share", key=_SHARE_KEY, way_out="Give a number from 0 to 1.")
    return float(share)
