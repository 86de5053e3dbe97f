"""The process groups of towers that are laid out otherwise than their decoder, and the mesh that they are cut over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.parallel_state import job_mesh
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import own_sharding
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.params.sizes.encoder import KEY, EncoderSizes
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes

Partition = list[list[int]]


def sharing_ranks(sizes: ParallelSizes, encoder: EncoderSizes) -> Partition:
    """Global ranks of every group that shares media, each in the order `EncoderSizes` numbers them."""
    found: dict[tuple[int, ...], list[int]] = {}
    coordinates = product(range(sizes.pp), range(sizes.dp), range(sizes.cp), range(sizes.tp))
    for rank, (pp, dp, cp, tp) in enumerate(coordinates):
        # Media are shared along an axis whole or not at all; ranks share them that differ along such axes alone.
        apart = [pp]
        for place, shared in ((dp, encoder.streams), (cp, encoder.parts), (tp, encoder.copies)):
            if shared == 1:
                apart.append(place)
        found.setdefault(tuple(apart), []).append(rank)
    return list(found.values())


def build_sharing_group(sizes: ParallelSizes, encoder: EncoderSizes) -> dist.ProcessGroup:
    """The ranks that share media with this one. Every rank of the job calls it."""
    return _own_group(sharing_ranks(sizes, encoder))


def build_team(sizes: ParallelSizes, encoder: EncoderSizes) -> ContextGroups | None:
    """The ranks that encode a medium together with this one; None where each encodes alone. Every rank calls it."""
    if encoder.team == 1:
        return None
    teams = _cut(sharing_ranks(sizes, encoder), lambda ranks: _neighbours(ranks, encoder.team))
    rings = _cut(teams, lambda team: [team[place :: encoder.ulysses] for place in range(encoder.ulysses)])
    exchanges = _cut(teams, lambda team: _neighbours(team, encoder.ulysses))
    ring = ulysses = None
    if encoder.ring > 1:
        ring = _own_group(rings)
    if encoder.ulysses > 1:
        ulysses = _own_group(exchanges)
    return ContextGroups(ring, ulysses, everyone=_own_group(teams))


def build_tower_mesh(sizes: ParallelSizes, device_type: str) -> DeviceMesh:
    """The mesh of towers that are whole although the decoder's layers are split: tensor ranks hold shards as well, and
    gradients are summed over them. One axis (shards), or two (copies, shards). Every rank calls it."""
    shape = (sizes.pp, sizes.dp_replicate, sizes.fsdp * sizes.tp)
    mesh = job_mesh(device_type, shape, ("pp", "tower_copies", "tower_shards"))
    if sizes.dp_replicate > 1:
        return mesh["tower_copies", "tower_shards"]
    return mesh["tower_shards"]


def check_tower_sums(model: nn.Module, towers: Sequence[str], ignored: Sequence[str]) -> None:
    """Raise `ConfigError` when something trained in a tower is left out of sharding, or the model shards itself:
    nothing would sum its gradients.

    Args:
        model: Built.
        towers: Names of towers that stay whole although the decoder is split.
        ignored: Names of the modules that sharding leaves out.
    """
    trained = []
    for name in ignored:
        touches_tower = is_inside(name, towers) or any(is_inside(tower, [name]) for tower in towers)
        is_trained = any(parameter.requires_grad for parameter in model.get_submodule(name).parameters())
        if touches_tower and is_trained:
            trained.append(name)
    if trained:
        raise _unsummed(f"parallel.fsdp_plan.ignored_modules leaves out {', '.join(trained)}")
    if towers and own_sharding(model) is not None:
        raise _unsummed(f"{type(model).__name__} shards itself")


def _unsummed(why: str) -> ConfigError:
    """Sharding cannot sum a tower's gradients over the ranks that split the decoder."""
    return ConfigError(
        f"1, but {why}: nothing would sum the tower's gradients over the ranks that split the decoder",
        key=f"{KEY}.tensor_parallel_size",
        way_out="Leave one of them out.",
    )


def _own_group(partition: Partition) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(partition)
    assert group is not None, "a partition of all ranks"
    return group


def _cut(partition: Partition, into: Callable[[list[int]], Partition]) -> Partition:
    return list(chain.from_iterable(map(into, partition)))


def _neighbours(ranks: Sequence[int], size: int) -> Partition:
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
