"""Rows with their media: sized at start without decoding, read as pixels when they are asked for."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from pathlib import PurePath
from typing import Any

import torch

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize, SoundGeometry
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import probe_audio, read_stretch
from mindspeed_mm.fsdp.data.data_utils.decoding.video import VideoHeader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaKind, RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.captions import (
    CaptionRules,
    drawn_caption,
    drawn_view,
    repeated_id,
)
from mindspeed_mm.fsdp.data.datasets.generation.media_marks import (
    HeaderCache,
    MediaMarks,
    doubled_note,
    rates_note,
    scaling_notes,
    stills_note,
)
from mindspeed_mm.fsdp.data.datasets.generation.pixels import (
    MediaHeader,
    SampleDescription,
    is_video,
    media_pixels,
    probe_media,
    probe_times,
)
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow
from mindspeed_mm.fsdp.data.datasets.generation.row_files import open_row_files
from mindspeed_mm.fsdp.data.datasets.generation.rows import build_media_loader, content_key, media_digest, read_rows
from mindspeed_mm.fsdp.data.datasets.generation.sizes import (
    SizeSettings,
    buckets_of,
)
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED, SOUND, TARGET, MediaRole
from mindspeed_mm.fsdp.params.data_args import BasicParameters, PreprocessParameters

_PROBING_THREADS = 16
_PROBED_AT_ONCE = 4096
_PROBLEMS_SHOWN = 10
_SAME_RATE = 0.01
"""Frames a second are rounded in most lists."""
_MAY_BE_ANIMATED = frozenset({".gif", ".webp", ".apng", ".avif", ".avifs"})
_WHITE = 255
_TAKEN = ("frame_interval", "clip_position", "short_clips", "crop", "flip")
"""Settings that decide, beside the frames a second, which pixels are taken of a medium for a size."""
_SHAPING_BASIC = {"max_samples", "on_bad_sample", "val_rate", "media_column", "caption_column", "data_storage_mode"} | {
    each.name for each in fields(CaptionRules)
}


class RawSource:
    """Captioned pictures and clips.

    Args:
        basic: Which rows.
        preprocess: To which sizes they are brought.
        geometry: What the model takes.
        marks: Of media that were looked into before.
        roles: Further media of a sample, `DiffusionAdapter.media_roles`.
        sound: What is made of the sound of clips, `DiffusionAdapter.sound`; None: it is not looked at.
        reads_fps: Whether the model is told how fast clips are, `DiffusionAdapter.reads_fps`.
        model_fps: Frames a second that the model makes, `DiffusionAdapter.frames_per_second`; None: any.

    Raises:
        DataError: Rows or headers are off and the policy is to stop, or too many are; a size suits no model.
        ConfigError: No rows, no size, or contradicting keys.
    """

    def __init__(
        self,
        basic: BasicParameters,
        preprocess: PreprocessParameters,
        geometry: MediaGeometry,
        marks: MediaMarks | None = None,
        roles: Sequence[MediaRole] = (),
        sound: SoundGeometry | None = None,
        reads_fps: bool = False,
        model_fps: float | None = None,
    ) -> None:
        self._known, self._roles = marks or MediaMarks(), tuple(roles)
        self._sound, self._reads_fps = sound, reads_fps
        self._basic, self._settings = basic, SizeSettings.read(preprocess, model_fps)
        self._geometry, self._sampling = geometry, self._settings.sampling
        files = open_row_files(basic)
        self._buckets = [buckets_of(preprocess, file, geometry, model_fps) for file in files]
        self.media = build_media_loader(basic, files)
        self.rows = read_rows(basic, self._declared, files, self._roles)
        self._has_prior = any(file.is_prior for file in self.rows.files)
        self.headers: list[MediaHeader] = []
        """What is known of each row's medium: what the row declares, else what the file says."""
        self.sizes = self._assign_sizes()
        """Size of each row's pixels."""
        self._check_left_out()
        self._warn_of_scaling()
        self._warn_of_rates(model_fps)
        self.seed = 0
        self._keys: dict[int, str] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> RowLocation:
        """Return where row `index` stands in its file, without reading it."""
        return self.rows.place(index)

    @property
    def left_out(self) -> dict[str, str]:
        """Place → reason, of rows that cannot be used."""
        return self.rows.left_out

    @property
    def repeats(self) -> list[int]:
        """How often an epoch reads each row."""
        return [self.repeats_of(index) for index in range(len(self))]

    @property
    def entries(self) -> list[str]:
        """The entry of `dataset` that each row belongs to."""
        return self.rows.entries()

    @property
    def is_prior(self) -> list[bool] | None:
        """Whether each row preserves the prior; None: none does."""
        files = self.rows.files
        if not self._has_prior:
            return None
        return [files[self.rows.file_number(row)].is_prior for row in range(len(self))]

    def repeats_of(self, index: int) -> int:
        """How often an epoch reads row `index`."""
        return self.rows.files[self.rows.file_number(index)].repeats

    def item(self, index: int, epoch: int, repeat: int = 0) -> JsonObject:
        """`sample_id`, `epoch`, `fps`, `caption`, `pixels`, (3, T, H, W) uint8, and the media of the roles.

        Args:
            index: Row.
            epoch: From 0.
            repeat: Which of its samples of an epoch.

        Raises:
            DataError: The medium is missing, refused, broken or too short.
        """
        row = self.rows[index]
        try:
            self._check_declared(index, row)
            sample_id = repeated_id(self.key(index, row), repeat)
            number = drawn_view(self.seed, epoch, sample_id, self.views)
            media = self._seen(index, row, number)
        except DataError as error:
            raise _error_at_row(row, error) from error
        item = {
            "sample_id": sample_id,
            "epoch": epoch,
            "fps": self.fps(index),
            "caption": row.captions[drawn_caption(self.seed, epoch, sample_id, len(row.captions))],
            "pixels": media[TARGET],
        }
        for role in self._roles:
            if role.name in media:
                item[role.batch_key] = media[role.name]
        if self._has_prior:
            item["is_prior"] = torch.tensor(row.is_prior)
        if row.scores:
            item["scores"] = torch.tensor(row.scores, dtype=torch.float64)
        return item

    def fps(self, index: int) -> float:
        """Frames a second of row `index` as it is shown; 0 of a picture, and where no model reads it."""
        header = self.headers[index]
        if not self._reads_fps or header.fps <= 0 or self.sizes[index].frames == 1:
            return 0.0
        return 1 / self._sampling.step_s(header.fps)

    def describe(self, index: int) -> SampleDescription:
        """What is known of a row and its medium, whose header is read where the row declares anything.

        Raises:
            DataError: The medium is missing, or the row is false about what decides its size.
        """
        row = self.rows[index]
        try:
            self._check_declared(index, row)
            found = self.contradiction(row)
            drawn = drawn_caption(self.seed, 0, self.key(index, row), len(row.captions))
        except DataError as error:
            raise _error_at_row(row, error) from error
        header, told = self.headers[index], ""
        if found is not None:
            header, told = found.header, found.what
        further = []
        for role, each in row.media_of_roles().items():
            further.append((role, _kind(role, each), each.media))
        own = row.media, row.captions, drawn, self.sizes[index], header, is_video(row)
        return SampleDescription(*own, tuple(further), told)

    def beside(self, row: GenerationRow) -> dict[str, tuple[Any, ...]]:
        """What `FeatureRecord.beside` notes of a row. Raises `DataError` where a medium is missing or broken."""
        found: dict[str, tuple[Any, ...]] = {}
        for role, each in row.media_of_roles().items():
            kind = _kind(role, each)
            found[role] = (kind,)
            if kind != "audio":
                found[role] = (kind, *astuple(probe_media(each, self.media)))
        return found

    @property
    def views(self) -> int:
        """How many views of a medium are trained on."""
        return self._settings.views

    def pixels(self, index: int, row: GenerationRow | None = None) -> dict[str, torch.Tensor]:
        """All views of row `index`, (views, 3, T, H, W) uint8: of the `target`, and of each role by its name. Raises
        `DataError` as `item`."""
        row = row or self.rows[index]
        try:
            self._check_declared(index, row)
            views = [self._seen(index, row, number) for number in range(self.views)]
            return {name: torch.stack([view[name] for view in views]) for name in views[0]}
        except DataError as error:
            raise _error_at_row(row, error) from error

    def _seen(self, index: int, row: GenerationRow, number: int) -> dict[str, torch.Tensor]:
        """One view of a row's media: all of them are scaled, cut and turned alike."""
        size, view = self.sizes[index], self._settings.view(self.digest(index, row).hex(), number)
        seen = {TARGET: media_pixels(row, size, self.media, self._sampling, view)}
        of_roles = row.media_of_roles()
        if REJECTED in self._roles:
            _check_same_size(self.headers[index], probe_media(of_roles[REJECTED.name], self.media))
        for role in self._roles:
            if role.frames == "sound":
                seen[role.name] = self._heard(index, row, of_roles.get(role.name, row))
            elif role.name in of_roles:
                of_role = size
                if role.frames != "all":
                    of_role = MediaSize(1, size.height, size.width)
                medium = of_roles[role.name], of_role, self.media, self._sampling, view
                seen[role.name] = media_pixels(*medium, is_whole=role.is_whole, repeats_still=role.repeats_still)
            elif role.is_white_by_default:
                seen[role.name] = torch.full_like(seen[TARGET], _WHITE)
            elif not role.is_optional:
                assert role.frame_of_target is not None  # rows without are refused when they are read
                at = role.frame_of_target % size.frames
                seen[role.name] = seen[TARGET][:, at : at + 1].clone()
        return seen

    def _heard(self, index: int, row: GenerationRow, heard: GenerationRow) -> torch.Tensor:
        """The sound of the frames that are taken, (channels, samples) float32: so many that each position is whole."""
        assert self._sound is not None
        size, video = self.sizes[index], probe_times(row, self.media)
        start_s, count = self._sampling.start_s(video, size.frames), size.sound * self._sound.samples_per_position
        wanted = (self._sound.sampling_rate, self._sound.channels, start_s, count, heard.name)
        # A file of its own begins with the pictures, wherever their clock begins.
        clock_s = None
        if isinstance(video, VideoHeader) and heard.media == row.media:
            clock_s = video.first_s
        with self.media.open(heard.media) as file:
            return torch.from_numpy(read_stretch(file, *wanted, clock_s=clock_s))

    def key(self, index: int, row: GenerationRow | None = None) -> str:
        """What the sample is, see `content_key`."""
        if index not in self._keys:
            row = row or self.rows[index]
            extras = dict(row.extras)
            if self.rows.files[self.rows.file_number(index)].sizes:
                extras["size"] = str(self.sizes[index])
            self._keys[index] = content_key(self.digest(index, row), row.captions, extras)
        return self._keys[index]

    def digest(self, index: int, row: GenerationRow | None = None) -> bytes:
        """`media_digest` of a row, of all its media where it has several; files are read for it once in each
        process."""
        if index not in self._digests:
            row = row or self.rows[index]
            found = self._digest_of(row)
            if row.roles:
                others = [(role, self._digest_of(each).hex()) for role, each in row.media_of_roles().items()]
                found = media_digest(repr((found.hex(), sorted(others))).encode())
            self._digests[index] = found
        return self._digests[index]

    def _digest_of(self, row: GenerationRow) -> bytes:
        with self.media.open(row.media) as file:
            digest = media_digest(file)
        return media_digest(digest + str(row.cut).encode()) if row.cut else digest

    def know_digest(self, index: int, digest: bytes) -> None:
        """The digest of a medium that nobody has touched since it was found."""
        self._digests[index] = digest

    def pixels_key(self, index: int) -> str:
        """What latents are made of: a function of the file, of the size, and of which frames and views are taken."""
        taken = {name: vars(self._settings)[name] for name in _TAKEN}
        taken["fps"] = self._sampling.taken_fps(self.headers[index].fps)
        said = (self.digest(index).hex(), str(self.sizes[index]), self.views, sorted(taken.items()))
        return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()

    def fingerprint(self) -> JsonObject:
        """What a resumed run compares: files of rows with their content, what shapes samples, and what decides their
        order: which rows could not be used at the start, and the sizes of the others."""
        basic = {name: self._basic.get(name) for name in sorted(_SHAPING_BASIC)}
        settings = {"basic_parameters": _plain(basic), "preprocess_parameters": _plain(vars(self._settings))}
        files = [file.facts(self._basic.cache_dir) for file in self.rows.files]
        order = (sorted(self.left_out), [(size.frames, size.height, size.width) for size in self.sizes])
        digest = hashlib.sha256(repr((settings, files, order)).encode()).hexdigest()
        return {"rows": len(self), "files": files, "settings": settings, "hash": digest}

    # --- sizes -------------------------------------------------------------------------------------------------------

    def _assign_sizes(self) -> list[MediaSize]:
        """Size of each row; rows whose medium has none are left out, or raise."""
        faults: dict[int, DataError] = {}
        sizes: list[MediaSize] = []
        for index, found in enumerate(self._headers()):
            try:
                if isinstance(found, DataError):
                    raise found
                sizes.append(self._size_of(index, found, f"the medium of {self.rows.place(index)}"))
                self.headers.append(found)
            except DataError as error:
                faults[index] = error
        if faults and self._basic.on_bad_sample == "error":
            problems: list[Problem] = []
            for fault in list(faults.values())[:_PROBLEMS_SHOWN]:
                problems += fault.problems
            raise DataError(f"the media of {len(faults)} of {len(self)} rows cannot be used", problems=problems)
        self.rows.leave_out({index: str(error) for index, error in faults.items()})
        return sizes

    def _size_of(self, index: int, header: MediaHeader, name: str = "the medium") -> MediaSize:
        """The bucket of a row with this header, with the length of its sound. Raises `DataError` as `Buckets.assign`,
        and for a picture where sound is learned."""
        size = self._buckets[self.rows.file_number(index)].assign(header, name)
        size = self._with_optional(size, index)
        if self._sound is None:
            return size
        if header.fps <= 0:
            raise DataError(f"{name} is a picture, which has no sound", way_out="Leave it out, or set model.task: t2v.")
        return replace(size, sound=self._sound.positions(size.frames, 1 / self._sampling.step_s(header.fps)))

    def _with_optional(self, size: MediaSize, index: int) -> MediaSize:
        """With what tells samples apart of which some lack media that others have: they share no micro-batch."""
        optional = [role for role in self._roles if role.is_optional and not role.is_white_by_default]
        if not optional:
            return size
        given = self.rows[index].roles.keys()
        pictures = sum(role.frames == "one" and role.name in given for role in optional)
        lacks_video = any(role.frames == "all" and role.name not in given for role in optional)
        return replace(size, pictures=pictures, lacks_video=lacks_video)

    def _headers(self) -> Iterator[MediaHeader | DataError]:
        """Of each row in turn; files are looked into by threads, many at a time."""
        cache = HeaderCache(self._basic.cache_dir, self.media.dataset_dir)
        declared, self.rows.looks = self.rows.looks, []
        with ThreadPoolExecutor(_PROBING_THREADS) as threads:
            for start in range(0, len(declared), _PROBED_AT_ONCE):
                headers: list[MediaHeader | Future[MediaHeader | DataError]] = []
                for index, header in enumerate(declared[start : start + _PROBED_AT_ONCE], start):
                    if header is None or self._sound is not None:
                        headers.append(threads.submit(self._probe, self.rows[index], header, cache))
                    else:
                        headers.append(header)
                for found in headers:
                    if isinstance(found, Future):
                        yield found.result()
                    else:
                        yield found
        cache.save()

    def _declared(self, row: GenerationRow) -> MediaHeader | None:
        """The header that a row declares, as far as it is needed; None: the file has to be asked."""
        if row.height is None or row.width is None:
            return None
        if not self._geometry.is_video or (row.num_frames == 1 and not is_video(row)):
            return MediaHeader(row.height, row.width)
        may_move = (
            is_video(row) or isinstance(row.media, bytes) or PurePath(row.media).suffix.lower() in _MAY_BE_ANIMATED
        )
        if not may_move:
            return MediaHeader(row.height, row.width)
        if row.num_frames is None or (row.fps is None and self._needs_rates):
            return None
        return MediaHeader(row.height, row.width, row.num_frames, row.fps or 1.0)

    @property
    def _needs_rates(self) -> bool:
        """Whether the frames a second of a clip decide what is made of it."""
        return self._reads_fps or self._sampling.fps is not None or self._sampling.model_fps is not None

    def contradiction(self, row: GenerationRow) -> Contradiction | None:
        """What a row declares of its medium and the file does not hold; None where both agree, or it declares nothing.

        Raises:
            DataError: The file is missing, refused or no medium.
        """
        if not row.declares:
            return None
        header = probe_media(row, self.media)
        declared = {"height": row.height, "width": row.width, "num_frames": row.num_frames, "fps": row.fps}
        found = {"height": header.height, "width": header.width, "num_frames": header.frames, "fps": header.fps}
        tolerance = {"fps": _SAME_RATE}
        told = []
        for name, value in declared.items():
            if value is None or (name == "fps" and header.frames == 1):
                continue
            if not math.isclose(value, found[name], rel_tol=tolerance.get(name, 0)):
                told.append(f"{name} {value:g}, the file has {found[name]:g}")
        if not told:
            return None
        return Contradiction(f"the row declares {'; '.join(told)}", header)

    def _check_declared(self, index: int, row: GenerationRow) -> None:
        """What a row declares is believed until its file is opened: a false declaration that has put it among samples
        of another size makes it a bad sample."""
        if self._declared(row) is None or (found := self.contradiction(row)) is None:
            return
        size = self.sizes[index]
        right = self._size_of(index, found.header)
        if right != size:
            raise DataError(
                f"{found.what}: it is a sample of {right}, not of {size}",
                way_out="Correct the row, or leave the declaration out: the file's own header is read then.",
            )

    def _warn_of_scaling(self) -> None:
        """How many media are changed much on the way to their size."""
        for note in scaling_notes(self.headers, self.sizes, self.place):
            warnings.warn(note, stacklevel=2)

    def _warn_of_rates(self, model_fps: float | None) -> None:
        """How many clips are resampled, shown faster or slower than the model makes them, or have frames repeated."""
        rates = []
        for header, size in zip(self.headers, self.sizes, strict=True):
            if header.fps > 0 and size.frames > 1:
                rates.append((header.fps, 1 / self._sampling.step_s(header.fps)))
        asked = []
        if not self._settings.keeps_lengths:
            asked = [size.frames for each in self._buckets for size in each.sizes]
        notes = [stills_note([header.fps <= 0 for header in self.headers], asked), doubled_note(rates)]
        if model_fps is not None:
            is_resampled = self._sampling.model_fps is not None
            told = [own if is_resampled else taken for own, taken in rates]
            notes.insert(0, rates_note(told, model_fps, is_resampled=is_resampled))
        for note in filter(None, notes):
            warnings.warn(note, stacklevel=2)

    def _probe(self, row: GenerationRow, declared: MediaHeader | None, cache: HeaderCache) -> MediaHeader | DataError:
        if known := self._known.header(row, self.media):  # its sound was read, too
            return declared or known
        header = declared or cache.get(row)
        try:
            if header is None:
                header = probe_media(row, self.media)
                cache.put(row, header)
            if self._sound is not None and header.fps > 0:
                self._probe_sound(row, self._sound)
        except DataError as error:
            return _error_at_row(row, error)
        return header

    def _probe_sound(self, row: GenerationRow, sound: SoundGeometry) -> None:
        """Raise `DataError` when there is no sound where a row's should be."""
        heard = row.media_of_roles().get(SOUND.name, row)
        with self.media.open(heard.media) as file:
            try:
                probe_audio(file, sound.sampling_rate, heard.name)
            except DataError as error:
                (problem, *_) = error.problems
                raise DataError(problem.what, way_out="Drop the row, or set model.task: t2v.") from error

    def _check_left_out(self) -> None:
        left_out, total = self.left_out, len(self) + len(self.left_out)
        if len(left_out) > math.ceil(self._basic.max_bad_fraction * total) or not len(self):
            raise DataError(
                f"{len(left_out)} of {total} samples are bad, more than {self._basic.max_bad_fraction:.3%}: repair "
                "them, or raise data.dataset_param.basic_parameters.max_bad_fraction",
                problems=[Problem(reason) for reason in list(left_out.values())[:_PROBLEMS_SHOWN]],
            )


@dataclass(frozen=True)
class Contradiction:
    """A row says otherwise of its medium than the file does."""

    what: str
    header: MediaHeader
    """What the file itself says of the medium."""


def _kind(role: str, row: GenerationRow) -> MediaKind:
    if role == SOUND.name:
        return "audio"
    if is_video(row):
        return "video"
    return "image"


def _check_same_size(chosen: MediaHeader, rejected: MediaHeader) -> None:
    """Raise `DataError` where the sides of a pair differ in size: they are given the same noise."""
    one = f"{chosen.height}×{chosen.width}×{chosen.frames}"
    other = f"{rejected.height}×{rejected.width}×{rejected.frames}"
    if one != other:
        raise DataError(
            f"the chosen side is {one} (height × width × frames), the rejected one {other}",
            key=REJECTED.columns[0],
            way_out="Pair media of one size.",
        )


def _error_at_row(row: GenerationRow, error: DataError) -> DataError:
    """The error with the row's place in front."""
    problem = error.problems[0]
    where = f"{row.place}  {problem.where}".strip()
    return DataError(problem.what, where=where, key=problem.key, way_out=problem.way_out)


def _plain(settings: Mapping[str, object]) -> JsonObject:
    """With lists in place of tuples, as JSON gives them back."""
    plain = dict(settings)
    for name, value in settings.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            plain[name] = list(value)
    return plain
