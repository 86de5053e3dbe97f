"""Writes a step as Megatron-Core's `torch_dist` has it, by torch's own `torch.distributed.checkpoint` alone."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunked:
    """A tensor that is stored in pieces, as ranks would store it: what torch's planner asks of such a thing.

    Args:
        tensor: The whole.
        each: Lengths of a piece; the last of a dim may be shorter.
    """

    def __init__(self, tensor: torch.Tensor, each: tuple[int, ...]) -> None:
        self.tensor, self.each = tensor, each

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.tensor.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        starts = (range(0, length, step) for length, step in zip(self.tensor.shape, self.each, strict=True))
        return [self._chunk(offsets) for offsets in product(*starts)]

    def _chunk(self, offsets: tuple[int, ...]) -> ChunkStorageMetadata:
        rest = (length - start for length, start in zip(self.tensor.shape, offsets, strict=True))
        sizes = (min(step, length) for step, length in zip(self.each, rest, strict=True))
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def piece(self, offsets: torch.Size) -> torch.Tensor:
        """The one that begins there."""
        chunk = self._chunk(tuple(offsets))
        bounds = zip(chunk.offsets, chunk.sizes, strict=True)
        return self.tensor[tuple(slice(start, start + length) for start, length in bounds)].contiguous()


class _Planner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.piece(index.offset) if isinstance(held, Chunked) else super().lookup_object(index)


def write_torch_dist(folder: Path, tensors: Mapping[str, torch.Tensor | Chunked]) -> Path:
    """Write `iter_0000012/` with tensors of a model, of an optimizer and what else a training saves.

    Returns:
        The step's folder.
    """
    step = folder / "iter_0000012"
    step.mkdir(parents=True)
    others: dict[str, Any] = {
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(3),
        "chained_1.optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(3),
        "rng_state/shard_0.0_1.1": io.BytesIO(b"1"),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_5": io.BytesIO(b"2"),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_5": io.BytesIO(b"3"),
    }
    dcp.save(
        {**tensors, **others},
        storage_writer=FileSystemWriter(step, thread_count=2),
        planner=_Planner(flatten_state_dict=False),
        no_dist=True,
    )
    settings = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    settings |= {"common_backend": "torch", "common_backend_version": 1}
    (step / "metadata.json").write_text(json.dumps(settings))
    common = {"iteration": 12, "checkpoint_version": 3.0, "args": argparse.Namespace(num_layers=5)}
    torch.save({**common, "opt_param_scheduler": {"max_lr": 1.0}}, step / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    return step
