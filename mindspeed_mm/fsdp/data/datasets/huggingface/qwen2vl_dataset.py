"""The built-in data set: rows of conversations or text, encoded while training.

The files are indexed, not read, when the data set is built; a row is converted, rendered and tokenised when it is asked
for, in whichever worker it falls to.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row, convert_text
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, build_collator
from mindspeed_mm.fsdp.data.data_utils.encode import EncodeOptions, SampleEncoder, Tokens
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader, check_remote_media_off
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.positions import build_positions
from mindspeed_mm.fsdp.data.data_utils.readers import ParquetReader, RowReader, file_facts, open_reader
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, Place, Sample
from mindspeed_mm.fsdp.data.data_utils.sources import RowFormat, find_sources
from mindspeed_mm.fsdp.data.data_utils.template import build_template
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of
from mindspeed_mm.fsdp.utils.register import data_register

_BASIC = "data.dataset_param.basic_parameters"
_ROWS_TRIED = 100


@data_register.register("huggingface")
class Qwen2VLDataset(Dataset[EncodedSample]):
    """Rows in JSON, JSONL, parquet or CSV files, for Qwen-VL and every other model with a processor or tokenizer.

    Args:
        basic_param: Which rows, and how they become token ids.
        preprocess_param: The processor and the sizes of media.
        dataset_param: The whole section; its `attr` says where a row keeps what.

    Raises:
        DataError: Files are missing or broken, or none of the first rows fits `attr`.
        ConfigError: Something is asked for that is not built yet.
    """

    is_deterministic = True
    """Encoding draws no random numbers, so the loader need not seed any."""

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        check_built(basic_param, preprocess_param)
        self._basic, self._preprocess = basic_param, preprocess_param
        self._attr = dataset_param.attr
        self._readers, self._formats = _open_sources(basic_param, RowFormat.from_attr(dataset_param.attr))
        most = basic_param.max_samples
        sizes = [len(reader) if most is None else min(len(reader), most) for reader in self._readers]
        self._ends = list(itertools.accumulate(sizes))
        self.on_bad_sample, self.max_bad_fraction = basic_param.on_bad_sample, basic_param.max_bad_fraction
        self.truncation = basic_param.truncation
        self._check_first_rows()
        self._build_encoder()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> EncodedSample:
        """Sample `index`, encoded.

        Raises:
            TooLongError: It does not fit `cutoff_len`.
            DataError: The row, its media or its label mask are off.
        """
        return self._encoder.encode(self.sample(index))

    def sample(self, index: int) -> Sample:
        """Row `index`, converted but not encoded."""
        which = bisect.bisect_right(self._ends, index)
        reader, number = self._readers[which], index - (self._ends[which - 1] if which else 0)
        row, place = reader.read(number), reader.place(number)
        return convert_text(row, place) if self._is_text else convert_row(row, self._formats[which], place)

    def place(self, index: int) -> Place:
        """Where row `index` stands."""
        which = bisect.bisect_right(self._ends, index)
        return self._readers[which].place(index - (self._ends[which - 1] if which else 0))

    def build_collator(self, collate_param: Any, *, packs: bool | None = None) -> Collator:
        """The collator that fits the samples.

        Args:
            collate_param: `dataloader_param.collate_param`.
            packs: Put all samples of a micro-batch into one row; None: as configured.
        """
        positions = None
        if self._basic.packs if packs is None else packs:
            preprocess = self._preprocess
            assert preprocess.model_name_or_path is not None  # the processor came from there
            positions = build_positions(
                preprocess.model_name_or_path, self._processor, trust_remote_code=preprocess.trust_remote_code
            )
        return build_collator(self._processor, self._plugin, collate_param, positions=positions)

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run compares: files with size, rows and content, and the settings that shape samples."""
        settings = {
            "basic_parameters": self._basic.model_dump(mode="json", include=_SHAPING_BASIC),
            "preprocess_parameters": self._preprocess.model_dump(mode="json", include=_SHAPING_PREPROCESS),
            "attr": self._attr.model_dump(mode="json"),
        }
        files = [file_facts(reader) for reader in self._readers]
        digest = hashlib.sha256(repr((settings, files)).encode()).hexdigest()
        return {"rows": len(self), "files": files, "settings": settings, "hash": digest}

    # --- parts -------------------------------------------------------------------------------------------------------

    @property
    def _is_text(self) -> bool:
        return self._basic.stage == "pretrain"

    def _build_encoder(self) -> None:
        basic, preprocess = self._basic, self._preprocess
        if not preprocess.model_name_or_path:
            raise ConfigError(
                "there is no folder to take the processor from",
                key="data.dataset_param.preprocess_parameters.model_name_or_path",
                way_out="Set it, or model.model_name_or_path.",
            )
        self._processor = load_processor(preprocess.model_name_or_path, trust_remote_code=preprocess.trust_remote_code)
        tokenizer = tokenizer_of(self._processor)
        self._plugin = build_mm_plugin(self._processor, preprocess)
        self._encoder = SampleEncoder(
            tokens=Tokens(tokenizer, of_processor=tokenizer is not self._processor),
            end_of_text=tokenizer.eos_token_id,
            template=None if self._is_text else build_template(self._processor, basic),
            plugin=self._plugin,
            media=MediaLoader(basic.dataset_dir, basic.media_roots),
            options=EncodeOptions(basic.cutoff_len, basic.train_on_prompt, basic.mask_history, basic.truncation),
        )

    def _check_first_rows(self) -> None:
        """Raise when none of the first rows converts: then it is the mapping that is off, not the rows."""
        first: DataError | None = None
        for index in range(min(len(self), _ROWS_TRIED)):
            try:
                self.sample(index)
                return
            except DataError as error:
                if self.on_bad_sample == "error":
                    raise
                first = first or error
        raise DataError(
            f"none of the first {min(len(self), _ROWS_TRIED)} rows fits: {first}",
            key="data.dataset_param.attr",
            way_out="Check the columns and tags in attr.",
        )


_SHAPING_BASIC = {
    "template",
    "chat_template",
    "enable_thinking",
    "cutoff_len",
    "train_on_prompt",
    "mask_history",
    "max_samples",
    "stage",
    "truncation",
    "on_bad_sample",
    "val_rate",
}
_SHAPING_PREPROCESS = {"image_max_pixels", "image_min_pixels", "use_fast_tokenizer", "split_special_tokens"}


def _open_sources(basic: BasicParameters, row_format: RowFormat) -> tuple[list[RowReader], list[RowFormat]]:
    sources = find_sources(basic.dataset, basic.dataset_dir, row_format)
    pairs = [(open_reader(file, basic.cache_dir), source.row_format) for source in sources for file in source.files]
    readers = [reader for reader, _ in pairs]
    _check_same_columns([reader for reader in readers if isinstance(reader, ParquetReader)])
    return readers, [row_format for _, row_format in pairs]


def _check_same_columns(readers: list[ParquetReader]) -> None:
    """Shards of one folder must have one schema."""
    first: dict[Path, ParquetReader] = {}
    for reader in readers:
        other = first.setdefault(reader.path.parent, reader)
        if reader.columns != other.columns:
            raise DataError(
                f"has the columns {reader.columns}, but {other.path.name} has {other.columns}", where=str(reader.path)
            )


def check_built(basic: BasicParameters, preprocess: PreprocessParameters) -> None:
    """Raise one clear error for a setting whose feature is not built yet."""
    check_remote_media_off(basic.allow_remote_media)
    asked = {
        f"{_BASIC}.streaming": basic.streaming,
        f"{_BASIC}.packing": basic.packing,
        f"{_BASIC}.neat_packing": basic.neat_packing,
        f"{_BASIC}.mix": basic.mix is not None,
        f"{_BASIC}.preprocess_on_fly": not basic.preprocess_on_fly,
        f"{_BASIC}.async_preprocess": basic.async_preprocess,
        f"{_BASIC}.stage": basic.stage == "rm",
        f"{_BASIC}.tool_format": basic.tool_format is not None,
        "data.dataset_param.preprocess_parameters.split_special_tokens": preprocess.split_special_tokens,
        "data.dataset_param.preprocess_parameters.use_audio_in_video": preprocess.use_audio_in_video,
        "data.dataset_param.preprocess_parameters.crop_to_patches": preprocess.crop_to_patches,
        "data.dataset_param.preprocess_parameters.image_do_pan_and_scan": preprocess.image_do_pan_and_scan,
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ConfigError("this is not built yet", key=key, way_out="Leave it at its default.")
