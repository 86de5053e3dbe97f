"""The device mesh of a job and every process group cut from it.

Mesh axes, outermost first: `pp, dp_replicate, dp_shard, ring, ulysses, tp`. Some act as one: `dp` = dp_replicate ×
dp_shard (who reads different samples), `cp` = ring × ulysses (who shares one sequence), `fsdp` = dp_shard × ring ×
ulysses (who shares one set of parameters). Experts see the same ranks as `pp, edp, efsdp, ep, tp`.
"""

from __future__ import annotations

from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
DATA_AXES = ("pp", "dp", "cp", "tp")
SHARD_AXES = ("pp", "dp_replicate", "fsdp", "tp")
EXPERT_AXES = ("pp", "edp", "efsdp", "ep", "tp")


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
        views = [_build_mesh(sizes, axes, device_type) for axes in (MESH_AXES, DATA_AXES, EXPERT_AXES, SHARD_AXES)]
        self.mesh, _, self.expert_mesh, self.shard_mesh = views
        # A parameter must meet fully_shard and tensor parallelism on one mesh: a shared axis is the last view's.
        self._axes = {axis: view[axis] for view in views for axis in view.mesh_dim_names or ()}

    def describe(self) -> str:
        """The axes with more than one rank: `dp_replicate 2 × dp_shard 4`."""
        sizes = ((axis, getattr(self.sizes, axis)) for axis in (*MESH_AXES, "ep"))
        return " × ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"

    def axis_mesh(self, axis: str) -> DeviceMesh:
        """The one-dimensional mesh of any axis named in this module's first lines."""
        return self._axes[axis]

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` different streams of samples this rank reads."""
        return self.get_dp_rank()

    @property
    def data_size(self) -> int:
        """How many ranks read different samples; those along cp, tp and pp read the same."""
        return self.get_dp_group_size()

    @property
    def is_first_of_its_samples(self) -> bool:
        """Whether no rank before this one, along cp, tp and pp, computes on the same samples."""
        return self._rank("cp") == self._rank("tp") == self._rank("pp") == 0

    @property
    def random_rank(self) -> int:
        """Which random numbers this rank draws: ranks along tp hold the same activations and draw the same."""
        return dist.get_rank() // self.sizes.tp

    def token_groups(self) -> list[dist.ProcessGroup]:
        """Groups of the ranks that hold different tokens of one micro-batch: sums over each in turn are over all."""
        return [self._group(axis) for axis in ("dp", "cp") if self._size(axis) > 1]

    # The mesh that parameters are sharded over.

    def get_fsdp_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that share one set of parameters."""
        return self._axes["fsdp"]

    def get_fsdp_group(self) -> dist.ProcessGroup:
        """Group of the ranks that share one set of parameters."""
        return self._group("fsdp")

    def get_fsdp_group_size(self) -> int:
        """Number of ranks that share one set of parameters."""
        return self._size("fsdp")

    def get_fsdp_rank(self) -> int:
        """Rank within the sharding group."""
        return self._rank("fsdp")

    def is_hsdp_enable(self) -> bool:
        """Whether several sharding groups hold copies of the parameters."""
        return self._size("dp_replicate") > 1

    def get_hsdp_device_mesh(self) -> DeviceMesh:
        """Two-dimensional mesh (copies, shards)."""
        return self.shard_mesh["dp_replicate", "fsdp"]

    def build_copies_device_mesh(self) -> DeviceMesh:
        """Two-dimensional mesh (copies, 1) of the ranks of all sharding groups: nothing is cut. Every rank calls it."""
        shape = (self.sizes.pp, self.sizes.dp_replicate * self.sizes.fsdp, 1, self.sizes.tp)
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=("pp", "copies", "whole", "tp"))
        return mesh["copies", "whole"]

    def get_hsdp_group(self) -> dist.ProcessGroup:
        """Group of the ranks that hold copies of the same shard."""
        return self._group("dp_replicate")

    # Data.

    def is_dp_enable(self) -> bool:
        """Whether ranks read different samples."""
        return self._size("dp") > 1

    def get_dp_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that read different samples."""
        return self._axes["dp"]

    def get_dp_group(self) -> dist.ProcessGroup:
        """Group of the ranks that read different samples."""
        return self._group("dp")

    def get_dp_group_size(self) -> int:
        """Number of ranks that read different samples."""
        return self._size("dp")

    def get_dp_rank(self) -> int:
        """Rank among those that read different samples."""
        return self._rank("dp")

    # Context: ring × ulysses, and each of the two.

    def is_cp_enable(self) -> bool:
        """Whether one sequence is spread over ranks."""
        return self._size("cp") > 1

    def get_cp_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that share a sequence."""
        return self._axes["cp"]

    def get_cp_group(self) -> dist.ProcessGroup:
        """Group of the ranks that share a sequence."""
        return self._group("cp")

    def get_cp_group_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self._size("cp")

    def get_cp_rank(self) -> int:
        """Rank among those that share a sequence."""
        return self._rank("cp")

    def is_ring_enable(self) -> bool:
        """Whether keys and values travel around a ring."""
        return self._size("ring") > 1

    def get_ring_device_mesh(self) -> DeviceMesh:
        """Mesh of a ring."""
        return self._axes["ring"]

    def get_ring_group(self) -> dist.ProcessGroup:
        """Group of a ring."""
        return self._group("ring")

    def get_ring_group_size(self) -> int:
        """Number of ranks in a ring."""
        return self._size("ring")

    def get_ring_rank(self) -> int:
        """Rank within the ring."""
        return self._rank("ring")

    def is_ulysses_enable(self) -> bool:
        """Whether sequence shards are exchanged for head shards around attention."""
        return self._size("ulysses") > 1

    def get_ulysses_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that exchange heads."""
        return self._axes["ulysses"]

    def get_ulysses_group(self) -> dist.ProcessGroup:
        """Group of the ranks that exchange heads."""
        return self._group("ulysses")

    def get_ulysses_group_size(self) -> int:
        """Number of ranks that exchange heads."""
        return self._size("ulysses")

    def get_ulysses_rank(self) -> int:
        """Rank among those that exchange heads."""
        return self._rank("ulysses")

    # Tensor and pipeline.

    def is_tp_enable(self) -> bool:
        """Whether single matrices are split over ranks."""
        return self._size("tp") > 1

    def get_tp_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that split matrices."""
        return self._axes["tp"]

    def get_tp_group(self) -> dist.ProcessGroup:
        """Group of the ranks that split matrices."""
        return self._group("tp")

    def get_tp_group_size(self) -> int:
        """Number of ranks that split matrices."""
        return self._size("tp")

    def get_tp_rank(self) -> int:
        """Rank among those that split matrices."""
        return self._rank("tp")

    def is_pp_enable(self) -> bool:
        """Whether the model is cut into stages."""
        return self._size("pp") > 1

    def get_pp_device_mesh(self) -> DeviceMesh:
        """Mesh of the stages."""
        return self._axes["pp"]

    def get_pp_group(self) -> dist.ProcessGroup:
        """Group of the stages."""
        return self._group("pp")

    def get_pp_group_size(self) -> int:
        """Number of stages."""
        return self._size("pp")

    def get_pp_rank(self) -> int:
        """Number of this rank's stage."""
        return self._rank("pp")

    # Experts: copies (edp) × shards of one expert (efsdp) × different experts (ep).

    def is_edp_enable(self) -> bool:
        """Whether several groups hold copies of the experts."""
        return self._size("edp") > 1

    def get_edp_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that hold copies of the same expert shard."""
        return self._axes["edp"]

    def get_edp_group(self) -> dist.ProcessGroup:
        """Group of the ranks that hold copies of the same expert shard."""
        return self._group("edp")

    def get_edp_group_size(self) -> int:
        """Number of copies of the experts."""
        return self._size("edp")

    def get_edp_rank(self) -> int:
        """Rank among the copies."""
        return self._rank("edp")

    def is_efsdp_enable(self) -> bool:
        """Whether the parameters of one expert are sharded."""
        return self._size("efsdp") > 1

    def get_efsdp_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that share the parameters of one set of experts."""
        return self._axes["efsdp"]

    def get_efsdp_group(self) -> dist.ProcessGroup:
        """Group of the ranks that share the parameters of one set of experts."""
        return self._group("efsdp")

    def get_efsdp_group_size(self) -> int:
        """Number of ranks that share the parameters of one set of experts."""
        return self._size("efsdp")

    def get_efsdp_rank(self) -> int:
        """Rank among those that share one set of experts."""
        return self._rank("efsdp")

    def is_ep_enable(self) -> bool:
        """Whether ranks hold different experts."""
        return self._size("ep") > 1

    def get_ep_device_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that hold different experts."""
        return self._axes["ep"]

    def get_ep_group(self) -> dist.ProcessGroup:
        """Group of the ranks that hold different experts."""
        return self._group("ep")

    def get_ep_group_size(self) -> int:
        """Number of ranks that hold different experts."""
        return self._size("ep")

    def get_ep_rank(self) -> int:
        """Rank among those that hold different experts."""
        return self._rank("ep")

    def _group(self, axis: str) -> dist.ProcessGroup:
        return self._axes[axis].get_group()

    def _size(self, axis: str) -> int:
        return self._axes[axis].size()

    def _rank(self, axis: str) -> int:
        return self._axes[axis].get_local_rank()


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
        shape = [getattr(sizes, axis) for axis in axes]
        if prod(shape) != world_size:
            product = " × ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))
            raise ConfigError(
                f"{product} = {prod(shape)}, but the job has {world_size} processes",
                key="parallel",
                way_out="Change the sizes, or start another number of processes.",
            )


def _build_mesh(sizes: ParallelSizes, axes: tuple[str, ...], device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(getattr(sizes, axis) for axis in axes), mesh_dim_names=axes)
