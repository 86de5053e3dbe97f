"""`mm posttrain score`: what the rewards of a configuration think of samples that stand in a file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.artifacts import atomic_file, atomic_write_text
from mindspeed_mm.core.errors import ConfigError, DataError, Problem, UsageError, told_as
from mindspeed_mm.core.file_writing import check_output_file, first_line_has
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.params.argument import PosttrainArguments
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.requests.train import ScoreRequest

if TYPE_CHECKING:
    from PIL import Image

    from mindspeed_mm.core.file_writing import IsOurs
    from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
    from mindspeed_mm.fsdp.posttrain_rewards.registry import Reward

_PROMPTS = ("prompt", "captions", "caption", "cap")
_TEXTS = ("completion", "text", "response")
_PICTURE = "file"
_is_scored = first_line_has("score", "scores", beside_others=True)
_is_histogram = first_line_has("bin_edges", "counts")
_CLIPS = (".mp4", ".webm", ".mkv", ".mov", ".avi")
_EVERY_FRAME_FPS = 1e6
_AT_A_TIME = 64
"""Rows whose samples are in memory together."""


@dataclass(frozen=True)
class ScoreOutcome:
    """Reports what `mm posttrain score` wrote: the file, its number of rows, and the mean scores."""

    path: str
    rows: int
    means: dict[str, float | None]
    """Of each reward, and of their weighted sum (`reward`); None where nothing was judged."""


def run(request: ScoreRequest, *, say: Callable[[int], None] = lambda _rows: None) -> ScoreOutcome:
    """Score each row's sample, `file` (a picture or a clip) or `completion`, and where there is one `file_rejected`.

    A row is written as it is, with `score`, the weighted sum, and `scores` by reward; those of a rejected sample end in
    `_rejected`.

    Args:
        request: A YAML whose `posttrain.rewards` judge, rows (JSONL, JSON, CSV or parquet; media lie beside them),
            and the files to write.
        say: Told how many rows are done.

    Raises:
        MMError: The configuration has no rewards, a row no sample, or a file to write is somebody else's; nothing is
            written then.
    """
    rows = request.rows
    out = _output(request.out, "--out", (request.config, rows), _is_scored)
    histogram = request.histogram
    if histogram is not None:
        histogram = _output(histogram, "--histogram", (request.config, rows, out), _is_histogram)
    arguments = load_with_plugins(request.config, request.overrides).arguments
    if not arguments.posttrain.rewards:
        raise ConfigError(
            "is empty: nothing judges", where=str(request.config), key="posttrain.rewards", way_out="Name rewards."
        )
    # Imported here: a wrong YAML is answered before torch is loaded.
    from mindspeed_mm.fsdp.loss.flow_pair_objective import ScoreHistogram

    written = 0
    totals: list[float] = []
    """Of all samples, those of rejected sides too."""
    found: dict[str, list[float]] = {"reward": [], **{each.name: [] for each in arguments.posttrain.rewards}}
    with atomic_file(out) as draft, draft.open("w", encoding="utf-8") as file:
        for row in _scored(arguments.posttrain, rows):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            totals += [row[key] for key in ("score", "score_rejected") if row.get(key) is not None]
            for name, value in ({"reward": row["score"]} | row["scores"]).items():
                if value is not None:
                    found[name].append(value)
            written += 1
            say(written)
    if histogram is not None and totals:
        scores = ScoreHistogram.of_scores(totals)
        atomic_write_text(histogram, json.dumps({"bin_edges": scores.edges, "counts": scores.counts}) + "\n")
    means = {name: sum(values) / len(values) if values else None for name, values in found.items()}
    return ScoreOutcome(str(out), written, means)


def _output(path: Path, key: str, others: Sequence[Path], is_ours: IsOurs) -> Path:
    """A file that may be written: none of these others, and nothing that this command did not write."""
    if path.resolve() in [each.resolve() for each in others]:
        raise UsageError(
            "is a file that this command reads, or writes otherwise",
            where=str(path),
            key=key,
            way_out="Name another file.",
        )
    return check_output_file(path, is_ours, key)


def _scored(posttrain: PosttrainArguments, path: Path) -> Iterator[JsonObject]:
    """The rows with their scores."""
    from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipRule
    from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader
    from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader
    from mindspeed_mm.fsdp.train.rollouts.build import build_rewards
    from mindspeed_mm.fsdp.utils.device import current_device

    every_frame = MediaLimits(clip=ClipRule(fps=_EVERY_FRAME_FPS, most_frames=sys.maxsize))
    media = MediaLoader(path.absolute().parent, limits=every_frame, called="the folder of ROWS")
    reader, rewards = open_reader(path), build_rewards(posttrain, current_device())
    asked: list[_RowToScore] = []
    for number in range(len(reader)):
        asked.append(_RowToScore(dict(reader.read(number)), str(reader.place(number))))
        if len(asked) < _AT_A_TIME and number + 1 < len(reader) and not asked[-1].has_clip:
            continue
        _score(rewards, asked, "", media)
        _score(rewards, [each for each in asked if f"{_PICTURE}_rejected" in each.row], "_rejected", media)
        for each in asked:
            yield each.row | each.scores
        asked = []


@dataclass
class _RowToScore:
    """A row whose samples are scored."""

    row: JsonObject
    place: str
    """Where it stands, for messages."""
    scores: JsonObject = field(default_factory=dict)

    @property
    def has_clip(self) -> bool:
        """Whether it has a clip, whose frames take memory: such a row is scored before the next one is read."""
        return any(_is_clip(self.row.get(name)) for name in (_PICTURE, f"{_PICTURE}_rejected"))


def _score(rewards: Sequence[Reward], asked: Sequence[_RowToScore], suffix: str, media: MediaLoader) -> None:
    """Give rows the `score` and `scores` of their chosen or rejected samples; null where a reward does not judge."""
    from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, scores_of

    if not asked:
        return
    prompts, samples, rows, places = [], [], [], []
    for each in asked:
        given = [each.row[name] for name in _PROMPTS if each.row.get(name)]
        text = given[0] if given else None
        if isinstance(text, list) and text:
            text = text[0]
        if not isinstance(text, str):
            raise DataError(
                "has no prompt", where=each.place, key=_PROMPTS[0], way_out=f"Give it one of {', '.join(_PROMPTS)}."
            )
        prompts.append(text)
        samples.append(_medium_or_text(each.row, each.place, suffix, media))
        rows.append(each.row)
        places.append(each.place)
    found = scores_of(rewards, Judged(prompts, samples, rows, ids=places)).tolist()
    for each, values in zip(asked, found, strict=True):
        total, by_name = None, {}
        for reward, value in zip(rewards, values, strict=True):
            by_name[reward.name] = None if math.isnan(value) else value
            if not math.isnan(value):
                total = (total or 0.0) + reward.weight * value
        each.scores |= {f"score{suffix}": total, f"scores{suffix}": by_name}


def _is_clip(name: object) -> bool:
    return isinstance(name, str) and name.lower().endswith(_CLIPS)


def _medium_or_text(
    row: JsonMapping, place: str, suffix: str, media: MediaLoader
) -> Image.Image | Sequence[Image.Image] | str:
    """The picture, all frames of the clip, or the text."""
    key = f"{_PICTURE}{suffix}"
    if isinstance(name := row.get(key), str):

        def of_the_row(problem: Problem) -> Problem:
            return replace(problem, where=place, key=key)

        with told_as(of_the_row):
            if _is_clip(name):
                return _frames(media, name)
            return media.load_image(name)
    for name in _TEXTS:
        if isinstance(row.get(name), str):
            return row[name]
    raise DataError(
        "has no sample to score",
        where=place,
        key=_PICTURE,
        way_out=f"Name a picture or a clip in '{_PICTURE}', or give a text in {' or '.join(_TEXTS)}.",
    )


def _frames(media: MediaLoader, name: str) -> Sequence[Image.Image]:
    """All frames of a clip, at their own size and rate."""
    from PIL import Image

    from mindspeed_mm.fsdp.posttrain_rewards.pictures import ClipFrames

    clip = media.load_video(name)
    return ClipFrames(map(Image.fromarray, clip.frames), clip.header.sampled_fps)
