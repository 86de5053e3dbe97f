"""Where results go that nobody named a folder for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Facts = dict[str, Any]
"""What results tell beside scores: the model, the data, settings, and how long it took."""


def results_folder(run: Path | None, evaluated: Path) -> Path:
    """`eval/` of a run, else `eval/NAME` of the working directory: the results of one folder do not replace another's.

    Args:
        run: The run whose model was evaluated, if it is one.
        evaluated: The model's folder, or that of generated pictures.
    """
    if run is not None:
        return run / "eval"
    return Path.cwd() / "eval" / evaluated.resolve().name
