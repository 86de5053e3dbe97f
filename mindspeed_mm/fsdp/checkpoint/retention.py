"""Which old checkpoints go: only after a newer one is committed, and never the last two good ones."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.manifest import read_manifest, verify_files

FEWEST_KEPT = 2


def prune(save: Path, save_total_limit: int | None, kept: int | None = None) -> list[int]:
    """Delete the oldest complete checkpoints beyond the limit and return their steps.

    Args:
        save: The run folder.
        save_total_limit: How many to keep, at least 2; None keeps all. Damaged ones do not count and are left alone.
        kept: A step whose checkpoint stays however old it is.
    """
    if save_total_limit is None:
        return []
    complete = [step for step in layout.list_iterations(save) if _is_complete(layout.checkpoint_folder(save, step))]
    doomed = [step for step in complete[: -max(save_total_limit, FEWEST_KEPT)] if step != kept]
    for step in doomed:
        layout.remove_checkpoint(layout.checkpoint_folder(save, step))
    return doomed


def _is_complete(folder: Path) -> bool:
    try:
        return not verify_files(folder, read_manifest(folder).files, "size")
    except CheckpointError:
        return False
