"""Where missing media may lie: the folders beside the rows, tried for some of the rows that miss one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.tasks.data.findings import BASIC, Fix
from mindspeed_mm.tasks.data.tally import BadRow

_MOST_TRIED = 200
_SUBFOLDERS = ("images", "image", "media", "videos", "audios", "data")


def search_media(dataset: MMDataset, basic: BasicParameters, rows: Sequence[BadRow]) -> list[Fix]:
    """Settings of `dataset_dir` under which the media of rows would be found: the best; none when nothing helps."""
    tried = rows[:_MOST_TRIED]
    names = [_paths(dataset.sample(row.index)) for row in tried] if dataset.has_rows else []
    found = []
    for folder in _candidates(basic):
        saved = sum(bool(paths) and all((folder / path).is_file() for path in paths) for paths in names)
        if saved:
            found.append(Fix(f"{BASIC}.dataset_dir={folder}", round(saved * len(rows) / len(tried))))
    return sorted(found, key=lambda fix: -fix.saves_rows)[:1]


def _paths(sample: Sample) -> list[str]:
    sources = [item.source.get("path") if isinstance(item.source, dict) else item.source for item in sample.media]
    flat = [name for source in sources for name in (source if isinstance(source, list) else [source])]
    return [name for name in flat if isinstance(name, str)]


def _candidates(basic: BasicParameters) -> list[Path]:
    """The folders of the files of rows, those around them, and their usual sub-folders."""
    files = _named_files(basic)
    bases = list(dict.fromkeys([*(file.parent for file in files), *(file.parent.parent for file in files)]))
    bases.append(Path(basic.dataset_dir))
    tried = [*bases, *(base / name for base in bases for name in _SUBFOLDERS)]
    here = Path(basic.dataset_dir).resolve()
    return [folder for folder in dict.fromkeys(tried) if folder.is_dir() and folder.resolve() != here]


def _named_files(basic: BasicParameters) -> list[Path]:
    entries = basic.dataset.split(",") if isinstance(basic.dataset, str) else list(basic.dataset or ())
    found = []
    for entry in (str(getattr(entry, "path", entry)).strip() for entry in entries):
        path = next((p for p in (Path(entry), Path(basic.dataset_dir) / entry) if p.exists()), None)
        if path is not None:
            found.append(path if path.is_file() else path / "rows")
    return found
