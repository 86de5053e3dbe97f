"""The built-in data set: rows of conversations or text, encoded while training.

The files are indexed, not read, when the data set is built; a row is converted, rendered and tokenised when it is asked
for, in whichever worker it falls to.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError, DataError, MMError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import LANGUAGE, ModelKind
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row, convert_text
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, build_collator
from mindspeed_mm.fsdp.data.data_utils.drawn import seeded
from mindspeed_mm.fsdp.data.data_utils.encode import EncodeOptions, SampleEncoder, SampleOutline, build_tokens
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader, with_media_beside
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin, filled_boxes, may_draw
from mindspeed_mm.fsdp.data.data_utils.positions import build_positions
from mindspeed_mm.fsdp.data.data_utils.prompts import collated_prompts, encoded_prompt, question_of_prompt, with_answer
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import unread_told
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import open_rows, open_streamed_rows
from mindspeed_mm.fsdp.data.data_utils.sample import (
    EncodedPair,
    EncodedPrompt,
    EncodedSample,
    NotesReported,
    RowLocation,
    Sample,
    SampleSize,
    offer_skipping,
)
from mindspeed_mm.fsdp.data.data_utils.template import build_template
from mindspeed_mm.fsdp.data.data_utils.training_view import (
    SHAPING_PREPROCESS,
    TOKEN_KEYS,
    check_trained_with,
    view_notes,
    view_processor,
    with_view,
)
from mindspeed_mm.fsdp.data.data_utils.transcript_language import require_language, tell_language
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.plugins import place_within
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import data_register

_BASIC = "data.dataset_param.basic_parameters"
_ROWS_TRIED = 100


@data_register.register("huggingface")
@data_register.register("qwen3_asr")
class Qwen2VLDataset(MMDataset):
    """Rows in JSON, JSONL, parquet or CSV files, for Qwen-VL and every other model with a processor or tokenizer.

    Args:
        basic_param: Which rows, and how they become token ids.
        preprocess_param: The processor and the sizes of media.
        dataset_param: The whole section; its `attr` says where a row keeps what.

    Raises:
        DataError: Files are missing or broken, or none of the first rows fits `attr`.
        ConfigError: Settings do not go together, or the processor cannot do what they ask for.
    """

    is_deterministic = True
    has_rows = True
    prompts_for: ModelKind | None = LANGUAGE
    train_media = False
    """Media in the model's turns are answers."""
    own_columns: frozenset[str] = frozenset()
    """Columns that a data set reads beside those of a conversation."""
    _draw_seed, _draw_epoch = 0, 0
    """Of what `conversation` draws; who asks for no epoch is told of the first."""

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        # The two sections count, whatever the whole one holds in their places.
        dataset_param = dataset_param.model_copy(
            update={"basic_parameters": basic_param, "preprocess_parameters": preprocess_param}
        )
        dataset_param = with_view(dataset_param, preprocess_param.model_name_or_path)
        basic_param = dataset_param.basic_parameters
        self.basic_parameters, self._preprocess = basic_param, dataset_param.preprocess_parameters
        self._param = dataset_param
        self._attr = dataset_param.attr
        self.streams = basic_param.streaming
        self._rows: Any
        if self.streams:
            self._rows = open_streamed_rows(basic_param, dataset_param.attr)
        else:
            self._rows = open_rows(basic_param, dataset_param.attr)
        self.parts, self.row_numbers = self._rows.parts, self._rows.row_numbers
        if basic_param.stage == "rm":
            self.rows_of_a_sample = 2
        self._check_pairs()
        self.on_bad_sample, self.max_bad_fraction = basic_param.on_bad_sample, basic_param.max_bad_fraction
        self.truncation = basic_param.if_too_long
        self.cuts_documents = self.truncation == "split" and basic_param.stage in ("sft", "pretrain")
        self._notes = NotesReported()
        # Before the processor is read: wrong columns are told in a second.
        self._check_first_rows()
        self._build_encoder()

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, index: int) -> bool:
        """Whether there is a row `index`."""
        if self.streams:
            return bool(self._rows.has(index))
        return index < len(self)

    def __getitem__(self, index: int) -> EncodedSample | EncodedPair | EncodedPrompt:
        """Sample `index`, encoded; of a preference row both answers, of a prompt what comes before the answer.

        Raises:
            TooLongError: It does not fit `cutoff_len`.
            DataError: The row, its media or its label mask are off.
        """
        sample = self._noted(index)
        encoded: Any
        if self.basic_parameters.stage == "prompt":
            encoded = encoded_prompt(self._encoder, sample, index, self.row(index))
        else:
            encoded = self._encoder.encode(sample)
        if sample.unread:
            encoded["unread"] = list(map(str, sample.unread))
        return encoded  # type: ignore[no-any-return]

    def _noted(self, index: int) -> Sample:
        """Row `index` as a sample, with its notes reported."""
        sample = self.sample(index)
        self._notes.report(sample)
        return sample

    def sample(self, index: int) -> Sample:
        """Row `index`, converted but not encoded; of a prompt with the answer that it has, or an empty one."""
        place = self._rows.place(index)
        with _placed(type(self), place), self._drawing(index):
            row = self.conversation(index)
        if self._is_text:
            return convert_text(row, place)
        stage = self.basic_parameters.stage
        row_format, is_prompt = self._rows.row_format(index).of_stage(stage), stage == "prompt"
        if is_prompt:
            row, row_format = with_answer(row, row_format, place)
        sample = convert_row(
            row, row_format, place, columns=self.own_columns, rewarded=is_prompt, draws=self.train_media
        )
        folder = self._rows.media_root(index)
        if folder is None and self.basic_parameters.dataset_dir is None:
            folder = self._rows.folder(index)
        if folder is not None:
            sample = with_media_beside(sample, str(folder.absolute()))
        return self._with_boxes(sample)

    @override
    def item(self, index: int, epoch: int) -> Any:
        self._draw_epoch = epoch
        try:
            return self[index]
        finally:
            self._draw_epoch = 0

    @override
    def draw_captions(self, seed: int) -> None:
        self._draw_seed = seed

    def _drawing(self, index: int) -> AbstractContextManager[None]:
        """Seeds what `conversation` draws for row `index`, so that all who ask for the row in an epoch get the same."""
        if self.is_deterministic:
            return contextlib.nullcontext()
        return seeded(self._draw_seed, self._draw_epoch, index)

    def conversation(self, index: int) -> JsonObject:
        """Row `index` in a layout that `attr` can tell of.

        A data set of rows of another layout overrides this: what it returns is a row like those of files, with its
        questions, answers and media; the rest is as ever. It may draw random numbers, which are those of the row and
        the epoch. It may raise `DataError` for a row that cannot be used, and what else it raises is reported as one.
        """
        row: JsonObject = self._rows.row(index)
        return row

    def measure(self, index: int) -> SampleSize:
        """The size that encoding sample `index` gives, its media known by their headers where those tell.

        Raises:
            TooLongError: It does not fit `cutoff_len`.
            DataError: The row is off.
        """
        if self.basic_parameters.stage == "prompt":
            return self._encoder.outline_question(question_of_prompt(self.sample(index))).size
        return self._encoder.measure(self.sample(index))

    def outline(self, index: int) -> SampleOutline | tuple[SampleOutline, SampleOutline]:
        """What encoding makes of sample `index`, without decoding media; of a preference row, of both answers.

        Raises:
            DataError: As encoding.
        """
        sample = self.sample(index)
        if self.basic_parameters.stage == "prompt":
            return self._encoder.outline_question(question_of_prompt(sample))
        return self._encoder.outline(sample)

    @override
    def joined_opening(self, index: int) -> str:
        sample = self.sample(index)
        if not sample.messages or sample.rejected is not None or self.basic_parameters.stage == "prompt":
            return ""
        encoded: Any = self._encoder.encode(sample)  # of no pair
        trained = encoded["input_ids"].tolist()
        asked = self._encoder.encode_question(question_of_prompt(sample)).input_ids.tolist()
        shared = next((at for at, (one, other) in enumerate(zip(trained, asked, strict=False)) if one != other), None)
        decode = tokenizer_of(self.processor).decode
        if shared is None or not decode(trained[shared:]).startswith(decode(asked[shared:])):
            return ""
        return str(decode(asked[shared:]))

    def row(self, index: int) -> JsonObject:
        """Row `index` as it stands in its file."""
        return self._rows.row(index)

    @override
    def place(self, index: int) -> RowLocation:
        return self._rows.place(index)

    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """The collator that fits the samples.

        Args:
            collate_param: `dataloader_param.collate_param`.
            packs: Put all samples of a micro-batch into one row; None: as configured.
        """
        positions = None
        if packs is None:
            packs = self.basic_parameters.packs
        if packs:
            preprocess = self._preprocess
            assert preprocess.model_name_or_path is not None  # the processor came from there
            positions = build_positions(
                preprocess.model_name_or_path, self.processor, trust_remote_code=preprocess.trust_remote_code
            )
        if self.basic_parameters.stage == "prompt":
            return collated_prompts
        pairs = self.basic_parameters.stage == "rm"
        return build_collator(self.processor, self.plugin, collate_param, positions=positions, pairs=pairs)

    def view_notes(self) -> list[str]:
        """What is given of how media are seen, and what the model's folder says instead, for the log."""
        return view_notes(self._param, self.processor)

    def row_notes(self) -> list[str]:
        """What some of the first rows hold and nothing reads, for the log."""
        counts, looked_at = Counter[str](), 0
        while looked_at < _ROWS_TRIED and self.has(looked_at):
            with contextlib.suppress(DataError):  # whoever reads the row says what is wrong with it
                counts.update(map(str, self.sample(looked_at).unread))
            looked_at += 1
        notes = []
        if counts:
            notes.append(unread_told(counts, f"the first {looked_at} rows"))
        if self.streams and self._is_text and self.truncation == "drop":
            notes.append(
                f"documents of more than cutoff_len {self.basic_parameters.cutoff_len:,} tokens are left out, since "
                "streamed rows are not measured: streaming: false cuts them, truncation: shrink keeps their beginnings"
            )
        return notes

    def fingerprint(self) -> JsonObject:
        """What a resumed run compares: files with size, rows and content, and the settings that shape samples."""
        shaping = {key for key in SHAPING_PREPROCESS if key not in _ADDED or self._preprocess[key]}
        basic = {key for key in _SHAPING_BASIC if key not in _ADDED or self.basic_parameters[key]}
        settings = {
            "basic_parameters": {
                **self.basic_parameters.model_dump(mode="json", include=basic),
                "truncation": self.basic_parameters.if_too_long,
            },
            "preprocess_parameters": self._preprocess.model_dump(mode="json", include=shaping),
            "attr": self._attr.model_dump(mode="json"),
            "template": "" if self.template is None else hashlib.sha256(self.template.source.encode()).hexdigest(),
        }
        files = self._rows.facts()
        digest = hashlib.sha256(repr((settings, files)).encode()).hexdigest()
        rows = None
        if not self.streams:
            rows = len(self)
        return {"rows": rows, "files": files, "settings": settings, "hash": digest}

    # --- parts -------------------------------------------------------------------------------------------------------

    @property
    def _is_text(self) -> bool:
        return self.basic_parameters.stage == "pretrain"

    def _build_encoder(self) -> None:
        basic, preprocess = self.basic_parameters, self._preprocess
        if not preprocess.model_name_or_path:
            raise ConfigError(
                "there is no folder to take the processor from",
                key="data.dataset_param.preprocess_parameters.model_name_or_path",
                way_out="Set it, or model.model_name_or_path.",
            )
        self.processor = view_processor(preprocess.model_name_or_path, preprocess)
        tell_language(self.processor, Path(preprocess.model_name_or_path))
        require_language(self.processor, Path(preprocess.model_name_or_path))
        check_trained_with(Path(preprocess.model_name_or_path), reads_rows_itself=False)
        tokenizer = tokenizer_of(self.processor)
        self.plugin = build_mm_plugin(self.processor, preprocess)
        if may_draw(self.processor, self.plugin):
            self.is_deterministic = False
        if not self._is_text:
            self.template = build_template(self.processor, basic)
            self.template.check_end()
        limits = MediaLimits.of(preprocess, self.processor, allow_remote=basic.allow_remote_media)
        beside, root = self._rows.media_roots, basic.dataset_dir
        if root is None:
            beside, root = [*self._rows.folders, *beside], str(self._rows.folders[0])
        self.media = MediaLoader(root, (*basic.media_roots, *beside), limits)
        self._encoder = SampleEncoder(
            tokens=build_tokens(self.processor, self.template, self.plugin, preprocess),
            end_of_text=tokenizer.eos_token_id,
            template=self.template,
            plugin=self.plugin,
            media=self.media,
            options=EncodeOptions(
                basic.cutoff_len,
                basic.train_on_prompt,
                basic.mask_history,
                basic.mask_empty_thoughts,
                basic.if_too_long,
                self.train_media,
            ),
        )

    def _with_boxes(self, sample: Sample) -> Sample:
        """The sample with the boxes of `objects` in its texts."""
        if self.media is None:  # the first rows are looked at before the model's processor is read
            return sample
        return filled_boxes(sample, self.processor, self.plugin, self.media)

    def _check_pairs(self) -> None:
        """Raise where `attr.ranking` says that rows are preference pairs, and the stage does not compare them."""
        if self.basic_parameters.stage != "rm" and any(row_format.ranking for row_format in self._rows.formats):
            raise ConfigError(
                f"stage is {self.basic_parameters.stage}, but rows are preference pairs",
                key=f"{_BASIC}.stage",
                way_out="Set stage: rm, or take attr.ranking out.",
            )

    def _check_first_rows(self) -> None:
        """Raise when none of the first rows can be used: then they are not alone."""
        if not self.has(0):
            raise DataError("there are no rows", key=f"{_BASIC}.dataset", way_out="Give files with rows.")
        first: DataError | None = None
        tried = 0
        while tried < _ROWS_TRIED and self.has(tried):
            try:
                self.sample(tried)
                return
            except DataError as error:
                if self.on_bad_sample == "error":
                    error.change_problems(offer_skipping)
                    raise
                first, tried = first or error, tried + 1
        assert first is not None
        first.retell(f"none of the first {tried} rows can be used; the first:", first.problems)
        raise first


@contextmanager
def _placed(dataset: type[Qwen2VLDataset], place: RowLocation) -> Iterator[None]:
    """Errors about a row name it; what the code of a data set from outside raises is one of them."""
    try:
        yield
    except DataError as error:
        error.change_problems(lambda problem: problem if problem.where else replace(problem, where=str(place)))
        raise
    except Exception as error:
        if isinstance(error, MMError) or dataset.conversation is Qwen2VLDataset.conversation:
            raise
        raise DataError(
            f"{dataset.__name__}.conversation fails: {type(error).__name__}: {error}",
            where=str(place),
            way_out=f"Correct the row, or the code at {place_within(dataset, error)}.",
        ) from error


_ADDED = (*TOKEN_KEYS, "image_max_tiles", "default_system", "mask_empty_thoughts")
"""Keys that older runs did not have: unset, they are no part of what is compared."""
_SHAPING_BASIC = {
    "template",
    "chat_template",
    "enable_thinking",
    "default_system",
    "cutoff_len",
    "train_on_prompt",
    "mask_history",
    "mask_empty_thoughts",
    "max_samples",
    "stage",
    "truncation",
    "on_bad_sample",
    "val_rate",
}
