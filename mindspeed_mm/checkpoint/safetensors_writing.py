"""Writes a safetensors file with the rights that any other new file gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path, notes: Mapping[str, str] | None = None) -> None:
    """Write tensors. The library makes a file that only its owner may read, whatever the umask says; this one has the
    umask's mode.

    Args:
        tensors: Contiguous, none sharing memory with another.
        path: The file; replaced when it is there.
        notes: Text for the header.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(dict(tensors), path, None if notes is None else dict(notes))
    except SafetensorError as error:
        raise _os_error(error, path) from error
    path.chmod(mode)


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """The library says `... (os error 28)`."""
    number = str(error).rpartition("os error ")[2].rstrip(") ")
    return OSError(int(number) if number.isdigit() else 5, str(error), str(path))
