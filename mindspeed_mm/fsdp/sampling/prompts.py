"""Prompts to generate from: from the configuration, the command line, or a file that is used to its last line."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader, is_data_url
from mindspeed_mm.fsdp.data.data_utils.rows.json_reader import parse_row
from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader
from mindspeed_mm.fsdp.models.diffusion.media_roles import spread_lists
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments

SEVERAL = {field: (field, f"{field}_2", f"{field}_3") for field in ("image", "reference")}
"""Fields that may name several pictures → the names of each."""
MEDIA_FIELDS = ("last_image", "video", "mask", "control", *itertools.chain(*SEVERAL.values()))
"""Fields of a row that name files; which of them there must be follows from the task."""
FIELDS = ("prompt", *MEDIA_FIELDS, "negative_prompt", "seed")
"""Fields of a row of JSON."""
ROW_SUFFIXES = (".jsonl", ".json")
LINE_SUFFIXES = (".txt", "")
SHOWN_PROBLEMS = 10
_SLUG_CHARACTERS = 40
_BETWEEN_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Prompt:
    """What somebody wants to see."""

    number: int
    """Line of its file or place in the list, from 0; with the seed it decides the noise."""
    text: str
    """May be empty: what the model makes without a caption."""
    place: str
    """`prompts.txt:7`."""
    image: Path | None = None
    """The picture that a video goes on from, or that is edited."""
    negative_prompt: str | None = None
    """None: that of the settings."""
    seed: int | None = None
    """Stands for the seed of the settings and the number: rows with the same one share their noise."""
    others: tuple[tuple[str, Path], ...] = ()
    """Further files: `last_image`, `video`, `mask`, `control`, `image_2`, `reference` …, each with its path."""

    @property
    def media(self) -> dict[str, Path]:
        """Field → file, of those that the prompt names."""
        media = dict(self.others)
        if self.image is None:
            return media
        return {"image": self.image, **media}

    @property
    def slug(self) -> str:
        """The words as a part of a file name."""
        text = unicodedata.normalize("NFKC", self.text).lower()
        words = _BETWEEN_WORDS.sub("-", text)
        return words.strip("-")[:_SLUG_CHARACTERS].strip("-") or "empty"


def prompts_of(sampling: SamplingArguments, key: str = "training.sampling") -> list[Prompt]:
    """The prompts that a configuration names: the list, then the file's, whose numbers go on from the list's.

    Raises:
        DataError: The file is missing or bad.
    """
    prompts = [Prompt(number, text, f"{key}.prompts[{number}]") for number, text in enumerate(sampling.prompts)]
    if sampling.prompts_file is not None:
        prompts += read_prompts(Path(sampling.prompts_file), first_number=len(prompts))
    return prompts


def read_prompts(path: Path, *, media_dir: Path | None = None, first_number: int = 0) -> list[Prompt]:
    """Every prompt of a file.

    `.txt`: one a line. Each line counts, an empty one too: it is the empty prompt. White space around a line goes.
    `.jsonl`, `.json`: objects with `prompt` and, if wanted, `image`, `negative_prompt`, `seed`. Lines end with LF or
    CRLF; a byte-order mark is skipped.

    Args:
        path: The file.
        media_dir: Where relative images start, and what they may not leave; by default the folder of the file.
        first_number: Number of the first line.

    Raises:
        DataError: Naming the file, or the bad rows (the first ten).
    """
    if not path.is_file():
        raise DataError("there is no such file", where=str(path), way_out="Give a file with one prompt a line.")
    if path.suffix in ROW_SUFFIXES:
        return _read_rows(path, MediaLoader(media_dir or path.absolute().parent), first_number)
    if path.suffix in LINE_SUFFIXES:
        return _read_lines(path, first_number)
    raise DataError(
        f"'{path.suffix}' files are not read as prompts",
        where=str(path),
        way_out="Give a .txt file with one prompt a line, or a .jsonl file of objects with 'prompt'.",
    )


def empty_note(prompts: Sequence[Prompt]) -> str:
    """What to tell somebody whose prompts are partly empty; nothing when none is."""
    places = [prompt.place for prompt in prompts if not prompt.text]
    if not places:
        return ""
    shown = ", ".join(places[:3])
    if len(places) > 3:
        shown += " …"
    count = "1 prompt is" if len(places) == 1 else f"{len(places)} prompts are"
    return f"{count} empty ({shown}): sampled without a caption"


def _read_lines(path: Path, first_number: int) -> list[Prompt]:
    text = _decode(path)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()  # the end of the last line begins no other
    if not lines:
        raise DataError("the file is empty", where=str(path), way_out="Write one prompt a line.")
    if _is_row(lines[0]):
        raise DataError(
            "the lines are JSON objects, not prompts", where=f"{path.name}:1", way_out="Rename the file to .jsonl."
        )
    prompts = []
    for line_number, line in enumerate(lines, 1):
        prompts.append(Prompt(first_number + line_number - 1, line.strip(), f"{path.name}:{line_number}"))
    return prompts


def _decode(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"byte {error.start} is not UTF-8 (0x{data[error.start]:02x})",
            where=f"{path.name}:{line}",
            way_out="Save the file as UTF-8.",
        ) from error
    if "\0" in text:
        raise DataError(
            "the file holds NUL bytes: it is not text", where=str(path), way_out="Give a file with one prompt a line."
        )
    return text.removeprefix("\ufeff")


def _is_row(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        return "prompt" in parse_row(line.encode(), "")
    except DataError:
        return False


def _read_rows(path: Path, media: MediaLoader, first_number: int) -> list[Prompt]:
    reader = open_reader(path)
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for index in range(len(reader)):
        place = reader.place(index)
        try:
            prompts.append(_prompt(reader.read(index), first_number + place.row - 1, str(place), media))
        except DataError as error:
            problems += error.problems
    if problems:
        headline = f"{path}: {len(problems)} of {len(reader)} rows are bad"
        raise DataError(headline, problems=problems[:SHOWN_PROBLEMS])
    return prompts


def _prompt(row: JsonMapping, number: int, place: str, media: MediaLoader) -> Prompt:
    try:
        row = spread_lists(row, SEVERAL)
    except ValueError as error:
        what = f"{len(row[str(error)])} files, where 3 are the most"
        raise DataError(what, where=place, key=str(error), way_out="Leave some out.") from None
    for name in row:
        if name not in FIELDS:
            way_out = f"{did_you_mean(name, FIELDS)}A row has {', '.join(FIELDS)}."
            raise DataError(f"'{name}' is not a field of a prompt", where=place, key=name, way_out=way_out)
    if "prompt" not in row:
        raise DataError(f"no 'prompt': the row has {sorted(row)}", where=place, key="prompt")
    text, negative, seed = row["prompt"], row.get("negative_prompt"), row.get("seed")
    if not isinstance(text, str):
        raise DataError(f"{text!r} is not text", where=place, key="prompt")
    if not isinstance(negative, str | None):
        raise DataError(f"{negative!r} is not text", where=place, key="negative_prompt")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise DataError(f"{seed!r} is not a whole number from 0 to 2^63 - 1", where=place, key="seed")
    files = {name: _file(row[name], place, media, name) for name in MEDIA_FIELDS if row.get(name) is not None}
    return Prompt(number, text.strip(), place, files.pop("image", None), negative, seed, tuple(files.items()))


def _file(item: object, place: str, media: MediaLoader, name: str) -> Path:
    """The path of a file that is there and may be opened; it is decoded when its turn comes."""
    if not isinstance(item, str) or not item:
        kind = "video" if name in ("video", "control") else "picture"
        raise DataError(f"{item!r} is not a path of a {kind}", where=place, key=name)
    if is_data_url(item):
        what = f"'{item[:30]}…' is a data: URL, and prompts of generators name files"
        raise DataError(what, where=place, key=name, way_out="Save it as a file and give its path.")
    try:
        media.open(item).close()
    except DataError as error:
        problem = error.problems[0]
        raise DataError(problem.what, where=place, key=name, way_out=problem.way_out) from error
    return Path(media.dataset_dir, item).resolve()
