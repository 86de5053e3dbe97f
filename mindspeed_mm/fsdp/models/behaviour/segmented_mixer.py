"""Layers that carry a state from token to token, over a packed row: document by document, as if each were alone.

Documents of one length, or nearly so, are computed at once; what fills the shorter ones up stands behind them, where a
causal layer does not look.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from mindspeed_mm.fsdp.ops.attention import check_borders, without_borders
from mindspeed_mm.fsdp.ops.graph_borders import outside_graphs
from mindspeed_mm.fsdp.ops.host_values import host_values


class SegmentedForward:
    """Stands for a layer's `forward`; calls without borders go through.

    Args:
        mixer: Called with `hidden_states` (1, T, C) by name, returns (1, T, C) or a tuple that begins with it.
    """

    def __init__(self, mixer: nn.Module) -> None:
        self._forward = mixer.forward

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output for a packed row."""
        borders = kwargs.get("cu_seq_lens_q")
        if borders is None:
            return self._forward(*args, **kwargs)
        hidden_1TC = args[0] if args else kwargs["hidden_states"]
        places = host_values(borders)
        check_borders(places, hidden_1TC[:, None])
        own = without_borders(kwargs)
        spans = list(pairwise(places))
        lengths = [stop - start for start, stop in spans]
        pieces: dict[int, Tensor] = {}
        others: tuple[Any, ...] | None = None  # what the layer returns beside hidden states, if it returns a tuple
        for bucket in buckets(lengths, waste_on(hidden_1TC.device)):
            cut = partial(_rows_of, length=hidden_1TC.shape[1], spans=[spans[document] for document in bucket])
            bucket_args, bucket_kwargs = tree_map_only(Tensor, cut, (args, own))
            output = self._forward(*bucket_args, **bucket_kwargs)
            if isinstance(output, tuple):
                output, *rest = output
                others = tuple(rest)
            for row, document in enumerate(bucket):
                pieces[document] = output[row, : lengths[document]]
        # Empty documents are in no bucket, and have no tokens to be put back.
        joined = torch.cat([pieces[document] for document in sorted(pieces)])[None]
        return joined if others is None else (joined, *others)


def waste_on(device: torch.device) -> float:
    """Most padding of a batch of documents, of its real tokens: an accelerator gains by computing more of them at once,
    a CPU does not."""
    return 0.0 if device.type == "cpu" else 0.25


def buckets(lengths: Sequence[int], waste: float) -> list[list[int]]:
    """Documents that are computed at once, by their numbers; empty ones are left out.

    Args:
        lengths: Tokens of each.
        waste: Most padding, of the real tokens of a bucket.
    """
    found: list[list[int]] = []
    tokens = 0
    # From the longest to the shortest: all rows of a bucket are filled up to its first one.
    documents = [number for number, length in enumerate(lengths) if length]
    documents.sort(key=lambda number: -lengths[number])
    for document in documents:
        tokens += lengths[document]
        if found:
            longest = lengths[found[-1][0]]
            if longest * (len(found[-1]) + 1) <= (1 + waste) * tokens:
                found[-1].append(document)
                continue
        found.append([document])
        tokens = lengths[document]
    return found


def _rows_of(tensor: Tensor, length: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """(documents, longest, …) of (1, length, …); other tensors stay."""
    if tensor.dim() < 2 or tensor.shape[:2] != (1, length):
        return tensor
    return pad_sequence([tensor[0, start:stop] for start, stop in spans], batch_first=True)
