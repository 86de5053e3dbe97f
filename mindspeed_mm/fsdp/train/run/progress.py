"""What a person sees of a run: a table line per log interval, a live bar with the time left on a terminal and in a
notebook, a log file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mindspeed_mm.core.redaction import without_secrets
from mindspeed_mm.core.terminal import visible
from mindspeed_mm.fsdp.utils.work_progress import bar, clock

COLUMNS = (
    ("step", 7), ("loss", 9), ("grad", 9), ("lr", 9), ("tok/s", 8), ("MFU", 6), ("mem GiB", 8), ("data", 6), ("eta", 9),
)  # fmt: skip
OF_POSTTRAINING = {"reward": "reward", "rewards/margins": "margin", "diversity": "divers."}
"""Metric → its column, behind the loss, of runs that have it."""
_WIDTH = 9
LINES_PER_HEADER = 40
_WIDEST_BAR = 100


def header_line(further: Sequence[str] = ()) -> str:
    """Names of the columns that `format_line` fills.

    Args:
        further: Metrics of `OF_POSTTRAINING` that the run has.
    """
    columns = [name.rjust(width) for name, width in COLUMNS]
    return " ".join(_behind_loss(columns, [OF_POSTTRAINING[name].rjust(_WIDTH) for name in further]))


def format_line(metrics: Mapping[str, float], further: Sequence[str] = ()) -> str:
    """Return a step's metrics as one table row, in the columns of `header_line` for the same `further` metrics."""
    mfu = _cell(metrics, "mfu", ".1%")
    cells = (
        str(metrics["step"]),
        f"{metrics['loss']:.4f}",
        f"{metrics['grad_norm']:.3g}",
        f"{metrics['lr']:.2e}",
        short_rate(metrics["tokens_per_s"]),
        mfu,
        f"{metrics['memory_gib']:.2f}",
        f"{metrics['data_share']:.1%}",
        clock(metrics["eta_s"]),
    )
    filled = [cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)]
    values = [_cell(metrics, name, ".4g").rjust(_WIDTH) for name in further]
    return " ".join(_behind_loss(filled, values))


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A number that a step need not have."""
    if name in metrics:
        return format(metrics[name], form)
    return "-"


def _behind_loss(cells: list[str], further: list[str]) -> list[str]:
    return [*cells[:2], *further, *cells[2:]]


HEADER = header_line()


def log_line(metrics: Mapping[str, float], total_steps: int) -> str:
    """A line for people who search logs of older tools: the same words, the same numbers."""
    line = (
        f"iteration {metrics['step']:>8}/{total_steps:>8} | consumed samples: {metrics['consumed_samples']:>12} | "
        f"elapsed time per iteration (ms): {metrics['step_ms']:.1f} | learning rate: {metrics['lr']:.6E} | "
        f"loss: {metrics['loss']:.6E} | grad norm: {metrics['grad_norm']:.3f} | "
        f"global batch size: {metrics['global_batch']} |"
    )
    if metrics["tokens"]:  # of data that have token ids
        line += f" tokens per sample: {metrics['tokens'] / max(metrics['samples'], 1):.1f} |"
    return line


def short_rate(value: float) -> str:
    """Shorten a rate with the suffix k, M or G, so that 1234 becomes `1.2k`; smaller values are rounded to integers."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}"


class Progress:
    """Speaks on rank 0 only. No output that fails, a full disk or a reader that is gone, ends the training.

    Args:
        rank: Global rank.
        log_file: Where the plain lines go, or None.
        stream: Where people look.
        plain_lines: Show steps as they stand in the log file, for scripts that read them, and no table.
    """

    def __init__(
        self, rank: int, log_file: Path | None = None, stream: TextIO | None = None, *, plain_lines: bool = False
    ) -> None:
        self._speaks, self._plain_lines = rank == 0, plain_lines
        self._stream: TextIO | None = (stream or sys.stdout) if self._speaks else None
        is_notebook = type(self._stream).__module__.startswith("ipykernel.")
        is_watched = self._stream is not None and (self._stream.isatty() or is_notebook)
        self._live = is_watched and "NO_COLOR" not in os.environ
        # A notebook knows no codes that clear a line.
        self._bar_stands = False
        self._cleared = f"\r{' ' * _WIDEST_BAR}\r" if is_notebook else "\r\033[K"
        self._log: TextIO | None = None
        self._lines = 0
        self._further: list[str] = []
        if log_file is not None and self._speaks:
            self._open_log(log_file)

    def note(self, text: str) -> None:
        """A line of prose; on a terminal it is broken between words."""
        shown = visible(without_secrets(text))
        self._print(self._wrapped(shown) + "\n")
        self._write_log(shown)

    def _wrapped(self, text: str) -> str:
        if self._stream is None or not self._stream.isatty():
            return text
        wrapper = textwrap.TextWrapper(
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * len("model  "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        return "\n".join(wrapper.fill(line) for line in text.splitlines())

    def keep(self, text: str) -> None:
        """A line of prose for the log file alone."""
        if self._speaks:
            self._write_log(visible(without_secrets(text)))

    def step(self, metrics: Mapping[str, float], last_step: int, total_steps: int) -> None:
        """A logged step.

        Args:
            metrics: As in `metrics.jsonl`.
            last_step: Where this start ends.
            total_steps: Where the schedule ends.
        """
        if not self._speaks:
            return
        if self._plain_lines:
            line = log_line(metrics, total_steps)
            self._print(f"{_now()} {line}\n")
            self._write_log(line)
            return
        further = [name for name in OF_POSTTRAINING if name in metrics or name in self._further]
        lines = [format_line(metrics, further)]
        if self._lines % LINES_PER_HEADER == 0 or further != self._further:
            lines.insert(0, header_line(further))
        self._further = further  # a step that draws nothing has no reward: its cell is empty
        self._lines += 1
        # The bar stands in a line without end, which the next output takes away.
        lines.append(bar(int(metrics["step"]), last_step, metrics["eta_s"]) if self._live else "")
        self._print("\n".join(lines))
        self._bar_stands = self._live and bool(lines[-1])
        self._write_log(log_line(metrics, total_steps))

    def end_steps(self) -> None:
        """Take the bar away; lines of prose may follow."""
        if self._bar_stands:
            self._print("")

    def close(self) -> None:
        """Flush and close what is open."""
        self.end_steps()
        if self._log is not None:
            with suppress(OSError):
                self._log.close()
        self._log = None

    def _open_log(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = path.open("a", encoding="utf-8")
        except OSError as error:
            self._print(f"warning: there will be no log file ({error})\n")

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write((self._cleared if self._bar_stands else "") + text)
            self._stream.flush()
            self._bar_stands = False
        except (OSError, ValueError):  # the reader of a pipe is gone, or the stream is closed
            with suppress(OSError, ValueError):  # what is left in its buffer must not fail at the end of the process
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stream, self._live = None, False

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            self._log.write(f"{_now()} {text}\n")
            self._log.flush()
        except OSError as error:
            self._log = None
            self._print(f"warning: the log file stops here ({error})\n")


def _now() -> str:
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}]"
