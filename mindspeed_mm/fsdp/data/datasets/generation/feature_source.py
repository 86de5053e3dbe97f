"""Rows whose media and captions were encoded by `mm extract`, and how the rows that a configuration names differ from
those that a feature set was made of."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.datasets.generation.captions import drawn_caption, drawn_view, repeated_id
from mindspeed_mm.fsdp.data.datasets.generation.pair_rows import roles_of_rows
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader, SampleDescription
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow
from mindspeed_mm.fsdp.data.datasets.generation.row_notes import empty_captions_note
from mindspeed_mm.fsdp.data.datasets.generation.rows import read_rows
from mindspeed_mm.fsdp.data.datasets.generation.sizes import Buckets, SizeSettings, differences
from mindspeed_mm.fsdp.data.feature_store import FeatureRecord, FeatureStore, SkippedRow, check_provenance
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED_LATENTS
from mindspeed_mm.fsdp.params.data_args import BasicParameters, PreprocessParameters

_KEY = "data.dataset_param.basic_parameters.features_dir"
_PROBLEMS_SHOWN = 5
_OTHERS = "Undo the change, or extract them again into another folder."


class FeatureSource:
    """Features of captioned pictures and clips.

    Args:
        store: The features: what `mm extract` wrote.
        basic: `max_samples`, and the rows that the features should be of, where it names any.
        preprocess: What the features should have been made with, where it names a size.
        adapter: The model that is trained.

    Raises:
        DataError: The folder is missing or broken, was made by other weights, in other sizes or of other frames.
    """

    left_out: dict[str, str] = {}
    """Nothing: what could not be read was never extracted."""

    def __init__(
        self, store: FeatureStore, basic: BasicParameters, preprocess: PreprocessParameters, adapter: DiffusionAdapter
    ) -> None:
        check_provenance(store, adapter)
        self._store, self._folder = store, store.folder
        self._adapter, self._basic = adapter, basic
        self.seed = 0
        self._records = self._store.records[: basic.max_samples]
        self._roles = roles_of_rows(adapter.media_roles, basic)
        self._has_pairs = basic.stage == "rm"
        self._has_prior = any(record.is_prior for record in self._records)
        if not self._records:
            raise DataError(
                "the feature set is empty", where=str(store.folder), key=_KEY, way_out="Run mm extract again."
            )
        if self._has_pairs:
            self._check_pairs()
        self.sizes: list[MediaSize] = [record.size for record in self._records]
        self._check_preprocessing(SizeSettings.read(preprocess, adapter.frames_per_second))
        self._warn_of_duplicates()
        self._warn_of_captions()

    def __len__(self) -> int:
        return len(self._records)

    def place(self, index: int) -> str:
        """The medium that the features are of."""
        return f"{self._folder.name}:{self._records[index].path}"

    @property
    def repeats(self) -> list[int]:
        """How often an epoch reads each row."""
        return [record.repeats for record in self._records]

    @property
    def is_prior(self) -> list[bool] | None:
        """Whether each row preserves the prior; None: none does."""
        if self._has_prior:
            return [record.is_prior for record in self._records]
        return None

    @property
    def entries(self) -> list[str]:
        """The entry of `dataset` that each row belongs to; empty where nobody asks for shares of them.

        Raises:
            DataError: Nothing says which of them a row belongs to.
        """
        if self._basic.mix is None or self._basic.dataset is None:
            return []
        with warnings.catch_warnings(action="ignore"):
            rows = read_rows(self._basic.model_copy(update={"on_bad_sample": "skip"}), roles=self._roles)
        known: dict[tuple[str, str], str] = {}
        for row, entry in zip(rows, rows.entries(), strict=True):
            known[str(row.place), row.digest] = entry
        found: list[str] = []
        for record in self._records:
            if (record.place, record.said) in known:
                found.append(known[record.place, record.said])
        lost = len(self._records) - len(found)
        if lost:
            raise DataError(
                f"{lost} of {len(self._records)} rows of the features belong to no entry of dataset any more, so "
                "shares cannot be kept",
                where=str(self._folder),
                key="data.dataset_param.basic_parameters.mix",
                way_out="Run mm extract again.",
            )
        return found

    def item(self, index: int, epoch: int, repeat: int = 0) -> JsonObject:
        """`sample_id`, `epoch`, `latents`, `text` (features of one caption by batch key) and conditions; arguments as
        of `RawSource.item`."""
        record = self._records[index]
        sample_id = repeated_id(record.key, repeat)
        caption = drawn_caption(self.seed, epoch, sample_id, len(record.captions))
        view = drawn_view(self.seed, epoch, sample_id, record.views)
        features = self._store.read(index, caption, view)
        text = {name: features.pop(name) for name in self._text_keys & features.keys()}
        if not self._has_pairs:
            features.pop(REJECTED_LATENTS, None)
        elif record.scores:
            features["scores"] = torch.tensor(record.scores, dtype=torch.float64)
        if self._has_prior:
            features["is_prior"] = torch.tensor(record.is_prior)
        return {"sample_id": sample_id, "epoch": epoch, "fps": record.fps, "text": text, **features}

    def describe(self, index: int) -> SampleDescription:
        """What the feature set knows of a sample."""
        record = self._records[index]
        drawn = drawn_caption(self.seed, 0, record.key, len(record.captions))
        header = None
        if record.header:
            header = MediaHeader(*record.header)
        return SampleDescription(record.path, record.captions, drawn, record.size, header, beside=record.beside)

    @property
    def null_text(self) -> dict[str, torch.Tensor] | None:
        """Features of the empty caption as batches have them, without the batch axis."""
        if self._store.null_text is None:
            return None
        return {name: value[0] for name, value in self._adapter.pad_text([self._store.null_text]).items()}

    def fingerprint(self) -> JsonObject:
        """What a resumed run compares: which samples, in which order, made by what."""
        keys = []
        for record in self._records:
            keys.append((record.key, str(record.size), tuple(record.captions), record.repeats))
        digest = hashlib.sha256(repr((keys, self._store.provenance)).encode()).hexdigest()
        return {"rows": len(self), "features": self._store.provenance, "hash": digest}

    @property
    def _text_keys(self) -> set[str]:
        if self._store.null_text is not None:
            return set(self._store.null_text)
        return {"prompt_embeds", "pooled_prompt_embeds", *self._adapter.text_shapes()}

    def row_changes(self) -> list[Problem]:
        """How the rows that the configuration names differ from those that the features were made of; nothing where it
        names none, or nobody knows what they were."""
        skipped = self._store.skipped
        if self._basic.dataset is None or skipped is None:
            return []
        changes = self._changes_from(self._basic, skipped)
        if changes and self._basic.max_samples is not None:  # the features may be of all rows
            return self._changes_from(self._basic.model_copy(update={"max_samples": None}), skipped) and changes
        return changes

    def _changes_from(self, basic: BasicParameters, skipped: Sequence[SkippedRow]) -> list[Problem]:
        try:
            with warnings.catch_warnings(action="ignore"):  # of rows that repeat another, which this set tells itself
                rows = read_rows(basic.model_copy(update={"on_bad_sample": "skip"}), roles=self._roles)
        except DataError as error:
            return [replace(problem, way_out="") for problem in error.problems]
        return row_changes(self._store.records, skipped, rows)

    def _check_preprocessing(self, settings: SizeSettings) -> None:
        """Features are what they are: other settings in the YAML would be ignored in silence."""
        if not settings.is_set:
            return
        known = self._store.preprocessing
        if known is None:
            self._check_sizes(settings)
            return
        problems = []
        for problem in differences(SizeSettings.noted(known), settings, self._adapter.geometry):
            problems.append(replace(problem, where=str(self._folder), way_out=problem.way_out or _OTHERS))
        if problems:
            raise DataError("the features were made with other settings than the configuration has", problems=problems)

    def _check_pairs(self) -> None:
        for record in self._records:
            if REJECTED_LATENTS not in record.tensors:
                raise DataError(
                    "the features hold no rejected sides, and stage is rm",
                    where=str(self._folder),
                    key=_KEY,
                    way_out="Extract rows with file_rejected by this configuration into another folder.",
                )

    def _check_sizes(self, settings: SizeSettings) -> None:
        """All that can be told of features that do not say how they were made."""
        buckets = Buckets(settings, self._adapter.geometry)
        others = [size for size in dict.fromkeys(self.sizes) if not buckets.takes(size)]
        if others:
            asked = ", ".join(map(str, buckets.sizes[:_PROBLEMS_SHOWN]))
            found = ", ".join(map(str, others[:_PROBLEMS_SHOWN]))
            raise DataError(
                f"holds samples of {found}; asked for are {asked}", where=str(self._folder), key=_KEY, way_out=_OTHERS
            )

    def _warn_of_duplicates(self) -> None:
        twice = len(self._records) - len({record.key for record in self._records})
        if twice:
            verb = by_count(twice, "repeats", "repeat")
            warnings.warn(f"{twice} of {len(self)} samples {verb} another: in an epoch they share noise", stacklevel=2)

    def _warn_of_captions(self) -> None:
        cut, empty = 0, []
        for record in self._records:
            cut += record.cut_captions > 0
            if not all(map(str.strip, record.captions)):
                empty.append(record.place)
        if note := empty_captions_note(empty, len(self)):
            warnings.warn(note, stacklevel=2)
        if cut:
            verb = by_count(cut, "has", "have")
            warnings.warn(
                f"{cut} of {len(self)} samples {verb} a caption that the text encoder did not read to its end",
                stacklevel=2,
            )


# --- rows that differ from those of the features ----------------------------------------------------------------------


_SHOWN = 5
_SHOWN_CHARACTERS = 60

_Said = str | tuple[str, tuple[str, ...]]
"""Digest of the row; of older feature sets medium and captions."""


@dataclass(frozen=True)
class _Row:
    """A row then or now."""

    place: str
    path: str
    captions: tuple[str, ...] | None
    """None: not known, of a row that was skipped."""
    said: _Said


def row_changes(
    records: Sequence[FeatureRecord], skipped: Sequence[SkippedRow], rows: Iterable[GenerationRow]
) -> list[Problem]:
    """Rows that were removed, added, changed or put into another order: one problem each, the first five, and how many
    there are.

    Args:
        records: Of the feature set.
        skipped: Of the feature set. What was skipped before it had a number may be back or not.
        rows: As they are now.
    """
    has_digests = all(record.said for record in records)
    then = _rows_then(records, skipped, has_digests)
    unusable = {row.place for row in skipped if row.row is None or not row.said}
    now = [_row_now(row, has_digests) for row in rows]
    said_then, said_now = [row.said for row in then], [row.said for row in now]
    before, today = Counter(said_then), Counter(said_now)
    # A difference of counters: of three equal rows then and two now, one was removed.
    removed = _surplus(then, before - today)
    added = [row for row in _surplus(now, today - before) if row.place not in unusable]
    problems = list(_changed_rows(removed, added))
    if not problems and said_then != list(filter(before.__contains__, said_now)):
        problems = [Problem("the rows are the same, but in a different order", then[0].place)]
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        problems = [*problems[:_SHOWN], Problem(f"… and {more} more rows differ", count=more)]
    return problems


def _rows_then(records: Sequence[FeatureRecord], skipped: Sequence[SkippedRow], has_digests: bool) -> list[_Row]:
    """Encoded and skipped rows in their order; rows skipped by an older version cannot be compared."""
    numbered: list[tuple[int, _Row]] = []
    for record in records:
        row = _Row(record.place, record.path, record.captions, _said_of_record(record, has_digests))
        numbered.append((record.row, row))
    for left_out in skipped:
        if has_digests and left_out.row is not None and left_out.said:
            numbered.append((left_out.row, _Row(left_out.place, left_out.path, None, left_out.said)))
    numbered.sort(key=lambda pair: pair[0])
    return [row for _, row in numbered]


def _said_of_record(record: FeatureRecord, has_digests: bool) -> _Said:
    if has_digests:
        return record.said
    return (record.path, record.captions)


def _row_now(row: GenerationRow, has_digests: bool) -> _Row:
    said: _Said = (row.name, row.captions)
    if has_digests:
        said = row.digest
    return _Row(str(row.place), row.name, row.captions, said)


def _surplus(rows: Sequence[_Row], counts: Counter[_Said]) -> list[_Row]:
    """So many of the rows that say something, the last ones of their kind."""
    left, found = Counter(counts), list[_Row]()
    for row in reversed(rows):
        if left[row.said] > 0:
            left[row.said] -= 1
            found.append(row)
    return found[::-1]


def _changed_rows(removed: Sequence[_Row], added: Sequence[_Row]) -> Iterable[Problem]:
    """A removed and an added row of one medium are one that was changed."""
    by_path: dict[str, list[_Row]] = {}
    for row in added:
        by_path.setdefault(row.path, []).append(row)
    for row in removed:
        successors = by_path.get(row.path)
        if successors:
            yield _changed(row, successors.pop(0))
        else:
            yield Problem(f"the row of '{row.path}' was removed", row.place)
    for successors in by_path.values():
        for row in successors:
            yield Problem(f"the row of '{row.path}' was added: it has no features", row.place)


def _changed(then: _Row, now: _Row) -> Problem:
    if then.captions is None or then.captions == now.captions:
        return Problem(f"fields of '{now.path}' other than its caption have changed", now.place)
    return Problem(
        f"the caption of '{now.path}' was {_shown_caption(then.captions)}, is {_shown_caption(now.captions or ())}",
        now.place,
    )


def _shown_caption(captions: tuple[str, ...]) -> str:
    text = repr(list(captions))
    if len(captions) == 1:
        text = repr(captions[0])
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}…"
