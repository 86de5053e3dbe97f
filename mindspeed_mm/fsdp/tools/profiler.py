"""The analysis of traces as a command of its own: `python -m mindspeed_mm.fsdp.tools.profiler analyse TRACE`.

It is `mm profile TRACE`. Traces are recorded by `tools.profile` of a configuration (`recorder.py`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

HELP = """\
Usage: python -m mindspeed_mm.fsdp.tools.profiler analyse TRACE|FOLDER [--top N] [--json]

  Show where the time of a trace went and what limits the steps. TRACE is what tools.profile, torch's profiler or an
  NPU's wrote (*.json, *.json.gz); of a FOLDER all ranks are compared.

Examples:
  python -m mindspeed_mm.fsdp.tools.profiler analyse runs/mine/profiling
  python -m mindspeed_mm.fsdp.tools.profiler analyse trace.json.gz --top 20 --json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(HELP, end="")
        return 0
    if words[0] not in ("analyse", "analyze"):
        print(
            f"'{words[0]}' is not a command of the profiler. Did you mean 'analyse'?\n\n{HELP}", end="", file=sys.stderr
        )
        return 2
    # By name: the command line stands above this layer, and nothing below it imports it.
    code: int = importlib.import_module("mindspeed_mm.cli.main").run(["profile", *words[1:]])
    return code


if __name__ == "__main__":
    sys.exit(main())
