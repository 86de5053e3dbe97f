"""The folder of the quick start: a mark tells it from folders of others, which are left alone."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.errors import UsageError

MARK = "made-by.txt"
"""In the folder: says that the quick start wrote it, and by which recipe."""


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        UsageError: It is a file, or it has content but no mark of this example.
    """
    way_out = "Name a folder that does not exist yet or is empty."
    if folder.exists() and not folder.is_dir():
        raise UsageError("is a file; the example needs a folder", where=str(folder), way_out=way_out)
    if folder.is_dir() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise UsageError("has other content, which is left alone", where=str(folder), way_out=way_out)
