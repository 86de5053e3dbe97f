"""`mm report`: one HTML file that holds everything a person asks about one or more runs. What was read of the runs is
put into words and pictures and into the template."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

import jinja2
from markupsafe import Markup

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.config_path import dotted
from mindspeed_mm.core.errors import ConfigError, MMError, UsageError
from mindspeed_mm.core.file_writing import write_page
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.params.loader import read_plugins
from mindspeed_mm.tasks.report.charts import SERIES, draw_charts
from mindspeed_mm.tasks.report.comparison import (
    configuration_differences,
    differences,
    published_differences,
    side_by_side,
)
from mindspeed_mm.tasks.report.data import Record, ReportedRun, choose_samples, read_run
from mindspeed_mm.tasks.report.samples import sample_grid, show
from mindspeed_mm.tasks.report.scores import judged, score_tables, short


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
    page = _render_page(list(map(read_run, folders)))
    out = out or RunFolder(folders[0]).report
    write_page(out, page, "--out")
    return out


# --- the page ---------------------------------------------------------------------------------------------------------

_MOST_SAMPLES = 12
"""Wrong answers shown, and right ones."""
_MOST_EVENTS = 40
_NOTHING = "–"
_PAGE, _BODY = "report/report_page.html.j2", "report/report_body.html.j2"


def _render_page(runs: Sequence[ReportedRun]) -> str:
    """One HTML page that needs nothing from outside itself."""
    subtitle = _subtitle(runs[0])
    if len(runs) > 1:
        subtitle = f"{len(runs)} runs"
    title = f"Report: {', '.join(run.name for run in runs)}"
    content = _page_content(runs, map(training_rows, (run.path for run in runs)))
    return page_environment().get_template(_PAGE).render(title=title, subtitle=subtitle, **content)


def render_body(runs: Sequence[ReportedRun]) -> str:
    """The same without title, style sheet and training rows, which take a processor to read: a piece of HTML for a page
    that has `report.css.j2`."""
    return page_environment().get_template(_BODY).render(**_page_content(runs, repeat(None)))


def page_environment() -> jinja2.Environment:
    """Jinja for pages about runs, whose templates are named from `tasks` on: what runs and people wrote is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _page_content(runs: Sequence[ReportedRun], rows: Iterable[Record | None]) -> Record:
    several = len(runs) > 1
    described = [_describe(run, several=several) for run in runs]
    return {
        "runs": [{**run, "training": shown} for run, shown in zip(described, rows, strict=False)],
        "beside": _beside(runs) if several else None,
        "scores": score_tables(runs),
        "charts": [(title, Markup(svg)) for title, svg in draw_charts(runs)],  # drawn by us
    }


def _beside(runs: Sequence[ReportedRun]) -> Record:
    """What the template shows of several runs together."""
    media = MediaLoader(runs[0].results.get("media_dir", runs[0].path))
    questions = side_by_side(runs)
    return {
        "base": runs[0].name,
        "measure": runs[0].results.get("measure", "accuracy"),
        "differences": differences(runs),
        "published": published_differences(runs),
        "questions": [{**_sample(each["sample"], media), "answers": each["answers"]} for each in questions],
        "settings": configuration_differences(runs),
    }


def _describe(run: ReportedRun, several: bool) -> Record:
    """What the template shows of a run."""
    wrong, right = choose_samples(run.samples, _MOST_SAMPLES)
    right_total = sum(bool(sample.get("correct")) for sample in run.samples)
    media = MediaLoader(run.results.get("media_dir", run.path))
    return {
        "name": run.name,
        "suffix": f": {run.name}" if several else "",
        "numbers": summary(run),
        "judged": judged(run),
        "grid": sample_grid(run.rounds),
        "wrong": _samples(wrong, media),
        "right": _samples(right, media),
        "wrong_total": len(run.samples) - right_total,
        "right_total": right_total,
        "events": [_event(event) for event in run.events[-_MOST_EVENTS:]],
        "event_counts": _count_events(run.events),
        "environment": list(_flat(run.facts)),
        "configuration": run.configuration,
    }


def summary(run: ReportedRun) -> list[tuple[str, str]]:
    """The numbers on top: name and value, the same names for every run."""
    return [
        ("status", str(run.facts.get("status", "unknown"))),
        ("steps", _steps(run)),
        ("training loss", _last_value(run.steps, "loss")),
        ("validation loss", _validation(run.validations)),
        ("best", _best(run)),
        ("time", _duration(run)),
        ("tokens a second", _over_steps(run, "tokens_per_s", lambda values: f"{statistics.median(values):,.0f}")),
        ("waiting for data", _over_steps(run, "data_share", lambda values: f"{100 * statistics.fmean(values):.1f} %")),
        ("peak memory", _over_steps(run, "memory_gib", lambda values: f"{max(values):.2f} GiB")),
    ]


def _best(run: ReportedRun) -> str:
    found = run.best
    if "step" not in found:
        return _NOTHING
    return f"{found['metric']} {found['value']:.4f} at step {found['step']}"


def _subtitle(run: ReportedRun) -> str:
    facts = run.facts
    parts = [facts.get("model_class"), facts.get("device"), facts.get("platform")]
    if isinstance(facts.get("started"), int | float):
        parts.insert(0, time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["started"])))
    return " · ".join(map(str, filter(None, parts)))


def _steps(run: ReportedRun) -> str:
    done = 0
    if run.steps:
        done = run.steps[-1]["step"]
    total = run.facts.get("total_steps")
    if isinstance(total, int) and total != done:
        return f"{done:,} of {total:,}"
    return f"{done:,}"


def _last_value(records: Sequence[Record], key: str) -> str:
    if not records or records[-1][key] is None:
        return _NOTHING
    return f"{records[-1][key]:.4f}"


def _validation(validations: Sequence[Record]) -> str:
    """The last validation: its loss, and the terms beside it by the names that the metrics have."""
    told = [_last_value(validations, "val_loss")]
    for name in validations[-1] if validations else ():
        if name.startswith("val_") and name != "val_loss":
            told.append(f"{name} {_last_value(validations, name)}")
    return ", ".join(told)


def _duration(run: ReportedRun) -> str:
    """Time spent in steps, resumed parts included; a pause between two starts does not count."""
    seconds, previous = 0.0, 0
    for record in run.steps:
        seconds += record.get("step_ms", 0.0) / 1000 * (record["step"] - previous)
        previous = record["step"]
    if not seconds:
        return _NOTHING
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _over_steps(run: ReportedRun, key: str, told: Callable[[list[float]], str]) -> str:
    """What all steps that have logged a number say together."""
    values = [record[key] for record in run.steps if key in record]
    if not values:
        return _NOTHING
    return told(values)


def _event(event: Record) -> Record:
    details = []
    for name, value in event.items():
        if name not in ("time", "kind", "step"):
            details.append(f"{name} {short(value)}")
    clock = ""
    if "time" in event:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    return {
        "time": clock,
        "kind": event.get("kind", ""),
        "step": event.get("step", ""),
        "details": ", ".join(details),
    }


def _count_events(events: Sequence[Record]) -> str:
    counts = Counter(str(event.get("kind")) for event in events)
    listed = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
    if len(events) > _MOST_EVENTS:
        return f"{listed} (the last {_MOST_EVENTS} below)"
    return listed


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as dotted names with values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, dotted(name, key))
    elif name in ("started", "ended") and isinstance(value, int | float):
        yield name, time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(value))
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield name, " ".join(value)
    elif isinstance(value, str):
        yield name, value
    else:
        yield name, json.dumps(value, ensure_ascii=False)


def _samples(samples: Sequence[Record], media: MediaLoader) -> list[Record]:
    return [_sample(sample, media) for sample in samples]


def _sample(sample: Record, media: MediaLoader) -> Record:
    names = sample.get("image", [])
    if not isinstance(names, list):
        names = [names]
    fields = {name: sample.get(name, "") for name in ("id", "task", "question", "expected", "given", "correct")}
    return {**fields, "pictures": [show(str(name), media) for name in names]}


# --- training rows ----------------------------------------------------------------------------------------------------
# Training rows for a report: the exact tokens that the model was given, read again by the run's configuration.

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
