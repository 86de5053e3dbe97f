"""Folders that many tests begin with are made once in a process, and copied after that: to make a model takes a few
tenths of a second, to copy one takes milliseconds."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

P = ParamSpec("P")


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    """Removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="made-once-")


_made: dict[tuple[str, ...], tuple[Path, Path]] = {}
"""Maker and its arguments → the folder that is copied, and what the maker returned."""


def made_once(make: Callable[Concatenate[Path, P], Path]) -> Callable[Concatenate[Path, P], Path]:
    """Let a function make a folder once for each of its arguments, which are told apart by how they are shown.

    Args:
        make: Writes into its first argument the same for the same other arguments, never its path, and returns a path
            in there.
    """

    @functools.wraps(make)
    def made(folder: Path, /, *args: P.args, **kwargs: P.kwargs) -> Path:
        key = (make.__module__, make.__qualname__, repr(args), repr(sorted(kwargs.items())))
        if key not in _made:
            kept = Path(_root().name, str(len(_made)))
            _made[key] = kept, make(kept, *args, **kwargs)
        kept, returned = _made[key]
        shutil.copytree(kept, folder, copy_function=shutil.copy, dirs_exist_ok=True)
        return folder / returned.relative_to(kept)

    return made
