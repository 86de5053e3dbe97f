"""Pictures as bytes from a worker to the device: a quarter of what their numbers take, an eighth where a processor
repeats a picture in time, as Qwen-VL's do.

A processor sizes a picture as bytes and then computes one number of each, so there are 256 numbers to a channel at
most. A worker finds the byte of each number, and makes sure that the table of the channel gives the number back to the
bit; where it does not, the numbers travel as they are. What was cut from bytes here keeps them, and nothing is sought.
On the device, numbers are looked up in the same table.

Shapes: N pictures, frames or patches; C channels, or 1 where all have the same table; R numbers of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.utils.model_parts import setting_of

_Coding = tuple[int, tuple[int, ...], int]
"""Number of the table, shape and repeats: what travels beside bytes."""
Tables = Mapping[str, tuple[torch.Tensor, ...]]
"""Key of a batch → tables (C, 256) that its numbers may be of."""

_PARTS = {"pixel_values": "image_processor", "pixel_values_videos": "video_processor"}
_LEVELS, _BYTES, _MADE_OF = "_levels", "_bytes", "_made_of"
_LOOKED_AT = 16
"""Patches."""
LEAST_BYTES = 1 << 16
"""Of numbers: below it, what is saved is less than what the search costs."""


@dataclass(frozen=True)
class Levels:
    """What the bytes of a tensor stand for."""

    table: torch.Tensor
    """(C, 256) float32."""
    shape: tuple[int, ...]
    """Of the numbers."""
    repeats: int
    """How often the numbers of a channel follow each other."""

    def numbers(self, codes_NCR: torch.Tensor) -> torch.Tensor:
        """The numbers, on the device of the bytes."""
        found = _looked_up(self.table.to(codes_NCR.device, non_blocking=True), codes_NCR)
        if self.repeats > 1:
            found = found.unsqueeze(2).expand(-1, -1, self.repeats, -1)
        return found.reshape(self.shape)


def tables_of(processor: object) -> Tables:
    """Of the pictures and videos of a processor; nothing of one that does not say how it normalises.

    Args:
        processor: The model's; None: there is none.
    """
    found = {}
    for key, name in _PARTS.items():
        part: Any = setting_of(processor, object, name)
        if setting_of(part, bool, "do_rescale") and setting_of(part, bool, "do_normalize"):
            found[key] = _tables(part.image_mean, part.image_std, part.rescale_factor)
    return found


def made_of(values: torch.Tensor, bytes_NCR: torch.Tensor, repeats: int) -> torch.Tensor:
    """Numbers that know the bytes they were made of.

    Args:
        values: (N, C · repeats · R).
        bytes_NCR: uint8.
        repeats: How often those of a channel follow each other.
    """
    setattr(values, _MADE_OF, (bytes_NCR, repeats))
    return values


def as_bytes(batch: Batch, tables: Tables) -> Batch:
    """A batch whose pictures are bytes, where these give every number back to the bit; in a worker.

    Args:
        batch: As collated.
        tables: Of `tables_of`.
    """
    levels: dict[str, _Coding] = {}
    for key, own in tables.items():
        values = batch.get(key)
        if isinstance(values, torch.Tensor) and values.dtype == torch.float32 and values.nbytes >= LEAST_BYTES:
            coded = _coded(values, own)
            if coded is not None:
                batch[key], levels[key] = coded
    if levels:
        return batch | {_LEVELS: levels}
    return batch


def with_stand_ins(batch: Batch, tables: Tables) -> Batch:
    """A batch of `as_bytes` in the training process: in place of bytes, a tensor of the numbers' shape without memory,
    whose numbers `bytes_of` leads to. Nothing on the host can take it for numbers.

    Args:
        batch: From a worker.
        tables: Those that the worker had.
    """
    for key, (which, shape, repeats) in batch.pop(_LEVELS, {}).items():
        stand_in = torch.empty(shape, dtype=torch.float32, device="meta")
        setattr(stand_in, _BYTES, (batch[key], Levels(tables[key][which], shape, repeats)))
        batch[key] = stand_in
    return batch


def bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Levels] | None:
    """The bytes behind a stand-in; None of any other tensor."""
    return getattr(tensor, _BYTES, None)


def _tables(mean: object, std: object, scale: float) -> tuple[torch.Tensor, ...]:
    """By the two orders of operations that processors of transformers have (`rescale_and_normalize` of torchvision's,
    `rescale` and `normalize` of Pillow's)."""
    steps = torch.arange(256, dtype=torch.float32)
    means, stds = (torch.tensor(value, dtype=torch.float32).reshape(-1, 1) for value in (mean, std))
    at_once = (steps - means * (1.0 / scale)) / (stds * (1.0 / scale))
    scaled = torch.from_numpy((np.arange(256, dtype=np.float64) * scale).astype(np.float32))
    return tuple(_of_one_channel_where_alike(table) for table in (at_once, (scaled - means) / stds))


def _of_one_channel_where_alike(table: torch.Tensor) -> torch.Tensor:
    if bool((table == table[:1]).all()):
        return table[:1].contiguous()
    return table.contiguous()


def _coded(values: torch.Tensor, tables: Iterable[torch.Tensor]) -> tuple[torch.Tensor, _Coding] | None:
    known: tuple[torch.Tensor, int] | None = getattr(values, _MADE_OF, None)
    for which, table in enumerate(tables):
        seen = _by_channel(values, len(table))
        if seen is None:
            continue
        if known is not None and _table_explains(seen, *known, table):
            return known[0], (which, tuple(values.shape), known[1])
        half = seen.shape[2] // 2
        repeats = 2 if values.dim() == 2 and torch.equal(seen[:, :, :half], seen[:, :, half:]) else 1
        if repeats == 2:
            seen = seen[:, :, :half]
        step = (table[:, 255:] - table[:, :1]) / 255
        codes = (seen - table[:, :1]).div_(step).round_().to(torch.uint8)  # whatever it is of other numbers
        if torch.equal(_looked_up(table, codes).view(torch.int32), seen.view(torch.int32)):  # the sign of a zero, too
            return codes, (which, tuple(values.shape), repeats)
    return None


def _table_explains(seen_NCR: torch.Tensor, codes_NCR: torch.Tensor, repeats: int, table: torch.Tensor) -> bool:
    """Whether a table is the one that bytes were made numbers by, as some of them tell."""
    if len(table) not in (1, codes_NCR.shape[1]):
        return False
    some = codes_NCR[:_LOOKED_AT]
    again = Levels(table, tuple(seen_NCR[:_LOOKED_AT].shape), repeats).numbers(some)
    return torch.equal(again, seen_NCR[:_LOOKED_AT])


def _looked_up(table: torch.Tensor, codes_NCR: torch.Tensor) -> torch.Tensor:
    places = codes_NCR.int()
    if len(table) > 1:
        places += torch.arange(0, table.numel(), 256, dtype=torch.int32, device=places.device)[:, None]
    return table.view(-1).index_select(0, places.view(-1)).view(codes_NCR.shape)


def _by_channel(values: torch.Tensor, channels: int) -> torch.Tensor | None:
    """(N, C, R) of pictures (…, C, height, width), or of patches (P, C · numbers); None: of another shape."""
    if values.dim() == 2:
        if values.shape[1] % channels:
            return None
        return values.view(len(values), channels, -1)
    if channels == 1:
        return values.reshape(len(values), 1, -1)
    if values.dim() < 4 or values.shape[-3] != channels:
        return None
    return values.reshape(-1, channels, values.shape[-2] * values.shape[-1])
