"""Writes the data and the model folder of the quick start alone: `python examples/digits/make_digits.py [FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.quickstart.make_digits import describe, make_digits
from mindspeed_mm.quickstart.tiny_model import LAYERS


def main() -> int:
    """Write the example and say what it is; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the digits example.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/digits"))
    parser.add_argument("--experts", type=int, default=0, help="of each text layer; 0: a dense model")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the text model")
    chosen = parser.parse_args()
    try:
        rows = make_digits(chosen.folder, experts=chosen.experts, layers=chosen.layers)
    except UsageError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    print(describe(chosen.folder, rows, chosen.experts, chosen.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
