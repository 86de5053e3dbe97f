"""When an extraction stops by itself: too many rows that cannot be used, or a disk that will not hold the features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.core.artifacts import free_bytes
from mindspeed_mm.core.errors import DataError, MachineError
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.data.feature_store.feature_file import SkippedRow
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.tasks.extract.batches import WorkBatch

FEATURES_KEY = "data.dataset_param.basic_parameters.features_dir"
_BASIC = "data.dataset_param.basic_parameters"
_LEAST_NUMBER_BYTES = 2
_REASONS_SHOWN = 3


class BadRows:
    """Counts rows that cannot be used.

    Args:
        basic: `on_bad_sample`, `max_bad_fraction`.
        unreadable: Place → reason, of rows that were left out before the work.
        rows: All others.
    """

    def __init__(self, basic: BasicParameters, unreadable: dict[str, str], rows: int) -> None:
        self._stops_at_once = basic.on_bad_sample == "error"
        self._fraction, self._total = basic.max_bad_fraction, rows + len(unreadable)
        self._found = list(unreadable.values())
        self.unreadable = [SkippedRow(None, place, "", reason) for place, reason in unreadable.items()]

    def add(self, skipped: Sequence[SkippedRow]) -> None:
        """Count rows.

        Raises:
            DataError: One is too many, or these are.
        """
        if skipped and self._stops_at_once:
            raise DataError(
                skipped[0].reason, key=f"{_BASIC}.on_bad_sample", way_out="Fix it, or set skip: it is then listed."
            )
        self._found += [row.reason for row in skipped]
        self._check(self._found)

    def recount(self, skipped: Sequence[SkippedRow]) -> None:
        """All rows of the work that were skipped, by whichever rank and start. Raises as `add`."""
        self._check([row.reason for row in self.unreadable] + [row.reason for row in skipped])

    def _check(self, reasons: Sequence[str]) -> None:
        if len(reasons) > math.ceil(self._fraction * self._total):
            raise DataError(
                f"{len(reasons)} of {self._total} rows cannot be used, more than {self._fraction:.1%}: "
                f"{'; '.join(reasons[-_REASONS_SHOWN:])}",
                key=f"{_BASIC}.max_bad_fraction",
                way_out="Fix them or raise max_bad_fraction, then run again: finished samples are kept.",
            )


def check_room(folder: Path, batches: Sequence[WorkBatch], geometry: MediaGeometry) -> None:
    """Raise `MachineError` when not even the latents of these batches fit on the disk."""
    # a lower bound, with the narrowest type and without text features: what it refuses surely does not fit
    numbers = sum(batch.views * len(batch.rows) * math.prod(geometry.latent_shape(batch.size)) for batch in batches)
    free = free_bytes(folder)
    if numbers * _LEAST_NUMBER_BYTES > free:
        raise MachineError(
            f"the latents alone take {_gib(numbers * _LEAST_NUMBER_BYTES)}, but only {_gib(free)} are free",
            where=str(folder),
            key=FEATURES_KEY,
            way_out="Free some space, or name a folder on another disk.",
        )


def room_warning(folder: Path, bytes_per_sample: float, samples: int) -> str | None:
    """What to say when so many more samples will not fit on the disk; None when they will."""
    # an estimate of one batch warns and refuses nothing
    needed, free = bytes_per_sample * samples, free_bytes(folder)
    if needed <= free:
        return None
    return (
        f"warning: {folder}: {samples} samples to come will take about {_gib(needed)}, but only {_gib(free)} are free"
    )


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
