"""The device mesh of a job and every process group cut from it: a table of axes, and the same few questions of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.utils.device import get_device_type

Axis = Literal["pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp", "dp", "cp", "fsdp", "edp", "efsdp", "ep"]
"""What the ranks along an axis have to do with each other:

pp            stages of the model
dp_replicate  copies of the parameters, on different samples
dp_shard      shards of the parameters, on different samples
ring          one sequence, whose keys and values travel around a ring
ulysses       one sequence, whose shards are exchanged for shards of the heads around attention
tp            parts of single matrices
dp            different samples: dp_replicate × dp_shard
cp            one sequence: ring × ulysses
fsdp          one set of parameters: dp_shard × ring × ulysses
edp           copies of the experts
efsdp         one set of experts, whose parameters they share
ep            different experts
"""
MESH_AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
DATA_AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
SHARD_AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "fsdp", "tp")
EXPERT_AXES: tuple[Axis, ...] = ("pp", "edp", "efsdp", "ep", "tp")
"""Views of the same ranks, outermost axis first."""

_GETTER = re.compile(
    "is_(?P<switch>AXIS)_enable|get_(?P<axis>AXIS)_(?P<what>group|group_size|rank|device_mesh)".replace(
        "AXIS", "|".join(get_args(Axis))
    )
)


class ParallelState:
    """Meshes, groups, sizes and ranks of this process along every axis.

    Args:
        sizes: Size of every axis.
        device_type: `cpu`, `cuda`, `npu`, …

    Raises:
        ConfigError: The sizes do not multiply to the number of processes.
    """

    def __init__(self, sizes: ParallelSizes, device_type: str) -> None:
        self.sizes = sizes
        self.device_type = device_type
        check_world_size(sizes, dist.get_world_size())
        self._axes: dict[Axis, DeviceMesh] = {}
        self.mesh = self._build_view(MESH_AXES)
        self._build_view(DATA_AXES)
        self.expert_mesh = self._build_view(EXPERT_AXES)
        # Last: an axis that views share is that of the last one, and a parameter must meet fully_shard and tensor
        # parallelism on one mesh.
        self.shard_mesh = self._build_view(SHARD_AXES)

    def _build_view(self, axes: tuple[Axis, ...]) -> DeviceMesh:
        view = job_mesh(self.device_type, tuple(sizes_along(self.sizes, axes)), axes)
        for axis in axes:
            self._axes[axis] = view[axis]
        return view

    # Any axis.

    def axis_mesh(self, axis: Axis) -> DeviceMesh:
        """The one-dimensional mesh of this rank along an axis."""
        return self._axes[axis]

    def axis_group(self, axis: Axis) -> dist.ProcessGroup:
        """The ranks along an axis that this rank is one of."""
        return self._axes[axis].get_group()

    def axis_size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return self._axes[axis].size()

    def axis_rank(self, axis: Axis) -> int:
        """Which of them this rank is."""
        return self._axes[axis].get_local_rank()

    def describe(self) -> str:
        """The axes with more than one rank: `dp_replicate 2 × dp_shard 4`."""
        axes: tuple[Axis, ...] = (*MESH_AXES, "ep")
        parts = []
        for axis, size in zip(axes, sizes_along(self.sizes, axes), strict=True):
            if size > 1:
                parts.append(f"{axis} {size}")
        return " × ".join(parts) or "one rank"

    # Samples and tokens.

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` different streams of samples this rank reads."""
        return self.axis_rank("dp")

    @property
    def data_size(self) -> int:
        """How many ranks read different samples; those along cp, tp and pp read the same."""
        return self.axis_size("dp")

    @property
    def is_first_of_its_samples(self) -> bool:
        """Whether no rank before this one, along cp, tp and pp, computes on the same samples."""
        return self.axis_rank("cp") == self.axis_rank("tp") == self.axis_rank("pp") == 0

    @property
    def random_rank(self) -> int:
        """Which random numbers this rank draws: ranks along tp hold the same activations and draw the same."""
        return dist.get_rank() // self.sizes.tp  # tp is the innermost axis: its ranks are neighbours

    def token_groups(self) -> list[dist.ProcessGroup]:
        """Groups of the ranks that hold different tokens of one micro-batch: sums over each in turn are over all."""
        axes: tuple[Axis, ...] = ("dp", "cp")
        return [self.axis_group(axis) for axis in axes if self.axis_size(axis) > 1]

    def __getattr__(self, name: str) -> Callable[[], object]:
        """The getters of MindSpeed-MM, which plugins written for it call, of every axis: `is_cp_enable()`,
        `get_cp_group()`, `get_cp_group_size()`, `get_cp_rank()`, `get_cp_device_mesh()`."""
        found = _GETTER.fullmatch(name)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        axis = cast("Axis", found["switch"] or found["axis"])
        answers: dict[str, Callable[[], Any]] = {
            "enable": lambda: self.axis_size(axis) > 1,
            "group": lambda: self.axis_group(axis),
            "group_size": lambda: self.axis_size(axis),
            "rank": lambda: self.axis_rank(axis),
            "device_mesh": lambda: self.axis_mesh(axis),
        }
        return answers[found["what"] or "enable"]

    # Two axes at once.

    def get_hsdp_device_mesh(self) -> DeviceMesh:
        """Return the two-dimensional mesh (copies, shards) for hybrid sharding."""
        return self.shard_mesh["dp_replicate", "fsdp"]

    def build_copies_device_mesh(self) -> DeviceMesh:
        """Two-dimensional mesh (copies, 1) of the ranks of all sharding groups: nothing is cut. Every rank calls it."""
        shape = (self.sizes.pp, self.sizes.dp_replicate * self.sizes.fsdp, 1, self.sizes.tp)
        mesh = job_mesh(self.device_type, shape, ("pp", "copies", "whole", "tp"))
        return mesh["copies", "whole"]


_state: ParallelState | None = None


def init_parallel_state(sizes: ParallelSizes, device_type: str) -> ParallelState:
    """Build the meshes of this job, once. Every rank calls it, with the same sizes.

    Raises:
        ConfigError: The sizes do not multiply to the number of processes.
        MachineError: It was called before.
    """
    global _state
    if _state is not None:
        raise MachineError("the parallel state exists already", way_out="Call destroy_parallel_state() first.")
    _state = ParallelState(sizes, device_type)
    return _state


def get_parallel_state() -> ParallelState:
    """The state of this job.

    Raises:
        MachineError: `init_parallel_state` was not called yet.
    """
    if _state is None:
        raise MachineError("there is no parallel state yet", way_out="Call init_parallel_state(sizes, device) first.")
    return _state


def destroy_parallel_state() -> None:
    """Forget the meshes; their process groups end with the job's group."""
    global _state
    _state = None


def check_world_size(sizes: ParallelSizes, world_size: int) -> None:
    """Raise `ConfigError` unless the sizes multiply to the number of processes, seen with and without experts."""
    for axes in (MESH_AXES, EXPERT_AXES):
        shape = sizes_along(sizes, axes)
        if prod(shape) != world_size:
            product = " × ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))
            raise ConfigError(
                f"{product} = {prod(shape)}, but the job has {world_size} processes",
                key="parallel",
                way_out="Change the sizes, or start another number of processes.",
            )


def sizes_along(sizes: ParallelSizes, axes: Sequence[Axis]) -> list[int]:
    """The size of each of these axes."""
    return [getattr(sizes, axis) for axis in axes]


_SAMPLE_AXES = frozenset({"dp_replicate", "dp_shard", "dp", "fsdp", "edp", "efsdp", "copies"})
"""Axes whose collectives are ordered among themselves anyway: where they hold the same ranks, they use one group. Other
axes exchange activations while parameters travel, and keep a group of their own."""

_meshes: dict[Hashable, DeviceMesh] = {}
"""What `job_mesh` has made in this job."""
_groups: dict[Hashable, dist.ProcessGroup] = {}
"""The groups behind them."""


def job_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of this shape over all ranks. Every rank requests the same meshes in the same order.

    A mesh is made once per job, and so is each of its groups: all axes of size 1 share one group of this rank alone. A
    second run in a process that stays in its group reuses them. Each gloo group keeps threads that wake up a hundred
    times a second, and DTensor remembers one mesh for all that are equal to it, so groups of an earlier run cannot be
    closed.
    """
    key = (id(dist.group.WORLD), device_type, shape, names)
    if key not in _meshes:
        ranks = torch.arange(dist.get_world_size()).view(shape)
        # One row for each group of the axis: its ranks last, all other axes flattened in front of them.
        groups = [_axis_group(ranks.movedim(place, -1).flatten(0, -2), name) for place, name in enumerate(names)]
        _meshes[key] = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)
    return _meshes[key]


def _axis_group(ranks_by_group: torch.Tensor, name: str) -> dist.ProcessGroup:
    """The group of this rank among those of one axis.

    Args:
        ranks_by_group: Global ranks of every group of the axis, (groups, ranks in each).
        name: Of the axis.
    """
    rows: list[list[int]] = ranks_by_group.tolist()
    use = name
    if len(rows[0]) == 1:
        use = "alone"
    elif name in _SAMPLE_AXES:
        use = "samples"
    key = (id(dist.group.WORLD), use, tuple(map(tuple, rows)))
    if key not in _groups:
        _groups[key] = _make_group(rows, name)
    return _groups[key]


def _make_group(rows: list[list[int]], name: str) -> dist.ProcessGroup:
    """Make the groups of an axis as `init_device_mesh` does; a group of one rank waits for no other rank."""
    world = dist.group.WORLD
    assert world is not None
    if len(rows) == 1:
        return world
    description = f"mesh_{name}"
    if world.bound_device_id is not None and get_device_type() != "cpu":
        # A backend bound to its device makes the parts of a group out of it, without meeting anew.
        own = dist.split_group(split_ranks=rows, group_desc=description)
    elif len(rows[0]) == 1:
        own = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=description)
    else:
        own, _ = dist.new_subgroups_by_enumeration(rows, group_desc=description)
    assert own is not None
    return own


def forget_meshes() -> None:
    """Let go of the meshes, before the job's group is left: they keep their groups, and so the job's, alive."""
    _meshes.clear()
    _groups.clear()
