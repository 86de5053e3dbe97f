"""Muon on the matrices of a model's blocks, AdamW on the rest, in one optimizer; on any mix of meshes.

Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982 (updates of AdamW's size, decoupled weight decay).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from mindspeed_mm.fsdp.models.loading.local_shard import copy_whole
from mindspeed_mm.fsdp.optimizer.adamw import StreamedAdamW
from mindspeed_mm.fsdp.optimizer.gradient_offload import offloaded, own_gradient
from mindspeed_mm.fsdp.optimizer.groups import Group
from mindspeed_mm.fsdp.optimizer.matrix_exchange import Cut, cut_of, mesh_device, shared_work
from mindspeed_mm.fsdp.optimizer.newton_schulz import orthogonal
from mindspeed_mm.fsdp.optimizer.shards import local, room_like

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
