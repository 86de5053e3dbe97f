"""The output head works on labelled tokens only: logits of tokens that no loss reads are never computed.

A pre-hook on the head keeps the rows of the flattened hidden states that carry a label. It runs inside the head's own
forward, after FSDP has gathered the head's weight, and works for every model whose head is a module of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.fsdp.ops.forward_stack import Args


def labelled_rows(shift_labels: torch.Tensor) -> torch.Tensor:
    """Indices (n,) int64 into the flattened (B·L) tokens that carry a label.

    Call it while the labels are on the host: on an accelerator, finding the indices would be a synchronisation.
    """
    return (shift_labels.reshape(-1) != IGNORED_LABEL).nonzero().squeeze(1)


def labels_per_sample(batch: Batch) -> torch.Tensor:
    """(samples,) how many labels each has: by row, in a packed row by document (padding is one without)."""
    is_label_BL = batch["shift_labels"] != IGNORED_LABEL
    borders = batch.get("cu_seq_lens_q")
    if borders is None:
        return is_label_BL.sum(dim=1)
    before = torch.cat([borders.new_zeros(1, dtype=torch.long), is_label_BL[0].cumsum(0)])
    return before.index_select(0, borders.long()).diff()


class LabelledRowsHead:
    """Hook on an output head, off until `select` names the rows.

    Args:
        head: The module that turns hidden states (B, L, H) into logits; registered before sharding.
    """

    def __init__(self, head: nn.Module) -> None:
        self._rows: torch.Tensor | None = None
        self._request: tuple[object, ...] = ()
        head.register_forward_pre_hook(self._keep_rows)

    @contextmanager
    def select(self, rows: torch.Tensor, *request: object) -> Iterator[None]:
        """While inside, the head sees only `rows` (n,) of the flattened tokens and returns logits (1, n, V).

        Args:
            rows: Their indices.
            request: A further argument for the head, which may ask for something else than logits.
        """
        self._rows, self._request = rows, request
        try:
            yield
        finally:
            self._rows, self._request = None, ()

    def _keep_rows(self, _module: nn.Module, inputs: Args) -> Args | None:
        if self._rows is None:
            return None
        hidden, *rest = inputs
        kept = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._rows)
        if not self._request:  # models that change their logits expect as many dims as there were
            kept = kept[(None,) * (hidden.dim() - 2)]
        return (kept, *rest, *self._request)
