"""A weight that the first and the last stage share (embedding and output head): each has a copy, and the two stay equal
to the bit, since both are updated by the same sum of gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.models.structure.share import Share


class TiedEnds:
    """The shared weights of which this rank has an end.

    Args:
        part: What this rank holds of the model, sharded.
        share: Names the copies.
        ties: Copy → first name, of the whole model, the same on all ranks.
        copy_rank: Pipeline rank of the copies.
    """

    def __init__(self, part: nn.Module, share: Share, ties: Mapping[str, str], copy_rank: int) -> None:
        self._share = share
        parameters = dict(part.named_parameters())
        self._ends = [
            (parameters.get(first), parameters.get(copy), share.owners[first], copy_rank)
            for copy, first in sorted(ties.items())
            if first in parameters or copy in parameters
        ]

    @torch.no_grad()
    def copy_values(self) -> None:
        """Give the copies the values of the weights."""
        for first, copy, first_rank, copy_rank in self._ends:
            if first is not None and copy is not None:
                _local(copy).copy_(_local(first))
            elif first is not None:
                dist.send(_local(first).contiguous(), group=self._share.group, group_dst=copy_rank)
            elif copy is not None:
                values = torch.empty_like(_local(copy))
                dist.recv(values, group=self._share.group, group_src=first_rank)
                _local(copy).copy_(values)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Let both ends have the sum of their gradients, once a step."""
        for first, copy, first_rank, copy_rank in self._ends:
            if first is not None and copy is not None:
                if first.requires_grad:
                    total = _gradient(first) + _gradient(copy)
                    for end in (first, copy):
                        _gradient(end).copy_(total)
                continue
            own, other = (first, copy_rank) if first is not None else (copy, first_rank)
            assert own is not None
            if own.requires_grad:
                gradient = _gradient(own)
                gradient.add_(self._exchanged(gradient, other))

    def _exchanged(self, gradient: Tensor, other: int) -> Tensor:
        theirs, ours = torch.empty_like(gradient), gradient.contiguous()
        group = self._share.group
        operations = [
            dist.P2POp(dist.isend, ours, group=group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return theirs


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, for writing in place; zeros where no micro-batch made one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
