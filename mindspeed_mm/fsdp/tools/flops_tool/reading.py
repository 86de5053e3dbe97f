"""Counts a model: its products, which of them the backward pass adds, and which are done again."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.tools.flops_tool.count import FlopCount, ModuleFlops
from mindspeed_mm.fsdp.tools.flops_tool.gradients import Differentiation
from mindspeed_mm.fsdp.tools.flops_tool.products import Product, Reader
from mindspeed_mm.fsdp.tools.flops_tool.sequences import find_sequences


def count_flops(
    model: nn.Module,
    *,
    head_on_labels: bool = True,
    recompute: Collection[str] = (),
    keeps: Collection[str] = (),
) -> FlopCount | None:
    """FLOPs of a training step of a model; None where it is not known how its modules are fed.

    Args:
        model: Built and not split or sharded, with its adapters and with what is frozen frozen. Parameters may be on
            the meta device.
        head_on_labels: Whether the output head is run on labelled rows only.
        recompute: Names of modules whose forward pass is done again in the backward pass.
        keeps: Kinds of work (`ModuleFlops.kind`) whose results these modules keep.
    """
    spec = resolve_spec(model)
    sequences = find_sequences(model, spec.head, head_on_labels=head_on_labels)
    if sequences is None:
        return None
    reader = Reader(model, sequences)
    products = list(reader.read())
    passes = Differentiation(model, sequences, products, spec.blocks, reader.attentions)
    again, gradients_of = frozenset(recompute), {id(product): number for product, number in passes.gradients()}
    works = []
    for product in products:
        gradients = gradients_of[id(product)]
        is_again = gradients > 0 and product.kind not in keeps and _is_inside(product, again)
        works.append(ModuleFlops(_shown(product), product.kind, product.unit, product.flops, gradients, is_again))
    return FlopCount(tuple(works), sequences.lengths, tuple(dict.fromkeys(reader.uncounted)))


def _is_inside(product: Product, names: Collection[str]) -> bool:
    parts = product.module.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1)) or "" in names


def _shown(product: Product) -> str:
    """The module that a layer belongs to; the layer itself where it stands alone."""
    if product.attends:
        return product.module
    parent = product.module.rpartition(".")[0]
    is_in_block = any(map(str.isdigit, parent.split(".")))
    return parent if is_in_block else product.module
