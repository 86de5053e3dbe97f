"""Counts and times of a server, in Prometheus' text format 0.0.4. Labels are ours, never a client's text."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "mm_serve_"
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """What is counted. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helps: dict[str, str] = {}
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[Labels, list[float]]] = defaultdict(dict)

    def count(self, name: str, told: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter.

        Args:
            name: Without prefix and `_total`.
            told: What it counts, for people.
            amount: To add.
            labels: Few, with few values each.
        """
        with self._lock:
            self._helps[name] = told
            self._counters[name][tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, told: str, seconds: float, **labels: str) -> None:
        """Add a time to a histogram. Arguments as those of `count`."""
        with self._lock:
            self._helps[name] = told
            # Times of each bucket and above all; their sum.
            counts = self._histograms[name].setdefault(tuple(sorted(labels.items())), [0.0] * (len(SECONDS) + 2))
            counts[bisect_left(SECONDS, seconds)] += 1
            counts[-1] += seconds

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """Everything as text.

        Args:
            gauges: Name → (what it is, its value now).
        """
        with self._lock:
            lines = [*self._counter_lines(), *self._histogram_lines()]
        for name, (told, value) in gauges.items():
            lines += [*_head(name, told, "gauge"), f"{_PREFIX}{name} {value:g}"]
        return "\n".join(lines) + "\n"

    def _counter_lines(self) -> Iterator[str]:
        for name, values in sorted(self._counters.items()):
            yield from _head(f"{name}_total", self._helps[name], "counter")
            for labels, value in sorted(values.items()):
                yield f"{_PREFIX}{name}_total{_labels(labels)} {value:.10g}"

    def _histogram_lines(self) -> Iterator[str]:
        for name, values in sorted(self._histograms.items()):
            yield from _head(name, self._helps[name], "histogram")
            for labels, (*counts, total) in sorted(values.items()):
                so_far = 0.0
                for bound, count in zip([*map(str, SECONDS), "+Inf"], counts, strict=True):
                    so_far += count
                    yield f"{_PREFIX}{name}_bucket{_labels([*labels, ('le', bound)])} {so_far:g}"
                yield f"{_PREFIX}{name}_sum{_labels(labels)} {total:.10g}"
                yield f"{_PREFIX}{name}_count{_labels(labels)} {so_far:g}"


def _head(name: str, told: str, kind: str) -> list[str]:
    return [f"# HELP {_PREFIX}{name} {told}", f"# TYPE {_PREFIX}{name} {kind}"]


def _labels(labels: Sequence[tuple[str, str]]) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in labels)
    if inner:
        return f"{{{inner}}}"
    return ""
