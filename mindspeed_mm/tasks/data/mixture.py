"""What each source gives of a mixture, and what it would give by the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part, find_part
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.tasks.data.tally import RowStatistics


@dataclass(frozen=True)
class SourceShare:
    """Share of one source in a mixture: by rows, by tokens and by its weight."""

    name: str
    rows: int
    """Usable ones."""
    tokens: int
    of_rows: float
    of_tokens: float
    weight: float | None
    """Share by the configured weights; None without weights."""

    def to_dict(self) -> dict[str, object]:
        """Return the share as a dictionary for JSON, with measured shares rounded to four digits."""
        return {
            "name": self.name,
            "rows": self.rows,
            "tokens": self.tokens,
            "of_rows": round(self.of_rows, 4),
            "of_tokens": round(self.of_tokens, 4),
            "weight": self.weight,
        }


def shares(dataset: MMDataset, basic: BasicParameters, tally: RowStatistics) -> list[SourceShare]:
    """Rows and tokens of each entry of `dataset:`; empty where the data set does not name its parts."""
    counts = tally.parts(dataset.parts)
    rows = max(1, sum(each.rows for each in counts))
    tokens = max(1, sum(each.tokens for each in counts))
    weights = _weights(dataset.parts, basic)
    total = sum(weights.values())
    found = []
    for number, each in enumerate(counts):
        weight = round(weights.get(number, 0.0) / total, 4) if total else None
        of_rows, of_tokens = each.rows / rows, each.tokens / tokens
        found.append(SourceShare(each.name, each.rows, each.tokens, of_rows, of_tokens, weight))
    return found


def _weights(parts: Sequence[Part], basic: BasicParameters) -> dict[int, float]:
    """Number of each source that has a weight → its weight."""
    if basic.mix is None or not parts:
        return {}
    return {find_part(parts, name): float(weight) for name, weight in basic.mix.weights.items()}
