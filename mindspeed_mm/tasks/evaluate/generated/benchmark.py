"""VBench by its own prompts: which are drawn for its dimensions, and the clips under the names that it looks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mindspeed_mm.core.artifacts import DRAWN_MANIFEST, read_jsonl
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.tasks.evaluate.generated.vbench import OF_ANY_CLIPS, OF_ITS_PROMPTS

DIMENSIONS = (*OF_ANY_CLIPS, *OF_ITS_PROMPTS)
_PROMPTS_OF = {
    "background_consistency": "scene",
    "aesthetic_quality": "overall_consistency",
    "imaging_quality": "overall_consistency",
    "motion_smoothness": "subject_consistency",
    "dynamic_degree": "subject_consistency",
}
"""Dimension → the one whose prompts it is measured of, where it has none of its own (VBench's prompt suite)."""


@dataclass(frozen=True)
class BenchmarkPrompt:
    """A prompt of VBench's own, and what is drawn of it."""

    name: str
    """As VBench has it: clips are named after it."""
    text: str
    """What is drawn: the same, or a longer version of it."""


def check_dimensions(dimensions: Sequence[str], where: str) -> None:
    """Raise `UsageError` for the first name that is no dimension of VBench."""
    for name in dimensions:
        if name not in DIMENSIONS:
            way_out = f"{did_you_mean(name, DIMENSIONS)}There are {', '.join(DIMENSIONS)}."
            raise UsageError(f"'{name}' is no dimension of VBench", where=where, key="dimensions", way_out=way_out)


def prompts_of(
    folder: Path,
    dimensions: Sequence[str],
    *,
    all_prompts: str = "all_dimension.txt",
    longer_prompts: str | None = None,
    most: int = 0,
) -> list[BenchmarkPrompt]:
    """The prompts of some dimensions, each once.

    Args:
        folder: VBench's `prompts`, with `prompts_per_dimension/<dimension>.txt`.
        dimensions: Some of `DIMENSIONS`; none: all prompts.
        all_prompts: File with all of them, in the folder.
        longer_prompts: File with longer versions of all, line by line; None: the prompts as they are. Those of a
            dimension are in `prompts_per_dimension_longer/<dimension>_longer.txt` beside it.
        most: Of a dimension; 0: all.

    Raises:
        DataError: A file is missing, or the longer versions are not as many.
    """
    names = sorted({_PROMPTS_OF.get(name, name) for name in dimensions}, key=DIMENSIONS.index)
    files = [folder / "prompts_per_dimension" / f"{name}.txt" for name in names] or [folder / all_prompts]
    longer: list[Path] = []
    if longer_prompts is not None:
        beside = (folder / longer_prompts).parent / "prompts_per_dimension_longer"
        longer = [beside / f"{name}_longer.txt" for name in names] or [folder / longer_prompts]
    found: dict[str, BenchmarkPrompt] = {}
    for number, file in enumerate(files):
        texts = names_of_file = _lines(file)
        if longer:
            texts = _lines(longer[number])
        if len(texts) != len(names_of_file):
            what = f"has {len(texts)} prompts, and {file} has {len(names_of_file)}"
            raise DataError(what, where=str(longer[number]), way_out="Each is the longer version of one.")
        for name, text in list(zip(names_of_file, texts, strict=True))[: most or None]:
            found.setdefault(name, BenchmarkPrompt(name, text))
    return list(found.values())


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        way_out = "eval_config.dataset.basic_param.data_folder is the folder `prompts` of VBench's repository."
        raise DataError("cannot be read", where=str(file), way_out=way_out) from error


@contextmanager
def under_their_names(drawn: Path, prompts: Sequence[BenchmarkPrompt]) -> Iterator[Path]:
    """A folder of links `<prompt>-<number>.mp4` to drawn clips for the length of the `with` block; clips that another
    program drew bear their names already, and are taken where they are.

    Args:
        drawn: Folder of the clips, perhaps with our manifest.
        prompts: In the order in which they were drawn.

    Raises:
        DataError: There is no clip.
    """
    if not (drawn / DRAWN_MANIFEST).is_file():
        if not any(drawn.glob("*.mp4")):
            raise DataError("holds no clips", where=str(drawn), way_out="Set eval_config.need_inference to true.")
        yield drawn
        return
    with TemporaryDirectory() as place:
        for entry in read_jsonl(drawn / DRAWN_MANIFEST):
            if entry["number"] < len(prompts):
                link = Path(place) / f"{prompts[entry['number']].name}-{entry['sample']}.mp4"
                link.symlink_to((drawn / entry["file"]).resolve())
        yield Path(place)
