"""The ranks along one axis of a mesh, as what layers that communicate hold on to."""

from __future__ import annotations

from typing import Any, Self

from torch.distributed.device_mesh import DeviceMesh


class AxisRanks:
    """The ranks that share something with this one.

    Args:
        mesh: The one-dimensional mesh of the axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # process groups cannot be copied, and a copied model has the same ranks
