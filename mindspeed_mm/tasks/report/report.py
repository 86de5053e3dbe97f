"""`mm report`: one HTML file that holds everything a person asks about one or more runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.file_writing import write_page
from mindspeed_mm.tasks.report.charts import SERIES
from mindspeed_mm.tasks.report.data import read_run
from mindspeed_mm.tasks.report.page import render_page


def run(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report; returns where.

    Args:
        folders: Run folders; several are drawn into the same charts.
        out: The HTML file; by default `report.html` in the first run.

    Raises:
        DataError: A folder is not a run.
        UsageError: There are more runs than colours, or `out` is none that a report may replace.
    """
    if len(folders) > len(SERIES):
        raise UsageError(f"{len(folders)} runs are too many for one report", way_out=f"Give at most {len(SERIES)}.")
    page = render_page(list(map(read_run, folders)))
    out = out or RunFolder(folders[0]).report
    write_page(out, page, "--out")
    return out
