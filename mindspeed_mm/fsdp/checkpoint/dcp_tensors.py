"""The tensors of a distributed checkpoint, whole, one at a time, in one process without a model or a process group."""

from __future__ import annotations

from typing import Literal

from torch import nn

from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader
from mindspeed_mm.checkpoint.lazy_tensor import Stored
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.loading import TensorIndex
from mindspeed_mm.fsdp.checkpoint.tree import EMA, model_tensors, tied_names

Weights = Literal["ema", "model"]
"""The average of the weights where one was kept of them, or all as they were trained."""


class DcpTensors:
    """Reads a checkpoint's model by name: its weights as they were trained, or the average where there is one.

    Args:
        checkpoint: From `committed.open_checkpoint`.
        weights: None takes the average when there is one.

    Raises:
        CheckpointError: The average is asked for and the checkpoint has none.
    """

    def __init__(self, checkpoint: CommittedCheckpoint, weights: Weights | None = None) -> None:
        self._reader = DcpReader(checkpoint.path)
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

    def lazy(self) -> dict[str, Stored]:
        """Every tensor of the model by name, not read yet."""
        trained = self._reader.model_tensors()
        return trained | {name: self._reader.lazy(f"{EMA}.{name}") for name in self._averaged}

    def matched_to(self, model: nn.Module) -> dict[str, Stored]:
        """The model's tensors by its own names, not read yet.

        Raises:
            CheckpointError: The checkpoint was saved from another model.
        """
        lazy = self.lazy()
        names = self._index.match(model_tensors(model), tied_names(model))
        return {name: lazy[held] for name, held in names.items()}
