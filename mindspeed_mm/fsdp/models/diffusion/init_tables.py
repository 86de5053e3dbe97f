"""From scratch: the modulation tables that several families' transformers hold beside torch's own layers."""

from __future__ import annotations

from torch import nn


def init_scale_shift_table(module: nn.Module) -> None:
    """N(0, 1/width), as in diffusers' constructors; a module without such a table is left alone."""
    table = module._parameters.get("scale_shift_table")
    if table is not None:
        table.normal_(std=table.shape[-1] ** -0.5)
