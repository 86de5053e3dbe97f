"""Saves a live model as a Hugging Face folder, under the keys and in the layout that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_mm.checkpoint.keymap import Step, check_used_once, natural_order
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.checkpoint.transformers_map import loading_steps, saving_steps
from mindspeed_mm.core.artifacts import atomic_folder
from mindspeed_mm.fsdp.checkpoint.hf_folder import MAX_SHARD_BYTES, DtypeRule, copy_assets, write_weights
from mindspeed_mm.fsdp.checkpoint.ranks import Ranks
from mindspeed_mm.fsdp.checkpoint.tree import model_tensors, tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_hf(
    model: nn.Module,
    folder: Path,
    assets_from: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    ranks: Ranks | None = None,
) -> None:
    """Write a live model, sharded or not. Called by all ranks; each tensor is gathered by itself, rank 0 writes.

    Args:
        model: The model.
        folder: Appears when complete.
        assets_from: Folder whose configuration, tokenizer and processor are copied.
        dtype: None writes each tensor in the dtype that `assets_from` has for it.
        max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        overwrite: Replace an existing folder.
        ranks: All of them; made here when not given, which is itself a collective.
    """
    ranks = ranks or Ranks()
    tensors = model_tensors(model)
    stored: dict[str, LazyTensor] = {
        name: Stored(name, tensor.shape, tensor.dtype, lambda: _Gathering(tensors)) for name, tensor in tensors.items()
    }
    made = hub_tensors(model, stored)
    rule = ranks.first("reading the source", lambda: DtypeRule.of_source(assets_from, dtype))
    with ExitStack() as stack:
        draft = folder
        if ranks.is_first:
            draft = stack.enter_context(atomic_folder(folder, overwrite=overwrite))
        ranks.first("copying", lambda: copy_assets(assets_from, draft, dtype))
        write_weights(made, draft, rule, max_shard_bytes, ranks)


class _Gathering:
    """Gives whole tensors of a sharded model: each read is a collective, so all ranks read in the same order."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def get_tensor(self, key: str) -> torch.Tensor:
        tensor = self._tensors[key]
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def hub_tensors(model: nn.Module, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """A model's tensors under the keys, and in the layout, of the folder that it came from.

    Raises:
        ModelFolderError: A tensor would be lost or written twice.
    """
    steps = _saving_steps(model, tensors)
    targets = dict.fromkeys(key for step in steps for key in step.targets)
    check_used_once(steps, tensors, targets)
    made = {key: tensor for step in steps for key, tensor in step.targets.items()}
    return {key: made[key] for key in sorted(made, key=natural_order)}


def remember_layout(model: nn.Module, source: Path) -> set[str]:
    """Note on a model built without weights how the source's weights would become its own, so that `hub_tensors` leads
    back to exactly that layout (older names, fused or split tensors).

    Args:
        model: From `ModelHub.build`.
        source: The folder that the run started from.

    Returns:
        The source's keys that a complete export has. Empty when the source holds no weights.
    """
    if not any(source.glob("*.safetensors")):
        return set()
    names, aliases = set(model.state_dict()), tied_names(model)
    rules = getattr(model, "_mm_conversion_rules", None)
    with open_weights(source) as stored:
        if rules is not None:
            steps = loading_steps(model, stored, names, rules)  # type: ignore[arg-type]
        elif (key_map := getattr(model, "key_map", None)) is not None:
            steps = key_map.steps(stored)
        else:
            steps = [Step((key,), {key: tensor}) for key, tensor in stored.items()]
    return {key for step in steps if any(t in names and t not in aliases for t in step.targets) for key in step.sources}


def _saving_steps(model: nn.Module, tensors: Mapping[str, LazyTensor]) -> list[Step]:
    from transformers import PreTrainedModel  # heavy

    if isinstance(model, PreTrainedModel):
        outline = _unsharded_outline(model)
        return saving_steps(outline, tensors, _saving_rules(outline))
    key_map = getattr(model, "key_map", None)
    if key_map is not None:
        return key_map.inverse.steps(tensors)
    return [Step((name,), {name: tensor}) for name, tensor in tensors.items()]


def _unsharded_outline(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or when it is sharded, one without storage and of its first class: sharding gives modules new
    classes, and transformers finds its rules by class name."""
    if not isinstance(model, FSDPModule):
        return model
    first_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    with torch.device("meta"):
        outline = first_class(model.config)
    outline._weight_conversions = getattr(model, "_weight_conversions", None)
    return outline


def _saving_rules(model: PreTrainedModel) -> list[Any]:
    """transformers' rules for a model that was made from scratch: none that lead to outdated names."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # heavy

    return get_model_conversion_mapping(model, add_legacy=False)
