"""verl's micro-batches, whose rows have their own lengths, as a model takes them, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def model_inputs(batch: Any) -> dict[str, Any]:
    """The arguments of a model's `forward`: rows padded on the right, positions as verl has computed them, media of all
    rows one behind another.

    Args:
        batch: With the jagged `input_ids` and `position_ids`: (rows, length), or (rows, axes, length) of models whose
            positions have several axes.
    """
    ids = batch["input_ids"]
    lengths = ids.offsets().diff()
    longest = int(lengths.max())
    mask = torch.arange(longest, device=ids.device) < lengths[:, None]
    positions = [row.transpose(0, 1) if row.dim() == 2 else row for row in batch["position_ids"].unbind()]
    padded = torch.nn.utils.rnn.pad_sequence(positions, batch_first=True)
    inputs = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(list(ids.unbind()), batch_first=True),
        "attention_mask": mask.long(),
        "position_ids": padded.permute(2, 0, 1) if padded.dim() == 3 else padded,
        "use_cache": False,
    }
    return inputs | _media(batch)


def _media(batch: Any) -> dict[str, Tensor]:
    """`multi_modal_inputs` has a mapping for each row: tensors of one name are joined."""
    rows = batch.get("multi_modal_inputs", None)
    if rows is None:
        return {}
    found: dict[str, list[Tensor]] = {}
    for row in getattr(rows, "data", rows):
        for name, value in (getattr(row, "data", row) or {}).items():
            if isinstance(value, Tensor):
                found.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in found.items()}


def next_tokens(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every token that has one behind it.

    Args:
        ids: Jagged, (rows, length).

    Returns:
        (n,) its index in the padded rows, flattened; (n,) the token behind it; (n,) its index in the jagged values.
    """
    offsets, values = ids.offsets(), ids.values()
    lengths = offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
    places = torch.arange(len(values), device=ids.device)
    own = places - offsets[row]
    has_next = own < lengths[row] - 1
    kept = places[has_next]
    return (row * int(lengths.max()) + own)[has_next], values[kept + 1], kept


def as_jagged(ids: Tensor, places: Tensor, numbers: Tensor) -> Tensor:
    """Numbers at these places of the jagged values, 0 at the last token of each row, in the shape of `ids`."""
    values = numbers.new_zeros(len(ids.values())).index_copy(0, places, numbers)
    return torch.nested.nested_tensor_from_jagged(values, ids.offsets())
