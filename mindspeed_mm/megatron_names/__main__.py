"""Runs a script with the names in place: `python -m mindspeed_mm.megatron_names script.py --flags`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.megatron_names.install import install


def main() -> None:
    """Run the script that the first word names, with the words behind it."""
    run_entry(_run)


def _run() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise UsageError(
            "names no script", where="mindspeed_mm.megatron_names", way_out="Give a script, and its flags behind it."
        )
    del sys.argv[0]
    install()
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
