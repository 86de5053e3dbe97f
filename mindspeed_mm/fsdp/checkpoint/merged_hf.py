"""A live model with adapters as one without: the base with the adapters added."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, DtypeRule, copy_assets, drafted_folder, write_weights
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.fsdp.checkpoint.adapters import of_untouched_base
from mindspeed_mm.fsdp.checkpoint.base_weights import open_base
from mindspeed_mm.fsdp.checkpoint.hf import folder_tensors, hub_tensors, live_tensors, remember_layout, with_beside
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.part import kept_beside
from mindspeed_mm.fsdp.models.lora.merge import deltas_of_run, merge_into
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.utils.ranks import Ranks


@contextmanager
def merged_tensors(model: nn.Module, outline: nn.Module, base: Path) -> Iterator[dict[str, LazyTensor]]:
    """The tensors of a model that trains adapters, sharded or not, by the names of the base's folder; inside, they can
    be read. Adapters are gathered when they are read: all ranks read the same ones in the same order.

    Args:
        model: With adapters.
        outline: The same model without, parameters on meta.
        base: Folder that the adapters were put on.

    Raises:
        ModelFolderError: The folder is not the model's.
    """
    lora = facts_of(model).lora
    assert lora is not None
    trained = of_untouched_base(live_tensors(model))
    with open_base(outline, base) as stored:
        tensors = folder_tensors(outline, stored)
        remember_layout(outline, base)
        merge_into(tensors, [(deltas_of_run(lora, trained, outline), 1.0)], None)
        tensors |= {name: tensor for name, tensor in trained.items() if not is_adapter_weight(name)}
        yield with_beside(hub_tensors(outline, tensors), kept_beside(outline, stored))


def save_merged_hf(model: nn.Module, outline: nn.Module, folder: Path, base: Path, *, ranks: Ranks) -> None:
    """Write it as a whole Hugging Face folder. Called by all ranks, rank 0 writes.

    Args:
        model: With adapters.
        outline: The same model without, parameters on meta.
        folder: Replaced when the new one is complete.
        base: Folder that the adapters were put on.
        ranks: All of them.

    Raises:
        ModelFolderError: The base is not the model's.
    """
    with merged_tensors(model, outline, base) as made, drafted_folder(folder, ranks, overwrite=True) as draft:
        rule = ranks.first("reading the source", lambda: DtypeRule.of_source(base, None))
        ranks.first("copying", lambda: copy_assets(base, draft, None))
        write_weights(made, draft, rule, MAX_SHARD_BYTES, ranks)
