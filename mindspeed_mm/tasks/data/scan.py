"""One pass over the rows by worker processes, in order, with the time left on stderr."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.core.cores import usable_cores
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.data.facts import Look, RowFacts

_CHUNK_ROWS = 32
_FEW_ROWS = 256
"""So few are read before workers would have started."""
MOST_WORKERS = 8


def default_workers() -> int:
    """As many as there are cores for this process, within reason."""
    return min(MOST_WORKERS, usable_cores())


def scan(
    rows: Sequence[int], look: Look, *, workers: int | None = None, stream: TextIO | None = None
) -> Iterator[RowFacts]:
    """The facts of rows, in the order given.

    Args:
        rows: Indices into the data set.
        look: Reads one row.
        workers: Processes; 0: this one; None: by the cores, and none for a few rows.
        stream: Where the progress goes; None: stderr.

    Raises:
        MachineError: A worker died.
    """
    if workers is None:
        workers = 0
        if len(rows) > _FEW_ROWS:
            workers = default_workers()
    progress = WorkProgress(stream=stream, total=len(rows))
    try:
        for chunk in _chunks(rows, look, workers):
            yield from chunk
            progress.advance(len(chunk))
    finally:
        progress.end()


class _Chunks(Dataset[list[RowFacts]]):
    """Some rows at once: sending one at a time would cost more than reading it."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def __getitem__(self, rows: Sequence[int]) -> list[RowFacts]:  # type: ignore[override]
        return [self._look(row) for row in rows]


def _chunks(rows: Sequence[int], look: Look, workers: int) -> Iterator[list[RowFacts]]:
    size = _CHUNK_ROWS if workers else 1
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    reader = _Chunks(look)
    if not workers:
        yield from map(reader.__getitem__, parts)
        return
    # A forked worker has the data set and the libraries already; another start method would import them for
    # seconds.
    forks = sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()
    loader: Any = DataLoader(
        reader,
        batch_size=None,
        sampler=parts,  # type: ignore[arg-type]
        collate_fn=_pass_chunk,
        num_workers=min(workers, len(parts)),
        worker_init_fn=_prepare_worker,
        multiprocessing_context="fork" if forks else None,
    )
    try:
        yield from loader
    except RuntimeError as error:  # torch's word for a dead worker
        raise MachineError(
            f"a process that reads rows ended: {error}",
            way_out="It probably ran out of memory: use fewer processes, e.g. --workers 1.",
        ) from error


def _pass_chunk(chunk: list[RowFacts]) -> list[RowFacts]:
    return chunk


def _prepare_worker(_: int) -> None:
    # The workers share the cores already, and tokenizers warns of its own threads after a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
