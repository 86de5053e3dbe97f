"""Rows of a text and the codes of its speech: what the data sets of speech generators have in common.

The codes, in rows and in batches, are frames of a number from each codebook of a codec, as talkers tell them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from mindspeed_mm.core.batch import NO_CODE, Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import open_rows
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, RowLocation, TooLongError
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import load_processor

FOLDER_KEY = "data.dataset_param.preprocess_parameters.model_name_or_path"


class SpokenRows(MMDataset):
    """Rows of JSONL, parquet or CSV.

    Args:
        basic_param: Which rows.
        preprocess_param: The model's folder, with its tokenizer.
        dataset_param: The whole section.

    Raises:
        DataError: Files are missing or broken.
        ConfigError: No folder is named, or rows are streamed.
        ModelFolderError: The folder has no tokenizer.
    """

    is_deterministic = True
    tokens_per_s: float
    """Of speech, for messages."""

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        folder = preprocess_param.model_name_or_path
        if not folder:
            raise ConfigError("there is no folder with a tokenizer", key=FOLDER_KEY, way_out="Name the model's.")
        if basic_param.streaming:
            raise ConfigError("these rows are not streamed", key="streaming", way_out="Set it to false.")
        self.folder = Path(folder)
        self.basic_parameters = basic_param
        self.on_bad_sample, self.max_bad_fraction = basic_param.on_bad_sample, basic_param.max_bad_fraction
        self.truncation = basic_param.if_too_long
        self._rows: Any = open_rows(basic_param, dataset_param.attr)
        self.parts = self._rows.parts
        self.processor = load_processor(folder)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> EncodedSample:
        """Sample `index` as it is in the first epoch. Raises `DataError` for a row that does not fit."""
        return self.item(index, 0)  # type: ignore[no-any-return]

    @override
    def place(self, index: int) -> RowLocation:
        return self._rows.place(index)  # type: ignore[no-any-return]

    def row(self, index: int) -> JsonObject:
        """Row `index` as it stands in its file."""
        found: JsonObject = self._rows.row(index)
        return found

    def fingerprint(self) -> JsonObject:
        """What a resumed run compares: files, and what shapes samples."""
        files = self._rows.facts()
        settings = {**self.settings(), "cutoff_len": self.basic_parameters.cutoff_len}
        digest = hashlib.sha256(repr((settings, files)).encode()).hexdigest()
        return {"rows": len(self), "files": files, "settings": settings, "hash": digest}

    def settings(self) -> JsonMapping:
        """Return what shapes samples besides `cutoff_len`, for the fingerprint. Subclasses implement it."""
        raise NotImplementedError

    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """Rows padded to the right.

        Raises:
            ConfigError: Rows are to be packed.
        """
        if packs is None:
            packs = self.basic_parameters.packs
        if packs:
            raise ConfigError("speech is not packed", key="packing", way_out="Set packing and neat_packing to false.")
        return self.padding_collator(collate_param)

    def padding_collator(self, collate_param: CollateParam) -> Collator:
        """What pads samples to one length."""
        raise NotImplementedError

    def text_of(self, row: Mapping[str, object], column: str, place: str) -> str:
        """A column of text. Raises `DataError` where there is none."""
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{text!r:.80} is not text", where=place, key=column, way_out="Repair or drop the row.")
        return text

    def ids_of(self, text: str) -> list[int]:
        """Its tokens, without any that a tokenizer puts around a text."""
        ids: list[int] = self.processor(text, add_special_tokens=False)["input_ids"]
        return ids

    def check_length(self, length: int, place: str) -> None:
        """Raise `TooLongError` for more tokens than `cutoff_len`."""
        longest = self.basic_parameters.cutoff_len
        if length > longest:
            error = TooLongError(
                f"the sample has {length} tokens, more than cutoff_len {longest}",
                where=place,
                key="data.dataset_param.basic_parameters.cutoff_len",
                way_out=f"Raise it: a second of speech has {self.tokens_per_s:g} tokens.",
            )
            error.tokens = length
            raise error


# --- codes of speech --------------------------------------------------------------------------------------------------


COLUMN = "audio_codes"


def codes_of(row: JsonMapping, place: str, sizes: Sequence[int], extracted_by: str, column: str = COLUMN) -> np.ndarray:
    """The frames of a row's speech, (frames, codebooks) int64.

    Args:
        row: As it stands in its file; the column is a list of frames.
        place: Of the row, for messages.
        sizes: How many codes each codebook has.
        extracted_by: What makes codes for this model, for messages.
        column: That has them.

    Raises:
        DataError: There are none, or none that the model knows.
    """
    given = row.get(column)
    if given is None or (isinstance(given, Sequence | np.ndarray) and not len(given)):
        raise DataError(
            "there are no codes, and no codec here makes them of a sound",
            where=place,
            key=column,
            way_out=f"Extract them with {extracted_by}.",
        )
    try:
        # (frames, codebooks); parquet gives an array of arrays, JSON a list of lists.
        codes = np.stack([np.asarray(frame) for frame in given])
    except (TypeError, ValueError):
        codes = np.zeros(0)
    if codes.ndim != 2 or codes.shape[1] != len(sizes) or not np.issubdtype(codes.dtype, np.integer):
        raise DataError(
            f"{column} are no frames of {len(sizes)} numbers each",
            where=place,
            key=column,
            way_out="Extract them with the codec of this model.",
        )
    if (codes < 0).any() or (codes >= np.array(sizes)).any():
        raise DataError(
            f"codes go from {codes.min()} to {codes.max()}, those of the codec from 0 to {min(sizes) - 1}",
            where=place,
            key=column,
            way_out="Extract them with the codec of this model.",
        )
    return codes.astype(np.int64)


def in_rows(batch: Batch) -> dict[str, torch.Tensor]:
    """`codec_ids` of a batch as (B, L, G), padded with none, and `frame_places`.

    Args:
        batch: Padded; its `codec_ids` are (T, G), of all samples one behind the other.
    """
    flat = batch["codec_ids"]
    rows = flat.new_full((*batch["input_ids"].shape, flat.shape[-1]), NO_CODE)
    # A mask picks places row by row, the order in which the samples' codes were joined.
    rows[batch["attention_mask"].bool()] = flat
    # By the second codebook: the first also has numbers that are no speech, such as those of voices.
    frames = rows[..., 1].flatten() != NO_CODE
    return {"codec_ids": rows, "frame_places": frames.nonzero().squeeze(1)}
