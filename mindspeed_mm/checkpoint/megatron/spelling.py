"""Names that Megatron's layers give the same tensors: with Transformer Engine's modules a norm is part of the linear
layer behind it, and experts are numbered within one module.

Names: Megatron-Core 0.16.1, `extensions/transformer_engine.py` and `models/gpt/gpt_layer_specs.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.errors import CheckpointError

OF_KERNELS = "is what Megatron's kernels keep for themselves"
_SPELLINGS = tuple(
    (re.compile(rf"(?P<layer>.*\.layers\.[^.]+\.){found}"), usual)
    for found, usual in (
        (r"self_attention\.linear_qkv\.layer_norm_(?P<p>weight|bias)", "input_layernorm.{p}"),
        (r"mlp\.linear_fc1\.layer_norm_(?P<p>weight|bias)", "pre_mlp_layernorm.{p}"),
        (r"self_attention\.linear_(?P<q>q|kv)_up_proj\.layer_norm_(?P<p>weight)", "self_attention.{q}_layernorm.{p}"),
        (
            r"mlp\.experts\.(?P<fc>linear_fc[12])\.(?P<p>weight|bias)(?P<e>\d+)",
            "mlp.experts.local_experts.{e}.{fc}.{p}",
        ),
    )
)


def usual_name(name: str) -> str:
    """A tensor's name as Megatron's plain layers have it."""
    for spelling, usual in _SPELLINGS:
        if found := spelling.fullmatch(name):
            return found["layer"] + usual.format(**found.groupdict())
    return name


def usual_names(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """The same tensors by their usual names, without what kernels keep for themselves.

    Args:
        tensors: By their own names.
        where: The file, for errors.

    Raises:
        CheckpointError: Two have the same usual name.
    """
    names: dict[str, str] = {}
    for name in tensors:
        # Transformer Engine's: scales of 8-bit products, pickled.
        if name.endswith("._extra_state"):
            continue
        first = names.setdefault(usual_name(name), name)
        if first != name:
            raise CheckpointError(f"is there as {first} too", where=where, key=name)
    return {usual: tensors[name] for usual, name in names.items()}
