"""What of a model works on a share of a sequence, and what speaks against it. Pure: nothing is changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.distributed.context.generators import check_attention, check_tokens
from mindspeed_mm.fsdp.distributed.context.towers import can_be_spread
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.towers import find_uncarried
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
        check_attention(model, ring)
        return ContextPlan(ring, ulysses, spreads_samples=True)
    decoder = find_decoder(model)
    if takes_share(model):
        return ContextPlan(ring, ulysses)
    problems = context_problems(attribute_at(decoder, "config"))
    if uncarried := find_uncarried(decoder):
        what = (
            f"layers of {type(decoder).__name__} read {', '.join(uncarried)}, of which ranks are not given their part"
        )
        problems.append(Problem(what, key=KEYS, way_out="Set both sizes to 1."))
    if problems:
        raise ConfigError(f"{type(model).__name__} cannot spread a sequence over ranks", problems=problems)
    spread = [name for name in towers if can_be_spread(model.get_submodule(name))]
    return ContextPlan(ring, ulysses, towers=tuple(spread))


def check_sample_tokens(model: nn.Module, latents: Tensor, plan: ContextPlan) -> None:
    """Raise `DataError` when a generator's samples, (B, C, …) latents, have fewer tokens than there are ranks to spread
    them over."""
    check_tokens(model, tuple(latents.shape[1:]), plan.ring, plan.ulysses)


# --- what a decoder cannot do -----------------------------------------------------------------------------------------


KEYS = "parallel.ring_attention_size · parallel.ulysses_parallel_size"


def takes_share(model: nn.Module) -> bool:
    """Whether the class says that its forward takes its share of a sequence, `mm_context`, and works on the own tokens,
    in attention of its own: nothing is changed in it."""
    return bool(attribute_at(model, "takes_share", False))


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that takes token embeddings through the layers. A model whose code predictor goes on from the state in
    front of each frame of speech (`code_loss_factor`), that has places of codes (`code_heads`), whose pictures say what
    their own labels are (`tells_pictures`, `draws_pictures`), or whose states of whole samples go on into what draws
    (`draws_from_states`), has none that other ranks could take a part of.

    Raises:
        ConfigError: The model does not name one, or its attention is not behind transformers' interface.
    """
    decoder = decoder_of(model)
    joining = ("code_loss_factor", "code_heads", "tells_pictures", "draws_pictures", "draws_from_states")
    is_joined = any(attribute_at(model, name, False) for name in joining)
    is_exchangeable = takes_share(model) or attribute_at(decoder, "_supports_attention_backend", False)
    if decoder is not None and is_exchangeable and not is_joined:
        return decoder
    raise ConfigError(
        f"{type(model).__name__} has no decoder whose attention can be exchanged",
        key=KEYS,
        way_out="Set both sizes to 1: the model class must name its decoder (get_decoder) and call transformers' "
        "attention interface (_supports_attention_backend).",
    )


def context_problems(config: PreTrainedConfig) -> list[Problem]:
    """What in a decoder's configuration a spread sequence cannot do. Pure; it needs attributes only."""
    problems = []
    others = set(attribute_at(config, "layer_types", ())) - {"full_attention", "sliding_attention"}
    if others:
        problems.append(f"layers of type {', '.join(sorted(others))}: only softmax attention goes over ranks")
    dropout = attribute_at(config, "attention_dropout", 0.0)
    if dropout:
        problems.append(f"attention_dropout is {dropout}: it would be drawn differently on each rank")
    chunk = attribute_at(config, "attention_chunk_size")
    if chunk is not None:
        problems.append(f"attention_chunk_size is {chunk}: attention across ranks has no chunks")
    return [Problem(what, key=KEYS, way_out="Set both sizes to 1.") for what in problems]
