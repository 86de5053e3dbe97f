"""Keeps the frozen weights of a model's blocks on the host, and brings each block's to the device ahead of its turn.

Blocks run one behind the other, in the backward pass the other way round. When a block begins, the weights of the next
one start on their way, in a queue of their own, and those of all others are let go of on the device: it holds the
weights of two blocks at a time. A block is computed again in the backward pass, so that nothing which was saved in the
forward pass holds on to weights that have left. What is trained stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.meta_device import HostWeights
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.utils.host_copies import HostCopies

WEIGHTS_KEY = "features.enable_weight_offload"


def frozen_weights(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names of the frozen parameters of these modules."""
    frozen = []
    for name in names:
        for full_name, parameter in model.get_submodule(name).named_parameters(prefix=name):
            if not parameter.requires_grad:
                frozen.append(full_name)
    return frozen


def check_weights_can_wait(model: nn.Module, names: Sequence[str], recomputed: Sequence[str]) -> None:
    """Raise `ConfigError` when these modules have no frozen weights, or keep some of them for the backward pass."""
    if not frozen_weights(model, names):
        raise ConfigError(
            "true, but nothing in these blocks is frozen: weights that are trained change on the device",
            key=WEIGHTS_KEY,
            way_out="Train adapters (training.lora.enable), freeze the blocks (model.freeze), or set it to false.",
        )
    if kept := [name for name in names if name not in recomputed]:
        raise ConfigError(
            f"true, but '{kept[0]}' is not computed again in the backward pass, until which it keeps its weights",
            key=WEIGHTS_KEY,
            way_out="Set features.recompute: true, and name it in recompute_plan.apply_modules if others stand there.",
        )


def offload_weights(model: nn.Module, names: Sequence[str]) -> None:
    """Let the frozen weights of these modules wait on the host; call it before recomputation is applied and before
    sharding, which leaves them alone.

    Args:
        model: Parameters on meta or real.
        names: Modules in the order in which they run, none inside another.
    """
    facts_of(model).note(HostWeights(frozenset(frozen_weights(model, names))))
    traffic = WeightTraffic()
    for name in names:
        module = model.get_submodule(name)
        replace_forward(module, ForwardKind.WEIGHTS, traffic.join(module))


class WeightTraffic:
    """The blocks of a model, and which of their weights are on the device."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._blocks: list[_Block] = []
        self._latest = -1

    def join(self, module: nn.Module) -> Callable[..., object]:
        """Add the block that runs behind those added before; returns its forward."""
        number, forward = len(self._blocks), module.forward
        self._blocks.append(_Block(module, self._copies))

        def with_weights(*args: object, **kwargs: object) -> object:
            self.enter(number, next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)))
            return forward(*args, **kwargs)

        return with_weights

    @property
    def on_device(self) -> list[int]:
        """Numbers of the blocks whose weights are on the device, or on their way."""
        return [number for number, block in enumerate(self._blocks) if block.is_here]

    def enter(self, number: int, device: torch.device) -> None:
        """A block begins, in the forward pass or again in the backward pass."""
        ahead = number - 1
        # The first block begins a forward pass or ends a backward pass: what comes next is the second one either way.
        if number == 0 or number > self._latest:
            ahead = number + 1
        self._latest = number
        for other in self.on_device:
            if other not in (number, ahead):
                self._blocks[other].leave()
        for wanted in (number, ahead):
            if wanted < len(self._blocks):
                self._blocks[wanted].bring(device)
        self._blocks[number].wait()


class _Block:
    """The frozen weights of one block.

    Args:
        module: Holds them.
        copies: The queue of all blocks.
    """

    def __init__(self, module: nn.Module, copies: HostCopies) -> None:
        self._module, self._copies = module, copies
        self._on_host: dict[nn.Parameter, torch.Tensor] = {}
        self._mark: torch.Event | None = None
        self.is_here = False

    def bring(self, device: torch.device) -> None:
        """Start to copy, unless the weights are here or on their way."""
        if self.is_here:
            return
        if not self._on_host:
            self._settle(device)
        for parameter, on_host in self._on_host.items():
            parameter.data = self._copies.to_device(on_host, device)
        self._mark, self.is_here = self._copies.mark(), True

    def wait(self) -> None:
        """What is computed from here on finds the weights."""
        self._copies.wait(self._mark)

    def leave(self) -> None:
        """Give up the copies on the device. Whoever reads a weight now computes with NaN."""
        self.wait()  # what is still on its way must not arrive in memory that others have by then
        for parameter in self._on_host:
            parameter.data = _absent(parameter)
        self.is_here = False

    def _settle(self, device: torch.device) -> None:
        """The first time: weights are where they were loaded."""
        for parameter in self._module.parameters():
            if not parameter.requires_grad:
                on_host = parameter.data.to("cpu")
                if device.type != "cpu":  # a copy from pinned memory runs beside the computation
                    on_host = on_host.pin_memory()
                self._on_host[parameter] = on_host


def _absent(parameter: nn.Parameter) -> torch.Tensor:
    """In the shape of a parameter, without its memory: NaN, also where bytes stand for numbers (`quantized_linear`)."""
    filling = float("nan")
    if not parameter.is_floating_point():
        filling = torch.iinfo(parameter.dtype).max
    return torch.full((), filling, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
