"""Which way round a folder holds stacked experts: transformers 5 saves them as its modules have them, the folders that
were released before have the last two dims swapped. Shapes tell it, unless they end in a square.
"""

from __future__ import annotations

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor


class UnknownOrder(ValueError):
    """Nobody says which way round a square is stored."""

    way_out = (
        'Say in its config.json which transformers saved it: "transformers_version": "5.0.0" where experts are stored '
        'as the module has them, [E, out, in], "4.57.0" where they are [E, in, out].'
    )


def in_order_of_module(version: object) -> bool | None:
    """Whether a folder holds experts as the module has them.

    Args:
        version: `transformers_version` of its config.json.

    Returns:
        None where nothing is said.
    """
    major = str(version or "").partition(".")[0]
    return int(major) >= 5 if major.isdecimal() else None


def oriented(tensor: LazyTensor, swapped: LazyTensor, shape: tuple[int, ...], as_module: bool | None) -> LazyTensor:
    """Stacked experts in the module's order. The way back is the same: a square that was swapped is swapped again.

    Args:
        tensor: As they are stored.
        swapped: With the last two dims swapped.
        shape: The module's.
        as_module: From `in_order_of_module`, which counts where the shape does not tell.

    Raises:
        ValueError: Neither has the shape.
        UnknownOrder: Both have it, and nothing is said.
    """
    if shape not in (tensor.shape, swapped.shape):
        raise ValueError(f"its shape is {tensor.shape}, expected {shape} or its last two dims swapped")
    if tensor.shape != swapped.shape:
        as_module = tensor.shape == shape
    elif as_module is None:
        raise UnknownOrder(f"{shape} ends in a square: its shape does not show which way round it is stored")
    return tensor if as_module else swapped
