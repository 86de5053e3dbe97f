"""Buckets: the sizes that pictures and clips are brought to, and which of them a medium goes to.

A medium goes to the bucket with the nearest aspect, among those the nearest in area, among those the one with most
frames that it can fill.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeGuard

from mindspeed_mm.core.errors import ConfigError, DataError, Problem, told_as
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, too_short
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader, View
from mindspeed_mm.fsdp.data.datasets.generation.row_files import RowFile
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters

ASPECTS = (1 / 2, 9 / 16, 2 / 3, 3 / 4, 1.0, 4 / 3, 3 / 2, 16 / 9, 2.0)
"""Height over width of the buckets that are made of an area."""
_RANDOM_CUTS = 4
"""Views of a medium where `crop: random` does not say."""
LONGEST_CLIP = 81
"""Most frames of a clip when `num_frames` is not given."""

_KEY = "data.dataset_param.preprocess_parameters"
MUCH_ENLARGED = 2.0
"""Media that are enlarged more along a side are told of."""
MUCH_CUT = 1 / 3
"""So are those that lose a larger share of their area."""
_ROUNDING = 1e-9
_ENTRIES = "data.dataset_param.basic_parameters.dataset"
_PLANE_KEYS = ("height", "width", "buckets", "max_pixels")
_OWN_KEYS = (*_PLANE_KEYS, "num_frames")
"""What an entry of `dataset` may set for itself."""
_BUCKET = re.compile(r"(\d+)[x×](\d+)(?:[x×](\d+))?")


@dataclass(frozen=True)
class SizeSettings:
    """The keys of `preprocess_parameters` that decide about sizes and frames; see the card."""

    height: int | None = None
    width: int | None = None
    num_frames: int | Sequence[int] | None = None
    buckets: Sequence[str] | None = None
    max_pixels: int | None = None
    fps: float | None = None
    frame_interval: int = 1
    clip_position: Literal["start", "middle"] = "start"
    short_clips: str = "error"
    max_enlargement: float = 32.0
    max_cut: float = 0.75
    enlarge: bool = True
    crop: Literal["middle", "random"] = "middle"
    flip: bool = False
    variants: int | None = None
    model_fps: float | None = None
    """See `ClipSampling`."""

    @classmethod
    def read(
        cls, preprocess: PreprocessParameters | Mapping[str, object], model_fps: float | None = None
    ) -> SizeSettings:
        """Out of the configuration.

        Args:
            preprocess: The section.
            model_fps: Frames a second that the model makes; they count where the section chooses none.

        Raises:
            ConfigError: A value is of the wrong kind; all such are reported at once.
        """
        given = _given(preprocess)
        problems = [*_wrong_values(given), *_conflicts(given)]
        if problems:
            raise ConfigError("sizes cannot be read", problems=problems)
        if isinstance(given.get("buckets"), str):
            given["buckets"] = [part.strip() for part in given["buckets"].split(",")]
        if "fps" not in given and "frame_interval" not in given:
            given["model_fps"] = model_fps
        return cls(**_comparable(given))

    @classmethod
    def noted(cls, preprocessing: Mapping[str, object]) -> SizeSettings:
        """As a feature set has noted them; what its version did not know was as the defaults are."""
        known = {name: preprocessing[name] for name in cls.__dataclass_fields__ if name in preprocessing}
        return cls(**_comparable(known))

    @property
    def is_set(self) -> bool:
        """Whether a size is named at all."""
        return (self.height, self.buckets, self.max_pixels) != (None, None, None)

    @property
    def keeps_lengths(self) -> bool:
        """Whether clips keep their own number of frames."""
        return self.num_frames is None and self.buckets is None

    @property
    def views(self) -> int:
        """How many views of a medium are trained on, one in an epoch."""
        if self.crop == "random":
            return self.variants or _RANDOM_CUTS
        if self.flip:
            return self.variants or 2
        return 1

    def view(self, digest: str, number: int) -> View:
        """A view of a medium, a function of its digest (`media_digest`) and the number of the view alone."""
        is_flipped = self.flip and number % 2 == 1
        if self.crop == "middle":
            return View(is_flipped=is_flipped)
        draw = random.Random(derive_seed(digest, number, "view"))
        return View(draw.random(), draw.random(), is_flipped)

    @property
    def sampling(self) -> ClipSampling:
        """Which frames of a video are taken."""
        is_repeated = self.short_clips == "repeat"
        return ClipSampling(self.fps, self.frame_interval, self.clip_position, is_repeated, self.model_fps)


def buckets_of(
    preprocess: PreprocessParameters, file: RowFile, geometry: MediaGeometry, model_fps: float | None = None
) -> Buckets:
    """The sizes of a file's media: its own where its entry of `dataset` names any.

    Raises:
        ConfigError: As `Buckets`; or the entry names a key that is not about sizes.
    """
    if not file.sizes:
        return Buckets(SizeSettings.read(preprocess, model_fps), geometry)
    key = f"{_ENTRIES}.{file.entry}.sizes"
    for name in file.sizes:
        if name not in _OWN_KEYS:
            raise ConfigError(
                "is not a size of media",
                key=f"{key}.{name}",
                way_out=f"{did_you_mean(name, _OWN_KEYS)}Known: {', '.join(_OWN_KEYS)}.",
            )
    with told_as(lambda problem: replace(problem, key=problem.key.replace(_KEY, key))):
        general = _given(preprocess)
        replaced = list(file.sizes)
        if not file.sizes.keys().isdisjoint(_PLANE_KEYS):
            replaced += _PLANE_KEYS
        if "buckets" in file.sizes:
            replaced.append("num_frames")
        for name in replaced:
            general.pop(name, None)
        return Buckets(SizeSettings.read({**general, **file.sizes}, model_fps), geometry)


def _given(preprocess: PreprocessParameters | JsonMapping) -> dict[str, Any]:
    """The keys of `SizeSettings` that are set."""
    return {name: preprocess[name] for name in _ALLOWED if preprocess.get(name) is not None}


class Buckets:
    """The sizes that media are brought to.

    Args:
        settings: What the configuration says.
        geometry: What the model takes.

    Raises:
        ConfigError: No size is set; or the model cannot take one, and the nearest is named.
    """

    def __init__(self, settings: SizeSettings, geometry: MediaGeometry) -> None:
        self._settings, self._sampling, self._geometry = settings, settings.sampling, geometry
        self.sizes = tuple(dict.fromkeys(_sizes(settings, geometry)))
        for size in self.sizes:
            geometry.check(size, key=f"{_KEY}.{_key_of(settings, size, geometry)}")
        self._nearest = lru_cache(maxsize=2**16)(self._find_nearest)

    def assign(self, header: MediaHeader, name: str = "medium") -> MediaSize:
        """The bucket of a medium.

        Raises:
            DataError: It has fewer frames than every bucket, and short clips are not filled up; or it would be enlarged
                or cut more than the configuration allows.
        """
        size = self._nearest(header)
        change = SizeChange.of(header, size)
        for key, value, limit in (
            ("max_enlargement", change.enlarged, self._settings.max_enlargement),
            ("max_cut", change.cut, self._settings.max_cut),
        ):
            if value > limit + _ROUNDING:
                raise DataError(
                    f"{name} is {header.height}×{header.width}: of the size {size} nearest to it, it would be enlarged "
                    f"{change.enlarged:.3g} times and {change.cut:.1%} of it would be cut away",
                    key=f"{_KEY}.{key}",
                    way_out=f"Leave it out, add a size that is nearer to it, or raise {key} ({limit:g}).",
                )
        frames = self._frames(header)
        if size.frames > frames and not self._sampling.repeats_short:
            raise too_short(name, frames, size.frames)
        return size

    def takes(self, size: MediaSize) -> bool:
        """Whether features of this size are what the configuration asks for."""
        has_plane = has_frames = False
        for each in self.sizes:
            has_plane |= (each.height, each.width) == (size.height, size.width)
            has_frames |= size.frames in (1, each.frames)
        return has_plane and (self._settings.keeps_lengths or has_frames)

    def _find_nearest(self, header: MediaHeader) -> MediaSize:
        frames, candidates = self._frames(header), self._candidates(header)
        least = min(size.frames for size in candidates)
        filled = [size for size in candidates if size.frames <= max(frames, least)]
        size = min(filled, key=lambda size: self._distance(size, header))
        if self._settings.enlarge or SizeChange.of(header, size).enlarged <= 1:
            return size
        step = self._geometry.side_step
        own = MediaSize(size.frames, header.height // step * step or step, header.width // step * step or step)
        if not self._geometry.takes(own):
            raise DataError(
                f"a medium of {header.height}×{header.width} is not enlarged, and the model does not take {own}",
                key=f"{_KEY}.enlarge",
                way_out=f"Leave it out, or set enlarge: true; the nearest size is {self._geometry.nearest(own)}.",
            )
        return own

    def _candidates(self, header: MediaHeader) -> Sequence[MediaSize]:
        frames = 1
        if header.frames != 1 or header.fps > 0:  # a video of one frame is a short clip, not a picture
            if not self._settings.keeps_lengths or not self._geometry.is_video:
                return self.sizes
            step = self._geometry.frame_step
            longest = min(self._frames(header), LONGEST_CLIP)
            # As the VAE takes clips: whole groups of frames, or one frame and whole groups behind it.
            if self._geometry.frame_group:
                frames = max(longest // step * step, 1)
            else:
                frames = (longest - 1) // step * step + 1
        return [MediaSize(frames, size.height, size.width) for size in self.sizes]

    def _frames(self, header: MediaHeader) -> int:
        if header.frames <= 1 or header.fps <= 0:
            return 1
        return self._sampling.frames_of(header.frames, header.fps)

    @staticmethod
    def _distance(size: MediaSize, header: MediaHeader) -> tuple[float, float, int]:
        # Logarithms: twice as wide is as far off as half as wide.
        aspect = math.log(size.height / size.width) - math.log(header.height / header.width)
        area = math.log(size.height * size.width) - math.log(header.height * header.width)
        return round(abs(aspect), 6), round(abs(area), 6), -size.frames


@dataclass(frozen=True)
class SizeChange:
    """What becomes of a medium on its way to its size."""

    enlarged: float
    """Along a side; below 1 it is made smaller."""
    cut: float
    """Share of its area that is not seen."""

    @classmethod
    def of(cls, header: MediaHeader, size: MediaSize) -> SizeChange:
        """Of a medium that is scaled to cover a size and cut around the middle."""
        enlarged = max(size.height / header.height, size.width / header.width)
        kept = size.height * size.width / enlarged**2 / (header.height * header.width)
        return cls(enlarged, max(0.0, 1 - kept))


def differences(then: SizeSettings, now: SizeSettings, geometry: MediaGeometry) -> list[Problem]:
    """What two settings make otherwise of media, however they are written: one problem for each key.

    Args:
        then: Some settings, with a size.
        now: Others, with a size; their keys are named.
        geometry: What the model takes; the keys about clips count for models of videos only.
    """
    before, today = _effect(then, geometry), _effect(now, geometry)
    problems = []
    for name, value in today.items():
        if before[name] == value:
            continue
        key, way_out = name, ""
        if name == "sizes":
            key = _key_of_sizes(now)
        if name == "fps" and then.model_fps is None and now.model_fps is not None:  # a rule of newer versions
            way_out = "Set frame_interval: 1, or extract them again into another folder."
        problems.append(Problem(f"was {before[name]}, is {value}", key=f"{_KEY}.{key}", way_out=way_out))
    return problems


def _key_of_sizes(settings: SizeSettings) -> str:
    """The key that names the sizes."""
    if settings.buckets is not None:
        return "buckets"
    if settings.max_pixels is None:
        return "height"
    return "max_pixels"


def _effect(settings: SizeSettings, geometry: MediaGeometry) -> JsonObject:
    """What settings come to: number and order of buckets, and the way that they are written, do not count."""
    sizes = sorted(Buckets(settings, geometry).sizes, key=lambda size: (size.height, size.width, size.frames))
    effect: JsonObject = {"sizes": ", ".join(map(str, sizes))}
    names = ["max_enlargement", "max_cut", "enlarge", "crop", "flip"]
    if geometry.is_video:
        effect["num_frames"] = "set"
        if settings.keeps_lengths:
            effect["num_frames"] = "each clip's own"
        effect["fps"] = _rate_taken(settings)
        names += ["frame_interval", "clip_position", "short_clips"]
    for name in names:
        value = vars(settings)[name]
        if value is None:
            value = "not set"
        effect[name] = value
    return effect | {"variants": settings.views}


def _rate_taken(settings: SizeSettings) -> str:
    if settings.fps is not None:
        return f"{settings.fps:g}"
    if settings.model_fps is None:
        return "each clip's own"
    return f"{settings.model_fps:g} of clips of another rate"


# --- the sizes that the configuration names --------------------------------------------------------------------------


def _sizes(settings: SizeSettings, geometry: MediaGeometry) -> list[MediaSize]:
    if settings.buckets:
        return [_parse_bucket(text) for text in settings.buckets]
    if settings.height is not None and settings.width is not None:
        planes = [(settings.height, settings.width)]
    elif settings.max_pixels is not None:
        planes = _planes_of_area(settings.max_pixels, geometry.side_step)
        # Shapes that the model has no positions for are left out; where none remains, the check names the nearest.
        planes = [plane for plane in planes if geometry.takes(MediaSize(1, *plane))] or planes
    else:
        raise ConfigError(
            "there is no size to bring the media to",
            key=f"{_KEY}.height",
            way_out="Give height and width, or buckets (480x832x81), or max_pixels.",
        )
    sizes = []
    for height, width in planes:
        for frames in _frame_counts(settings):
            sizes.append(MediaSize(frames, height, width))
    return sizes


def _frame_counts(settings: SizeSettings) -> Sequence[int]:
    if settings.num_frames is None:
        return (1,)
    if isinstance(settings.num_frames, int):
        return (settings.num_frames,)
    return settings.num_frames


def _planes_of_area(area: int, step: int) -> list[tuple[int, int]]:
    """For each of the usual aspects a (height, width) within the area, near to it and to the aspect."""
    return sorted({_plane_of_area(area, aspect, step) for aspect in ASPECTS})


def _plane_of_area(area: int, aspect: float, step: int) -> tuple[int, int]:
    rows, columns = math.sqrt(area * aspect) / step, math.sqrt(area / aspect) / step
    # Sides are whole steps: each exact side is rounded down and up, and the best of the four pairs is taken.
    within = []
    for rounded_rows in (math.floor(rows), math.ceil(rows)):
        for rounded_columns in (math.floor(columns), math.ceil(columns)):
            height, width = max(1, rounded_rows) * step, max(1, rounded_columns) * step
            if height * width <= area:
                within.append((height, width))
    if not within:
        return step, step
    return min(within, key=lambda plane: (abs(math.log(plane[0] / plane[1] / aspect)), -plane[0] * plane[1]))


def _parse_bucket(text: str) -> MediaSize:
    height, width, frames = _BUCKET.fullmatch(text.replace(" ", "")).groups()  # type: ignore[union-attr]
    return MediaSize(int(frames or 1), int(height), int(width))


def _key_of(settings: SizeSettings, size: MediaSize, geometry: MediaGeometry) -> str:
    """The key to blame for a size that the model does not take."""
    if settings.buckets:
        return "buckets"
    if size.frames != geometry.nearest(size).frames:
        return "num_frames"
    if settings.height is None:
        return "max_pixels"
    return "height"


# --- what may stand there --------------------------------------------------------------------------------------------


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_bucket_list(value: object) -> bool:
    if isinstance(value, str):
        value = value.split(",")
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_bucket, value))


def _is_bucket(value: object) -> bool:
    return isinstance(value, str) and _BUCKET.fullmatch(value.replace(" ", "")) is not None


def _comparable(settings: Mapping[str, object]) -> JsonObject:
    """Lists as tuples: what was read of JSON equals what was read of YAML."""
    comparable = dict(settings)
    for name, value in settings.items():
        if isinstance(value, list):
            comparable[name] = tuple(value)
    return comparable


def _is_rate(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_rate_from_1(value: object) -> bool:
    return _is_rate(value) and value >= 1


def _is_share(value: object) -> bool:
    return value == 0 or (_is_rate(value) and value <= 1)


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_whole_or_list(value: object) -> bool:
    return _is_count(value) or (isinstance(value, list | tuple) and all(map(_is_count, value)))


class _Allowed(NamedTuple):
    """What a key may hold."""

    is_right: Callable[[object], bool]
    words: str = "a whole number above 0"


_ALLOWED = {
    "height": _Allowed(_is_count),
    "width": _Allowed(_is_count),
    "num_frames": _Allowed(_is_whole_or_list, "a whole number above 0, nor a list of them"),
    "buckets": _Allowed(_is_bucket_list, "a list of sizes such as 480x832x81 (height, width, frames) or 512x512"),
    "max_pixels": _Allowed(_is_count),
    "fps": _Allowed(_is_rate, "a number above 0"),
    "frame_interval": _Allowed(_is_count),
    "clip_position": _Allowed(lambda value: value in ("start", "middle"), "start or middle"),
    "short_clips": _Allowed(lambda value: value in ("error", "repeat"), "error or repeat"),
    "max_enlargement": _Allowed(_is_rate_from_1, "a number from 1 on"),
    "enlarge": _Allowed(_is_switch, "true or false"),
    "crop": _Allowed(lambda value: value in ("middle", "random"), "middle or random"),
    "flip": _Allowed(_is_switch, "true or false"),
    "variants": _Allowed(_is_count),
    "max_cut": _Allowed(_is_share, "a share from 0 to 1"),
}
"""Every key of `SizeSettings`."""
_EXCLUDED_BY = {"buckets": ("num_frames", "height"), "max_pixels": ("height", "buckets")}
"""Key → keys that say the same in another way."""


def _wrong_values(given: Mapping[str, object]) -> Iterator[Problem]:
    for name, value in given.items():
        if not _ALLOWED[name].is_right(value):
            yield Problem(f"{value!r} is not {_ALLOWED[name].words}", key=f"{_KEY}.{name}")


def _conflicts(given: Mapping[str, object]) -> Iterator[Problem]:
    absent = {"height", "width"} - given.keys()
    if len(absent) == 1:
        yield Problem("only one side is given", key=f"{_KEY}.{absent.pop()}", way_out="Give height and width.")
    for key, others in _EXCLUDED_BY.items():
        beside = [other for other in others if other in given]
        if key in given and beside:
            yield Problem(f"is given beside {beside[0]}", key=f"{_KEY}.{key}", way_out="Keep one of them.")
    if "variants" in given and not given.get("flip") and given.get("crop") != "random":
        yield Problem(
            "nothing tells variants from one another", key=f"{_KEY}.variants", way_out="Set flip or crop: random."
        )
    if "fps" in given and given.get("frame_interval", 1) != 1:
        yield Problem("is given beside fps", key=f"{_KEY}.frame_interval", way_out="Keep one of them.")
