"""Two transformers that share the noise levels between them, trained and sampled from as one module (Wan2.2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ExpertPair(nn.Module):
    """Sends each sample to the transformer of its noise level. The two bear the names of their folders, `EXPERT_PARTS`.

    Both are called wherever gradients or other ranks may wait for them, with a sample that counts for nothing where
    none is theirs: every rank then gathers the same weights, and every step has the gradients of both.

    Args:
        transformer: For times from the boundary on.
        transformer_2: For times below.
        boundary: In the transformers' own time, 0..1000.
    """

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary

    @property
    def config(self) -> Any:
        """Of the first: the two have the same sizes."""
        return self.transformer.config

    @property
    def dtype(self) -> torch.dtype:
        """What pipelines ask a transformer for."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """What pipelines ask a transformer for."""
        return next(self.parameters()).device

    def cache_context(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """What pipelines wrap calls in; nothing is cached here."""
        return nullcontext()

    def forward(self, timestep: torch.Tensor, return_dict: bool = False, **inputs: Any) -> tuple[torch.Tensor]:
        """The samples' outputs in their order, (B, …), as the transformers give them with `return_dict=False`.

        Args:
            timestep: (B,) times.
            return_dict: Of no effect: tuples are returned.
            inputs: Other arguments of the transformers. Tensors are of B samples; anything else is for all of them.
        """
        is_noisy = timestep >= self.boundary
        shares = [is_noisy.nonzero().flatten(), (~is_noisy).nonzero().flatten()]
        calls_both = torch.is_grad_enabled() or (dist.is_initialized() and dist.get_world_size() > 1)
        output: torch.Tensor | None = None
        for expert, rows in zip((self.transformer, self.transformer_2), shares, strict=True):
            is_spare = len(rows) == 0
            if is_spare and not calls_both:
                continue
            rows = rows.new_zeros(1) if is_spare else rows
            given = dict(inputs)
            for key, value in inputs.items():
                if isinstance(value, torch.Tensor):
                    given[key] = value[rows]
            (made,) = expert(timestep=timestep[rows], return_dict=False, **given)
            if output is None:
                output = made.new_zeros(len(timestep), *made.shape[1:])
            # Added, not assigned: an expert without samples of its own adds nothing, and still has gradients.
            output = output.index_add(0, rows, made * 0 if is_spare else made)
        assert output is not None
        return (output,)
