"""What the operating system refuses, in a person's words: rights, space and names are not bugs."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from mindspeed_mm.core.errors import MachineError, MMError, UsageError

_WAYS_OUT = {
    errno.EACCES: "Ask its owner for permission, or work as the user who created it.",
    errno.EPERM: "Ask its owner for permission, or work as the user who created it.",
    errno.EISDIR: "Move the folder away: a file belongs in its place.",
    errno.EROFS: "The file system is read-only: choose another place.",
    errno.ENOSPC: "Free some space, or choose another place.",
    errno.EDQUOT: "Free some space, or choose another place.",
    errno.EFBIG: "Choose another file system, or raise the limit on file sizes.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
    errno.ENFILE: "Too many files are open on this machine.",
    errno.EIO: "Look at the disk.",
    errno.EXDEV: "The folder cannot be renamed there, as in an image of a container: write to a new folder instead.",
    errno.ESTALE: "The file server no longer has it: try again.",
}
_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}
_SAFETENSORS = re.compile(r"No such file or directory: (.+)")
_LONGEST_SHOWN = 120


def explained_os_error(error: OSError) -> MMError | None:
    """The error as one of ours, with the file and a way out; None for one that says nothing to a person."""
    path = ""
    if isinstance(error.filename, str | bytes):  # a descriptor, or None, names no file
        path = os.fsdecode(error.filename)
    if error.errno in _WAYS_OUT:
        return MachineError(os.strerror(error.errno), where=path, way_out=_WAYS_OUT[error.errno])
    if error.errno in _NAMES:
        if len(path) > _LONGEST_SHOWN:
            path = f"{path[:_LONGEST_SHOWN]}…"
        return UsageError(os.strerror(error.errno), where=path, way_out="Give another path.")
    if error.errno == errno.ENOENT:
        return _removed_folder(path)
    if error.errno is None:  # safetensors raises its own, with the path in the text alone
        found = _SAFETENSORS.fullmatch(str(error))
        if found is not None:
            return _missing_file_error(Path(found[1]))
    return None


def with_home(path: Path) -> Path:
    """The path with `~` or `~user` replaced by that home.

    Raises:
        UsageError: There is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        way_out = "Give the path in full."
        raise UsageError(f"there is no user '{path.parts[0][1:]}'", where=str(path), way_out=way_out) from error


def _removed_folder(path: str) -> MMError | None:
    """Of a file that is not there: the folder that it was to be in, or the one that was worked in, if that is gone."""
    try:
        folder = Path.cwd() / Path(path).parent
    except FileNotFoundError:
        way_out = "Go to a folder that is there, and run the command again."
        return MachineError("the folder that this command was started in has been removed", way_out=way_out)
    if folder.exists():
        return None
    way_out = "Check its name, or run the command again, which makes its own folders anew."
    what = "there is no such folder, or it has been removed while this command ran"
    return MachineError(what, where=str(folder), way_out=way_out)


def _missing_file_error(path: Path) -> MMError | None:
    """Of a file that safetensors says is not there: that is its word for every file that it cannot open."""
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return None
    except OSError as error:
        return explained_os_error(error)
    return None
