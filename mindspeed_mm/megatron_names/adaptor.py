"""`mindspeed.megatron_adaptor`: imported for its patches, of which none is needed here."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_mm.arguments import parse_args


def get_mindspeed_args(get_defaults: bool = False) -> Namespace:
    """The flags of this process, before `pretrain` reads them; words of a script's own are left out.

    Args:
        get_defaults: Not read: absent flags have their defaults.
    """
    return parse_args(ignore_unknown_args=True)
