"""AdamW a stretch of the parameters at a time: its moments may be packed, and they and the gradients may live on the
host. And torch's AdamW on shards, for runs that ask for none of that. The arithmetic is torch's own in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.loading.local_shard import local
from mindspeed_mm.fsdp.optimizer.groups import Group
from mindspeed_mm.fsdp.optimizer.offload import StreamedItem, bucket_bytes, forget_gradients, offloaded, work_in_buckets
from mindspeed_mm.fsdp.optimizer.state_formats import MOMENTS, Format, format_of
from mindspeed_mm.fsdp.utils.device import memory_room_bytes

PIECE = 1 << 21
"""Numbers that are updated at a time. It does not depend on the memory there is: what is drawn by chance for a number
is the same on all ranks that hold it."""
HOST = torch.device("cpu")


@dataclass
class ParameterSlice:
    """A stretch of one parameter's part, flat."""

    parameter: torch.Tensor
    gradient: torch.Tensor | None
    """None: it comes from the host."""
    factor: torch.Tensor | None
    moments: list[tuple[Format, list[torch.Tensor]]]
    step: float
    """Steps done before this one."""
    seed: int


class Ready(NamedTuple):
    """A piece with all that torch's AdamW takes."""

    piece: ParameterSlice
    gradient: torch.Tensor
    numbers: list[torch.Tensor]
    """The two moments, unpacked."""
    kept: list[list[torch.Tensor]]
    """Where they are packed again, on the device."""


class StreamedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019). With `state_dtype` None the same to the bit as torch's.

    Args:
        groups: Of parameters.
        names: Parameter → its name in the whole model, for what is drawn by chance.
        state_dtype: `training.optimizer_state_dtype`.
        swaps: Keep the moments on the host.
        memory_share: Of the device's memory, that may be in use while the moments come and go.
        options: Of `torch.optim.AdamW`.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        names: Mapping[torch.Tensor, str],
        *,
        state_dtype: str | None = None,
        swaps: bool = False,
        memory_share: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self.state_dtype, self.swaps, self._memory_share = state_dtype, swaps, memory_share
        self._names = names
        for group in self._groups_of_adamw():
            for parameter in group["params"]:
                self._check(parameter)

    @property
    def kind(self) -> str:
        """What its state is, whoever computes it and wherever it lives."""
        if self.state_dtype:
            return f"AdamW {self.state_dtype}"
        return "AdamW"

    def state_device(self, key: str, parameter: torch.Tensor) -> torch.device:
        """Where an entry of a parameter's state is kept. The step is counted on the host: it is needed there."""
        if key == "step" or (self.swaps and key.startswith(MOMENTS)):
            return HOST
        return local(parameter).device

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, wherever they are."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            forget_gradients(group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        self._update_all()

    def _update_all(self) -> None:
        for group in self._groups_of_adamw():
            self._update_group(group)

    def _groups_of_adamw(self) -> list[Group]:
        """All but those of matrices, which a derived optimizer updates in its own way."""
        return [group for group in self.param_groups if not group["matrices"]]

    def _update_group(self, group: Group) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None or offloaded(parameter) is not None:
                by_device.setdefault(local(parameter).device, []).append(parameter)
        for device, parameters in by_device.items():
            items = chain.from_iterable(map(self._pieces, parameters))
            most = bucket_bytes(memory_room_bytes(self._memory_share))
            work_in_buckets(items, partial(self._update, group), most, device)
            for parameter in parameters:
                self.state[parameter]["step"] += 1

    def _update(self, group: Group, bucket: list[StreamedItem[ParameterSlice]]) -> None:
        """torch's AdamW on the pieces of a bucket."""
        ready = [_unpacked(item) for item in bucket]
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        first_moments: list[torch.Tensor] = []
        second_moments: list[torch.Tensor] = []
        for each in ready:
            parameters.append(each.piece.parameter)
            gradients.append(each.gradient)
            first_moments.append(each.numbers[0])
            second_moments.append(each.numbers[1])
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            gradients,
            first_moments,
            second_moments,
            [],
            _counters([each.piece for each in ready], group),
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for each in ready:
            for (how, _), numbers, kept in zip(each.piece.moments, each.numbers, each.kept, strict=True):
                how.pack(numbers, kept, each.piece.seed)

    def _pieces(self, parameter: torch.Tensor) -> Iterator[StreamedItem[ParameterSlice]]:
        """A parameter's part in stretches, with what has to come from the host."""
        state, formats = self._state_of(parameter), self._formats(parameter)
        away = offloaded(parameter)
        own, step = local(parameter).view(-1), float(state["step"])
        whole_gradient = parameter.grad if away is None else away.host
        assert whole_gradient is not None  # only parameters with a gradient come here
        gradient = local(whole_gradient).reshape(-1)
        for start in range(0, own.numel(), PIECE):
            end = min(start + PIECE, own.numel())
            piece = ParameterSlice(
                own[start:end], gradient[start:end], None, [], step, _seed(self._names[parameter], step, start)
            )
            # What lives on the host comes and goes around the update; a gradient only comes.
            updated: list[torch.Tensor] = []
            read_only: list[torch.Tensor] = []
            for how in formats:
                tensors = [_stretch(local(state[key]).view(-1), own, start, end) for key in how.state_keys()]
                piece.moments.append((how, tensors))
                if self.swaps:
                    updated += tensors
            if away is not None:
                read_only.append(gradient[start:end])
                piece.gradient, piece.factor = None, away.factor
            yield StreamedItem(piece, updated, read_only, self._extra(formats, piece))

    def _extra(self, formats: list[Format], piece: ParameterSlice) -> int:
        """Bytes of moments as numbers, and of what packing takes."""
        bytes_of_a_number = 0
        for how in formats:
            if how.dtype != piece.parameter.dtype:
                bytes_of_a_number += 48 if how.block else 16
        return bytes_of_a_number * piece.parameter.numel()

    def _formats(self, parameter: torch.Tensor) -> list[Format]:
        return [format_of(key, parameter, self.state_dtype) for key in MOMENTS]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for how in self._formats(parameter):
                state |= how.room(parameter, self.state_device(how.key, parameter))
        return state

    def _check(self, parameter: torch.Tensor) -> None:
        self._formats(parameter)
        if not local(parameter).is_contiguous():
            raise ConfigError(
                f"the shard of {self._names[parameter]} does not lie in one stretch of memory",
                key="training.optimizer",
                way_out="Use adamw without optimizer_state_dtype and gradient offload.",
            )


def _unpacked(streamed: StreamedItem[ParameterSlice]) -> Ready:
    piece, staged = streamed.item, list(streamed.staged)
    # What is staged is in the order of `_pieces`: the moments, if they live on the host, then the gradient, if it does.
    kept: list[list[torch.Tensor]] = []
    numbers: list[torch.Tensor] = []
    for how, tensors in piece.moments:
        if streamed.updated:
            tensors = [staged.pop(0) for _ in tensors]
        kept.append(tensors)
        numbers.append(how.unpack(tensors, piece.parameter.dtype))
    gradient = piece.gradient if piece.gradient is not None else staged.pop(0)
    if piece.factor is not None:
        gradient.mul_(piece.factor)
    return Ready(piece, gradient, numbers, kept)


def _seed(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def _stretch(kept: torch.Tensor, own: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The part of what is kept for the numbers from `start` to `end`: blocks have one factor."""
    each = own.numel() // kept.numel()
    return kept[start // each : end // each]


def _counters(pieces: list[ParameterSlice], group: Group) -> list[torch.Tensor]:
    """Numbers of steps for torch to count up, where it wants them."""
    if not (group["fused"] or group["capturable"]):
        return [torch.tensor(piece.step) for piece in pieces]
    device, steps = pieces[0].parameter.device, {piece.step for piece in pieces}
    if len(steps) == 1:
        return list(torch.full((len(pieces),), *steps, dtype=torch.float32, device=device).unbind())
    return [torch.full((), piece.step, dtype=torch.float32, device=device) for piece in pieces]


# --- on shards --------------------------------------------------------------------------------------------------------


class ShardedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019), the same to the bit as torch's; its state is sharded as the parameters are.

    It works on the shards themselves: every number is updated on its own, so a rank needs no other's. Given sharded
    tensors, torch works out in the first step how the whole list of them is placed, which takes many Python calls:
    close to a million for a model with a hundred parameters.
    """

    kind = "AdamW"
    found_inf: torch.Tensor | None = None
    """While an update is made: whether the device leaves it out. By this name torch looks for it; its GradScaler sets
    it."""

    def _init_group(self, group: Group, *lists: list[torch.Tensor]) -> bool:
        """torch's own, which fills the lists that one update works on: parameters, gradients, states."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex

    def can_leave_out_on(self, device: torch.device) -> bool:
        """Whether the device itself can leave an update out: torch's fused kernel does, where the parameters lie beside
        what tells it to. It is tried on one number, for which the host waits: a backend's kernel may not know of it."""
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        is_beside = all(local(parameter).device == device for parameter in parameters)
        return is_beside and all(group["fused"] for group in self.param_groups) and _kernel_leaves_out(device)

    def step_unless(self, left_out: torch.Tensor) -> None:
        """One update, which the device leaves out, with the count of steps, where it finds 1.0 in `left_out`.

        Args:
            left_out: 0-d, fp32, 0.0 or 1.0, on the device of the parameters; it is not read.
        """
        self.found_inf = left_out
        try:
            self.step()
        finally:
            self.found_inf = None


def _kernel_leaves_out(device: torch.device) -> bool:
    """Whether the fused kernel of a device does nothing when it is told so."""
    if device.type == "meta":
        return False
    parameter = torch.nn.Parameter(torch.ones(1, device=device))
    parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer = ShardedAdamW([parameter], lr=0.1, fused=True)
    try:
        optimizer.step_unless(torch.ones((), device=device))
    except (RuntimeError, TypeError):  # it refuses the argument
        return False
    return parameter.tolist() == [1.0] and float(optimizer.state[parameter]["step"]) == 0
