"""Conversations whose answers are spoken: `dataset_type: qwen3_omni_talker`.

What Qwen3-Omni's talker reads of a conversation and what it tells stands place by place as
`Qwen3OmniMoeForConditionalGeneration.generate` of transformers gives it: the user's turns as they are, no other turn,
and the last answer with the codes of its speech. The answer's words go beside the frames, one a frame:

    text   user's turns  mark role ⏎  pad pad pad pad    bos  word₁  word₂  …  eos  pad …  pad
    codec                             head …      voice  pad  bos    frames …              eos
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mindspeed_mm.core.batch import IGNORED_LABEL, NO_CODE, Batch
from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, GenericCollator, padded_rows, register_collator
from mindspeed_mm.fsdp.data.data_utils.encode import SampleOutline, at_place, build_tokens
from mindspeed_mm.fsdp.data.data_utils.prompts import words_of
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, SampleSize, TooLongError
from mindspeed_mm.fsdp.data.data_utils.spoken_rows import codes_of, in_rows
from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import data_register

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig


_NAME = "qwen3_omni_talker"
_FOLDER_KEY = "data.dataset_param.preprocess_parameters.model_name_or_path"
_FRAMES_PER_S = 12.5


@data_register.register("qwen3_omni_talker")
class Qwen3OmniTalkerDataset(Qwen2VLDataset):
    """Conversations in any format of `attr`, whose rows also have the codes of the last answer's speech and the name
    of its speaker: `{"messages": […], "audios": […], "speaker": "ethan", "audio_codes": [[17, 203, …], …]}`.

    `audio_codes` has a frame of all codebooks each 80 ms.

    Args:
        basic_param: Which rows.
        preprocess_param: The model's folder.
        dataset_param: The whole section.

    Raises:
        DataError: Files are missing or broken, or none of the first rows fits `attr`.
        ConfigError: Settings do not go together.
        ModelFolderError: The folder is not one of Qwen3-Omni with a talker.
    """

    is_deterministic = True
    prompts_for = None
    own_columns = frozenset({"audio_codes", "speaker"})

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        super().__init__(basic_param, preprocess_param, dataset_param)
        if self.template is None or self.basic_parameters.stage == "rm":
            raise ConfigError(
                f"stage is {self.basic_parameters.stage}, but a talker is trained on conversations",
                key="data.dataset_param.basic_parameters.stage",
                way_out="Set it to sft.",
            )
        preprocess, tokenizer = self._preprocess, tokenizer_of(self.processor)
        self._tokens = build_tokens(tokenizer, self.template, self.plugin, preprocess)
        self._config = _config_of(Path(str(preprocess.model_name_or_path)))

    def __getitem__(self, index: int) -> EncodedSample:
        """Sample `index`: the talker's places, and beside them what the thinker reads.

        Raises:
            TooLongError: It does not fit `cutoff_len`.
            DataError: The conversation is off, or has no codes or voice that the model knows.
        """
        conversation: Any = super().__getitem__(index)
        spoken = self._spoken(index, conversation["input_ids"], shrunk=conversation["shrunk"])
        made: Any = {
            "sample_id": conversation["sample_id"],
            "input_ids": spoken.input_ids,
            "labels": spoken.labels,
            "media": conversation["media"],
            "shrunk": False,
            "codec_ids": spoken.codec_ids,
            "media_places": spoken.places[spoken.media_sources],
            "media_sources": spoken.media_sources,
            "thinker_input_ids": conversation["input_ids"][: spoken.read],
        }
        return made  # type: ignore[no-any-return]

    def measure(self, index: int) -> SampleSize:
        """The talker's places, and the patches that the thinker sees."""
        return self.outline(index).size

    def outline(self, index: int) -> SampleOutline:
        """The talker's places and labels, beside the text that the thinker reads."""
        read: Any = super().outline(index)  # of no pair: `stage: rm` is refused
        spoken = self._spoken(index, np.asarray(read.input_ids), shrunk=read.shrunk)
        places = spoken.places.tolist()
        length = len(spoken.input_ids)
        return read._replace(  # type: ignore[no-any-return]
            input_ids=spoken.input_ids,
            labels=spoken.labels,
            weights=(spoken.labels != IGNORED_LABEL).astype(np.float32),
            media_spans=[(places[first], places[last - 1] + 1) for first, last in read.media_spans],
            size=SampleSize(length, read.size.patches),
            full_tokens=length,
        )

    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """Rows padded to the right.

        Raises:
            ConfigError: Rows are to be packed.
        """
        if packs is None:
            packs = self.basic_parameters.packs
        if packs:
            raise ConfigError("speech is not packed", key="packing", way_out="Set packing and neat_packing to false.")
        return super().build_collator(collate_param.model_copy(update={"model_name": _NAME}), packs=False)

    def fingerprint(self) -> JsonObject:
        """Return the fingerprint of the rows and settings, to which the model's configuration belongs, too."""
        found = super().fingerprint()
        return found | {"settings": found["settings"] | {"config": repr(self._config.to_dict())}}

    def _spoken(self, index: int, ids: np.ndarray, *, shrunk: bool) -> SpokenAnswer:
        row, place = self.row(index), str(self.place(index))
        try:
            codes, voice = self._codes(row, place), self._voice(row, place)
            spoken = spoken_answer(self._config, ids, self._words(index), codes, voice)
        except DataError as error:
            raise at_place(error, place) from error
        longest, length = self.basic_parameters.cutoff_len, len(spoken.input_ids)
        if shrunk or length > longest:
            too_long = TooLongError(
                f"the sample has {length} places or more, beyond cutoff_len {longest}",
                where=place,
                key="data.dataset_param.basic_parameters.cutoff_len",
                way_out=f"Raise it: a second of speech has {_FRAMES_PER_S:g} of them.",
            )
            too_long.tokens = length
            raise too_long
        return spoken

    def _words(self, index: int) -> list[int]:
        """Tokens of the last answer as it is spoken: without thoughts, which the template may write in front of it."""
        answer = self.sample(index).messages[-1]["content"]
        text = words_of(answer)
        if not text.strip():
            raise DataError("the last answer has no words", way_out="Give the text that is spoken, or drop the row.")
        words, _ = self._tokens.encode(self._tokens.protect(text), [])
        return words.tolist()  # type: ignore[no-any-return]

    def _codes(self, row: Mapping[str, object], place: str) -> np.ndarray:
        talker = self._config.talker_config
        others = talker.num_code_groups - 1
        sizes = [talker.code_predictor_config.vocab_size] * (1 + others)
        return codes_of(row, place, sizes, "the encoder of the codec whose decoder is code2wav")

    def _voice(self, row: Mapping[str, object], place: str) -> int:
        known = self._config.talker_config.speaker_id or {}
        name = str(row.get("speaker") or "").lower()
        if name not in known:
            what = "the row names no voice"
            if name:
                what = f"'{name}' is not a voice of this model"
            raise DataError(
                what,
                where=place,
                key="speaker",
                way_out=f"Give one of {', '.join(known)}.",
            )
        return int(known[name])


@register_collator(_NAME)
class Qwen3OmniTalkerCollator(GenericCollator):
    """Rows of the talker and rows of the thinker, both padded to the right."""

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """`thinker_input_ids` as (B, K) with their mask, and places counted in the flattened rows."""
        ours: list[Any] = [dict(sample) for sample in samples]
        read = [{"input_ids": sample.pop("thinker_input_ids")} for sample in ours]
        places = [(sample.pop("media_places"), sample.pop("media_sources")) for sample in ours]
        batch = super().__call__(ours)
        thinker = padded_rows(read, {"input_ids": self._pad_id}, self._multiple)
        widths = (batch["input_ids"].shape[1], thinker["input_ids"].shape[1])
        own, sources = [], []
        for row, (own_places, source_places) in enumerate(places):  # counted in the flattened rows
            own.append(own_places + row * widths[0])
            sources.append(source_places + row * widths[1])
        return {
            **batch,
            **in_rows(batch),
            **{f"thinker_{name}": rows for name, rows in thinker.items()},
            "media_places": torch.from_numpy(np.concatenate(own)),
            "media_sources": torch.from_numpy(np.concatenate(sources)),
        }


def _config_of(folder: Path) -> Qwen3OmniMoeConfig:
    from transformers import Qwen3OmniMoeConfig  # loaded with the processor

    path = folder / "config.json"
    config = read_json_object(path, ModelFolderError)
    if config.get("model_type") != Qwen3OmniMoeConfig.model_type or not config.get("enable_audio_output", True):
        raise ModelFolderError(
            f"describes a {config.get('model_type')} model that does not speak, not one of Qwen3-Omni with its talker",
            where=str(path),
            key=_FOLDER_KEY,
        )
    return Qwen3OmniMoeConfig.from_dict(config)


_OPENING = 3
"""Tokens in front of an answer's first word: the mark of a turn, its role, a line feed."""


@dataclass(frozen=True)
class SpokenAnswer:
    """A sequence of L places of the talker, made from one of K of the thinker."""

    input_ids: np.ndarray
    """(L,) int64 of text, with the placeholders of media."""
    codec_ids: np.ndarray
    """(L, G) int64 of the codebooks."""
    labels: np.ndarray
    """(L,) int64 of the first codebook, not shifted."""
    places: np.ndarray
    """(K,) int64 where each token of the thinker's is among the L; of turns that are not the user's, the one before."""
    media_sources: np.ndarray
    """(M,) int64 places of media among the K."""
    read: int
    """How many of the K places the thinker has to read: none behind the last user's turn."""


def spoken_answer(
    config: Qwen3OmniMoeConfig, ids_K: np.ndarray, words: Sequence[int], codes: np.ndarray, voice: int
) -> SpokenAnswer:
    """The sequence of one sample.

    Args:
        config: Of the whole model: marks of text and codes.
        ids_K: The conversation's tokens.
        words: Tokens of the last answer's text, without thoughts.
        codes: (frames, G).
        voice: The speaker's number in the first codebook.

    Raises:
        DataError: The conversation does not end with an answer, follows no question, or others than users show media.
    """
    user_K, opening = _users_turns(config, ids_K), _opening(config, ids_K)
    media_K = np.isin(ids_K, _placeholders(config))
    if (media_K & ~user_K).any():
        raise DataError(
            "media are in a turn that is not the user's, and the talker reads only the user's turns of a prompt",
            way_out="Move them into a user's turn, or drop the row.",
        )
    asked = ids_K[user_K]
    marks = config.talker_config
    head = [marks.codec_nothink_id, marks.codec_think_bos_id, marks.codec_think_eos_id, voice, marks.codec_pad_id]
    first = [NO_CODE] * (len(asked) + len(opening)) + [*head, marks.codec_bos_id]
    speech = [*codes[:, 0].tolist(), marks.codec_eos_token_id]
    pad = config.tts_pad_token_id
    # One word beside each frame; words beyond the last frame are not read.
    beside = [*words[1:], config.tts_eos_token_id][: len(speech)]
    text = [*asked, *opening, *[pad] * (len(head) - 1), config.tts_bos_token_id, words[0], *beside]
    text += [pad] * (len(first) + len(speech) - len(text))
    codec_ids = np.full((len(text), codes.shape[1]), NO_CODE, dtype=np.int64)
    codec_ids[:, 0] = first + speech
    codec_ids[len(first) : -1] = codes
    sources = np.flatnonzero(media_K)
    return SpokenAnswer(
        np.array(text, dtype=np.int64),
        codec_ids,
        np.array([IGNORED_LABEL] * len(first) + speech, dtype=np.int64),
        # How many of the user's tokens come before: only these are kept for the talker.
        places=np.cumsum(user_K) - 1,
        media_sources=sources,
        read=int(np.flatnonzero(user_K)[-1]) + 1,
    )


def _users_turns(config: Qwen3OmniMoeConfig, ids_K: np.ndarray) -> np.ndarray:
    """(K,) which places are in a turn of the user."""
    starts = np.flatnonzero(ids_K[:-1] == config.im_start_token_id)
    user_K = np.zeros(len(ids_K), dtype=bool)
    for start, end in zip(starts, [*starts[1:], len(ids_K)], strict=True):
        user_K[start:end] = ids_K[start + 1] == config.user_token_id
    if not user_K.any():
        raise DataError("no turn is the user's", way_out="Give each row a question, or drop it.")
    return user_K


def _opening(config: Qwen3OmniMoeConfig, ids_K: np.ndarray) -> Sequence[int]:
    """What the last turn, which is the model's, begins with."""
    last = int(np.flatnonzero(ids_K[:-1] == config.im_start_token_id)[-1])
    if ids_K[last + 1] != config.assistant_token_id:
        raise DataError("the last turn is not the model's", way_out="End the row with the answer that is spoken.")
    return ids_K[last : last + _OPENING].tolist()  # type: ignore[no-any-return]


def _placeholders(config: Qwen3OmniMoeConfig) -> list[int]:
    thinker = config.thinker_config
    return [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
