"""Training rows for a report: the exact tokens that the model was given, read again by the run's configuration."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.params.loader import read_plugins
from mindspeed_mm.tasks.report.data import Record

MOST_ROWS = 3
_BUILT_IN = ("huggingface", None)
_UNTRUSTED = (
    "model.trust_remote_code=false",
    "data.dataset_param.preprocess_parameters.trust_remote_code=false",
)
"""Whatever the run trusted: a report is made of runs that come from elsewhere too."""


def training_rows(run: Path) -> Record | None:
    """What the template shows: `rows` in the order of training, or the `trouble` that they cannot be read any more.

    None where there is nothing to show: generators, data sets of plugins (a report runs no foreign code, nor that of a
    model folder), and runs that keep no configuration.
    """
    resolved = RunFolder(run).resolved
    if not resolved.exists():
        return None
    try:
        plugins, _, dataset_type = read_plugins(resolved)
        if plugins or dataset_type not in _BUILT_IN:
            return None
        return {"rows": _read(resolved), "trouble": ""}
    except ConfigError:
        return None
    except MMError as error:
        return {"rows": [], "trouble": str(error)}


def _read(resolved: Path) -> list[Record]:
    # Imported here: a report of a run without rows need not load a processor.
    from mindspeed_mm.tasks.data.opening import open_data
    from mindspeed_mm.tasks.data.page import shown_row
    from mindspeed_mm.tasks.data.preview import first_rows, show_rows

    data = open_data(resolved, _UNTRUSTED, patient=True, pieces=True)
    chosen = first_rows(data.loader(), len(data.dataset), MOST_ROWS)
    return [shown_row(row, data.dataset.media) for row in show_rows(data, chosen)]
