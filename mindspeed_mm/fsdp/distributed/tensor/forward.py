"""What split modules do instead of their own `forward`: their parameters as this rank has them, and the collectives
around them.

A module's `forward` is replaced on the instance, as recompute does: nothing is wrapped, no parameter changes its name,
and hooks (sharding, the labelled rows of a head) stay around it. Parameters are DTensors on the axis `tp`, or plain
ones of which a rank uses a part.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.distributed.tensor.collectives import (
    TensorRanks,
    copy_to_ranks,
    gather_features,
    sum_gradient,
    sum_of_all,
    sum_over_ranks,
    sum_to_own_tokens,
)
from mindspeed_mm.fsdp.ops.forward_stack import Forward


class SplitInput:
    """The way into split layers. Modules that take the very same tensor (queries, keys, values) share one crossing, and
    so one collective in the backward pass.

    Args:
        ranks: Of the group.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._last: weakref.ref[torch.Tensor] | None = None
        self._crossed: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The input of a split layer, for this rank's part of it."""
        is_same = self._last is not None and self._last() is tensor
        # What crossed while no gradient was recording is of no use where one is, and the other way round.
        records = tensor.requires_grad and torch.is_grad_enabled()
        if is_same and self._crossed is not None and self._crossed.requires_grad == records:
            return self._crossed
        crossed = copy_to_ranks(tensor, self._ranks)
        self._last, self._crossed = weakref.ref(tensor, self._forget), crossed
        return crossed

    def __deepcopy__(self, memo: object) -> SplitInput:
        return SplitInput(self._ranks)

    def _forget(self, dead: weakref.ref[torch.Tensor]) -> None:
        if self._last is dead:
            self._last = self._crossed = None


class LocalForward:
    """A module's own forward on the parameters that `local` gives.

    Args:
        module: Whose `forward` this replaces.
        ranks: Of the group.
    """

    def __init__(self, module: nn.Module, ranks: TensorRanks) -> None:
        self._forward: Forward = module.forward  # bound: a deep copy of the module takes its own along
        self._module, self._ranks = module, ranks

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the module's own forward while its parameters are replaced by what `local` returns."""
        own: dict[str, torch.Tensor | None] = {}
        for name, parameter in self._module.named_parameters(recurse=False, remove_duplicate=False):
            own[name] = self.local(name, parameter)
        with parameters_as(self._module, own):
            return self._forward(*args, **kwargs)

    def local(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        """What the module sees of a parameter: here all of it, used on this rank's tokens or heads only."""
        return sum_gradient(parameter, self._ranks)


class ColumnForward(LocalForward):
    """A linear layer cut by output features.

    Args:
        module: The layer.
        ranks: Of the group.
        entry: The way in; None where a module around this one has let its input in already.
        blocks: Relative sizes of the layers fused in this one, each cut on its own. Given: parameters are whole.
        gathers: Return the features of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: TensorRanks,
        entry: SplitInput | None,
        blocks: Sequence[int] = (),
        gathers: bool = False,
    ) -> None:
        super().__init__(module, ranks)
        self._entry, self._blocks, self._gathers = entry, blocks, gathers

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """(…, in) → (…, out / ranks)."""
        tensor, *rest = args
        if self._entry is not None:
            tensor = self._entry(tensor)
        output = super().__call__(tensor, *rest, **kwargs)
        if self._gathers:
            return gather_features(output, self._ranks)
        return output

    def local(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, entries of the bias."""
        return local_part(parameter, self._ranks, 0, self._blocks)


class RowForward(LocalForward):
    """A linear layer cut by input features; its bias is added once, behind the sum.

    Args:
        module: The layer.
        ranks: Of the group.
        to_own_tokens: Sequence parallelism: keep this rank's tokens of the sum.
        blocks: Relative sizes of what is concatenated in the input. Given: parameters are whole.
    """

    def __init__(
        self, module: nn.Module, ranks: TensorRanks, to_own_tokens: bool = False, blocks: Sequence[int] = ()
    ) -> None:
        super().__init__(module, ranks)
        self._to_own_tokens, self._blocks = to_own_tokens, blocks

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """(…, in / ranks) → (…, out)."""
        partial = super().__call__(*args, **kwargs)
        bias: torch.Tensor | None = self._module._parameters.get("bias")
        if self._to_own_tokens:
            output = sum_to_own_tokens(partial, self._ranks)
            if bias is not None:  # each rank adds it to its own tokens alone
                bias = sum_gradient(bias, self._ranks)
        else:
            output = sum_over_ranks(partial, self._ranks)
        if bias is None:
            return output
        return output + bias

    def local(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        """Columns of the weight, no bias."""
        if name == "bias":
            return None
        return local_part(parameter, self._ranks, 1, self._blocks)


class EmbeddingForward(LocalForward):
    """An embedding cut by rows: tokens of other ranks give zeros, the sum over ranks gives all."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """ids (…) → (…, H)."""
        ids, *rest = args
        rows = self._module.weight.shape[0] // self._ranks.size  # type: ignore[index, operator, union-attr]
        own = ids - self._ranks.rank * rows
        elsewhere = (own < 0) | (own >= rows)
        with padding_moved(self._module, -self._ranks.rank * rows, rows):
            found = super().__call__(own.masked_fill(elsewhere, 0), *rest, **kwargs)
        return sum_over_ranks(found.masked_fill(elsewhere.unsqueeze(-1), 0), self._ranks)

    def local(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the embedding's weight."""
        return local_part(parameter, self._ranks, 0)


class HeadNumbersForward(LocalForward):
    """An attention with parameters of one number a head: it sees those of this rank's heads."""

    def local(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """(heads,) → (heads / ranks,)."""
        return local_part(parameter, self._ranks, 0, (1,))


class WideNormForward(LocalForward):
    """`torch.nn.RMSNorm` over features that lie on several ranks: x / √(mean x² + ε) · weight, in fp32 at least."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """(…, F / ranks), as it comes."""
        (own,) = args
        norm: Any = self._module
        wide = own if own.dtype == torch.float64 else own.float()
        eps = torch.finfo(own.dtype).eps if norm.eps is None else norm.eps
        squares = wide.square().sum(dim=-1, keepdim=True)
        mean = sum_of_all(squares, self._ranks) / (self._ranks.size * own.shape[-1])
        weight = local_part(norm.weight, self._ranks, 0, (1,))
        return (wide * torch.rsqrt(mean + eps)).to(own.dtype) * weight


def local_part(parameter: torch.Tensor, ranks: TensorRanks, dim: int, blocks: Sequence[int] = ()) -> torch.Tensor:
    """This rank's part of a parameter along `dim`: of a DTensor what it holds, of a whole one the same part of every
    block, with the gradient summed over ranks."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    unit = parameter.shape[dim] // sum(blocks)
    fused = sum_gradient(parameter, ranks).split([unit * block for block in blocks], dim=dim)
    return torch.cat([block.chunk(ranks.size, dim=dim)[ranks.rank] for block in fused], dim=dim)


@contextmanager
def parameters_as(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """While inside, the module's own parameters are these tensors."""
    own = dict(module._parameters)
    # Plain tensors on purpose: gradients flow back through them.
    module._parameters.update(values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


@contextmanager
def padding_moved(module: nn.Module, shift: int, rows: int) -> Iterator[None]:
    """While inside, an embedding's `padding_idx`, whose row gets no gradient, counts this rank's rows."""
    padding: Any = getattr(module, "padding_idx", None)
    if padding is None:
        yield
        return
    moved = padding + shift
    module.padding_idx = moved if 0 <= moved < rows else None  # type: ignore[assignment]
    try:
        yield
    finally:
        module.padding_idx = padding
