"""Tells what a model folder or a run is for by looking, without torch."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.model_kinds import LANGUAGE, ModelKind, kind_of_folder


def kind_of_path(path: Path) -> ModelKind:
    """The kind of model in a folder, or that a run or one checkpoint of a run has trained. A path that is nothing at
    all counts as a language model."""
    folders = (path, _started_from(path), _started_from(path.absolute().parent))
    return next((kind for folder in folders if (kind := kind_of_folder(folder)) is not LANGUAGE), LANGUAGE)


def _started_from(run: Path) -> Path | None:
    """The model folder that a run names."""
    try:
        facts = parse_json((run / "run.json").read_bytes())
    except (OSError, ValueError):
        return None
    name = facts.get("model_name_or_path") if isinstance(facts, dict) else None
    if isinstance(name, str):
        return Path(name)
    return None
