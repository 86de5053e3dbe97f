"""Adapters added to the weights under them, tensor by tensor, nothing read before it is written.

plain   W + s·B·A                           experts: for each of them
DoRA    m ⊙ (W + s·B·A) / ‖W + s·B·A‖       rows, length by length

Several adapters add what each would add to the base alone, as PEFT's forward pass does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from mindspeed_mm.checkpoint.lazy_tensor import Computed, LazyTensor, Reordered, TensorReader, WithRows
from mindspeed_mm.core.errors import ModelFolderError, Problem
from mindspeed_mm.fsdp.models.lora.experts import factors
from mindspeed_mm.fsdp.models.lora.files import StoredAdapter
from mindspeed_mm.fsdp.models.lora.names import MAGNITUDE, LoraReport, Strength, adapter_weight
from mindspeed_mm.fsdp.ops.experts import ExpertModule, fused_experts

_MOST = 5


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to one weight."""

    a: LazyTensor
    b: LazyTensor
    scale: float
    magnitude: LazyTensor | None = None
    experts: int = 0
    """Number of experts in a fused parameter; 0 for a linear layer."""
    is_transposed: bool = False
    """Fused parameters lie as (experts, inputs, outputs)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that the difference is added to."""
        inputs, outputs = self.a.shape[1], self.b.shape[0]
        if not self.experts:
            return outputs, inputs
        if self.is_transposed:
            return self.experts, inputs, outputs
        return self.experts, outputs, inputs

    @property
    def parts(self) -> list[LazyTensor]:
        """Tensors that `added` needs: A, B and, where there is one, the magnitude."""
        parts = [self.a, self.b]
        if self.magnitude is not None:
            parts.append(self.magnitude)
        return parts

    def added(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """The difference to the weight, from `parts` as read."""
        if self.experts:
            a_ErI, b_EOr = factors(a, b, self.experts)
            product = self.scale * (b_EOr @ a_ErI)
            if self.is_transposed:
                return product.transpose(1, 2)
            return product
        product = self.scale * (b @ a)
        if not rest:
            return product
        direction = weight + product
        return (rest[0] / torch.linalg.norm(direction, dim=1))[:, None] * direction - weight


def with_deltas(base: LazyTensor, deltas: Sequence[tuple[Delta, float]], dtype: torch.dtype | None) -> LazyTensor:
    """A weight with adapters added, each so many times. Added up in the widest of the dtypes that are read and written:
    what is written is rounded once."""
    sources = [base, *chain.from_iterable(delta.parts for delta, _ in deltas)]
    widest = dtype or base.dtype
    for source in sources:
        widest = torch.promote_types(widest, source.dtype)

    def merged(read: list[torch.Tensor]) -> torch.Tensor:
        values = iter([tensor.to(widest) for tensor in read])
        weight = total = next(values)
        for delta, times in deltas:
            total = total + times * delta.added(weight, *islice(values, len(delta.parts)))
        return total

    return Computed(sources, merged, base.shape, widest)


def merge_into(
    tensors: dict[str, LazyTensor], adapters: Sequence[tuple[Mapping[str, Delta], float]], dtype: torch.dtype | None
) -> None:
    """Add adapters to tensors of a model, in place.

    Args:
        tensors: The model's, by its own names.
        adapters: Weight → what is added to it, and how many times.
        dtype: That will be written; None: each tensor's own.
    """
    added: dict[str, list[tuple[Delta, float]]] = {}
    for deltas, times in adapters:
        for name, delta in deltas.items():
            added.setdefault(name, []).append((delta, times))
    for name, own in added.items():
        tensors[name] = with_deltas(tensors[name], own, dtype)


def deltas_of_run(lora: LoraReport, trained: Mapping[str, LazyTensor], outline: nn.Module) -> dict[str, Delta]:
    """What a run's own adapter adds.

    Args:
        lora: Of the run.
        trained: What it trained, by names in the model with adapters, as of an untouched base.
        outline: The model without adapters.
    """

    def read(layer: str, side: str) -> LazyTensor:
        return trained[adapter_weight(layer, side)]

    found = {}
    for layer in lora.targets:
        magnitude = read(layer, MAGNITUDE) if lora.use_dora else None
        found[f"{layer}.weight"] = Delta(read(layer, "A"), read(layer, "B"), lora.scale, magnitude)
    for name, layer, module in levels(outline, lora.parameters_targeted):
        strength = lora.strengths.get(name.rpartition(".")[2], Strength(lora.rank, lora.alpha))
        found[name] = _of_experts(read(layer, "A"), read(layer, "B"), strength.scale, module)
    return found


class FileDeltas(NamedTuple):
    """What one file of adapters does to a model, by names of the model."""

    deltas: dict[str, Delta]
    """What it adds to a weight."""
    whole: dict[str, LazyTensor]
    """What it trained whole."""
    tokens: dict[str, tuple[LazyTensor, tuple[int, ...]]]
    """Rows of tokens that it trained in full, and where they belong in the weight."""

    def replace_in(self, tensors: dict[str, LazyTensor]) -> None:
        """Put in what was trained whole, and rows of tokens, in place of a model's own."""
        tensors.update(self.whole)
        for name, (rows, positions) in self.tokens.items():
            order = sorted(range(len(positions)), key=positions.__getitem__)
            in_order = Reordered(rows, 0, torch.tensor(order))
            tensors[name] = WithRows(tensors[name], in_order, [positions[at] for at in order])


@contextmanager
def deltas_of_files(adapters: Sequence[StoredAdapter], outline: nn.Module) -> Iterator[list[FileDeltas]]:
    """What adapters do to a model; inside, it can be read.

    Args:
        adapters: From files.
        outline: The model without adapters, parameters on meta.

    Raises:
        ModelFolderError: They are of another model.
    """
    with ExitStack() as stack:
        found = []
        for adapter in adapters:
            reader = stack.enter_context(safe_open(adapter.weights, framework="pt"))
            found.append(_of_file(adapter, outline, reader))
        yield found


def _of_file(adapter: StoredAdapter, outline: nn.Module, reader: TensorReader) -> FileDeltas:
    found = {}
    for layer, sides in adapter.layers.items():
        parts = {side: adapter.stored(key, reader) for side, key in sides.items()}
        found[f"{layer}.weight"] = Delta(parts["A"], parts["B"], adapter.scale(layer), parts.get(MAGNITUDE))
    for name, layer, module in levels(outline, _fused_parameters(adapter, outline)):
        if layer not in adapter.fused:
            raise _foreign(adapter, [Problem("has no adapter in the file", key=name)])
        sides = adapter.fused[layer]
        a, b = adapter.stored(sides["A"], reader), adapter.stored(sides["B"], reader)
        found[name] = _of_experts(a, b, adapter.scale(name), module)
    whole: dict[str, LazyTensor] = {name: adapter.stored(adapter.keys[name], reader) for name in adapter.whole}
    tokens: dict[str, tuple[LazyTensor, tuple[int, ...]]] = {}
    for name, (key, rows) in adapter.tokens.items():
        tokens[name] = (adapter.stored(key, reader), rows)
    _check_fits(adapter, outline, found, whole)
    _check_tokens(adapter, outline, tokens)
    return FileDeltas(found, whole, tokens)


def _check_tokens(
    adapter: StoredAdapter, outline: nn.Module, tokens: Mapping[str, tuple[LazyTensor, tuple[int, ...]]]
) -> None:
    state = outline.state_dict(keep_vars=True)
    problems = []
    for name, (stored, rows) in tokens.items():
        if name not in state:
            problems.append(Problem("is not in the model", key=name))
        elif (max(rows) >= len(state[name])) or stored.shape != (len(rows), *state[name].shape[1:]):
            what = f"rows up to {max(rows)} of {list(stored.shape)} by the adapter, {list(state[name].shape)} here"
            problems.append(Problem(what, key=name))
    if problems:
        raise _foreign(adapter, problems)


def levels(outline: nn.Module, parameters: Sequence[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """(parameter, what PEFT calls its wrapper, module) of fused parameters with adapters: PEFT wraps a module once for
    each, in their order, the last one outermost."""
    for module_name, module in fused_experts(outline).items():
        own = [f"{module_name}.{name}" for name, _ in module.named_parameters(recurse=False)]
        wrapped = [name for name in own if name in parameters]
        for position, name in enumerate(wrapped):
            yield name, module_name + ".base_layer" * (len(wrapped) - 1 - position), module


def _fused_parameters(adapter: StoredAdapter, outline: nn.Module) -> list[str]:
    ends = adapter.settings.get("target_parameters") or ()
    named = []
    for name, _ in outline.named_parameters():
        if any(name == end or name.endswith(f".{end}") for end in ends):
            named.append(name)
    return named


def _of_experts(a: LazyTensor, b: LazyTensor, scale: float, module: ExpertModule) -> Delta:
    return Delta(a, b, scale, experts=module.num_experts, is_transposed=bool(module.is_transposed))


def _check_fits(
    adapter: StoredAdapter, outline: nn.Module, deltas: Mapping[str, Delta], whole: Mapping[str, LazyTensor]
) -> None:
    state = outline.state_dict(keep_vars=True)
    wanted: dict[str, Delta | LazyTensor] = {**deltas, **whole}
    missing, misshapen = [], []
    for name, source in wanted.items():
        if name not in state:
            missing.append(Problem("is not in the model", key=name))
        elif tuple(state[name].shape) != tuple(source.shape):
            shapes = f"{list(source.shape)} by the adapter, {list(state[name].shape)} in the model"
            misshapen.append(Problem(shapes, key=name))
    problems = missing + misshapen
    fused = {layer for _, layer, _ in levels(outline, list(wanted))}
    for layer in adapter.fused:
        if layer not in fused:
            problems.append(Problem("is not in the model", key=layer))
    if problems:
        raise _foreign(adapter, problems)


def _foreign(adapter: StoredAdapter, problems: Sequence[Problem]) -> ModelFolderError:
    return ModelFolderError(
        f"{adapter.weights}: the adapters do not belong to this model: {len(problems)} of their weights do not fit. "
        "Name the folder that they were trained on.",
        problems=problems[:_MOST],
    )
