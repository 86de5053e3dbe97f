"""Stands for MindSpeed-MM's scores of generated clips, which are not computed here."""

from __future__ import annotations

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.train.provider.entry import run_entry


def refuse() -> None:
    """Say so.

    Raises:
        UsageError: Always.
    """
    way_out = "Draw the clips with inference_sora.py, and score them with the benchmark's own tool."
    raise UsageError("generated clips are not scored here", where="evaluate_gen.py", way_out=way_out)


def main() -> None:
    """Run the script, which ends with a message and the exit code of a usage error."""
    run_entry(refuse)


if __name__ == "__main__":
    main()
