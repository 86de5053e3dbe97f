"""The nearest known word to a mistyped one, and where a missing path may be."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

from mindspeed_mm.core.os_errors import with_home


def nearest(word: str, known: Iterable[str], most: int = 1, likeness: float = 0.6) -> list[str]:
    """Up to `most` known words at least so like `word` (from 0 to 1), best first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=likeness)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"Did you mean 'x'? "` with a trailing space, or an empty string when nothing is near."""
    found = nearest(word, known)
    if found:
        return f"Did you mean '{found[0]}'? "
    return ""


def near_path(path: Path, fits: Callable[[Path], bool] = Path.exists) -> Path | None:
    """The entry beside a missing file or folder that was probably meant, or None.

    Names are compared without their ending, which makes any two short names of one kind alike.

    Args:
        path: What is missing.
        fits: What may be offered.
    """
    if not path.parent.is_dir():
        return None
    by_stem = {entry.stem.lower(): entry for entry in sorted(path.parent.iterdir()) if fits(entry)}
    near = nearest(path.stem.lower(), by_stem, likeness=0.75)
    if near:
        return by_stem[near[0]]
    return None


_FILES = (".bin", ".gguf", ".json", ".pt", ".pth", ".safetensors", ".yaml", ".yml")


def where_else(path: Path) -> str:
    """The way out for an input that does not exist: a similar name in the same folder, or a download if it looks like a
    name on a model hub, else where relative paths start."""
    near = near_path(with_home(path))
    if near is not None:
        return f"Did you mean '{near}'?"
    may_be_on_hub = not path.is_absolute() and len(path.parts) == 2 and path.suffix not in _FILES
    if may_be_on_hub and not path.parent.exists():
        name, folder = path.as_posix(), path.name
        return (
            f"If this is a name on a model hub, download it first (hf download {name} --local-dir {folder}, or "
            f"modelscope download {name} --local_dir {folder}) and name the local folder."
        )
    return f"Relative paths start at '{Path.cwd()}'."
