"""A language model out of a folder of its own, in place of the one that a larger model's folder holds."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.megatron.family import TEXT, MegatronModel
from mindspeed_mm.core.errors import UsageError

_BASE = "model"
"""What the names of a language model's own folder begin with, but for the head's."""


def text_keys(keys: Collection[str], model: MegatronModel) -> list[str]:
    """Those of a larger model's keys on the hub that are its language model's."""
    regexes: list[re.Pattern[str]] = []
    for rule in model.rules_of(TEXT):
        regexes += rule.regexes
    return [key for key in keys if any(regex.fullmatch(key) for regex in regexes)]


def renamed_text(tensors: Mapping[str, LazyTensor], model: MegatronModel, folder: Path) -> dict[str, LazyTensor]:
    """A language model's tensors under the names that they have in the larger model.

    Args:
        tensors: By the keys of its own folder: `model.layers.0…`, `lm_head.weight`.
        model: The larger one.
        folder: Of the language model, for errors.

    Raises:
        UsageError: The model is a language model alone.
    """
    source_of = model.hub_names
    if len(model.towers) == 1:
        raise UsageError(
            "the model is a language model alone, and no other can take its place",
            where=str(folder),
            key="cfg.common_model_config.llm_hf_dir",
            way_out="Name this folder in cfg.hf_config.hf_dir.",
        )
    at = source_of[model.embedding].split(".")[:-2]
    if at[-1:] == [_BASE]:  # the whole language model lies in the larger one
        start = ".".join([*at[:-1], ""])
        return {start + key: tensor for key, tensor in tensors.items()}
    base, head = ".".join(at), source_of[model.head]
    return {_renamed(key, base, head): tensor for key, tensor in tensors.items()}


def _renamed(key: str, base: str, head: str) -> str:
    """Without the head, which stands beside the larger model."""
    first, _, rest = key.partition(".")
    if first == _BASE:
        return f"{base}.{rest}"
    if rest == "weight":
        return head
    return key
