"""Where the tensors of a folder come from: this rank's own reading, or rank 0, which alone has the files.

Sent is one tensor at a time, whole: no rank ever holds more of the model than that beside its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Region, Stored
from mindspeed_mm.checkpoint.stored_weights import open_stored
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.utils.device import current_device

Fetch = Callable[[LazyTensor], LazyTensor]
"""Makes a tensor readable on this rank; every rank calls it for the same tensors in the same order."""


class WeightSource(NamedTuple):
    """A folder's tensors, and how to get at one."""

    stored: Mapping[str, LazyTensor]
    fetch: Fetch


@contextmanager
def open_source(
    folder: Path, config: Mapping[str, object] | None, *, from_first_rank: bool = False
) -> Iterator[WeightSource]:
    """A folder's tensors, open for the length of the `with` block.

    Args:
        folder: As `open_stored` takes it.
        config: Of the model.
        from_first_rank: Rank 0 reads and sends; the files need to be there for no other rank. Collective then.

    Raises:
        ModelFolderError: As `open_stored`; what rank 0 finds wrong, all ranks raise.
    """
    if not from_first_rank or not dist.is_initialized() or dist.get_world_size() == 1:
        with open_stored(folder, config) as stored:
            yield WeightSource(stored, lambda tensor: tensor)
    elif dist.get_rank() == 0:
        with _opened_for_all(folder, config) as stored:
            yield WeightSource(stored, _send)
    else:
        described = _said_by_first(None)
        yield WeightSource({key: Stored(key, shape, dtype, _no_file) for key, shape, dtype in described}, _receive)


@contextmanager
def _opened_for_all(folder: Path, config: Mapping[str, object] | None) -> Iterator[Mapping[str, LazyTensor]]:
    """Rank 0's tensors; the others learn what there is, or what is wrong."""
    with ExitStack() as opened:
        try:
            stored = opened.enter_context(open_stored(folder, config))
        except MMError as error:
            _said_by_first(error)
            raise
        _said_by_first([(key, tensor.shape, tensor.dtype) for key, tensor in stored.items()])
        yield stored


def _said_by_first(what: object) -> Any:
    """What rank 0 says; an error is raised where it is heard."""
    said = [what]
    dist.broadcast_object_list(said, src=0)
    if isinstance(said[0], MMError) and dist.get_rank() != 0:
        raise said[0]
    return said[0]


def _send(tensor: LazyTensor) -> LazyTensor:
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=current_device())
    tensor.copy_to(values, tuple((0, length) for length in tensor.shape))
    return _InMemoryTensor(_broadcast(values))


def _receive(tensor: LazyTensor) -> LazyTensor:
    return _InMemoryTensor(_broadcast(torch.empty(tensor.shape, dtype=tensor.dtype, device=current_device())))


def _broadcast(values: torch.Tensor) -> torch.Tensor:
    dist.broadcast(values.reshape(-1).view(torch.uint8), src=0)  # as bytes: libraries lack the shortest types
    return values


def _no_file() -> NoReturn:
    raise AssertionError("only rank 0 reads")


class _InMemoryTensor(LazyTensor):
    """A tensor that is in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values.shape, values.dtype)
        self._values = values

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        out.copy_(self._values[tuple(slice(start, start + length) for start, length in region)])
