"""How the vision towers of a model are laid out over the ranks of its decoder: sizes only, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.parallel_args import EncoderPlan, ParallelArguments

KEY = "parallel.encoder_plan"


@dataclass(frozen=True)
class EncoderSizes:
    """Who shares media. In a group of `streams × parts × copies` ranks, outermost first, each `ring × ulysses`
    neighbours are a team, which encodes a medium together."""

    streams: int = 1
    """Data ranks, which bring different media."""
    parts: int = 1
    """Context ranks of the decoder, which bring the same media and read different parts of their features."""
    copies: int = 1
    """Tensor ranks of the decoder, which bring the same media and read the same features."""
    ring: int = 1
    """Ranks of a team that pass keys and values round."""
    ulysses: int = 1
    """Ranks of a team that exchange heads."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share media: `streams` × `parts` × `copies`."""
        return self.streams * self.parts * self.copies

    @property
    def team(self) -> int:
        """Ranks that encode a medium together."""
        return self.ring * self.ulysses

    @property
    def teams(self) -> int:
        """How many media are encoded at a time."""
        return self.ranks // self.team

    def describe(self) -> str:
        """One line for the log: `whole media shared by data 2 × tensor 2 ranks`."""
        axes = {"data": self.streams, "context": self.parts, "tensor": self.copies}
        shared = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        what = "whole media" if self.team == 1 else f"media, each by ring {self.ring} × ulysses {self.ulysses} ranks,"
        return f"{what} shared by {shared} ranks"


def resolve_encoder_sizes(parallel: ParallelArguments, data_ranks: int) -> EncoderSizes | None:
    """The layout of towers; None where it is the decoder's.

    Args:
        parallel: The section.
        data_ranks: Ranks that read different samples.

    Raises:
        ConfigError: A layout that cannot be had; the message names the sizes that can.
    """
    check_encoder_plan(parallel)
    plan = parallel.encoder_plan
    tensor = plan.tensor_parallel_size or parallel.tensor_parallel_size
    ring = plan.ring_attention_size or parallel.ring_attention_size
    ulysses = plan.ulysses_parallel_size or parallel.ulysses_parallel_size
    decoder_context = parallel.ring_attention_size, parallel.ulysses_parallel_size
    streams = data_ranks if plan.balance else 1
    copies = parallel.tensor_parallel_size if tensor == 1 else 1
    if (ring, ulysses) == decoder_context:
        sizes = EncoderSizes(streams=streams, parts=1, copies=copies, ring=1, ulysses=1)
    else:
        parts = decoder_context[0] * decoder_context[1]
        sizes = EncoderSizes(streams=streams, parts=parts, copies=copies, ring=ring, ulysses=ulysses)
    _check_team(sizes, data_ranks)
    if sizes.ranks == 1:
        return None
    return sizes


def check_encoder_plan(parallel: ParallelArguments) -> None:
    """Raise `ConfigError` for what no number of ranks makes possible."""
    plan, decoder = parallel.encoder_plan, parallel.tensor_parallel_size
    if plan.tensor_parallel_size not in (None, 1, decoder):
        way_out = "Leave it out, or raise parallel.tensor_parallel_size."
        if decoder > 1:
            way_out = "Set it to 1: towers stay whole, and the ranks that split the decoder share their media."
        raise ConfigError(
            f"{plan.tensor_parallel_size} is neither 1 nor that of the decoder, {decoder}",
            key=f"{KEY}.tensor_parallel_size",
            way_out=way_out,
        )


def is_given(plan: EncoderPlan) -> bool:
    """Whether towers are to be laid out otherwise than the decoder."""
    return plan != EncoderPlan()


def _check_team(sizes: EncoderSizes, data_ranks: int) -> None:
    if sizes.ranks % sizes.team == 0:
        return
    fitting = ", ".join(str(size) for size in range(1, sizes.ranks + 1) if sizes.ranks % size == 0)
    way_out = f"Their product can be {fitting}"
    if sizes.streams == 1 and (sizes.ranks * data_ranks) % sizes.team == 0:
        way_out += f"; with {KEY}.balance=true {sizes.team} can be had"
    raise ConfigError(
        f"{sizes.team} ranks are to share a medium's patches, but {sizes.ranks} share media "
        f"(data {sizes.streams} · context {sizes.parts} · tensor {sizes.copies})",
        key=f"{KEY}.ring_attention_size · {KEY}.ulysses_parallel_size",
        way_out=f"{way_out}.",
    )
