"""Tells what a model folder or a run is for by looking, without torch."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.json_file import parse_json

_GENERATOR = "model_index.json"


def is_generator(path: Path) -> bool:
    """Whether a folder, a run or one checkpoint of a run is an image or video generator. A path that is nothing at all
    is none."""
    if (path / _GENERATOR).is_file():
        return True
    started_from = (_started_from(folder) for folder in (path, path.absolute().parent))
    return any(folder is not None and (folder / _GENERATOR).is_file() for folder in started_from)


def _started_from(run: Path) -> Path | None:
    """The model folder that a run names."""
    try:
        facts = parse_json((run / "run.json").read_bytes())
    except (OSError, ValueError):
        return None
    name = facts.get("model_name_or_path") if isinstance(facts, dict) else None
    return Path(name) if isinstance(name, str) else None
