"""The report's page: what was read of the runs, put into words and pictures and into the template."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.tasks.report.charts import draw_charts
from mindspeed_mm.tasks.report.comparison import (
    configuration_differences,
    differences,
    published_differences,
    side_by_side,
)
from mindspeed_mm.tasks.report.data import Record, ReportedRun, choose_samples
from mindspeed_mm.tasks.report.media import show
from mindspeed_mm.tasks.report.rows import training_rows
from mindspeed_mm.tasks.report.samples import sample_grid
from mindspeed_mm.tasks.report.scores import score_tables, short

MOST_SAMPLES = 12
"""Wrong answers shown, and right ones."""
MOST_EVENTS = 40
TEMPLATE = "report/report_page.html.j2"


def render_page(runs: Sequence[ReportedRun]) -> str:
    """One HTML page that needs nothing from outside itself."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = ", ".join(run.name for run in runs)
    return environment.get_template(TEMPLATE).render(
        title=f"Report: {names}",
        subtitle=_subtitle(runs[0]) if len(runs) == 1 else f"{len(runs)} runs",
        runs=[_describe(run, several=len(runs) > 1) for run in runs],
        beside=_beside(runs) if len(runs) > 1 else None,
        scores=score_tables(runs),
        charts=[(title, Markup(svg)) for title, svg in draw_charts(runs)],  # drawn by us
    )


def _beside(runs: Sequence[ReportedRun]) -> dict[str, Any]:
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


def _describe(run: ReportedRun, several: bool) -> dict[str, Any]:
    """What the template shows of a run."""
    wrong, right = choose_samples(run.samples, MOST_SAMPLES)
    right_total = sum(bool(sample.get("correct")) for sample in run.samples)
    media = MediaLoader(run.results.get("media_dir", run.path))
    return {
        "name": run.name,
        "suffix": f": {run.name}" if several else "",
        "numbers": summary(run),
        "judged": "generated" if run.rounds else "held-out",
        "grid": sample_grid(run.rounds),
        "training": training_rows(run.path),
        "wrong": [_sample(sample, media) for sample in wrong],
        "right": [_sample(sample, media) for sample in right],
        "wrong_total": len(run.samples) - right_total,
        "right_total": right_total,
        "events": [_event(event) for event in run.events[-MOST_EVENTS:]],
        "event_counts": _count_events(run.events),
        "environment": list(_flat(run.facts)),
        "configuration": run.configuration,
    }


def summary(run: ReportedRun) -> list[tuple[str, str]]:
    """The numbers on top: name and value, the same names for every run."""
    return [
        ("status", str(run.facts.get("status", "unknown"))),
        ("steps", _steps(run)),
        ("training loss", _last(run.steps, "loss")),
        ("validation loss", ", ".join([_last(run.validations, "val_loss"), *_other_terms(run.validations)])),
        ("best", _best(run)),
        ("time", _duration(run)),
        ("tokens a second", _median(run.steps, "tokens_per_s")),
        ("waiting for data", _percent(run.steps, "data_share")),
        ("peak memory", _peak_memory(run.steps)),
    ]


def _best(run: ReportedRun) -> str:
    found = run.best
    return f"{found['metric']} {found['value']:.4f} at step {found['step']}" if "step" in found else "–"


def _subtitle(run: ReportedRun) -> str:
    facts = run.facts
    parts = [facts.get("model_class"), facts.get("device"), facts.get("platform")]
    if isinstance(facts.get("started"), int | float):
        parts.insert(0, time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["started"])))
    return " · ".join(str(part) for part in parts if part)


def _steps(run: ReportedRun) -> str:
    done = run.steps[-1]["step"] if run.steps else 0
    total = run.facts.get("total_steps")
    return f"{done:,} of {total:,}" if isinstance(total, int) and total != done else f"{done:,}"


def _last(records: Sequence[Record], key: str) -> str:
    return f"{records[-1][key]:.4f}" if records and records[-1][key] is not None else "–"


def _other_terms(validations: Sequence[Record]) -> list[str]:
    """Terms beside the loss in the last validation, by the names that the metrics have."""
    names = [
        name for name in (validations[-1] if validations else {}) if name.startswith("val_") and name != "val_loss"
    ]
    return [f"{name} {_last(validations, name)}" for name in names]


def _duration(run: ReportedRun) -> str:
    """Time spent in steps, resumed parts included; a pause between two starts does not count."""
    seconds, previous = 0.0, 0
    for record in run.steps:
        seconds += record.get("step_ms", 0.0) / 1000 * (record["step"] - previous)
        previous = record["step"]
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if seconds else "–"


def _median(records: Sequence[Record], key: str) -> str:
    values = [record[key] for record in records if key in record]
    return f"{statistics.median(values):,.0f}" if values else "–"


def _percent(records: Sequence[Record], key: str) -> str:
    values = [record[key] for record in records if key in record]
    return f"{100 * statistics.fmean(values):.1f} %" if values else "–"


def _peak_memory(records: Sequence[Record]) -> str:
    values = [record["memory_gib"] for record in records if "memory_gib" in record]
    return f"{max(values):.2f} GiB" if values else "–"


def _event(event: Record) -> dict[str, Any]:
    known = ("time", "kind", "step")
    details = ", ".join(f"{name} {short(value)}" for name, value in event.items() if name not in known)
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"])) if "time" in event else ""
    return {"time": clock, "kind": event.get("kind", ""), "step": event.get("step", ""), "details": details}


def _count_events(events: Sequence[Record]) -> str:
    counts = Counter(str(event.get("kind")) for event in events)
    listed = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
    return f"{listed} (the last {MOST_EVENTS} below)" if len(events) > MOST_EVENTS else listed


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested facts as dotted names with values."""
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in _flat(inner, f"{name}.{key}" if name else str(key))]
    if name in ("started", "ended") and isinstance(value, int | float):
        return [(name, time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(value)))]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [(name, " ".join(value))]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [(name, text)]


def _sample(sample: Record, media: MediaLoader) -> dict[str, Any]:
    images = sample.get("image", [])
    names = images if isinstance(images, list) else [images]
    fields = {name: sample.get(name, "") for name in ("id", "task", "question", "expected", "given", "correct")}
    return {**fields, "pictures": [show(str(name), media) for name in names]}
