"""Curves of one or more runs as SVG that takes its colours and its font from the page around it.

matplotlib draws with stand-in colours; the page's CSS variables are put in their place, so one picture serves light and
dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

from mindspeed_mm.tasks.report.data import Record, ReportedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = list[tuple[int, float]]
"""Steps with values."""
MOST_POINTS = 300
"""Points drawn of a curve: what a screen can show."""
SERIES = ("#010101", "#010102", "#010103", "#010104", "#010105", "#010106")
INK, GRID = "#020201", "#020202"
_CSS = {colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)} | {
    INK: "currentColor",
    GRID: "var(--grid)",
}
_SMOOTHING_WINDOWS = 40
"""A smoothed curve averages over about one in so many of its points."""


@dataclass(frozen=True)
class Chart:
    """One picture: its title, what it takes from a logged step, and how it is drawn."""

    title: str
    key: str
    scale: float = 1.0
    log: bool = False
    smooth: bool = False
    from_zero: bool = False
    is_rare: bool = False
    """Measured every so many steps: each measurement is marked."""


CHARTS = (
    Chart("Loss", "loss", log=True, smooth=True),
    Chart("Held-out accuracy, %", "eval_accuracy", scale=100, is_rare=True),
    Chart("Held-out word error rate, %", "eval_wer", scale=100, is_rare=True),
    Chart("Held-out character error rate, %", "eval_cer", scale=100, is_rare=True),
    Chart("Reward", "reward", smooth=True),
    Chart("Diversity of the samples of a prompt", "diversity", from_zero=True, smooth=True),
    Chart("Groups without spread, %", "groups_without_spread", scale=100, from_zero=True, smooth=True),
    Chart("Clipped ratios, %", "clip_share", scale=100, from_zero=True),
    Chart("Entropy of drawn tokens", "entropy", from_zero=True, smooth=True),
    Chart("Tokens of an answer", "completion_tokens", from_zero=True, smooth=True),
    Chart("Divergence from the reference", "kl", from_zero=True, smooth=True),
    Chart("Reward margin of pairs", "rewards/margins", smooth=True),
    Chart("Pairs moved the right way, %", "rewards/accuracies", scale=100, smooth=True),
    Chart("log p of chosen answers", "logps/chosen", smooth=True),
    Chart("Gradient norm", "grad_norm", log=True, smooth=True),
    Chart("Learning rate", "lr"),
    Chart("Throughput, tokens a second", "tokens_per_s", from_zero=True),
    Chart("MFU by the causal convention, %", "mfu", scale=100, from_zero=True),
    Chart("Waiting for data, % of the time", "data_share", scale=100, from_zero=True),
    Chart("Peak memory, GiB", "memory_gib", from_zero=True),
)


def draw_charts(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """Title and SVG of every chart that some run has numbers for. Runs keep their colour in all of them."""
    drawn = []
    for chart in (*CHARTS, *_single_rewards(runs)):
        if any(points(_records(run, chart), chart.key) for run in runs):
            drawn.append((chart.title, _draw(chart, runs)))
    return drawn


def _single_rewards(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Each of several rewards by itself; of weight 0 it is a judge, from which nothing is learned."""
    names: set[str] = set()
    for run in runs:
        for name in chain.from_iterable(run.steps):
            if name.startswith("reward/"):
                names.add(name)
    return [Chart(f"Reward {name.removeprefix('reward/')}", name, smooth=True) for name in sorted(names)]


def _records(run: ReportedRun, chart: Chart) -> Sequence[Record]:
    if chart.is_rare:
        return run.evaluations
    return run.steps


def points(records: Sequence[Record], key: str) -> Curve:
    """Step and value of the records that have one."""
    found = []
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float):
            found.append((record["step"], float(value)))
    return found


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average, corrected for its start (Kingma and Ba 2014, section 3)."""
    average, result = 0.0, []
    for number, value in enumerate(values, 1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**number))
    return result


def thinned(curve: Curve) -> Curve:
    """Every n-th point and the last one."""
    if len(curve) <= MOST_POINTS:
        return curve
    stride = -(-len(curve) // MOST_POINTS)
    kept = curve[::stride]
    if kept[-1] == curve[-1]:
        return kept
    return [*kept, curve[-1]]


def _draw(chart: Chart, runs: Sequence[ReportedRun]) -> str:
    from matplotlib import rc_context  # a second, and only a report needs it
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title, "font.size": 8}):
        figure = Figure(figsize=(4.4, 2.3), layout="constrained")
        axes = figure.add_subplot()
        for run, colour in zip(runs, SERIES, strict=False):
            _draw_run(axes, chart, run, colour)
        _dress(axes, chart)
        if chart.key == "loss" and any(run.validations for run in runs):
            first = {line.get_label(): line for line in reversed(axes.lines)}
            labels = [label for label in ("training", "validation") if label in first]
            axes.legend([first[label] for label in labels], labels, frameon=False, labelcolor=INK)
        svg = io.StringIO()
        figure.savefig(
            svg, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return themed(svg.getvalue(), chart.title)


def _draw_run(axes: Axes, chart: Chart, run: ReportedRun, colour: str) -> None:
    curve = [(step, value * chart.scale) for step, value in points(_records(run, chart), chart.key)]
    if chart.log:
        curve = _positive(curve)
    if not curve:
        return
    if chart.smooth:
        axes.plot(*_columns(curve), color=colour, linewidth=0.7, alpha=0.35)
        steps, values = zip(*curve, strict=True)
        weight = len(values) / (len(values) + _SMOOTHING_WINDOWS)
        curve = list(zip(steps, smoothed(values, weight), strict=True))
    style = "o-" if chart.is_rare else "-"
    axes.plot(*_columns(curve), style, color=colour, linewidth=1.4, markersize=3, label="training")
    if chart.key == "loss" and run.validations:
        validation = _positive(points(run.validations, "val_loss"))
        axes.plot(*_columns(validation), "o--", color=colour, markersize=3, linewidth=0.9)
        axes.lines[-1].set_label("validation")
    for event in run.events:
        if event.get("kind") == "resume":
            axes.axvline(event.get("step", 0), color=GRID, linewidth=1, linestyle=":")


def _positive(curve: Curve) -> Curve:
    """What a logarithmic axis can show."""
    return [(step, value) for step, value in curve if value > 0]


def _columns(curve: Curve) -> Iterator[tuple[float, ...]]:
    """Steps, then values, of as many points as a screen can show."""
    return zip(*thinned(curve), strict=True)


def _dress(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if chart.from_zero:
        axes.set_ylim(bottom=0, top=max(1e-3, axes.get_ylim()[1]))
    axes.set_xlabel("step", color=INK)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def themed(svg: str, title: str) -> str:
    """The picture alone, to stand inside an HTML page: no XML prologue, no namespaces, the page's colours and font."""
    body = svg[svg.index("<svg") :]
    for pattern, replacement in _CLEANING:
        body = re.sub(pattern, replacement, body)
    body = re.sub("|".join(_CSS), lambda match: _CSS[match[0]], body)
    return body.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


_CLEANING: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?s)<metadata>.*?</metadata>", ""),
    (r"(?s)<style[^>]*>.*?</style>", ""),  # of the page, which has it once for all pictures
    (r' xmlns(:\w+)?="[^"]*"', ""),
    (r'(<svg[^>]*?) height="[^"]*"', r"\1"),
    (r'(<svg[^>]*?) width="[^"]*"', r"\1"),
    (r'<g id="[a-zA-Z]+(_[a-z]+)*_?\d*"', "<g"),
    (r"\n\s*", "\n"),
)
