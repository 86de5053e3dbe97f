"""Texts and the codes of their speech: `dataset_type: mosstts_delay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from mindspeed_mm.core.batch import IGNORED_LABEL, NO_CODE, Batch
from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, read_json_object
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, GenericCollator, register_collator
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import TextOnlyPlugin
from mindspeed_mm.fsdp.data.data_utils.positions import TextPositions
from mindspeed_mm.fsdp.data.data_utils.rendering.tokens import Tokens
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, SampleSize
from mindspeed_mm.fsdp.data.data_utils.spoken_rows import FOLDER_KEY, SpokenRows, codes_of
from mindspeed_mm.fsdp.data.datasets.moss_tts_delay.layout import (
    AUDIO,
    FIELDS,
    SAID,
    DelayedSequence,
    sound_part,
    text_part,
    user_turn,
)
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

if TYPE_CHECKING:  # an annotation only: this imports transformers' models
    from mindspeed_mm.fsdp.models.moss_tts_delay.configuration_moss_tts_delay import MossTTSDelayConfig

_EXTRACTED_BY = "examples/moss_tts/prepare_data.py (MOSS-Audio-Tokenizer)"
_BOOKS_KEY = "data.dataset_param.basic_parameters.n_vq"
_CODES_OF_VOICES, _VOICES = ("reference_audio_codes", "ref_audio_codes"), ("reference", "reference_audio", "ref_audio")


@data_register.register("mosstts_delay")
class MossTTSDelayDataset(SpokenRows):
    """Rows of MOSS-TTS's fine-tuning: `{"text": "hello", "audio_codes": [[17, 203, …], …], "language": "English"}`.

    `audio_codes` has a frame of all codebooks each 80 ms. Voices to speak in are `ref_audio_codes`, or
    `reference_audio_codes`, one of each speaker; a row may have the other `FIELDS`, too. Sounds (`audio`) are not
    looked at.

    Args:
        basic_param: Which rows. Without `dataset`, `dataset_dir` names them, as in MindSpeed-MM's file.
        preprocess_param: The model's folder.
        dataset_param: The whole section.

    Raises:
        DataError: Files are missing or broken.
        ConfigError: `n_vq` is not the model's number of codebooks.
        ModelFolderError: The folder is not one of MOSS-TTS, or its tokenizer lacks a chat template.
    """

    is_deterministic = True
    tokens_per_s = 12.5

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        if basic_param.dataset is None:
            basic_param = basic_param.model_copy(update={"dataset": basic_param.dataset_dir, "dataset_dir": None})
        super().__init__(basic_param, preprocess_param, dataset_param)
        self._split = preprocess_param.split_special_tokens
        self._writer = TurnWriter(self.processor, config_of(self.folder), self.folder, split_special=self._split)
        books, asked = self._writer.config.n_vq, basic_param.get("n_vq")
        if asked not in (None, books):
            what = f"{asked!r}, and the model has {books} codebooks"
            raise ConfigError(what, key=_BOOKS_KEY, way_out="Leave it out, and extract all codebooks.")

    def item(self, index: int, epoch: int) -> EncodedSample:
        """Sample `index`, in every epoch the same.

        Raises:
            DataError: The row lacks codes, or has codes that the model does not know.
            TooLongError: It has more places than `cutoff_len`.
        """
        row, place = self._rows.row(index), str(self.place(index))
        question = self._writer.question(row, _voices_of(row, place, self._writer.sizes), place)
        codes = codes_of(row, place, self._writer.sizes, _EXTRACTED_BY)
        made = DelayedSequence.joined([question, self._writer.answer(codes)])
        self.check_length(len(made.input_ids), place)
        sample: Any = {
            "sample_id": place,
            "input_ids": made.input_ids,
            "labels": made.labels(len(question.input_ids)),
            "media": [],
            "shrunk": False,
            "codec_ids": made.codec_ids,
        }
        return sample  # type: ignore[no-any-return]

    def measure(self, index: int) -> SampleSize:
        """Count the places of a sample, for which it is written out."""
        return SampleSize(len(self.item(index, 0)["input_ids"]), 0)

    @override
    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """Rows padded to the right, or several samples in one row."""
        if packs is None:
            packs = self.basic_parameters.packs
        positions = None
        if packs:
            positions = TextPositions()
        return MossTTSDelayCollator(self.processor, TextOnlyPlugin(), collate_param, positions)

    def settings(self) -> JsonObject:
        """Return the model's configuration, by which samples are laid out, and how their texts are read."""
        return {"config": repr(self._writer.config.to_dict()), "split_special_tokens": self._split}


class TurnWriter:
    """Writes turns as the model reads them, in training and in speaking alike.

    Args:
        tokenizer: Of the model's folder.
        config: Of the model.
        folder: For messages.
        split_special: Special tokens in a field are text.

    Raises:
        ModelFolderError: The tokenizer has no chat template, or gives no character positions.
    """

    def __init__(self, tokenizer: Any, config: MossTTSDelayConfig, folder: Path, *, split_special: bool = True) -> None:
        self.config, self._tokenizer = config, tokenizer
        self._tokens = Tokens(tokenizer, of_processor=False, split_special=split_special)
        self.sizes = [config.audio_vocab_size] * config.n_vq
        if not getattr(tokenizer, "chat_template", None):
            way_out = "Copy chat_template.jinja or tokenizer_config.json of the released folder."
            raise ModelFolderError("has no chat template", where=str(folder), key=FOLDER_KEY, way_out=way_out)
        said, *around = (self._written("assistant", AUDIO), *self._around())
        self._opening, self._closing = (self._ids(text) for text in said.split(AUDIO, 1))
        if around[0] != said.split(AUDIO, 1)[0]:
            what = f"opens the assistant's turn as {around[0]!r} for answers, and as {said!r} for those that are there"
            raise ModelFolderError(f"its chat template {what}", where=str(folder), key=FOLDER_KEY)

    def question(
        self, row: Mapping[str, object], voices: Sequence[np.ndarray | None] | None, place: str
    ) -> DelayedSequence:
        """All in front of an answer: the user's turn, and the opening of the assistant's.

        Args:
            row: Its `FIELDS`.
            voices: Codes (N, G) of each speaker's voice, or None; None: nothing is said of voices.
            place: Of the row, for messages.

        Raises:
            DataError: Nothing is said, or a field holds a mark of sounds.
        """
        for name in FIELDS:
            if isinstance(row.get(name), Mapping | list):
                what = f"{row[name]!r:.80} is not text"
                raise DataError(what, where=place, key=name, way_out="Repair or drop the row.")
        if not any(str(row.get(name) or "").strip() for name in SAID):
            raise DataError("there is nothing to say", where=place, key="text", way_out="Repair or drop the row.")
        for name in FIELDS:
            if AUDIO in str(row.get(name)):
                what = f"{row[name]!r:.80} holds {AUDIO}, which stands for a sound"
                raise DataError(what, where=place, key=name, way_out="Leave it out of the text.")
        told = {name: self._tokens.protect(str(row.get(name))) for name in FIELDS}
        are_given = None
        if voices is not None:
            are_given = [voice is not None for voice in voices]
        turn = self._written("user", user_turn(told, are_given))
        given, books = [voice for voice in voices or () if voice is not None], self.config.n_vq
        texts = turn.split(AUDIO)
        parts = [text_part(self._ids(texts[0]), books)]
        for codes, text in zip(given, texts[1:], strict=True):
            parts += [sound_part(self.config, codes, is_answer=False), text_part(self._ids(text), books)]
        sounds = sum(int((part.input_ids == self.config.audio_start_token_id).sum()) for part in parts)
        if sounds != len(given):
            what = "the text holds the mark that begins a sound"
            raise DataError(what, where=place, key="text", way_out="Leave it out of the text.")
        return DelayedSequence.joined([*parts, text_part(self._opening, books)])

    def answer(self, codes: np.ndarray) -> DelayedSequence:
        """The assistant's turn behind its opening, with codes (N, G)."""
        closing = text_part(self._closing, self.config.n_vq)
        return DelayedSequence.joined([sound_part(self.config, codes, is_answer=True), closing])

    def _around(self) -> tuple[str]:
        """How the template opens an answer that is still to come."""
        asked = [{"role": "user", "content": AUDIO}]
        open_turn = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        return (open_turn.removeprefix(self._written("user", AUDIO)),)

    def _written(self, role: str, content: str) -> str:
        """One turn by itself, as the published code writes each."""
        turn = [{"role": role, "content": content}]
        text: str = self._tokenizer.apply_chat_template(turn, add_generation_prompt=False, tokenize=False)
        return text

    def _ids(self, text: str) -> list[int]:
        if not text:
            return []
        return self._tokens.encode(text, ())[0].tolist()  # type: ignore[no-any-return]


def _voices_of(row: JsonMapping, place: str, sizes: Sequence[int]) -> list[np.ndarray | None] | None:
    """Codes of the voices that a row gives; None where it says nothing of voices.

    Raises:
        DataError: There is a sound without codes, or codes are not the model's.
    """
    for name in _CODES_OF_VOICES:
        given = row.get(name)
        if given is None or (isinstance(given, Sequence | np.ndarray) and not len(given)):
            continue
        each: Any = [given]
        if _depth(given) == 3:
            each = given
        return [None if v is None else codes_of({name: v}, place, sizes, _EXTRACTED_BY, name) for v in each]
    for name in _VOICES:
        given = row.get(name)
        listed = [given]
        if isinstance(given, list):
            listed = given
        if any(listed):
            raise DataError(
                f"{given!r:.80} is a sound without codes",
                where=place,
                key=name,
                way_out=f"Extract them with {_EXTRACTED_BY}.",
            )
        if isinstance(given, list) and given:
            return [None] * len(given)
    return None


def _depth(given: object) -> int:
    """Of nested lists: 2 for frames, 3 for a list of voices, any of which may be None."""
    depth, inner = 0, given
    while isinstance(inner, Sequence | np.ndarray) and not isinstance(inner, str):
        depth += 1
        inner = next((each for each in inner if each is not None), None)
        if inner is None:
            return 3
    return depth


@register_collator("mosstts_delay", packs=True)
class MossTTSDelayCollator(GenericCollator):
    """Rows padded to the right, or one packed row; says which codes are predicted at which place."""

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """`codec_ids` as (B, L, G), and `code_places` with their `code_targets`."""
        batch = super().__call__(samples)
        flat, ids_BL = batch["codec_ids"], batch["input_ids"]
        codes_TG = flat.new_full((ids_BL.numel(), flat.shape[-1]), NO_CODE)
        mask = batch.get("attention_mask")
        places = torch.arange(len(flat))
        if mask is not None:
            places = mask.flatten().nonzero().squeeze(1)
        codes_TG[places] = flat
        is_trained_TG = (codes_TG >= 0) & (batch["labels"].flatten() != IGNORED_LABEL)[:, None]
        rows = is_trained_TG.any(dim=1).nonzero().squeeze(1)
        targets = codes_TG.masked_fill(~is_trained_TG, IGNORED_LABEL).index_select(0, rows)
        codes_BLG = codes_TG.unflatten(0, ids_BL.shape)
        # A code is predicted from the place before it.
        return batch | {"codec_ids": codes_BLG, "code_places": rows - 1, "code_targets": targets}


def config_of(folder: Path) -> MossTTSDelayConfig:
    """The configuration of a model's folder.

    Raises:
        ModelFolderError: It is not one of MOSS-TTS with a delay pattern.
    """
    from mindspeed_mm.fsdp.models.moss_tts_delay.configuration_moss_tts_delay import MossTTSDelayConfig  # seconds

    path = folder / "config.json"
    config = read_json_object(path, ModelFolderError)
    if config.get("model_type") != MossTTSDelayConfig.model_type:
        what = f"describes a {config.get('model_type')} model, not one of MOSS-TTS with a delay pattern"
        raise ModelFolderError(what, where=str(path), key=FOLDER_KEY)
    return MossTTSDelayConfig.from_dict(config)
