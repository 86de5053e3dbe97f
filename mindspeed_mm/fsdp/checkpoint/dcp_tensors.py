"""The tensors of a distributed checkpoint, whole, one at a time, in one process without a model or a process group."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindspeed_mm.checkpoint.dcp_folder.metadata_unpickler import MetadataReader
from mindspeed_mm.checkpoint.dcp_folder.storage import read_tree
from mindspeed_mm.checkpoint.lazy_tensor import Stored
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.loading import TensorIndex
from mindspeed_mm.fsdp.checkpoint.tree import EMA, model_tensors, tied_names

Weights = Literal["ema", "model"]
"""The average of the weights where one was kept of them, or all as they were trained."""

_KEPT = 2


class DcpTensors:
    """Reads a checkpoint's model by name. The last tensors read are kept: a map that cuts one into many asks for it
    again and again.

    Args:
        checkpoint: From `committed.open_checkpoint`.
        weights: None takes the average when there is one.

    Raises:
        CheckpointError: The average is asked for and the checkpoint has none.
    """

    def __init__(self, checkpoint: CommittedCheckpoint, weights: Weights | None = None) -> None:
        self._reader = MetadataReader(checkpoint.path)
        self._index = TensorIndex(self._reader, checkpoint)
        average = self._index.average_entries()
        if weights == "ema" and not average:
            raise CheckpointError(
                "holds no average of the weights",
                where=str(checkpoint.path),
                key="training.ema.enable",
                way_out="Take the weights as they were trained: --weights model.",
            )
        self.weights: Weights = weights or ("ema" if average else "model")
        """Which were taken."""
        self._averaged = average.keys() if self.weights == "ema" else set()
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()

    def lazy(self) -> dict[str, Stored]:
        """Every tensor of the model by name, not read yet."""
        entries = self._entries()
        return {name: Stored(name, entry.size, entry.properties.dtype, lambda: self) for name, entry in entries.items()}

    def matched_to(self, model: nn.Module) -> dict[str, Stored]:
        """The model's tensors by its own names, not read yet.

        Raises:
            CheckpointError: The checkpoint was saved from another model.
        """
        lazy = self.lazy()
        names = self._index.match(model_tensors(model), tied_names(model))
        return {name: lazy[held] for name, held in names.items()}

    def get_tensor(self, key: str) -> torch.Tensor:
        """One whole tensor in host memory, in the dtype that it was saved in."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        entry = self._entries()[key]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_tree({f"{EMA}.{key}" if key in self._averaged else f"{self._index.prefix}{key}": tensor}, self._reader)
        self._kept[key] = tensor
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return tensor

    def _entries(self) -> dict[str, TensorStorageMetadata]:
        average = self._index.average_entries() if self.weights == "ema" else {}
        return self._index.model_entries() | average
