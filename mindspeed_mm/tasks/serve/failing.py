"""What a client is told, and what the log of the server gets, when a request fails within the server."""

from __future__ import annotations

import sys
import traceback

from mindspeed_mm.core.errors import MachineError, ModelFolderError, UsageError
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.tasks.serve.limits import RefusedError


def failure_of(error: Exception, param: str | None = None) -> RefusedError:
    """The answer to a request that failed; the reason is printed to stderr.

    Args:
        error: Of the model or of the server itself. An error that is an answer stays what it is.
        param: Field of the request that cannot be answered; None: as the error's key says.
    """
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, UsageError):
        return RefusedError.of(error)
    if isinstance(error, NotFiniteError):
        sys.stderr.write(f"{error}\n")
        what = error.problems[0].what.rstrip(".")
        return RefusedError(500, f"the model failed: {what}.", code="not_finite")
    if isinstance(error, MachineError | ModelFolderError):
        sys.stderr.write(f"{error}\n")
        return RefusedError.of(error, param)
    traceback.print_exception(error, file=sys.stderr)
    return RefusedError(500, f"the server failed: {type(error).__name__}.", code="internal_error")
