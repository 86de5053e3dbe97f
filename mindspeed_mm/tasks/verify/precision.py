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
def keeping_double() -> Iterator[None]:
    """While inside, what asks torch for fp32 of an fp64 tensor or of whole numbers, but bytes, gets fp64:
    `x.float()`, `x.to(torch.float32)`, `softmax(x, dtype=torch.float32)`. Batches are made, and raw media encoded, as
    always: feature extractors and frozen encoders round their filters to fp32 and multiply them by sound in fp32."""
    with ExitStack() as stack:
        stack.enter_context(swapped(BatchMaker, "__getitem__", _rounding(BatchMaker.__getitem__)))
        stack.enter_context(swapped(LiveEncoder, "__call__", _rounding(LiveEncoder.__call__)))
        stack.enter_context(swapped(torch.Tensor, "float", _float_of(torch.Tensor.float)))
        for owner, name in _TAKE_A_DTYPE:
            stack.enter_context(swapped(owner, name, _keeping(getattr(owner, name))))
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


def _float_of(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(plain)
    def own(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return tensor.double() if _is_kept(tensor) else plain(tensor, *args, **kwargs)

    return own


def _keeping(plain: Callable[..., _R]) -> Callable[..., _R]:
    @wraps(plain)
    def own(tensor: object, *args: object, **kwargs: object) -> _R:
        if _is_kept(tensor):
            args = tuple(map(_double_for_single, args))
            kwargs = {name: _double_for_single(value) for name, value in kwargs.items()}
        return plain(tensor, *args, **kwargs)

    return own


def _is_kept(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or _rounds.get():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.dtype is torch.float64
    return tensor.dtype is not torch.uint8  # bytes are raw media


def _double_for_single(value: object) -> object:
    return torch.float64 if value is torch.float32 else value
