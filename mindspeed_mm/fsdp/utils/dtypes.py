"""The configuration's names of number formats as torch's."""

from __future__ import annotations

from typing import overload

import torch

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@overload
def torch_dtype(name: str) -> torch.dtype: ...
@overload
def torch_dtype(name: str | None) -> torch.dtype | None: ...


def torch_dtype(name: str | None) -> torch.dtype | None:
    """`bf16` → `torch.bfloat16`; None stays None."""
    if name:
        return TORCH_DTYPES[name]
    return None
