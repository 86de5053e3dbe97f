"""Released weights in few bits, read as the numbers that they stand for: to train them, they have to be numbers.

Four formats are read, each by its published formula; a rank reads the codes and scales of its shard and no others.

fp8                 DeepSeek-V3 (arXiv:2412.19437, section 3.3; `weight_dequant` of its inference code): `X.weight` in
                    8-bit floats times `X.weight_scale_inv`, one number for each block of 128 × 128
mxfp4               GPT-OSS, in OCP's Microscaling format (specification 1.0, section 5.2): `X_blocks`, two codes of
                    E2M1 a byte, the low one first, times 2 ** (`X_scales` - 127), one for each 32; turned round behind
compressed-tensors  Kimi-K2, `pack-quantized`: `X.weight_packed`, eight codes of 4 bits (or four of 8) in an int32, the
                    lowest first, minus half their range, times `X.weight_scale`, one for each group along a row;
                    Kimi-K3, `mxfp4-pack-quantized`: `X.weight_packed`, two codes of E2M1 a byte, the low one first,
                    times 2 ** (`X.weight_scale` - 127), one for each 32 along a row
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from mindspeed_mm.checkpoint.lazy_tensor import Concatenated, LazyTensor, Region, Sliced
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a code stand for; the fourth is the sign."""
_BITS_OF_INT32 = 32
_GROUP_OF_MXFP4 = 32


class Quantization(NamedTuple):
    """How a folder's weights are kept."""

    method: str
    block: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale: fp8."""
    bits: int = 4
    """Bits of one code: compressed-tensors."""
    is_float: bool = False
    """Whether codes are numbers of E2M1 with exponents as scales, in place of whole numbers: compressed-tensors."""


def read_quantization(section: object, where: str, key: str) -> Quantization:
    """What a `quantization_config` says.

    Args:
        section: Its content.
        where: The file, for messages.
        key: Its dotted place in there.

    Raises:
        ModelFolderError: It is a format that is not read here.
    """
    # What is no table is taken for the name of the method.
    settings = section if isinstance(section, Mapping) else {"quant_method": section}
    method = str(settings.get("quant_method", "unknown"))
    blocks = settings.get("weight_block_size")
    if method == "fp8" and isinstance(blocks, list) and len(blocks) == 2 and all(blocks):
        return Quantization(method, (int(blocks[0]), int(blocks[1])))
    if method == "mxfp4":
        return Quantization(method)
    if method == "compressed-tensors" and (bits := _packed_bits(settings)):
        return Quantization(method, bits=bits)
    if method == "compressed-tensors" and _is_packed_mxfp4(settings):
        return Quantization(method, is_float=True)
    told = ", ".join(str(word) for word in (method, settings.get("format"), settings.get("fmt")) if word)
    raise ModelFolderError(
        f"the weights are quantised ({told}) in a way that cannot be read, and cannot be trained",
        where=where,
        key=key,
        way_out="Use the unquantised weights of this model. Supported are fp8 with weight_block_size, mxfp4, and "
        "compressed-tensors of the formats mxfp4-pack-quantized, and pack-quantized with symmetric whole numbers of 4 "
        "or 8 bits.",
    )


_READ_SCHEME: Mapping[str, tuple[object, ...]] = {
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group", "channel"),
    "actorder": (None,),
}
"""Setting of compressed-tensors → the values that `_of_packed_rows` reads; the first is the one where none is said."""


def _packed_bits(settings: Mapping[str, object]) -> int | None:
    """Of whole numbers that `_of_packed_rows` reads; None for any others."""
    groups = settings.get("config_groups")
    if settings.get("format") != "pack-quantized" or not isinstance(groups, Mapping):
        return None
    widths = set()
    for group in groups.values():
        scheme = group.get("weights") or {}
        # Gathered over all groups: folders with 4 bits here and 8 there are refused.
        widths.add(scheme.get("num_bits"))
        for name, values in _READ_SCHEME.items():
            if scheme.get(name, values[0]) not in values:
                return None
    for bits in (4, 8):
        if widths == {bits}:
            return bits
    return None


def _is_packed_mxfp4(settings: Mapping[str, object]) -> bool:
    """Whether all groups are of floats of 4 bits, 32 of which share an exponent."""
    groups = settings.get("config_groups")
    if settings.get("format") != "mxfp4-pack-quantized" or not isinstance(groups, Mapping) or not groups:
        return False
    known = {"type": "float", "num_bits": 4, "group_size": _GROUP_OF_MXFP4}
    schemes = [group.get("weights") or {} for group in groups.values()]
    return all(scheme.get(name, value) == value for scheme in schemes for name, value in known.items())


def sections_of(config: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Every `quantization_config` in a config.json that says something, with its dotted place."""
    for key, value in config.items():
        if key == "quantization_config" and value:
            yield f"{path}{key}", value
        elif isinstance(value, Mapping):
            yield from sections_of(value, f"{path}{key}.")


def refuse_quantized(config: Mapping[str, object], where: str) -> None:
    """Raise `ModelFolderError` for a config.json of weights in few bits: conversions carry tensors over as they lie."""
    for key, _ in sections_of(config):
        raise ModelFolderError(
            "the weights are quantised, and a conversion would carry their codes over as if they were weights",
            where=where,
            key=key,
            way_out="Use the unquantised weights of this model; what `mm train` makes of these is exported as numbers.",
        )


def without_quantization(config: Mapping[str, object]) -> dict[str, object]:
    """A config.json of weights that are numbers."""
    kept: dict[str, object] = {}
    for key, value in config.items():
        if key != "quantization_config":
            kept[key] = without_quantization(value) if isinstance(value, Mapping) else value
    return kept


def dequantized(stored: Mapping[str, LazyTensor], config: Mapping[str, object], where: str) -> Mapping[str, LazyTensor]:
    """A folder's tensors with those that are kept in few bits as fp32 numbers, under the names that these have.

    Args:
        stored: As they lie in the files.
        config: The folder's config.json.
        where: The folder, for messages.

    Raises:
        ModelFolderError: The format is not read here, or codes and scales do not belong together.
    """
    found = dict(stored)
    for key, section in sections_of(config):
        rule = read_quantization(section, f"{where}/config.json", key)
        joined = {}
        if rule.method == "fp8":
            joined = _of_ranks(found, config, rule)
        # The fused matrices leave with their scales, so that `_of_blocks` does not read them a second time.
        kept = {name: tensor for name, tensor in found.items() if name.removesuffix("_scale_inv") not in joined}
        found = {**_READERS[rule.method](kept, rule, where), **joined}
    return found


# --- the formats ------------------------------------------------------------------------------------------------------


def _without_scales(stored: Mapping[str, LazyTensor], *ends: str) -> dict[str, LazyTensor]:
    return {key: tensor for key, tensor in stored.items() if not key.endswith(ends)}


def _of_blocks(stored: dict[str, LazyTensor], rule: Quantization, where: str) -> dict[str, LazyTensor]:
    found = _without_scales(stored, ".weight_scale_inv")
    for key, scales in stored.items():
        name = key.removesuffix("_scale_inv")
        codes = stored.get(name)
        if not key.endswith(".weight_scale_inv") or codes is None:
            continue
        *leading, rows, columns = codes.shape
        row_step, column_step = rule.block
        # The last block of a row or column may be cut off: rounded up.
        grid = (*leading, -(-rows // row_step), -(-columns // column_step))
        _check_shape(scales, grid, key, name, where)
        found[name] = ScaledBlocks(codes, scales, rule.block)
    return found


_FUSED = re.compile(r"model\.(?:mtp\.layers\.\d+|layers\.(\d+))\.self_attn\.qkv_proj\.weight")


def _of_ranks(stored: Mapping[str, LazyTensor], config: JsonMapping, rule: Quantization) -> dict[str, LazyTensor]:
    """Queries, keys and values in one matrix, whose rows lie as ranks of tensor parallelism hold them, as many as there
    are key heads: each rank's queries, keys and values, in blocks of its own. MiMo-V2.5 is released so (vLLM, pull
    request 57508). They are put in order here; none where a folder has them in order, or apart."""
    found: dict[str, LazyTensor] = {}
    if config.get("attention_projection_layout") != "fused_qkv":
        return found
    ranks, step = int(config["num_key_value_heads"]), rule.block[0]
    for name, codes in stored.items():
        match, scales = _FUSED.fullmatch(name), stored.get(f"{name}_scale_inv")
        if match is None or scales is None:
            continue
        # Sliding-window layers have sizes of their own (`swa_…`); so have those that predict further tokens.
        windowed = match[1] is None or config["hybrid_layer_pattern"][int(match[1])]
        sizes = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        heads, groups, width, value = (int(config[f"swa_{size}" if windowed else size]) for size in sizes)
        parts = [heads * width // ranks, groups * width // ranks, groups * value // ranks]
        # Of one rank. Each begins a new block of scales, which is why they are no run over all rows.
        rows, steps = sum(parts), -(-sum(parts) // step)
        if scales.shape[0] != ranks * steps or codes.shape[0] != ranks * rows:
            return {}
        shards = [
            ScaledBlocks(Sliced(codes, 0, rank * rows, rows), Sliced(scales, 0, rank * steps, steps), rule.block)
            for rank in range(ranks)
        ]
        starts = (0, parts[0], parts[0] + parts[1])
        # All ranks' queries, then all keys, then all values.
        pieces = [Sliced(shard, 0, at, size) for at, size in zip(starts, parts, strict=True) for shard in shards]
        found[name] = Concatenated(pieces, 0)
    return found


def _of_micro_scales(stored: dict[str, LazyTensor], rule: Quantization, where: str) -> dict[str, LazyTensor]:
    found = _without_scales(stored, "_blocks", "_scales")
    for key, blocks in stored.items():
        name = key.removesuffix("_blocks")
        scales = stored.get(f"{name}_scales")
        if not key.endswith("_blocks") or scales is None:
            continue
        _check_shape(scales, blocks.shape[:-1], f"{name}_scales", key, where)
        found[name] = MicroScaled(blocks, scales)
    return found


def _of_packed_rows(stored: dict[str, LazyTensor], rule: Quantization, where: str) -> dict[str, LazyTensor]:
    if rule.is_float:
        return _of_packed_floats(stored, where)
    found = _without_scales(stored, ".weight_packed", ".weight_scale", ".weight_shape")
    for key, codes in stored.items():
        name = key.removesuffix("_packed")
        scales, shape = stored.get(f"{name}_scale"), stored.get(f"{name}_shape")
        if not key.endswith(".weight_packed") or scales is None or shape is None:
            continue
        # `weight_shape` is itself a tensor, [rows, columns]; the width of the packed codes is rounded up.
        rows, columns = map(int, shape.read().tolist())
        if columns % scales.shape[1]:
            _refuse(f"{columns} columns in {scales.shape[1]} groups", f"{name}_scale", where)
        _check_shape(codes, (rows, -(-columns * rule.bits // _BITS_OF_INT32)), key, f"{name}_shape", where)
        _check_shape(scales, (rows, scales.shape[1]), f"{name}_scale", f"{name}_shape", where)
        found[name] = PackedRows(codes, scales, columns, rule.bits)
    return found


def _of_packed_floats(stored: dict[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    found = _without_scales(stored, ".weight_packed", ".weight_scale")
    for key, codes in stored.items():
        name = key.removesuffix("_packed")
        scales = stored.get(f"{name}_scale")
        if not key.endswith(".weight_packed") or scales is None:
            continue
        # (R, C / 2) bytes
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        _check_shape(scales, (rows, columns // _GROUP_OF_MXFP4), f"{name}_scale", key, where)
        found[name] = MicroScaledRows(codes, scales)
    return found


_READERS = {"fp8": _of_blocks, "mxfp4": _of_micro_scales, "compressed-tensors": _of_packed_rows}


def _check_shape(tensor: LazyTensor, shape: tuple[int, ...], key: str, beside: str, where: str) -> None:
    if tensor.shape != shape:
        _refuse(f"has shape {list(tensor.shape)}; beside {beside} it should be {list(shape)}", key, where)


def _refuse(what: str, key: str, where: str) -> None:
    raise ModelFolderError(what, where=where, key=key, way_out="Compare the folder with the original model's.")


class ScaledBlocks(LazyTensor):
    """Numbers (…, R, C) that are codes of the same shape times one scale a block of rows and columns.

    Args:
        codes: 8-bit floats.
        scales: One for each block.
        block: Its rows and columns; the last ones may be cut off.
    """

    def __init__(self, codes: LazyTensor, scales: LazyTensor, block: tuple[int, int]) -> None:
        super().__init__(codes.shape, torch.float32, [codes, scales])
        self.codes, self.scales, self.block = codes, scales, block

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        *leading, rows, columns = region
        row_step, column_step = self.block
        row_groups, rows_skipped = _whole_groups(rows, row_step)
        column_groups, columns_skipped = _whole_groups(columns, column_step)
        numbers = _read(self.codes, region, torch.float32)
        scales = _read(self.scales, (*leading, row_groups, column_groups), torch.float32)
        # A region may begin in the middle of a block: the scales of whole blocks are spread out, then cut to it.
        scales = scales.repeat_interleave(row_step, dim=-2).narrow(-2, rows_skipped, rows[1])
        scales = scales.repeat_interleave(column_step, dim=-1).narrow(-1, columns_skipped, columns[1])
        out.copy_(numbers.mul_(scales))


class MicroScaled(LazyTensor):
    """Numbers (E, K, N) out of codes (E, N, K / 32, 16), two a byte, and exponents (E, N, K / 32).

    Args:
        blocks: The codes.
        scales: The exponents, 127 more than they are.
    """

    def __init__(self, blocks: LazyTensor, scales: LazyTensor) -> None:
        *leading, rows, groups, size = blocks.shape
        # Stored as (experts, out, in); GPT-OSS's module has (experts, in, out).
        super().__init__((*leading, 2 * groups * size, rows), torch.float32, [blocks, scales])
        self.blocks, self.scales, self.group = blocks, scales, 2 * size

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        *leading, columns, rows = region
        groups, skipped = _whole_groups(columns, self.group)
        # (…, rows, groups, 16): whole groups; they are cut to the region once they are numbers.
        codes = _read(self.blocks, (*leading, rows, groups, (0, self.group // 2)), torch.uint8)
        numbers = _scaled(codes, _read(self.scales, (*leading, rows, groups), torch.uint8))
        numbers = numbers.flatten(-2).narrow(-1, skipped, columns[1])
        out.copy_(numbers.transpose(-1, -2))


def _scaled(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """(…, groups, 32) numbers out of (…, groups, 16) bytes and (…, groups) exponents."""
    table = torch.cat([torch.tensor(_E2M1), -torch.tensor(_E2M1)])  # by code: its fourth bit is the sign
    by_value = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)  # the low one of a byte first
    # 2 ** (e - 127), as the scale of 8 bits, E8M0, is biased.
    return torch.ldexp(table[by_value.int()], exponents.int()[..., None] - 127)


class MicroScaledRows(LazyTensor):
    """Numbers (R, C) out of codes (R, C / 2), two a byte, and exponents (R, C / 32).

    Args:
        codes: The codes.
        scales: The exponents, 127 more than they are.
    """

    def __init__(self, codes: LazyTensor, scales: LazyTensor) -> None:
        super().__init__((codes.shape[0], 2 * codes.shape[1]), torch.float32, [codes, scales])
        self.codes, self.scales = codes, scales

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        rows, columns = region
        groups, skipped = _whole_groups(columns, _GROUP_OF_MXFP4)
        start, count = groups
        codes = _read(self.codes, (rows, (start * _GROUP_OF_MXFP4 // 2, count * _GROUP_OF_MXFP4 // 2)), torch.uint8)
        exponents = _read(self.scales, (rows, groups), torch.uint8)
        numbers = _scaled(codes.unflatten(1, (-1, _GROUP_OF_MXFP4 // 2)), exponents)
        out.copy_(numbers.flatten(1).narrow(1, skipped, columns[1]))


class PackedRows(LazyTensor):
    """Numbers (R, C) out of whole numbers that share an int32 with their neighbours in the row, times a scale a group.

    Args:
        codes: int32 (R, C · bits / 32).
        scales: (R, groups).
        columns: C.
        bits: Of a whole number.
    """

    def __init__(self, codes: LazyTensor, scales: LazyTensor, columns: int, bits: int) -> None:
        super().__init__((codes.shape[0], columns), torch.float32, [codes, scales])
        self.codes, self.scales, self.bits = codes, scales, bits

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        rows, columns = region
        words, skipped = _whole_groups(columns, _BITS_OF_INT32 // self.bits)
        packed = _read(self.codes, (rows, words), torch.int32)
        shifts = torch.arange(0, _BITS_OF_INT32, self.bits, dtype=torch.int32)
        # Masked after the shift, which fills up with the sign of the int32; stored without a sign, from 0 upwards.
        unsigned = packed[..., None] >> shifts & 2**self.bits - 1
        whole = unsigned - 2 ** (self.bits - 1)
        numbers = whole.flatten(1).narrow(1, skipped, columns[1]).float()
        # Columns that share a scale; all of a row where scales are one a channel.
        size = self.shape[1] // self.scales.shape[1]
        groups, skipped = _whole_groups(columns, size)
        scales = _read(self.scales, (rows, groups), torch.float32).repeat_interleave(size, dim=1)
        out.copy_(numbers.mul_(scales.narrow(1, skipped, columns[1])))


def _read(tensor: LazyTensor, region: Region, dtype: torch.dtype) -> torch.Tensor:
    values = torch.empty([length for _, length in region], dtype=dtype)
    tensor.copy_to(values, region)
    return values


def _whole_groups(part: tuple[int, int], size: int) -> tuple[tuple[int, int], int]:
    """The groups of `size` that a (start, length) lies in, as another one, and what is skipped of the first."""
    start, length = part
    first, last = start // size, -(-(start + length) // size)
    return (first, last - first), start - first * size
