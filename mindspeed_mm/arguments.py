"""Megatron-style flags as a namespace. It imports no torch."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from mindspeed_mm.provider.parse import ExtraArgsProvider, fill_absent, parse

__all__ = ["fill_absent", "parse_args"]


def parse_args(extra_args_provider: ExtraArgsProvider | None = None, ignore_unknown_args: bool = False) -> Namespace:
    """The flags of this process, with Megatron's defaults for those that are absent.

    `mindspeed_mm.provider.translate.translate` makes a configuration of the namespace.

    Args:
        extra_args_provider: Adds flags of your own to the parser that it is given, and returns it.
        ignore_unknown_args: Leave out words that belong to no flag.

    Raises:
        UsageError: Every word that cannot be read.
        ConfigError: The one YAML that stands in place of flags cannot be read.
    """
    return parse(sys.argv[1:], os.environ, extra_args_provider, ignore_unknown_args)
