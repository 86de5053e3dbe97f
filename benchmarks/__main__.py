"""`python -m benchmarks [NAME…]`: measure, write `benchmarks/results/NAME.json`, print one table.

Names: those of `NAMES`; none given: all. A target that is missed is written and printed as missed; it is not an error.
"""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import Figure, table
from benchmarks.machine import write_result

NAMES = (
    "help",
    "check",
    "loading",
    "saving",
    "conversion",
    "startup",
    "step_time",
    "diffusion_step",
    "extraction",
    "growth",
    "data_rate",
    "data_startup",
    "data_memory",
    "batches",
    "planning",
    "communication",
    "plans",
    "features",
    "chunk_loss",
    "layers",
    "towers",
    "windows",
    "balance",
    "optimizer_states",
    "answers",
    "serving",
    "preference",
    "reinforcement",
    "accelerator",
)


def main(names: list[str]) -> int:
    """Run what is asked for."""
    if unknown := [name for name in names if name not in NAMES]:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    # Whoever waits for a turn is stopped, and would stay so without us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: list[tuple[str, Figure]] = []
    with tempfile.TemporaryDirectory(prefix="mm-benchmarks-") as work:
        for name in names or NAMES:
            print(f"{name} …", flush=True)
            result = importlib.import_module(f"benchmarks.{name}").run(Path(work))
            if result is None:
                continue
            write_result(name, f"python -m benchmarks {name}", result)
            known = Figure.__dataclass_fields__
            figures += [(name, Figure(**{k: v for k, v in f.items() if k in known})) for f in result["figures"]]
    print(f"\n{table(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
