"""One feature set from its rows: begun or taken up again, verified, encoded, finished."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import DataError, StoppedAfterSave
from mindspeed_mm.core.garbage import passed_over_by_collection
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.data.datasets.generation.media_marks import MediaMarks
from mindspeed_mm.fsdp.data.datasets.generation.pair_rows import roles_of_rows
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.data.datasets.generation.sizes import SizeSettings
from mindspeed_mm.fsdp.data.feature_store.description import (
    Description,
    FeatureSetContents,
    check_same_work,
    measure_components,
    read_description,
)
from mindspeed_mm.fsdp.data.feature_store.feature_file import DamagedFile, Verification, check_file, write_feature_file
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder, FinishedWork, read_skipped, write_index
from mindspeed_mm.fsdp.data.feature_store.writer import SHARD_BYTES, FeatureWriter, ShardBuilder, explained
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.params.data_args import BasicParameters, PreprocessParameters
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.extract.batches import BatchEncoder, Survey, WorkBatch, decoded_ahead
from mindspeed_mm.tasks.extract.growth import WorkPlan, plan_work
from mindspeed_mm.tasks.extract.limits import FEATURES_KEY, BadRows, check_room, room_warning

_LIBRARIES = ("torch", "diffusers", "transformers", "safetensors")
_POLL_S = 0.2


@dataclass(frozen=True)
class ExtractOptions:
    """What the command line adds to a configuration."""

    batch_size: int | None = None
    """Samples encoded at a time; None: as before, or by their pixels."""
    dtype: str | None = None
    """That encoders compute in: `bf16`, `fp32`; None: as the folder stores them."""
    overwrite: bool = False
    """Forget the features that are there."""
    verify: Verification = "hash"
    """How closely features that are there are looked at."""
    threads: int = 2
    """That decode media."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class ExtractOutcome:
    """What became of a set."""

    out: str
    samples: int
    """Rows with features."""
    skipped: int
    """Rows that could not be used; `skipped.jsonl` lists them."""
    kept: int
    """Of these, rows that an earlier start had done."""
    damaged: tuple[str, ...]
    """Files that were found damaged and made again."""
    seconds: float
    samples_per_s: float
    """While encoding: without the start, with everything that is written."""
    cut_captions: int = 0
    """Samples with a caption of which the text encoder did not read the end; the index counts them by row."""
    empty_captions: int = 0
    """Samples with an empty caption."""

    def sentence(self) -> str:
        """Return a sentence about the set: samples, speed, rows kept or skipped, and captions cut or empty."""
        told = f"{self.out}: {self.samples} samples"
        if self.kept:
            told += f", {self.kept} rows were already done"
        if self.samples_per_s:
            told += f" ({self.samples_per_s:.1f} samples/s)"
        if self.skipped:
            told += f"; {self.skipped} rows were skipped, see {self.out}/skipped.jsonl"
        if self.cut_captions:
            told += f"; {self.cut_captions} samples have a caption that the text encoder did not read to its end"
        if self.empty_captions:
            told += f"; {self.empty_captions} samples have an empty caption"
        return told


class Encoders:
    """The frozen encoders, loaded when something is to be encoded.

    Args:
        adapter: Of the folder.
        device: Where they run.
        dtype: `bf16`, `fp32`; None: as stored.
    """

    def __init__(self, adapter: DiffusionAdapter, device: torch.device, dtype: str | None) -> None:
        self.adapter, self._device, self._dtype = adapter, device, dtype

    @property
    def precision(self) -> str | None:
        """Type and quantisation that the encoders run in, as `Description.dtype` records them; None: as stored."""
        kind = self.adapter.quantize_encoders
        if kind is None:
            return self._dtype
        return f"{self._dtype or 'as stored'}, encoders in {kind}"

    @cached_property
    def encode(self) -> BatchEncoder:
        """Encoder of decoded batches into features; the first access loads the models onto the device."""
        pipeline = load_encoders(self.adapter, self._device, torch_dtype(self._dtype))
        return BatchEncoder(self.adapter, pipeline, self._device)


def locked_for_work(folder: FeatureFolder, ranks: Ranks) -> AbstractContextManager[None]:
    """Keep other extractions out of a folder, on the first rank for all.

    Raises:
        MachineError: Another one is at work there, or nothing can be written.
    """
    if not ranks.is_first:
        return nullcontext()
    folder.check()  # before the lock is written there
    return RunFolder(folder.path, FEATURES_KEY).lock(f"extract-{uuid.uuid4().hex[:8]}")


def drop_damaged(folder: FeatureFolder, verify: Verification, ranks: Ranks, progress: WorkProgress) -> tuple[str, ...]:
    """Take away what is damaged, each rank its share, and wait for the others.

    Returns:
        This rank's files that were taken away.
    """
    files = []
    for error in folder.drop_damaged(verify, ranks.rank, ranks.world_size):
        problem = error.problems[0]
        progress.note(f"{problem.where}  {problem.what}: it is extracted again")
        files.append(problem.where)
    ranks.gather(None)
    return tuple(files)


class SetExtraction:
    """Makes one feature set.

    Args:
        folder: Where to.
        basic: Which rows, and what happens to bad ones.
        preprocess: To which sizes they are brought.
        encoders: What encodes them.
        ranks: Who works.
        options: What the command line adds.
        stop: Whether somebody wants an end.
        stream: Where people look.
    """

    def __init__(
        self,
        folder: Path,
        basic: BasicParameters,
        preprocess: PreprocessParameters,
        encoders: Encoders,
        *,
        ranks: Ranks,
        options: ExtractOptions,
        stop: StopSignal,
        stream: TextIO,
    ) -> None:
        self.folder = FeatureFolder(folder)
        self._encoders, self._adapter = encoders, encoders.adapter
        self._settings = SizeSettings.read(preprocess, self._adapter.frames_per_second)
        self._ranks, self._is_first = ranks, ranks.rank == 0
        self._options, self._stop = options, stop
        self._progress = WorkProgress(stream=stream, rank=ranks.rank, world_size=ranks.world_size)
        self._marks = MediaMarks.read(self.folder.marks)
        self._source = RawSource(
            basic,
            preprocess,
            self._adapter.geometry,
            self._marks,
            roles=roles_of_rows(self._adapter.media_roles, basic),
            sound=self._adapter.sound,
            reads_fps=self._adapter.reads_fps,
            model_fps=self._adapter.frames_per_second,
        )
        # the source takes sizes of untouched media from the marks, and knows afterwards what is there now
        self._now = Survey.of(self._source)
        self._plans: dict[tuple[int, int | None], WorkPlan] = {}
        self._bad = BadRows(basic, self._source.left_out, len(self._source))

    def run(self) -> ExtractOutcome | None:
        """Make the set, or what is missing of it; None on all ranks but the first.

        Raises:
            StoppedAfterSave: A signal asked for an end; run again to go on.
            DataError: Rows are off, or something else made what is there.
            MachineError: The folder is in use, cannot be written, or the disk is full.
        """
        began = time.monotonic()
        with locked_for_work(self.folder, self._ranks), explained(self.folder):
            self._prepare()
            damaged = drop_damaged(self.folder, self._options.verify, self._ranks, self._progress)
            self._begin()
            missing = self._find_missing()
            self._ranks.gather(None)  # all have looked before the first one writes
            encode = self._load_encoders(missing)
            with passed_over_by_collection():
                encoding_s = self._encode(encode, missing)
                if not self._is_first:
                    return None
                contents = self._finish()
        encoded = _rows(missing)
        # the list also has rows that earlier starts have skipped
        asked = {row for batch in missing for row in batch.rows}
        skipped_now = sum(row.row in asked for row in read_skipped(self.folder.skipped))
        return ExtractOutcome(
            out=str(self.folder.path),
            samples=contents.samples,
            skipped=contents.skipped,
            kept=contents.samples - (encoded - skipped_now),
            damaged=damaged,
            seconds=round(time.monotonic() - began, 3),
            samples_per_s=round(encoded / encoding_s, 2) if encoded else 0.0,
            cut_captions=contents.cut_captions,
            empty_captions=contents.empty_captions,
        )

    # --- before the work ---------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """A folder to work in."""
        if self._is_first:
            # under the lock: another extraction may be at work on what is to be forgotten
            if self._options.overwrite:
                self.folder.clear()
                self._marks = MediaMarks()
            self.folder.prepare()
            if self.folder.description.is_file():
                before = read_description(self.folder.description)
                check_same_work(before, self._describe(before), self.folder.description)
        self._ranks.gather(None)

    def _begin(self) -> None:
        """Settle what is to be done, and how rows are dealt into batches."""
        if self._is_first:
            description = self._settle()
            description.write(self.folder.description)
            self.folder.open_work()
        self._ranks.gather(None)
        self._description = read_description(self.folder.description)
        if self._description.rows_fingerprint != self._now.fingerprint:
            raise DataError("this rank reads different rows than rank 0", where=str(self.folder.path))
        self._plan = self._plan_from(self._description.first_batch, self._description.batch_size)
        if self._plan.digest != self._description.plan:
            raise DataError("this rank finds other features than rank 0", where=str(self.folder.path))
        self._batches = self._plan.batches
        self._ranks.gather(None)  # all have looked at what is there before it is changed
        if self._is_first:  # of what has changed the older mark stays until its features are there
            self._marks.with_new(self._now.media).write(self.folder.marks)

    def _settle(self) -> Description:
        """What is done now: what was begun, or, where rows, media or sizes are others, what they add to it."""
        if not self.folder.description.is_file():
            return self._describe(None)
        before = read_description(self.folder.description)
        now = self._describe(before)
        first = before.first_batch
        has_same_rows = now.rows_fingerprint == before.rows_fingerprint and self._marks.has_same(self._now.media)
        # Frames, cuts and mirrored views change what is made of a row whose size stays.
        is_same = has_same_rows and SizeSettings.noted(before.preprocessing) == self._settings
        if is_same and self._plan_from(first, now.batch_size).digest == before.plan:
            return replace(
                before,
                model_folder=now.model_folder,
                components=now.components,
                format_version=now.format_version,
            )
        first = self.folder.next_batch
        # training that begins now is told that the set is not done, instead of reading half of it
        self.folder.index.unlink(missing_ok=True)
        return replace(now, first_batch=first, plan=self._plan_from(first, now.batch_size).digest)

    def _plan_from(self, first: int, batch_size: int | None) -> WorkPlan:
        """See `plan_work`; what is there of earlier work does not change while a set is made."""
        if (first, batch_size) not in self._plans:
            reads_media = self._adapter.task in self._adapter.text_reads_media
            plan = plan_work(self._source, self.folder, first, self._marks, self._now, batch_size, reads_media)
            self._plans[first, batch_size] = plan
        return self._plans[first, batch_size]

    def _describe(self, before: Description | None) -> Description:
        components, batch_size = None, self._options.batch_size
        if before is not None:
            components, batch_size = before.components, batch_size or before.batch_size
        return Description(
            family=self._adapter.transformer_class,
            task=self._adapter.task,
            geometry=asdict(self._adapter.geometry),
            model_folder=str(self._adapter.folder.absolute()),
            components=measure_components(self._adapter, components),
            preprocessing=asdict(self._settings),
            dtype=self._encoders.precision,
            batch_size=batch_size,
            rows=len(self._source),
            rows_fingerprint=self._now.fingerprint,
            component_configs={"vae": self._adapter.component_config("vae")},
            versions={"mindspeed-mm": __version__, **{name: _version(name) for name in _LIBRARIES}},
        )

    def _find_missing(self) -> list[WorkBatch]:
        done = self.folder.done()
        # numbered alike on every rank, so a start with more or fewer ranks goes on with what is left
        missing = [batch for batch in self._batches if batch.number not in done]
        check_room(self.folder.path, missing, self._adapter.geometry)
        return missing

    # --- the work ----------------------------------------------------------------------------------------------------

    def _load_encoders(self, missing: Sequence[WorkBatch]) -> BatchEncoder | None:
        """Those of this rank; None where it has nothing to encode. The first rank sees to the empty caption."""
        if self._is_first:
            try:
                check_file(self.folder.null_text, "hash")
            # missing or damaged: it belongs to every row, so it is made before them
            except DamagedFile:
                write_feature_file(self.folder.null_text, self._encoders.encode.encode_empty())
        if self._own(missing):
            return self._encoders.encode
        return None

    def _own(self, missing: Sequence[WorkBatch]) -> Sequence[WorkBatch]:
        return missing[self._ranks.rank :: self._ranks.world_size]

    def _encode(self, encode: BatchEncoder | None, missing: Sequence[WorkBatch]) -> float:
        """This rank's share of the batches; the first rank makes shards on the way.

        Args:
            encode: From `_load_encoders`.
            missing: Of all ranks.

        Returns:
            Seconds that it took.
        """
        shards = None
        if self._is_first:
            first = self._description.first_batch
            shards = ShardBuilder(self.folder, len(self._batches), self._options.shard_bytes, first=first)
        began = time.monotonic()
        if encode is not None:
            self._encode_batches(encode, self._own(missing), shards, to_come=_rows(missing))
        if shards is not None:
            self._await_others(shards)
        return time.monotonic() - began

    def _encode_batches(
        self, encode: BatchEncoder, batches: Sequence[WorkBatch], shards: ShardBuilder | None, to_come: int
    ) -> None:
        self._progress.begin(_rows(batches))
        with (
            FeatureWriter(self.folder, shards) as writer,
            decoded_ahead(self._source, batches, self._options.threads) as decoded,
        ):
            for batch in decoded:
                self._raise_if_stopped()
                tensors = encode(batch)
                self._bad.add(batch.skipped)
                writer.add(batch.number, tensors, batch.records, batch.skipped)
                self._progress.advance(len(batch.records) + len(batch.skipped))
                if batch.number == batches[0].number:
                    # The first batch shows how much space a sample takes.
                    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
                    warning = room_warning(self.folder.path, size_bytes / max(len(batch.records), 1), to_come)
                    if warning is not None:
                        self._progress.note(warning)
        self._progress.end()

    def _await_others(self, shards: ShardBuilder) -> None:
        """Make shards until every batch is in one."""
        everything = {batch.number for batch in self._batches}
        shards.compact()
        while not everything <= self.folder.done():
            self._raise_if_stopped()
            time.sleep(_POLL_S)
            shards.compact()
        shards.compact()

    def _finish(self) -> FeatureSetContents:
        """The index and the list of skipped rows: with them the set is done."""
        work = FinishedWork.read(self.folder, self._description.first_batch)
        self._bad.recount(work.skipped)
        self._now.media.write(self.folder.marks)
        contents = write_index(self.folder, self._description, self._bad.unreadable, self._plan.kept, work)
        self.folder.drop_work()
        return contents

    def _raise_if_stopped(self) -> None:
        if not self._stop.requested:
            return
        done = self.folder.done()
        samples = len(self._plan.kept) + _rows([batch for batch in self._batches if batch.number in done])
        raise StoppedAfterSave(
            f"stopped: {samples} of {len(self._source)} samples are done",
            where=str(self.folder.path),
            way_out="Run the same command again to continue.",
        )


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"  # that is an error once an encoder is loaded


def _rows(batches: Sequence[WorkBatch]) -> int:
    return sum(len(batch.rows) for batch in batches)
