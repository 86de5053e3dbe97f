"""Where missing media may lie: the folders beside the rows, tried for some of the rows that miss one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.fsdp.data.data_utils.rows.sources import rows_folder
from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataEntry
from mindspeed_mm.tasks.data.findings import BASIC, Fix
from mindspeed_mm.tasks.data.tally import BadRow

_MOST_TRIED = 200
_SUBFOLDERS = ("images", "image", "media", "videos", "audios", "data")


def search_media(dataset: MMDataset, basic: BasicParameters, rows: Sequence[BadRow]) -> list[Fix]:
    """Settings of `dataset_dir` under which the media of rows would be found: the best; none when nothing helps."""
    tried = rows[:_MOST_TRIED]
    if not dataset.has_rows:
        return []
    folders = [] if basic.dataset_dir is not None else [file.parent for file in _named_files(basic)]
    paths_of_rows = []
    for row in tried:
        if paths := _paths(dataset.sample(row.index)):
            paths_of_rows.append([_as_written(path, folders) for path in paths])
    found = []
    for folder in _candidates(basic):
        saved = 0
        for paths in paths_of_rows:
            saved += all((folder / path).is_file() for path in paths)
        if saved:
            found.append(Fix(f"{BASIC}.dataset_dir={folder}", round(saved * len(rows) / len(tried))))
    return sorted(found, key=lambda fix: -fix.saves_rows)[:1]


def _as_written(path: str, folders: Sequence[Path]) -> str:
    """A path as its row has it: without the folder of the rows, where it was looked up."""
    for folder in folders:
        if path.startswith(f"{folder.absolute()}/"):
            return path.removeprefix(f"{folder.absolute()}/")
    return path


def _paths(sample: Sample) -> list[str]:
    found = []
    for item in sample.media:
        source = item.source
        if isinstance(source, dict):
            source = source.get("path")
        names = source if isinstance(source, list) else [source]  # a list: the frames of a clip
        found += [name for name in names if isinstance(name, str)]
    return found


def _candidates(basic: BasicParameters) -> list[Path]:
    """The folders of the files of rows, those around them, and their usual sub-folders."""
    files = _named_files(basic)
    bases = [file.parent for file in files]
    bases += [beside.parent for beside in bases]
    bases = list(dict.fromkeys(bases))
    bases.append(rows_folder(basic.dataset_dir))
    tried = list(bases)
    for base in bases:
        tried += [base / name for name in _SUBFOLDERS]
    here = None if basic.dataset_dir is None else Path(basic.dataset_dir).resolve()
    found = []
    for folder in dict.fromkeys(tried):
        if folder.is_dir() and folder.resolve() != here:
            found.append(folder)
    return found


def _named_files(basic: BasicParameters) -> list[Path]:
    """The files of rows that are there; a folder of them counts as a file in it."""
    entries: Sequence[str | DataEntry] = basic.dataset or ()
    if isinstance(entries, str):
        entries = entries.split(",")
    found = []
    for entry in entries:
        name = str(entry.path if isinstance(entry, DataEntry) else entry).strip()
        for path in (Path(name), rows_folder(basic.dataset_dir) / name):
            if path.exists():
                found.append(path if path.is_file() else path / "rows")
                break
    return found
