"""Counts a model: its products, which of them the backward pass adds, and which are done again.

The backward pass needs the gradient of a weight where it is trained, that of an input where something in front of it is
trained. Frozen weights and towers cost their forward pass alone; below the first adapter nothing is differentiated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.tools.flops_tool.count import FlopCount, ModuleFlops
from mindspeed_mm.fsdp.tools.flops_tool.products import Product, Reader, owner
from mindspeed_mm.fsdp.tools.flops_tool.sequences import Sequences, find_sequences


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
        works.append(
            ModuleFlops(_module_of_product(product), product.kind, product.unit, product.flops, gradients, is_again)
        )
    return FlopCount(tuple(works), sequences.lengths, tuple(dict.fromkeys(reader.uncounted)))


def _is_inside(product: Product, names: Collection[str]) -> bool:
    parts = product.module.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1)) or "" in names


def _module_of_product(product: Product) -> str:
    """The module that a layer belongs to; the layer itself where it stands alone."""
    if product.attends:
        return product.module
    parent = product.module.rpartition(".")[0]
    is_in_block = any(map(str.isdigit, parent.split(".")))
    if is_in_block:
        return parent
    return product.module


# --- which products the backward pass needs ---------------------------------------------------------------------------


_ENTRY = re.compile(
    r"((to|add|in_proj)_)?(w?qkvz?|kv|q|k|v|query|key|value|gate|up|gate_up|in|b|g|f|z|a|ba|w1|w3)(_a)?(_proj.*)?"
)
"""Layers beside each other that read the input of the module around them."""
_RAW = re.compile(
    r"(.*embedder\.linear_1|(all_)?x_embedder(\..*)?|context_embedder(\.proj_in)?|(vace_)?patch_embed(ding|\..*)|img_in"
    r"|proj_in|caption_projection\.linear_1|t_embedder\.mlp\.0)"
)
"""Layers of generators that read what a batch holds."""
_MAIN = "main"


class Differentiation:
    """Answers how many gradients of a product are formed, for products in the order of the model.

    Args:
        model: Built.
        sequences: What each module goes over.
        products: All of them.
        blocks: Names of the repeated blocks.
        attentions: Names of modules that are attention.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequences,
        products: Sequence[Product],
        blocks: Iterable[str],
        attentions: Collection[str],
    ) -> None:
        self._sequences, self._products = sequences, products
        self._blocks = frozenset(blocks)
        self._order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        self._first: dict[str, int] = {}
        """Sequence → place of the first module that is trained on the way to it: memory apart from the main path, each
        tower by its own name, what stands between towers and decoder by what it hands over."""
        self._blocks_with_norms: set[str] = set()
        self._raw = {self._first_of(side) for side in sequences.sides}
        """Layers of towers that read what a batch holds."""
        makers = {product.module for product in products if not product.attends}
        for name, module in model.named_modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self._note(name, is_norm=owner(name) not in makers and name.rpartition(".")[0] not in attentions)

    def gradients(self) -> Iterator[tuple[Product, float]]:
        """Each product, and how many products of its size the backward pass adds."""
        stations: dict[str, list[Product]] = {}
        for product in self._products:
            stations.setdefault(self.block_of(product.module), []).append(product)
        for block, products in stations.items():
            has_gradient: dict[str, bool] = {}
            for place, product in enumerate(products):
                if product.attends:
                    yield product, _of_attention(product, has_gradient)
                    continue
                fed = self._is_fed(block, products[:place] if block else (), product)
                has_gradient[product.module] = has_gradient.get(product.module, False) or fed or product.trained
                yield product, float(fed) + float(product.trained)

    def _first_of(self, side: str) -> str:
        for product in self._products:
            if self._sequences.side_of(product.module) == side:
                return product.module
        return ""

    def block_of(self, name: str) -> str:
        """The block that a module is in, the outermost one; empty outside."""
        start = ""
        for part in name.split("."):
            start = f"{start}.{part}" if start else part
            if start in self._blocks:
                return start
        return ""

    def _note(self, name: str, *, is_norm: bool) -> None:
        """Remember a module that is trained."""
        block = self.block_of(name)
        if block and is_norm:
            self._blocks_with_norms.add(block)
        path = self._path(owner(name), bool(block))
        self._first.setdefault(path, self._order[name])

    def _path(self, name: str, in_block: bool) -> str:
        """Which of the model's paths a module is on."""
        if side := self._sequences.side_of(name):
            return side
        sequence = self._sequences.of(name)
        if sequence in (units.MEDIA, units.SOUND_TOKENS, units.LABELS):
            return sequence
        is_memory = sequence in self._sequences.memory and not in_block
        if is_memory:
            return sequence
        return _MAIN

    def _is_fed(self, block: str, before: Sequence[Product], product: Product) -> bool:
        """Whether the input of a product has a gradient."""
        if product.adapter == "B":
            return True
        name, sequence = product.module, self._sequences.of(product.module)
        if name in self._raw or (not block and _RAW.fullmatch(name)):
            return False
        if sequence in self._sequences.memory and not self._sequences.side_of(name):
            return self._is_trained_before(name, sequence, *self._sequences.sides)
        path = self._path(name, bool(block))
        feeding: list[str] = []  # paths that end in this one: whatever is trained on them is in front of it
        if path not in self._sequences.sides:
            feeding += self._sequences.sides
        if path in (_MAIN, units.LABELS):
            feeding += [units.MEDIA, units.SOUND_TOKENS]
        if path == units.LABELS:
            feeding.append(_MAIN)
        if self._is_trained_before(block or name, path, *feeding) or block in self._blocks_with_norms:
            return True
        return any(each.trained and _leads(each, product) for each in before)

    def _is_trained_before(self, name: str, path: str, *feeding: str) -> bool:
        """Whether something is trained on a path in front of a module, or anywhere on the paths that feed it."""
        if self._first.get(path, sys.maxsize) < self._order.get(name, sys.maxsize):
            return True
        return not self._first.keys().isdisjoint(feeding)


def _of_attention(product: Product, has_gradient: Mapping[str, bool]) -> float:
    """Two for each product where all of queries, keys and values have a gradient; less in the first layers that train
    only some of them."""
    queries, keys, values = (any(map(has_gradient.get, names)) for names in product.attends)
    if product.kind != "attention":
        return 2.0 * (queries or keys or values)
    scores = (queries + keys) * (1 - product.value_share)
    return scores + ((queries or keys) + values) * product.value_share


def _leads(first: Product, then: Product) -> bool:
    """Whether the output of a layer is part of the input of a later one of the same block: not of one beside it."""
    parent, _, name = then.module.rpartition(".")
    if first.module == then.module:
        return then.adapter == "B"
    if not first.module.startswith(f"{parent}."):
        return True
    if _ENTRY.fullmatch(name):
        return False
    return "_b" not in name or first.module.rpartition(".")[2].split("_")[0] == name.split("_")[0]
