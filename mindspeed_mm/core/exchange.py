"""Two paths change places in one step, where the system can do that."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

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
