"""fp64 from end to end: models round to fp32 here and there, which would be all that could be seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepsDouble(TorchFunctionMode):
    """While inside, what asks torch for fp32 of an fp64 tensor gets fp64: `x.float()`, `x.to(torch.float32)`,
    `softmax(x, dtype=torch.float32)`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Any call of torch."""
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.float64:
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            return tensor
        args = [_kept(value) for value in args]
        return func(*args, **{name: _kept(value) for name, value in kwargs.items()})


def _kept(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
