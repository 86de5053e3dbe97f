"""Two folders change places: in one step where the system can do that, else in two renames that can be taken back."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

# AT_FDCWD and RENAME_EXCHANGE of Linux' headers
_FROM_WORKING_DIRECTORY = -100
_EXCHANGE = 2
_CANNOT = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV}


def exchange(one: Path, other: Path) -> bool:
    """Let two existing paths of one file system change places (`renameat2` with `RENAME_EXCHANGE`, Linux).

    Returns:
        False where the system or the file system cannot do that; nothing has changed then.

    Raises:
        OSError: It was refused for another reason.
    """
    # glibc has it from 2.28 on; Python has no function for it
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    here = _FROM_WORKING_DIRECTORY
    if function(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(other))


def swap_folders(new: Path, standing: Path, aside: Path) -> None:
    """Give `new` the name of `standing`, and `standing` the name `aside`. Every writer that replaces a folder does it
    here.

    Args:
        new: A complete folder.
        standing: The folder that it replaces. Something has this name at every moment, but for the instant between two
            renames where the file system cannot exchange two names.
        aside: A free name. `new` has it first, so that the replaced folder has no other name at any moment.

    Raises:
        OSError: `aside` is taken, or a rename was refused. All folders have their former names then.
    """
    # tells after a failure which of the two folders has the name `aside`
    identity = new.stat().st_ino
    if os.path.lexists(aside):  # an empty folder would be replaced silently
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(aside))
    try:
        new.rename(aside)
        if exchange(aside, standing):
            return
        aside.rename(new)
        standing.rename(aside)
        new.rename(standing)
    except BaseException:
        if os.path.lexists(aside):
            if aside.stat().st_ino == identity:
                aside.rename(new)
            elif not os.path.lexists(standing):
                aside.rename(standing)
        raise
