"""Muon on the matrices of a model's blocks, AdamW on the rest, in one optimizer; on any mix of meshes.

Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982 (updates of AdamW's size, decoupled weight decay). A
momentum becomes an orthogonal direction by Newton-Schulz iteration. Ranks that share matrices take turns, so that each
matrix is worked on, whole, by one of them: M matrices, R rows or columns of a shard along the dimension that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from typing_extensions import override

from mindspeed_mm.fsdp.models.loading.local_shard import copy_whole, local, room_like
from mindspeed_mm.fsdp.ops.collectives import exchange_parts
from mindspeed_mm.fsdp.optimizer.adamw import StreamedAdamW
from mindspeed_mm.fsdp.optimizer.groups import Group
from mindspeed_mm.fsdp.optimizer.offload import offloaded, own_gradient
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

MOMENTUM = "momentum_buffer"
AT_A_TIME_BYTES = 64 << 20
"""Whole matrices that a rank works on at a time; a single one may be larger."""

Work = tuple[torch.Tensor, Group]
"""A parameter and its group."""


class Muon(StreamedAdamW):
    """Muon and AdamW.

    Args:
        groups: Of parameters; `matrices` says how many a parameter (or one of its experts) is, 0 leaves it to AdamW.
        names: Parameter → its name in the whole model.
        momentum: Decay of the momentum; updates look ahead (Nesterov).
        steps: Of Newton-Schulz.
        matched_rms: Root mean square of an update of rate 1, 0.2 being AdamW's: the direction is multiplied by
            `matched_rms` √max(rows, columns). 0: Jordan's √max(1, rows / columns).
        options: Of AdamW.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        names: Mapping[torch.Tensor, str],
        *,
        momentum: float,
        steps: int,
        matched_rms: float,
        **options: Any,
    ) -> None:
        super().__init__(groups, names, **options)
        self._momentum, self._steps, self._matched_rms = momentum, steps, matched_rms

    @property
    @override
    def kind(self) -> str:
        return "Muon"

    def _update_all(self) -> None:
        """AdamW's parameters, then the matrices. Ranks that share a matrix agree on whether it has a gradient."""
        super()._update_all()
        cuts: dict[tuple[Hashable, ...], Cut] = {}
        alike: dict[tuple[Hashable, ...], list[Work]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                has_gradient = parameter.grad is not None or offloaded(parameter) is not None
                if group["matrices"] and has_gradient:
                    cut = cut_of(parameter)
                    key = (*cut.key, parameter.shape, group["matrices"])
                    cuts.setdefault(key, cut)
                    alike.setdefault(key, []).append((parameter, group))
        for key, work in alike.items():
            self._update_alike(cuts[key], work)

    def _update_alike(self, cut: Cut, work: list[Work]) -> None:
        """Parameters of one shape, cut in one way."""
        count = work[0][1]["matrices"]
        compute = partial(self._direction, count=count)
        if cut.is_mixed:
            for parameter, group in work:
                self._apply(parameter, group, self._from_whole(parameter, compute))
            return
        for some in self._rounds(cut, work):
            momenta = torch.stack([self._looking_ahead(parameter) for parameter, _ in some])
            directions = shared_work(momenta, cut, compute, AT_A_TIME_BYTES)
            for (parameter, group), direction in zip(some, directions, strict=True):
                self._apply(parameter, group, direction)

    def _rounds(self, cut: Cut, work: list[Work]) -> Iterator[list[Work]]:
        """As many 2-D matrices at a time as there are ranks to share them; experts are many already."""
        each = cut.ranks if work[0][0].ndim == 2 else 1
        for start in range(0, len(work), each):
            yield work[start : start + each]

    def _looking_ahead(self, parameter: torch.Tensor) -> torch.Tensor:
        """The momentum after this gradient, and a step ahead; this rank's part."""
        gradient, state = own_gradient(parameter), self.state[parameter]
        if not state:
            state[MOMENTUM] = room_like(parameter, parameter.dtype, gradient.device)
        momentum = local(state[MOMENTUM]).lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(momentum, self._momentum)

    def _from_whole(self, parameter: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """This rank's part of the direction, from the whole matrix on every rank."""
        ahead = room_like(parameter, parameter.dtype, mesh_device(parameter))
        local(ahead).copy_(self._looking_ahead(parameter))
        assert isinstance(ahead, DTensor)
        copy_whole(ahead, compute(ahead.full_tensor()))
        return local(ahead)

    def _direction(self, whole: torch.Tensor, count: int) -> torch.Tensor:
        """(…, rows, columns) of `count` matrices one above the other → their directions, scaled."""
        apart = whole.unflatten(-2, (count, -1))
        rows, columns = apart.shape[-2:]
        if self._matched_rms:
            scale = self._matched_rms * sqrt(max(rows, columns))
        else:
            scale = sqrt(max(1, rows / columns))
        return orthogonal(apart, self._steps).mul_(scale).flatten(-3, -2)

    def _apply(self, parameter: torch.Tensor, group: Group, direction: torch.Tensor) -> None:
        weights = local(parameter)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(direction.to(weights.device), alpha=-group["lr"])


# --- the direction of a matrix ----------------------------------------------------------------------------------------

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic, by Keller Jordan (Muon, 2024): steepest at 0, so that few steps suffice. Singular values
end between 0.7 and 1.2, not at 1."""
EPS = 1e-7


def orthogonal(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """U Vᵀ, roughly, of every matrix U Σ Vᵀ.

    Args:
        matrices: (…, rows, columns).
        steps: Of the iteration.

    Returns:
        Of the same shape and dtype. Computed in bf16 on an accelerator, in the matrices' own dtype on a CPU and for
        fp64.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.reshape(-1, *matrices.shape[-2:])
    x = x.mT if is_tall else x  # the smaller product
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)).to(_iteration_dtype(matrices))
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape).to(matrices.dtype)


def _iteration_dtype(matrices: torch.Tensor) -> torch.dtype:
    keeps = matrices.device.type == "cpu" or matrices.dtype == torch.float64
    if keeps:
        return matrices.dtype
    return torch.bfloat16


# --- whole matrices out of shards -------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How the last two dimensions of a parameter are cut over ranks. Cuts of the first of three (experts) and copies
    are no matter here: what a rank has of them is whole."""

    group: dist.ProcessGroup | None = None
    """Ranks that share the matrices; None: they are whole."""
    dim: int = 0
    """-2 or -1."""
    length: int = 0
    """Length of the whole matrix along `dim`."""
    ranks: int = 1
    rank: int = 0
    is_mixed: bool = False
    """Cut in several ways at a time."""
    device: torch.device | None = None
    """Where the ranks meet; None: where the shards are."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for parameters that can be worked on together."""
        return self[:-1]

    def sizes(self) -> list[int]:
        """R of each rank, as `torch.chunk` cuts."""
        most = -(-self.length // self.ranks)
        return [max(0, min(most, self.length - rank * most)) for rank in range(self.ranks)]


def cut_of(parameter: torch.Tensor) -> Cut:
    """How a parameter's matrices are cut."""
    if not isinstance(parameter, DTensor):
        return Cut()
    mesh, first = parameter.device_mesh, parameter.ndim - 2
    cut = []
    for axis, placement in enumerate(parameter.placements):
        # `_StridedShard` is not a subclass of `Shard`; both have a `dim`, and `Replicate` has none.
        dim: int = attribute_at(placement, "dim", -1)
        if dim >= first and mesh.size(axis) > 1:
            cut.append((axis, dim, placement.is_shard()))
    if not cut:
        return Cut()
    axis, dim, is_plain = cut[0]
    if len(cut) > 1 or not is_plain:
        return Cut(is_mixed=True)
    return Cut(
        mesh.get_group(axis),
        dim - parameter.ndim,
        parameter.shape[dim],
        mesh.size(axis),
        mesh.get_local_rank(axis),
        device=mesh_device(parameter),
    )


def mesh_device(parameter: DTensor | torch.Tensor) -> torch.device:
    """Where collectives run: the accelerator, even when shards are kept on the host."""
    if isinstance(parameter, DTensor):
        return torch.empty(0, device=parameter.device_mesh.device_type).device
    return parameter.device


def shared_work(
    shards: torch.Tensor, cut: Cut, work: Callable[[torch.Tensor], torch.Tensor], at_a_time_bytes: int
) -> torch.Tensor:
    """What `work` makes of whole matrices, cut as they were.

    Args:
        shards: (…, rows, columns), this rank's parts of M matrices.
        cut: How they are cut.
        work: (M', rows, columns) → the same shape.
        at_a_time_bytes: Whole matrices on a rank at a time, at least one.
    """
    flat = shards.flatten(end_dim=-3)
    if not len(flat):  # fewer experts than ranks
        return shards
    other = flat.shape[-1 if cut.dim == -2 else -2]
    whole_bytes = (cut.length or flat.shape[-1]) * other * flat.element_size()  # the same on all ranks
    most = max(1, at_a_time_bytes // whole_bytes) * cut.ranks
    results = [_worked_on(some, cut, work) for some in flat.split(most)]
    return torch.cat(results).view_as(shards)


def _worked_on(shards: torch.Tensor, cut: Cut, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if cut.group is None:
        return work(shards)
    shares = [len(part) for part in torch.arange(len(shards)).tensor_split(cut.ranks)]
    own, sizes = shares[cut.rank], cut.sizes()
    moved = shards.to(cut.device).transpose(cut.dim, -2)  # (M, R, other)
    other = moved.shape[-1]
    # There: this rank's rows of everybody's matrices, for all rows of its own. Back: the same the other way round.
    there = [(matrices, sizes[cut.rank], other) for matrices in shares]
    back = [(own, rows, other) for rows in sizes]
    whole = torch.cat(exchange_parts(moved.split(shares), back, cut.group), dim=1).transpose(cut.dim, -2)
    if own:
        whole = work(whole)
    returned = exchange_parts(whole.transpose(cut.dim, -2).split(sizes, dim=1), there, cut.group)
    return torch.cat(returned).transpose(cut.dim, -2)
