"""What the board shows of one run, or of several beside one another: the report's own words, curves and pictures."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import DataError, MMError, UsageError
from mindspeed_mm.tasks.report.charts import SERIES
from mindspeed_mm.tasks.report.data import ReportedRun, read_run
from mindspeed_mm.tasks.report.page import render_body
from mindspeed_mm.tasks.ui.files import plain_files, shown_name

_KEPT = 8
"""Rendered runs and comparisons that are kept until their files change."""


class Showing:
    """Renders runs, each again only when its files have changed.

    Args:
        root: The board's folder, without links; pictures are shown from below it alone.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rendered: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def show(self, runs: Sequence[Path], stamp: str = "") -> tuple[str, str | None]:
        """HTML of runs for a page with the report's style sheet.

        Args:
            runs: Their folders, the one that others are compared with first.
            stamp: What the client has; empty: nothing.

        Returns:
            The stamp of what there is now, and the HTML; None where the client has it.

        Raises:
            UsageError: There are more runs than colours.
            DataError: A run is gone, holds links, or its files are not those of a run.
        """
        if not 0 < len(runs) <= len(SERIES):
            raise UsageError(f"{len(runs)} runs cannot be compared", way_out=f"Choose one to {len(SERIES)}.")
        now = self._stamp(runs)
        if now == stamp:
            return now, None
        with self._lock:  # matplotlib draws one picture at a time
            if now not in self._rendered:
                self._rendered[now] = self._render(runs)
            self._rendered.move_to_end(now)
            while len(self._rendered) > _KEPT:
                self._rendered.popitem(last=False)
            return now, self._rendered[now]

    def _stamp(self, runs: Sequence[Path]) -> str:
        """A digest of the names, sizes and times of all files that a report reads."""
        found = hashlib.sha256()
        for path in runs:
            run = RunFolder(path)
            bulky = [each.name for each in (run.tensorboard, run.log, run.lock_file)]
            try:
                names = [each.name for each in path.iterdir()]
                bulky += [name for name in names if name.startswith("iter_") or name in _UNREAD]
                for name, stamp in plain_files(path, bulky):
                    found.update(f"{path}\0{name}\0{stamp}\n".encode("utf-8", "surrogateescape"))
            except OSError as error:
                raise DataError("is gone, or cannot be read", where=path.name, way_out="Look at another.") from error
        return found.hexdigest()[:32]

    def _render(self, runs: Sequence[Path]) -> str:
        try:
            return render_body([self._inside(read_run(path)) for path in runs])
        except MMError:
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            what = f"holds files that no run of this version writes ({type(error).__name__}: {error})"
            raise DataError(what, where=", ".join(path.name for path in runs)) from error

    def _inside(self, run: ReportedRun) -> ReportedRun:
        """The run under the name that the board lists; pictures that it would fetch from elsewhere are looked for in
        its own folder."""
        named = replace(run, name=shown_name(run.path, self._root))
        folder = run.results.get("media_dir")
        if folder is None:
            return named
        where = Path(str(folder))
        is_inside = where.is_absolute() and where.resolve().is_relative_to(self._root)
        return named if is_inside else replace(named, results={**run.results, "media_dir": str(run.path)})


_UNREAD = frozenset({"model", "rows", "rollouts", "hf", "exported"})
"""Folders of a run that no report reads."""
