"""`mm_extra_args_provider`, which scripts of MindSpeed-MM hand to `pretrain`."""

from __future__ import annotations

import argparse


def mm_extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser as it is: it knows `--mm-model`, `--mm-data` and `--mm-tool`, as all other flags."""
    return parser
