"""Sizes of the parallel groups, from the configuration and the number of ranks. Pure: no process group is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.encoder import resolve_encoder_sizes

_MOST_TRIED = 256
"""Numbers of data ranks that are tried to find the least that fits."""


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the mesh axes.

    Two meshes over the same ranks: `pp × dp_replicate × dp_shard × ring × ulysses × tp = world`, and inside one
    pipeline and tensor rank `edp × efsdp × ep = world / (pp × tp)`. A sharding group spans `dp_shard × ring × ulysses`.
    """

    world: int
    """All ranks."""
    pp: int
    """Pipeline stages."""
    dp_replicate: int
    """Copies of the sharded model."""
    dp_shard: int
    """Data ranks in a sharding group (context-parallel ranks not counted)."""
    ring: int
    """Ring attention."""
    ulysses: int
    """Ulysses attention."""
    tp: int
    """Tensor parallelism."""
    edp: int
    """Copies of the sharded experts."""
    efsdp: int
    """Sharding inside an expert group."""
    ep: int
    """Expert parallelism."""

    @property
    def dp(self) -> int:
        """Data ranks: those that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def cp(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def fsdp(self) -> int:
        """Ranks in a sharding group."""
        return self.dp_shard * self.cp


def least_ranks(parallel: ParallelArguments) -> int:
    """The smallest number of ranks that the sizes fit; that of one data rank where none of the first few does."""
    sequence = parallel.ring_attention_size * parallel.ulysses_parallel_size
    together = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * sequence
    for data_ranks in range(1, _MOST_TRIED + 1):
        try:
            return resolve_parallel_sizes(parallel, together * data_ranks).world
        except ConfigError:
            continue
    return together


def least_sizes(parallel: ParallelArguments) -> ParallelSizes:
    """Sizes for the fewest ranks that fit.

    Raises:
        ConfigError: As of `resolve_parallel_sizes`.
    """
    return resolve_parallel_sizes(parallel, least_ranks(parallel))


def resolve_parallel_sizes(parallel: ParallelArguments, world_size: int) -> ParallelSizes:
    """Sizes of all groups for this number of ranks.

    Raises:
        ConfigError: Sizes that do not multiply to the world size; the message holds both numbers.
    """
    pp, tp = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    ring, ulysses = parallel.ring_attention_size, parallel.ulysses_parallel_size
    of_model = {"pipeline_parallel_size": pp, "tensor_parallel_size": tp}
    of_sequence = {"ring_attention_size": ring, "ulysses_parallel_size": ulysses}
    model_ranks = _divide(world_size, of_model, "ranks")
    data_ranks = _divide(model_ranks, of_sequence, "ranks left")
    _check_data_size(parallel.data_parallel_size, data_ranks, world_size)
    auto = parallel.fully_shard_parallel_size == "auto"
    fsdp = model_ranks if auto else int(parallel.fully_shard_parallel_size)
    dp_replicate = _divide(model_ranks, {"fully_shard_parallel_size": fsdp}, "ranks left by pipeline and tensor")
    dp_shard = _divide(fsdp, of_sequence, "ranks of a sharding group")
    resolve_encoder_sizes(parallel, data_ranks)
    ep = parallel.expert_parallel_size
    of_experts = {"expert_parallel_size": ep}
    # Not given: experts are spread inside a sharding group, and what is left of it cuts each of them.
    efsdp = parallel.expert_fully_shard_parallel_size or _divide(fsdp, of_experts, "ranks of a group")
    edp = _divide(model_ranks, {"expert_fully_shard_parallel_size": efsdp, **of_experts}, "ranks left")
    return ParallelSizes(world_size, pp, dp_replicate, dp_shard, ring, ulysses, tp, edp, efsdp, ep)


def _divide(ranks: int, sizes: Mapping[str, int], what: str) -> int:
    """What is left of the ranks by sizes, by key, that multiply; those that are 1 have no part in a mistake."""
    size = prod(sizes.values())
    if ranks % size == 0:
        return ranks // size
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    nearest = sorted(divisors, key=lambda number: abs(number - size))[:3]
    given = [f"parallel.{name}" for name, factor in sizes.items() if factor > 1]
    kind = "products" if len(given) > 1 else "sizes"
    raise ConfigError(
        f"{size} does not divide the {ranks} {what}",
        key=" · ".join(given),
        way_out=f"Nearest {kind} that do: {', '.join(map(str, sorted(nearest)))}.",
    )


def _check_data_size(wanted: int | None, derived: int, world_size: int) -> None:
    if wanted not in (None, derived):
        raise ConfigError(
            f"{wanted} data ranks are asked for, but {world_size} ranks and the other sizes make {derived}",
            key="parallel.data_parallel_size",
            way_out="Leave the key out; it is derived.",
        )
