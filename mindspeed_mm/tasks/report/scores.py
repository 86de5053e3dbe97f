"""What was measured of the runs, as tables: a line for each task and run, those of one task under one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_mm.tasks.report.data import Record, ReportedRun

OVERALL = "overall"


@dataclass(frozen=True)
class Line:
    """One measured value of a run on a task, as a line of a `ScoreTable`."""

    task: str
    series: int
    """Number of the run, from 1: its colour."""
    run: str
    value: str
    interval: str = ""
    count: str = ""
    bar: tuple[float, float, float] | None = None
    """Of a share the low end of its interval, itself, and the high end, in per cent; None of other values."""


@dataclass
class ScoreTable:
    """One kind of measurement of all runs that have it."""

    title: str
    measure: str
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ordered(self) -> ScoreTable:
        """With the lines of a task together, in the order in which tasks first come."""
        tasks = list(dict.fromkeys(line.task for line in self.lines))
        return ScoreTable(
            self.title, self.measure, sorted(self.lines, key=lambda line: tasks.index(line.task)), self.notes
        )


def score_tables(runs: Sequence[ReportedRun]) -> list[ScoreTable]:
    """Held-out questions first, then published sets, harnesses and generated samples."""
    tables: dict[str, ScoreTable] = {}
    for series, run in enumerate(runs, 1):
        for part in _tables_of(run, series):
            table = tables.setdefault(part.title, ScoreTable(part.title, part.measure))
            table.lines += part.lines
            for note in part.notes:
                if note not in table.notes:
                    table.notes.append(note)
    return [table.ordered() for table in tables.values()]


def _tables_of(run: ReportedRun, series: int) -> Iterator[ScoreTable]:
    measure = str(run.results.get("measure", "accuracy"))
    if run.results.get("tasks"):
        title = f"{measure.capitalize()} on {judged(run)} samples"
        yield ScoreTable(title, measure, _score_lines(run.results, run, series), _findings(run.results))
    for results in run.published:
        notes = [str(results["note"])] if results.get("note") else []
        yield ScoreTable(str(results["title"]), "score", _score_lines(results, run, series), notes)
    for results in run.harnesses:
        title = f"{results['harness']['name']} {results['harness']['version']}"
        yield ScoreTable(title, "figure", _harness_lines(results, run, series))
    if run.generated:
        yield ScoreTable("Measures of generated samples", "value", _generated_lines(run.generated, run, series))


def judged(run: ReportedRun) -> str:
    """What samples of a run are: a generator's are its own, and judged by others."""
    if run.rounds:
        return "generated"
    return "held-out"


def _score_lines(results: Record, run: ReportedRun, series: int) -> list[Line]:
    tasks = dict(results.get("tasks", {}))
    overall = results.get("overall")
    if len(tasks) > 1 and isinstance(overall, dict) and "low" in overall:
        tasks[OVERALL] = overall
    return [_score_line(task, score, run, series) for task, score in tasks.items()]


def _score_line(task: str, score: Record, run: ReportedRun, series: int) -> Line:
    share, count = share_of(score)
    value = f"{100 * share:.1f} %"
    if "low" not in score:
        return Line(task, series, run.name, value)
    low, high = score["low"], score["high"]
    # A rate of errors can be above 1, and a bar ends there.
    bar = (min(100 * low, 100), min(100 * share, 100), min(100 * high, 100))
    return Line(task, series, run.name, value, f"{100 * low:.1f}–{100 * high:.1f} %", count, bar)


def share_of(score: Record) -> tuple[float, str]:
    """A score as a share, and of what it is one, in words."""
    if "rate" in score:
        return score["rate"], f"{score['errors']:,} of {score['units']:,} wrong"
    if "mean" in score:
        return score["mean"], f"mean of {score['n']}"
    return score["accuracy"], f"{score.get('correct')} of {score.get('n')} right"


def _findings(results: Record) -> list[str]:
    """Sentences beside the scores: notes, and tables of numbers by name."""
    notes = results.get("notes", [])
    if not isinstance(notes, list):
        notes = [notes]
    lines = list(map(str, notes))
    for name, table in results.items():
        if name in ("tasks", OVERALL) or not isinstance(table, dict):
            continue
        numbers = []
        for label, value in table.items():
            if isinstance(value, int | float):
                numbers.append(f"{short(value)} {label}")
        if numbers:
            lines.append(f"{name.replace('_', ' ')}: {', '.join(numbers)}")
    return lines


def _harness_lines(results: Record, run: ReportedRun, series: int) -> list[Line]:
    lines = []
    for task, found in results["tasks"].items():
        names = found["chief"] or list(found["figures"])
        count = "" if found["n"] is None else f"n={found['n']}"
        for name in names:
            lines.append(_number_line(f"{task}, {name}", found["figures"][name], count, run, series))
    return lines


def _generated_lines(results: Record, run: ReportedRun, series: int) -> list[Line]:
    lines = []
    for name, found in results["measures"].items():
        count = f"n={found['n']}" if "n" in found else ""
        lines.append(_number_line(name, found, count, run, series))
    return lines


def _number_line(task: str, found: Record, count: str, run: ReportedRun, series: int) -> Line:
    value = "infinite" if found["value"] is None else short(found["value"])
    low, high = found.get("low"), found.get("high")
    interval = ""
    if low is not None and high is not None:
        interval = f"{short(low)} to {short(high)}"
    return Line(task, series, run.name, value, interval, count)


def short(value: object) -> str:
    """A number in four digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
