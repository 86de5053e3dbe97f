"""Questions as the model was trained to see them: the run's own encoder, up to the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError, told_as
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR, UNIFIED, kind_of_folder
from mindspeed_mm.core.whole_text import check_whole_characters
from mindspeed_mm.fsdp.data.data_utils.data_collator import left_padded_questions, with_media
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion, EncodeOptions, SampleEncoder, build_tokens
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin, filled_boxes
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat, recognised
from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader
from mindspeed_mm.fsdp.data.data_utils.rows.sources import find_sources
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation, Sample
from mindspeed_mm.fsdp.data.data_utils.template import build_template
from mindspeed_mm.fsdp.data.data_utils.training_view import view_of, view_processor, with_view
from mindspeed_mm.fsdp.data.data_utils.transcript_language import detects_language, is_whisper, tell_language
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.sampling.answers.questions import as_asked
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import data_register


@dataclass(frozen=True)
class RowsView:
    """How rows are read and shown to a model."""

    param: DatasetParam
    """Settings of the run, of a configuration that is named, or of the model's folder alone."""

    @property
    def mark(self) -> str:
        """Changes when rows are shown in another way."""
        basic = self.param.basic_parameters
        shown: tuple[object, ...] = (view_of(self.param), basic.template, basic.chat_template)
        if basic.default_system:
            shown = (*shown, basic.default_system)
        return f"-{hashlib.sha256(repr(shown).encode()).hexdigest()[:8]}"

    @property
    def draws(self) -> bool:
        """Whether media in the model's turns are answers, as the data set of the run has it."""
        name = self.param.dataset_type
        return name in data_register and bool(getattr(data_register.get(name), "train_media", False))

    def of_people(self) -> RowsView:
        """The same for what people write: special tokens in their words are text, whatever holds for the rows of a
        run, for with them one could write turns of others."""
        preprocess = self.param.preprocess_parameters.model_copy(update={"split_special_tokens": True})
        return RowsView(self.param.model_copy(update={"preprocess_parameters": preprocess}))

    def row_format(self, data: Path) -> RowFormat:
        """How the rows of a file are laid out: as the configuration says for this file, or for all its files; the usual
        spellings where the first row does not fit that. What a run on pairs is asked has one answer."""
        asked, usual = self._configured(data), RowFormat()
        if asked == usual:
            return usual
        try:
            first = open_reader(data).read(0)
        except DataError:
            return usual  # whoever reads the file says what is wrong with it
        if asked.ranking and (asked.chosen or "chosen") not in first:
            asked = replace(asked, ranking=False)
        try:
            recognised(first, asked, RowLocation(data.name, 1), needs_answer=False)
        except DataError:
            return usual
        return asked

    def _configured(self, data: Path) -> RowFormat:
        basic, attr = self.param.basic_parameters, RowFormat.from_attr(self.param.attr)
        formats = []
        for dataset in (basic.dataset, basic.val_dataset):
            if not dataset:
                continue
            try:
                sources = find_sources(dataset, basic.dataset_dir, attr)
            except (ConfigError, DataError):
                continue  # the run's rows are somewhere else by now
            for source in sources:
                if data.resolve() in [file.resolve() for file in source.files]:
                    return source.row_format
                formats.append(source.row_format)
        if len(set(formats)) == 1:
            return formats[0]
        return attr


def check_answers_rows(folder: Path) -> None:
    """Raise `ModelFolderError` for a model that only draws, or is asked part by part, one prompt at a time."""
    kind = kind_of_folder(folder)
    if kind is GENERATOR:
        raise ModelFolderError(
            "it draws, and answers no questions",
            where=str(folder),
            way_out="Draw by mm infer MODEL --prompts FILE --out samples, and measure that by mm evaluate samples "
            "--generated.",
        )
    if kind is UNIFIED:
        raise ModelFolderError(
            "it answers and draws, which is built for one prompt at a time",
            where=str(folder),
            way_out="Ask it by mm infer MODEL --prompt TEXT, with --image and --draw.",
        )


class QuestionEncoder:
    """Encodes questions as training encoded the conversations that it learned from.

    Args:
        folder: The model's, with processor and chat template.
        view: How rows were shown.

    Raises:
        ModelFolderError: As `check_answers_rows`.
    """

    def __init__(self, folder: Path, view: RowsView | None = None) -> None:
        check_answers_rows(folder)
        param = with_view((view or RowsView(DatasetParam())).param, folder)
        self._basic, self._preprocess = param.basic_parameters, param.preprocess_parameters
        # A run may come from somebody else: that its configuration trusted a folder's code is no word of who asks now.
        untrusting = self._preprocess.model_copy(update={"trust_remote_code": False})
        self.processor = view_processor(folder, untrusting)
        self.tokenizer = tokenizer_of(self.processor)
        tell_language(self.processor, folder)
        self._detects_language = detects_language(self.processor, folder)
        self._plugin = build_mm_plugin(self.processor, self._preprocess)
        with told_as(as_asked):
            self._template = build_template(self.processor, self._basic)
        self._tokens = build_tokens(self.processor, self._template, self._plugin, self._preprocess)

    @property
    def hears(self) -> bool:
        """Whether the model takes sounds."""
        return is_whisper(self.processor) or "audio" in self._plugin.placeholders

    @property
    def end_ids(self) -> list[int]:
        """The tokenizer's end token, and the one by which training ends the model's turns."""
        ends = dict.fromkeys((self.tokenizer.eos_token, self._template.turn_end))
        return [self.tokenizer.convert_tokens_to_ids(end) for end in ends if end is not None]

    def media(self, folder: Path, roots: Sequence[str | Path] = ()) -> MediaLoader:
        """What opens media: relative paths start in `folder`, absolute ones may lie there, in `roots` or in those of
        the configuration."""
        limits = MediaLimits.of(self._preprocess, self.processor, allow_remote=self._basic.allow_remote_media)
        return MediaLoader(folder, (*roots, *self._basic.media_roots), limits)

    def encode(
        self, question: Sample, media: MediaLoader, variables: Mapping[str, object] | None = None
    ) -> EncodedQuestion:
        """One question; `variables` go to the chat template beside those of training. Raises `DataError`, naming the
        row, or a variable that the template does not read."""
        check_whole_characters([question.messages, question.tools], str(question.place))
        question = filled_boxes(question, self.processor, self._plugin, media)
        options = EncodeOptions(self._basic.cutoff_len)
        end = self.tokenizer.eos_token_id
        template = self._template
        if variables:
            template = template.with_variables(variables)
        encoder = SampleEncoder(self._tokens, end, template, self._plugin, media, options)
        with told_as(as_asked):
            return encoder.encode_question(question)

    def collate(self, questions: Sequence[EncodedQuestion]) -> dict[str, Any]:
        """What the model takes: rows padded on the left, the media of all of them."""
        batch: dict[str, Any] = left_padded_questions(questions, self._plugin, self.tokenizer.pad_token_id)
        if is_whisper(self.processor):
            batch = self._transcript_starts(batch, [len(question.media) for question in questions])
        return with_media(batch, self._plugin, [question.media for question in questions])

    def _transcript_starts(self, texts: JsonObject, sounds: Sequence[int]) -> JsonObject:
        """What the decoder of a speech recogniser goes on from; nothing where it is to find out the language itself.

        Raises:
            DataError: A question has no sound, or several, or asks on.
        """
        way_out = "Give rows of one turn with one sound."
        for count in sounds:
            if count != 1:
                what = f"this model transcribes one sound a row, and a row has {count}"
                raise DataError(what, key="audios", way_out=way_out)
        if not texts["attention_mask"].all():
            what = "this model transcribes one sound, and a row goes on with an earlier transcript"
            raise DataError(what, key="audios", way_out=way_out)
        if self._detects_language:
            return {}
        return {"decoder_input_ids": texts["input_ids"]}
