"""Texts and the speech tokens that say them: `dataset_type: cosyvoice`, for CosyVoice3's language model.

Text and speech tokens stand in one sequence. An id below `text_rows` is of text; the others are rows of the speech
embedding, moved up by `text_rows`. Labels count speech rows from 0. As everywhere here, a label is that of the token at
its own place; a token is predicted from the one before it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from typing_extensions import override

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, build_collator
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import TextOnlyPlugin
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, SampleSize
from mindspeed_mm.fsdp.data.data_utils.spoken_rows import FOLDER_KEY, SpokenRows
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

    is_deterministic = True  # chances come from generators of its own
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
        if mixes:
            tokens = self._speech.mixed(prompt, text, speech)
        else:
            tokens = self._speech.whole(prompt, text, speech)
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

    def settings(self) -> JsonObject:
        """The share of samples in which text and speech take turns, and where rows of speech begin."""
        return {"mixed_share": self._share, "speech": repr(self._speech)}

    # --- one row ------------------------------------------------------------------------------------------------------

    def _codes(self, row: Mapping[str, object], place: str) -> list[int]:
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


def _speech_rows(folder: Path, mix_ratio: object) -> SpeechRows:
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


def _share(given: object) -> float:
    share = given
    if share is None:
        share = MIXED_SHARE
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"{share!r} is not a share", key=_SHARE_KEY, way_out="Give a number from 0 to 1.")
    return float(share)


START, END, SPEECH_FOLLOWS, TEXT_FOLLOWS = range(4)
"""Speech rows behind those of the codec. `TEXT_FOLLOWS` is to be predicted, and never stands in a sequence."""


@dataclass(frozen=True)
class SpeechRows:
    """Where the rows of speech begin, and how text and speech take turns."""

    text_rows: int
    codec_rows: int
    text_turn: int
    """Tokens of text at a time, where they take turns."""
    speech_turn: int
    """Tokens of speech that follow them."""

    def can_mix(self, text: Sequence[int], speech: Sequence[int]) -> bool:
        """Whether there is speech for every turn of the text."""
        return len(speech) * self.text_turn > len(text) * self.speech_turn

    def whole(self, prompt: Sequence[int], text: Sequence[int], speech: Sequence[int]) -> SpeechSequence:
        """All of the text, then all of the speech."""
        return self._ended(self._begun(prompt), text, speech)

    def mixed(self, prompt: Sequence[int], text: Sequence[int], speech: Sequence[int]) -> SpeechSequence:
        """Text and speech in turns, as for text that is still being written; then the rest of both."""
        tokens, full = self._begun(prompt), len(text) // self.text_turn
        for turn in range(full):
            tokens.unlabelled(text[turn * self.text_turn :][: self.text_turn])
            tokens.labelled(self._rows(speech[turn * self.speech_turn :][: self.speech_turn]), self.text_rows)
            # Told by the speech's last token, although text comes next.
            tokens.label_of_next = self.codec_rows + TEXT_FOLLOWS
        return self._ended(tokens, text[full * self.text_turn :], speech[full * self.speech_turn :])

    def _begun(self, prompt: Sequence[int]) -> SpeechSequence:
        tokens = SpeechSequence()
        tokens.unlabelled([self._mark(START), *prompt])
        return tokens

    def _ended(self, tokens: SpeechSequence, text: Sequence[int], speech: Sequence[int]) -> SpeechSequence:
        tokens.unlabelled([*text, self._mark(SPEECH_FOLLOWS)])
        tokens.labelled([*self._rows(speech), self.codec_rows + END], self.text_rows)
        return tokens

    def _mark(self, mark: int) -> int:
        return self.text_rows + self.codec_rows + mark

    def _rows(self, speech: Sequence[int]) -> list[int]:
        return [int(token) for token in speech]


@dataclass
class SpeechSequence:
    """A sequence that is being written."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    label_of_next: int = IGNORED_LABEL
    """Of the first of the tokens without labels that come next."""

    def unlabelled(self, ids: Sequence[int]) -> None:
        """Add tokens that are given."""
        self.ids += ids
        self.labels += [self.label_of_next, *[IGNORED_LABEL] * (len(ids) - 1)]
        self.label_of_next = IGNORED_LABEL

    def labelled(self, rows: Sequence[int], first_row: int) -> None:
        """Add speech that is to be predicted."""
        self.ids += [first_row + row for row in rows]
        self.labels += rows

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels, (L,) int64 each."""
        return np.array(self.ids, dtype=np.int64), np.array(self.labels, dtype=np.int64)
