"""The one door to files that `torch.save` writes: tensors and plain containers come in, nothing in them is run.

Such a file is a pickle. It is read by torch's restricted unpickler, which builds tensors, numbers, text and containers
and refuses whatever else it asks for; a refused file is scanned, so that the message names what it asked for.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.errors import CheckpointError, first_names


def load_weights(path: Path) -> Any:
    """The content of a `.pt`, `.pth` or `.bin` file; tensors on the CPU, mapped from the disk where the file allows it.

    Raises:
        CheckpointError: The file is missing, broken, or asks for anything beyond tensors and plain containers.
    """
    try:
        return _load_quietly(path)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except Exception as error:  # foreign bytes: torch's readers raise whatever they stumble over
        raise _refusal(path, error) from error


@contextmanager
def os_errors_told(path: Path) -> Iterator[None]:
    """Raise the operating system's error. torch's archive writer hides it behind "unexpected pos 704 vs 598"."""
    try:
        yield
    except RuntimeError as error:
        cause = _os_error(error)
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def _os_error(error: BaseException) -> OSError | None:
    """The operating system's error that an exception arose from or while handling."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        # torch raises its own error while the other one is handled, without `from`.
        seen = seen.__cause__ or seen.__context__
    return seen


def find_unsafe_globals(path: Path) -> list[str]:
    """What a zipped file asks for beyond tensors and plain containers, as `module.name`; nothing is imported or run.

    Raises:
        ValueError: The file is none of `torch.save`'s archives, or a damaged one.
    """
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except OSError:
        raise
    except Exception as error:  # foreign bytes: torch's scanner raises whatever it stumbles over
        raise ValueError(str(error)) from error


def _load_quietly(path: Path) -> object:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        # Only the zipped format can be mapped; asked of an older file, torch raises.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path) or None)


def _refusal(path: Path, error: Exception) -> CheckpointError:
    """In our words: torch's advise to switch the restriction off."""
    asked_for = _asked_for(path, error)
    if not asked_for:
        return CheckpointError(
            "is broken, or not a file that torch.save wrote", where=str(path), way_out="Copy the file again."
        )
    return CheckpointError(
        f"is refused: it asks for {first_names(asked_for)}, which tensors do not need",
        where=str(path),
        way_out="It may have been made to run code. Get the file as safetensors, or made of tensors alone.",
    )


def _asked_for(path: Path, error: Exception) -> list[str]:
    """From the archive; the older format, a bare pickle, cannot be scanned: there torch's message names the first."""
    try:
        return find_unsafe_globals(path)
    except (ValueError, OSError):
        return re.findall(r"GLOBAL (\S+) was not an allowed global", str(error))[:1]
