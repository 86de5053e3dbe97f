"""What `mm … --nproc N` starts as each rank, by its path: the same command with the launcher's own import path.

Python puts the working directory, or the script's, before everything else when it runs a module or a script: whatever
lies there would be imported by ranks and not by a command without ranks. This file runs before the package is found, so
it imports nothing of it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping

IMPORTS_VARIABLE = "MM_LAUNCHER_IMPORTS"
SAFE_PATH = "PYTHONSAFEPATH"


def imports_of_this_process(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make `start` import what this process would."""
    imports = {"path": sys.path, "safe_path": environment.get(SAFE_PATH)}
    return {IMPORTS_VARIABLE: json.dumps(imports), SAFE_PATH: "1"}


def start() -> None:
    """Run `python -m mindspeed_mm` with the arguments of this process."""
    imports = json.loads(os.environ.pop(IMPORTS_VARIABLE))
    sys.path[:] = imports["path"]
    os.environ.pop(SAFE_PATH)
    if imports["safe_path"] is not None:
        os.environ[SAFE_PATH] = imports["safe_path"]
    runpy.run_module("mindspeed_mm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    start()
