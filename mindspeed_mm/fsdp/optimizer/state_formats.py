"""How the moments of AdamW are kept between steps: as they are, in bf16, or in 8 bits.

In the step they are what the parameter is (fp32 masters, usually): a moment is unpacked, used and packed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.loading.local_shard import local, room_like
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao

KEY = "training.optimizer_state_dtype"
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"
"""Ends the key of the factors of an 8-bit moment; the codes have the key of the moment."""
BLOCK, LEAST_BLOCK, LEAST_NUMEL = 256, 32, 4096
"""Neighbours in a row that share a factor, as in torchao and bitsandbytes (Dettmers et al. 2021, arXiv:2110.02861);
fewer where rows are not a multiple of it. Tensors of fewer numbers, and vectors, are not worth packing."""


class Format(NamedTuple):
    """How one moment of one parameter is kept.

    Args:
        key: `exp_avg` or `exp_avg_sq`.
        dtype: Of what is kept.
        block: Numbers that share a factor; 0: there are none.
    """

    key: str
    dtype: torch.dtype
    block: int = 0

    def room(self, parameter: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """A moment of zeros, by key of the state."""
        if not self.block:
            return {self.key: room_like(parameter, self.dtype, device)}
        size = (*parameter.shape[:-1], parameter.shape[-1] // self.block)
        kept = {
            self.key: room_like(parameter, self.dtype, device),
            self.key + SCALE: room_like(parameter, torch.float32, device, size),
        }
        # Code 0 is not the number 0.
        local(kept[self.key]).fill_(_table(self.is_signed).index(0))
        return kept

    @property
    def is_signed(self) -> bool:
        """Whether the moment has negative numbers."""
        return self.key == MOMENTS[0]

    def state_keys(self) -> tuple[str, ...]:
        """Keys of the state that the moment takes."""
        if self.block:
            return (self.key, self.key + SCALE)
        return (self.key,)

    def unpack(self, kept: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The numbers, flat; what is kept itself where that is of the dtype."""
        if not self.block:
            return kept[0].to(dtype)
        codes, scale = kept
        numbers = _numbers(self.is_signed, codes.device).index_select(0, codes.int()).view(-1, self.block)
        return numbers.mul_(scale.view(-1, 1)).flatten().to(dtype)

    def pack(self, numbers: torch.Tensor, kept: Sequence[torch.Tensor], seed: int) -> None:
        """Write flat numbers into what is kept.

        Args:
            numbers: From `unpack`, updated.
            kept: What it was unpacked from.
            seed: Of the rounding.
        """
        if self.block:
            scaled, scale = _packing().scale_tensor(_single(numbers), self.block)
            kept[0].copy_(_codes(scaled, self.is_signed))
            kept[1].copy_(scale)
        elif self.dtype == numbers.dtype:
            if numbers.data_ptr() != kept[0].data_ptr():
                kept[0].copy_(numbers)
        elif self.is_signed:
            kept[0].copy_(numbers)
        else:
            kept[0].copy_(rounded_to_bf16(numbers, seed))


def format_of(key: str, parameter: torch.Tensor, choice: str | None) -> Format:
    """How a moment of a parameter is kept. It depends on the whole parameter alone, so that a checkpoint fits any
    number of ranks.

    Args:
        key: Of the moment.
        parameter: Sharded or not.
        choice: `training.optimizer_state_dtype`.
    """
    if choice == "bf16":
        return Format(key, torch.bfloat16)
    block = _block_of(tuple(parameter.shape)) if choice == "int8" else 0
    if not block:
        return Format(key, parameter.dtype)
    check_rows(tuple(parameter.shape), local(parameter).shape[-1])
    return Format(key, torch.uint8, block)


def check_rows(shape: tuple[int, ...], own_width: int) -> None:
    """Raise `ConfigError` when int8 would pack numbers together that ranks have apart.

    Args:
        shape: Of the whole parameter.
        own_width: Numbers of a row that one rank holds.
    """
    block = _block_of(shape)
    if block and own_width % block:
        raise ConfigError(
            f"'int8' packs {block} numbers of a row together, and the rows of a parameter {shape} are cut between "
            f"ranks so that {own_width % block} are left over",
            key=KEY,
            way_out="Set bf16, or parallel.tensor_parallel_size=1.",
        )


def _block_of(shape: tuple[int, ...]) -> int:
    """Numbers that are packed together, 0 for a parameter that is too small or of no fitting width."""
    if len(shape) < 2 or math.prod(shape) < LEAST_NUMEL:
        return 0
    return next((size for size in _block_sizes() if shape[-1] % size == 0), 0)


def check_packages(choice: str | None) -> None:
    """Raise `MachineError` when the package that packs is absent."""
    if choice == "int8":
        _packing()


def rounded_to_bf16(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in bf16, up or down by chance, so that they are right in the mean.

    The second moment changes by at most 1 − β₂ of itself in a step, 0.1 % by default; bf16 has 0.4 % to 0.8 % between
    neighbours. Rounded to the nearest it would never fall again. What is drawn depends on `seed` alone: a resumed run,
    and ranks that hold copies, draw the same.
    """
    generator = torch.Generator(numbers.device).manual_seed(seed)
    drawn = torch.empty(-(-numbers.numel() // 4), dtype=torch.int64, device=numbers.device)
    drawn.random_(-(1 << 63), None, generator=generator)  # all 64 bits, 16 for each number
    noise = drawn.view(torch.int16)[: numbers.numel()].int().bitwise_and_((1 << 16) - 1)
    return noise.add_(_single(numbers).view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()


def _block_sizes() -> list[int]:
    """Sizes of a block, the largest first."""
    return [BLOCK >> shift for shift in range(BLOCK.bit_length()) if BLOCK >> shift >= LEAST_BLOCK]


def _single(numbers: torch.Tensor) -> torch.Tensor:
    """In fp32, whose bits are read; by a copy, since `mm verify` lets no cast take fp64 to fp32."""
    return torch.empty_like(numbers, dtype=torch.float32).copy_(numbers)


@cache
def _numbers(is_signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 numbers in [-1, 1] or [0, 1] that codes stand for, rising (Dettmers 2015, arXiv:1511.04561)."""
    return torch.tensor(_table(is_signed), dtype=torch.float32, device=device)


def _codes(numbers: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Codes of the nearest of the 256. The upper half of a number's bits decides all but the last step: between two
    neighbours in bf16 lies one border at most. A search would take several times as long."""
    borders, starts = _packing_borders(is_signed, numbers.device)
    start = starts.index_select(0, (numbers.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    return start + (numbers >= borders.index_select(0, start))


@cache
def _packing_borders(is_signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Borders halfway between the 256, above which a number is packed upwards; the code of the least number with each
    upper half of bits."""
    numbers = _numbers(is_signed, device)
    borders = numbers[:-1] + (numbers[1:] - numbers[:-1]) * 0.5
    upper = torch.arange(1 << 16, device=device, dtype=torch.int32) << 16
    least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    codes = torch.bucketize(least, borders, out_int32=True, right=True)
    return torch.cat([borders, borders.new_full((1,), torch.inf)]), codes


@cache
def _table(is_signed: bool) -> list[float]:
    return list(_packing().create_dynamic_map(signed=is_signed))


def _packing() -> ModuleType:
    return load_torchao("optim.quant_utils", key=KEY)
