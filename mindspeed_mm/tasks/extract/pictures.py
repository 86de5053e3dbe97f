"""Features of pictures in rows of models that answer and draw: every picture that has latents, once for each size.

What is done is known by what it was made of, so that work goes on with whatever is missing: after a kill, and when rows
or sizes have changed. Ranks read the rows in turn, tell one another what they found, and take batches in turn.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from mindspeed_mm.core.errors import DataError, ModelFolderError, StoppedAfterSave
from mindspeed_mm.core.garbage import passed_over_by_collection
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.data.build import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.bagel.features import TASK, picture_key
from mindspeed_mm.fsdp.data.feature_store.description import (
    Description,
    check_same_work,
    measure_files,
    read_description,
)
from mindspeed_mm.fsdp.data.feature_store.feature_file import FeatureRecord, SkippedRow, tensor_name
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder, FinishedWork, write_index
from mindspeed_mm.fsdp.data.feature_store.writer import FeatureWriter, ShardBuilder, explained
from mindspeed_mm.fsdp.models.diffusion.picture_vae import FLUX_LATENTS, PictureVAE, vae_files, without_vae
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.extract.feature_set import ExtractOptions, ExtractOutcome, drop_damaged, locked_for_work
from mindspeed_mm.tasks.extract.limits import BadRows, room_warning

_AT_ONCE = 8
"""Pictures of a batch, which a kill loses together, where the command line does not say."""
_POLL_S = 0.2


class _Picture(NamedTuple):
    """A picture that is to be encoded."""

    row: int
    number: int
    """Among the pictures of its row that have latents."""
    place: str
    height: int
    width: int


_Decoded = tuple[str, torch.Tensor] | SkippedRow
"""Key and pixels of a picture; what is wrong with one that cannot be read."""


class PictureExtraction:
    """Makes one feature set.

    Args:
        folder: Where to.
        param: The section, with raw rows.
        model_folder: With the VAE.
        device: Where that runs.
        ranks: Who works.
        options: What the command line adds.
        stop: Whether somebody wants an end.
        stream: Where people look.

    Raises:
        ModelFolderError: There is no VAE.
        MMError: Rows or settings are off.
    """

    def __init__(
        self,
        folder: Path,
        param: DatasetParam,
        model_folder: Path,
        device: torch.device,
        *,
        ranks: Ranks,
        options: ExtractOptions,
        stop: StopSignal,
        stream: TextIO,
    ) -> None:
        self.folder, self._model_folder, self._device = FeatureFolder(folder), model_folder, device
        self._ranks, self._options, self._stop = ranks, options, stop
        self._progress = WorkProgress("pictures", stream, rank=ranks.rank, world_size=ranks.world_size)
        config = read_json_object(model_folder / "config.json", ModelFolderError)
        self._latents: JsonObject = FLUX_LATENTS | (config.get("vae_config") or {})
        self._architecture = str((config.get("architectures") or [config.get("model_type")])[0])
        self._dataset: Any = build_mm_dataset(param)[0].origin
        self._bad = BadRows(param.basic_parameters, {}, len(self._dataset))

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
            wanted, unreadable = self._find_pictures()
            known = self._known()
            missing = [picture for key, picture in wanted.items() if key not in known]
            batches = self._deal(missing)
            description = self._describe(wanted)
            self._ranks.gather(None)  # all have looked at what is there before it is changed
            if self._ranks.is_first:
                self.folder.index.unlink(missing_ok=True)
                description.write(self.folder.description)
                self.folder.open_work()
            self._ranks.gather(None)
            encoding_s = self._encode(batches)
            if not self._ranks.is_first:
                return None
            work = FinishedWork.read(self.folder, 0)
            self._bad.recount([*unreadable, *work.skipped])
            contents = write_index(self.folder, description, unreadable, work=work)
            self.folder.drop_work()
        return ExtractOutcome(
            out=str(self.folder.path),
            samples=contents.samples,
            skipped=contents.skipped,
            kept=contents.samples - len(missing),
            damaged=damaged,
            seconds=round(time.monotonic() - began, 3),
            samples_per_s=round(len(missing) / encoding_s, 2) if missing else 0.0,
        )

    # --- before the work ---------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._ranks.is_first:
            if self._options.overwrite:
                self.folder.clear()
            self.folder.prepare()
            if self.folder.description.is_file():
                before = read_description(self.folder.description)
                check_same_work(before, self._describe({}, before), self.folder.description)
        self._ranks.gather(None)

    def _find_pictures(self) -> tuple[dict[str, _Picture], list[SkippedRow]]:
        """Pictures of all rows by their keys, each where it comes first; rows that cannot be used."""
        own: list[tuple[str, _Picture]] = []
        skipped: list[SkippedRow] = []
        # to know what a picture is its file is read whole, so each rank takes a share of the rows
        for row in range(self._ranks.rank, len(self._dataset), self._ranks.world_size):
            self._raise_if_stopped()
            place = str(self._dataset.place(row))
            try:
                for number, source in enumerate(self._dataset.latent_sources(row)):
                    content, size = self._dataset.latent_picture(source)
                    own.append((picture_key(content, size), _Picture(row, number, place, *size)))
            except DataError as error:
                skipped.append(SkippedRow(row, place, "", str(error)))
        found, bad = [], []
        for pictures, rows in self._ranks.gather((own, skipped)):
            found += pictures
            bad += rows
        self._bad.add(bad)
        wanted: dict[str, _Picture] = {}
        # by row and number, whichever rank has read it: every rank deals the same batches
        for key, picture in sorted(found, key=lambda each: each[1]):
            wanted.setdefault(key, picture)
        return wanted, bad

    def _known(self) -> set[str]:
        """Keys of the features that are there."""
        keys: set[str] = set()
        for path in self.folder.files():
            keys |= {record.key for record in self.folder.facts(path)[0].records}
        return keys

    def _deal(self, missing: Sequence[_Picture]) -> dict[int, Sequence[_Picture]]:
        """Pictures by number of batch: first the numbers that a kill has left out, some of which may stay empty."""
        size = self._options.batch_size or _AT_ONCE
        todo = [missing[start : start + size] for start in range(0, len(missing), size)]
        done = self.folder.done()
        # shards are made of batches that follow one another: a number never written holds up all behind it
        holes = [number for number in range(self.folder.next_batch) if number not in done]
        free = (number for number in count() if number not in done)
        numbers = list(islice(free, max(len(todo), len(holes))))
        return dict(zip(numbers, [*todo, *[()] * (len(numbers) - len(todo))], strict=True))

    def _describe(self, wanted: dict[str, _Picture], before: Description | None = None) -> Description:
        files = vae_files(self._model_folder)
        if not files:
            raise without_vae(self._model_folder)
        if before is None and self.folder.description.is_file():
            before = read_description(self.folder.description)
        return Description(
            family=self._architecture,
            task=TASK,
            geometry={"latent_channels": self._latents["z_channels"], "spatial_ratio": self._latents["downsample"]},
            model_folder=str(self._model_folder.absolute()),
            components=measure_files(self._model_folder, {"vae": files}, None if before is None else before.components),
            preprocessing={},
            dtype=self._options.dtype or "fp32",
            batch_size=None,
            rows=len(wanted),
            rows_fingerprint=hashlib.sha256(repr(sorted(wanted)).encode()).hexdigest(),
            versions={"mindspeed-mm": __version__, "torch": torch.__version__},
        )

    # --- the work ----------------------------------------------------------------------------------------------------

    def _encode(self, batches: dict[int, Sequence[_Picture]]) -> float:
        """This rank's share of the batches; the first rank makes shards on the way. Seconds that it took."""
        everything = self.folder.done() | batches.keys()
        self._ranks.gather(None)  # of what was there all know before the first batch is written
        shards = None
        if self._ranks.is_first:
            shards = ShardBuilder(self.folder, len(everything), self._options.shard_bytes)
        mine = dict(list(batches.items())[self._ranks.rank :: self._ranks.world_size])
        began = time.monotonic()
        if mine:
            self._encode_batches(mine, shards)
        if shards is not None:
            shards.compact()
            while not everything <= self.folder.done():
                self._raise_if_stopped()
                time.sleep(_POLL_S)
                shards.compact()
            shards.compact()
        return time.monotonic() - began

    def _encode_batches(self, mine: dict[int, Sequence[_Picture]], shards: ShardBuilder | None) -> None:
        dtype = torch_dtype(self._options.dtype or "fp32")
        assert dtype is not None
        sizes = self._latents["z_channels"], self._latents["downsample"]
        vae = PictureVAE(self._model_folder, *sizes, self._device, dtype)
        pictures = [picture for of_batch in mine.values() for picture in of_batch]
        self._progress.begin(len(pictures))
        with (
            passed_over_by_collection(),
            FeatureWriter(self.folder, shards) as writer,
            ThreadPoolExecutor(self._options.threads) as pool,
        ):
            decoded = self._decoded(pictures, pool)
            for number, of_batch in mine.items():
                self._raise_if_stopped()
                tensors: dict[str, torch.Tensor] = {}
                records: list[FeatureRecord] = []
                skipped: list[SkippedRow] = []
                # `decoded` goes on into the next batch; behind `of_batch` it loses no picture where that ends
                for picture, found in zip(of_batch, decoded, strict=False):
                    if isinstance(found, SkippedRow):
                        skipped.append(found)
                        continue
                    key, pixels = found
                    tensors[tensor_name(key, "latents")] = vae.posterior(pixels).contiguous()
                    size = MediaSize(1, picture.height, picture.width)
                    records.append(FeatureRecord(picture.row, key, picture.place, "", (), size))
                self._bad.add(skipped)
                writer.add(number, tensors, records, skipped)
                self._progress.advance(len(of_batch))
                if records and number == next(iter(mine)):
                    each = sum(tensor.nbytes for tensor in tensors.values()) / len(records)
                    if warning := room_warning(self.folder.path, each, len(pictures)):
                        self._progress.note(warning)
        self._progress.end()

    def _decoded(self, pictures: Sequence[_Picture], pool: ThreadPoolExecutor) -> Iterator[_Decoded]:
        """Of each picture, a few ahead of the one that is asked for."""
        # `pool.map` would decode all at once, and hold all pixels
        ahead = 2 * self._options.threads
        waiting: list[Future[_Decoded]] = []
        for picture in pictures:
            waiting.append(pool.submit(self._decode, picture))
            if len(waiting) > ahead:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()

    def _decode(self, picture: _Picture) -> _Decoded:
        try:
            source = self._dataset.latent_sources(picture.row)[picture.number]
            content, size = self._dataset.latent_picture(source)
            return picture_key(content, size), self._dataset.latent_pixels(source)
        except DataError as error:
            return SkippedRow(picture.row, picture.place, "", str(error))

    def _raise_if_stopped(self) -> None:
        if self._stop.requested:
            raise StoppedAfterSave(
                f"stopped: the features of {len(self._known())} pictures are done",
                where=str(self.folder.path),
                way_out="Run the same command again to continue.",
            )
