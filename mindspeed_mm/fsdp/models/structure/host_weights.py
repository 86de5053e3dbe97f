"""Which parameters wait on the host until their block runs: noted on the model, read where weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mindspeed_mm.fsdp.models.facts import facts_of


@dataclass(frozen=True)
class HostWeights:
    """The fact of a model."""

    names: frozenset[str]


def host_weights(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are loaded into the memory of the host; none of most models."""
    found = facts_of(model).noted(HostWeights)
    return found.names if found is not None else frozenset()
