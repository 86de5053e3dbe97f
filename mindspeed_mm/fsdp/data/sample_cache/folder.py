"""The folder of one set of settings: its segments, who may write to it, and which record belongs to which row."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.core.artifacts import atomic_write_bytes, atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.data.sample_cache.identity import digest_of
from mindspeed_mm.fsdp.data.sample_cache.segment import ENTRY, SUFFIX, DamagedSegment, read_entries
from mindspeed_mm.fsdp.params.rules.path import check_writable

CACHE_KEY = "data.dataset_param.basic_parameters.cache_dir"
_LOOK_EVERY_S = 0.2
_TELL_EVERY_S = 30.0
_OLD_TABLE_S = 3600.0
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Table:
    """For each row of a data set, where its record is."""

    segments: list[str]
    """Names of files."""
    segment: np.ndarray
    """(rows,) number of the file; -1: there is no record."""
    entries: np.ndarray
    """(rows,) of `ENTRY`."""

    @property
    def is_missing(self) -> np.ndarray:
        """(rows,) whether nothing is known of a row."""
        return self.segment < 0

    @property
    def is_usable(self) -> np.ndarray:
        """(rows,) whether there is a record with a sample; others are known to be too long, or not known."""
        return (self.segment >= 0) & (self.entries["size"] > 0)


class CacheFolder:
    """Segments of one set of settings.

    Args:
        root: Of all settings.
        settings: See `identity.settings_of`.
    """

    def __init__(self, root: Path, settings: dict[str, Any]) -> None:
        self.path = root / digest_of(settings)
        self._settings = settings

    def prepare(self) -> None:
        """Make it.

        Raises:
            ConfigError: It lies below a file.
            MachineError: It cannot be written.
        """
        check_writable(self.path, CACHE_KEY)
        try:
            make_writable_folder(self.path)
        except MachineError as error:
            problem = error.problems[0]
            raise MachineError(
                problem.what, where=problem.where, key=CACHE_KEY, way_out="Set it to a folder with room."
            ) from error
        # No `.json`: a folder of rows may be what the cache stands in, and every .json in it is taken for rows.
        if not (self.path / "settings.txt").exists():
            atomic_write_text(
                self.path / "settings.txt", json.dumps(self._settings, indent=1, ensure_ascii=False) + "\n"
            )

    def clear(self, older_than_s: float = 0.0) -> None:
        """Take away the records, and what a kill left.

        Args:
            older_than_s: By the clock of the file system: what is younger stays.
        """
        (self.path / ".lock").touch()
        now = (self.path / ".lock").stat().st_mtime
        for path in (*self.segments(), *self.path.glob("rows-*"), *self.path.glob(".*.tmp")):
            if now - path.stat().st_mtime >= older_than_s:
                path.unlink(missing_ok=True)

    def segments(self) -> list[Path]:
        """In the order in which they were written, as far as the file system tells."""
        found = list(self.path.glob(f"segment-*{SUFFIX}"))
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))

    def size_bytes(self) -> int:
        """Return the size of all segments on the disk together, in bytes."""
        return sum(path.stat().st_size for path in self.segments())

    @contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[None]:
        """One process at a time; the others wait here, in no collective, however long it takes.

        Where a file system knows no locks, several write at once: they then do the same work twice, and no harm.
        """
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            told = time.monotonic()
            while _is_taken(descriptor):
                if time.monotonic() - told >= _TELL_EVERY_S:
                    told = time.monotonic()
                    tell(f"waiting for another process that encodes samples into {self.path}")
                time.sleep(_LOOK_EVERY_S)
            yield
        finally:
            os.close(descriptor)

    def look_up(self, keys: np.ndarray) -> Table:
        """Find the records of rows.

        Args:
            keys: (rows,) S16.
        """
        names: list[str] = []
        numbers, parts = [], []
        for path in self.segments():
            try:
                parts.append(read_entries(path))
            except DamagedSegment as error:
                warnings.warn(f"{error}: its samples are encoded again", stacklevel=2)
                path.unlink(missing_ok=True)
                continue
            numbers.append(np.full(len(parts[-1]), len(names), dtype=np.int32))
            names.append(path.name)
        known = np.concatenate([np.zeros(0, ENTRY), *parts])
        segment = np.concatenate([np.zeros(0, np.int32), *numbers])
        entries, found = np.zeros(len(keys), ENTRY), np.full(len(keys), -1, dtype=np.int32)
        if len(known):
            order = np.argsort(known["key"], kind="stable")
            # The last of equal keys: a record that was written again stands behind the one that was found damaged.
            at = order[np.maximum(np.searchsorted(known["key"], keys, side="right", sorter=order) - 1, 0)]
            is_known = known["key"][at] == keys
            entries[is_known], found[is_known] = known[at[is_known]], segment[at[is_known]]
        return Table(names, found, entries)

    # --- the table of a data set, for the processes that waited while it was made -------------------------------------

    def save_table(self, rows: str, table: Table) -> None:
        """Keep the table of the rows named `rows`, for those that wait for it; an older one is not waited for."""
        content = io.BytesIO()
        np.savez(content, segments=np.array(table.segments), segment=table.segment, entries=table.entries)
        content_bytes = content.getvalue()
        atomic_write_bytes(self._table(rows), _digest(content_bytes) + content_bytes)
        now = self._table(rows).stat().st_mtime
        for path in self.path.glob("rows-*"):
            if now - path.stat().st_mtime > _OLD_TABLE_S:
                path.unlink(missing_ok=True)

    def table_mark(self, rows: str) -> tuple[int, int] | None:
        """Tells whether a table was written since it was last asked for; None where there is none."""
        try:
            status = self._table(rows).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def load_table(self, rows: str) -> Table | None:
        """The table, if it is there and whole."""
        try:
            content = self._table(rows).read_bytes()
        except OSError:
            return None
        if _digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
            return None
        with np.load(io.BytesIO(content[_DIGEST_BYTES:]), allow_pickle=False) as parts:
            return Table(parts["segments"].tolist(), parts["segment"], parts["entries"])

    def _table(self, rows: str) -> Path:
        return self.path / f"rows-{rows}.table"


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    return False


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
