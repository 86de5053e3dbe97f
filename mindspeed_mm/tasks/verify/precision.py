"""fp64 from end to end: models round to fp32 here and there, which would be all that could be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F

from mindspeed_mm.fsdp.data.dataloader.fetch import BatchMaker
from mindspeed_mm.fsdp.models.behaviour.host_grids import KeptRows
from mindspeed_mm.fsdp.models.diffusion.live_encoding import LiveEncoder
from mindspeed_mm.tasks.verify.faults import swapped

_P = ParamSpec("_P")
_R = TypeVar("_R")
_TAKE_A_DTYPE: tuple[tuple[object, str], ...] = (
    (torch.Tensor, "to"), (torch.Tensor, "type"), (torch.Tensor, "softmax"), (torch.Tensor, "log_softmax"),
    (torch, "softmax"), (torch, "log_softmax"), (F, "softmax"), (F, "log_softmax"),
)  # fmt: skip
"""Functions of torch (2.11 to 2.13) that models round with. A `TorchFunctionMode` would see all of them, but not in the
backward pass, where layers are computed again: the autograd engine leaves it."""
_rounds: ContextVar[bool] = ContextVar("rounds", default=False)
"""Whether torch is left alone for the moment."""


@contextmanager
def keeping_double(*, of_whole_numbers: bool = False) -> Iterator[None]:
    """While inside, what asks torch for fp32 of an fp64 tensor gets fp64: `x.float()`, `x.to(torch.float32)`,
    `softmax(x, dtype=torch.float32)`. Batches are made, and raw media encoded, as always: feature extractors and frozen
    encoders round their filters to fp32 and multiply them by sound in fp32.

    Args:
        of_whole_numbers: Sizes and positions become fp64, too, since some models multiply them by fp64 (GLM-4V). Those
            that round angles to fp32 then compute others than they do alone.
    """
    kept = _Kept(of_whole_numbers)
    with ExitStack() as stack:
        stack.enter_context(swapped(BatchMaker, "__getitem__", _rounding(BatchMaker.__getitem__)))
        stack.enter_context(swapped(LiveEncoder, "__call__", _rounding(LiveEncoder.__call__)))
        # Rows that were kept before are fp32, and those of fp64 are not for the runs that come after.
        stack.enter_context(swapped(KeptRows, "of", KeptRows.made))
        stack.enter_context(swapped(torch.Tensor, "float", kept.float_of(torch.Tensor.float)))
        for owner, name in _TAKE_A_DTYPE:
            stack.enter_context(swapped(owner, name, kept.keeping(getattr(owner, name))))
        yield


def _rounding(plain: Callable[_P, _R]) -> Callable[_P, _R]:
    @wraps(plain)
    def own(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = _rounds.set(True)
        try:
            return plain(*args, **kwargs)
        finally:
            _rounds.reset(before)

    return own


class _Kept:
    """Which tensors are kept from fp32, and functions that keep them.

    Args:
        of_whole_numbers: As of `keeping_double`; bytes, which are raw media, stay as they are.
    """

    def __init__(self, of_whole_numbers: bool) -> None:
        self._of_whole_numbers = of_whole_numbers

    def float_of(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(plain)
        def own(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            if self._is_kept(tensor):
                return tensor.double()
            return plain(tensor, *args, **kwargs)

        return own

    def keeping(self, plain: Callable[..., _R]) -> Callable[..., _R]:
        @wraps(plain)
        def own(tensor: object, *args: object, **kwargs: object) -> _R:
            if self._is_kept(tensor):
                args = tuple(map(_double_for_single, args))
                kwargs = {name: _double_for_single(value) for name, value in kwargs.items()}
            return plain(tensor, *args, **kwargs)

        return own

    def _is_kept(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or _rounds.get():
            return False
        if tensor.is_floating_point() or tensor.is_complex() or not self._of_whole_numbers:
            return tensor.dtype is torch.float64
        return tensor.dtype is not torch.uint8


def _double_for_single(value: object) -> object:
    if value is torch.float32:
        return torch.float64
    return value
