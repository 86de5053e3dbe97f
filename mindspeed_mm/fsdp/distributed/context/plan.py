"""What of a model works on a share of a sequence, and what speaks against it. Pure: nothing is changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.context.decoders import context_problems, find_decoder
from mindspeed_mm.fsdp.distributed.context.generators import check_attention, check_tokens
from mindspeed_mm.fsdp.distributed.context.towers import can_be_spread
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


@dataclass(frozen=True)
class ContextPlan:
    """How one sequence is spread over ranks."""

    ring: int
    """Ranks that pass keys and values round."""
    ulysses: int
    """Ranks that exchange heads."""
    spreads_samples: bool = False
    """Whether the tokens of a sample are spread, and every rank computes the loss of all of them."""
    towers: tuple[str, ...] = ()
    """Towers whose patches are spread with the text; any other tower is computed whole on every rank."""

    def describe(self) -> str:
        """One line for the log."""
        towers = f", patches of {', '.join(self.towers)} too" if self.towers else ""
        return f"sequences over ring {self.ring} × ulysses {self.ulysses}{towers}"


def resolve_context_plan(model: nn.Module, ring: int, ulysses: int, towers: Collection[str] = ()) -> ContextPlan | None:
    """The plan of a whole model; None where nothing is spread.

    Args:
        model: Whole; parameters on meta or real.
        ring: `parallel.ring_attention_size`.
        ulysses: `parallel.ulysses_parallel_size`.
        towers: Names of towers that follow the decoder.

    Raises:
        ConfigError: The model's attention cannot be spread, or its class brings no interface to it.
    """
    if ring * ulysses == 1:
        return None
    if facts_of(model).kind.spreads_samples:
        check_attention(model)
        return ContextPlan(ring, ulysses, spreads_samples=True)
    if problems := context_problems(attribute_at(find_decoder(model), "config")):
        raise ConfigError(f"{type(model).__name__} cannot spread a sequence over ranks", problems=problems)
    spread = [name for name in towers if can_be_spread(model.get_submodule(name))]
    return ContextPlan(ring, ulysses, towers=tuple(spread))


def check_sample_tokens(model: nn.Module, latents: Tensor, plan: ContextPlan) -> None:
    """Raise `DataError` when a generator's samples, (B, C, …) latents, have fewer tokens than there are ranks to spread
    them over."""
    check_tokens(model, tuple(latents.shape[1:]), plan.ring, plan.ulysses)
