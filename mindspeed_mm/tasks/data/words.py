"""What a check and the statistics say, in lines for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_mm.tasks.data.check import DataCheck, MediaRead
from mindspeed_mm.tasks.data.denoised import denoised_lines
from mindspeed_mm.tasks.data.findings import DataFinding
from mindspeed_mm.tasks.data.mixture import SourceShare
from mindspeed_mm.tasks.data.paint import Paint, bars
from mindspeed_mm.tasks.data.role_stats import named_numbers, times_each, with_counts
from mindspeed_mm.tasks.data.stats import DataStats, MediaStats

MEDIA_READ: dict[MediaRead, str] = {
    "headers": "media by their headers",
    "measured": "media decoded, because headers do not tell their size",
    "decoded": "media decoded",
    "samples": "whole samples, as the data set makes them",
    "features": "stored features",
    "none": "no media",
}
"""How media were looked at, in words."""


def check_lines(result: DataCheck, paint: Paint) -> list[str]:
    """The verdict, the findings with their fixes, and how long rows are."""
    errors = result.errors
    warnings = len(result.findings) - errors
    verdict = []
    if errors:
        verdict.append(paint.bad(_count(errors, "error")))
    if warnings:
        verdict.append(paint.odd(_count(warnings, "warning")))
    lines = [f"{result.path}: {', '.join(verdict) or paint.good('ok')}"]
    if result.rows:
        speed = result.read / max(result.seconds, 1e-9)
        pace = paint.soft(f"  ({MEDIA_READ[result.media_read]}, {result.seconds:.1f} s, {speed:,.0f} rows/s)")
        lines.append(f"  {_rows_read(result.read, result.rows, result.usable)}{pace}")
    if result.cut:
        lines.append(_cut(result.cut, result.samples))
    for finding in result.findings:
        lines += _finding(finding, paint)
    lines += bars("tokens of a row, before truncation", result.tokens, paint)
    lines += bars("patches of a row, where there are any", result.patches, paint)
    return [*lines, *share_lines(result.shares, paint)]


def _finding(finding: DataFinding, paint: Paint) -> Iterator[str]:
    mark = paint.bad("error") if finding.is_error else paint.odd("warning")
    yield ""
    yield f"{mark}  {paint.head(finding.kind)}: {finding.what}"
    for example in finding.examples:
        yield f"    {_on_one_line(example)}"
    if finding.rows > len(finding.examples) > 0:
        yield paint.soft(f"    … and {finding.rows - len(finding.examples):,} more (--bad-rows FILE lists bad rows)")
    for fix in finding.fixes:
        saves = f"  (saves {_count(fix.saves_rows, 'row')})" if fix.saves_rows else ""
        yield f"    → {fix.what}{paint.good(saves)}"


def share_lines(shares: Sequence[SourceShare], paint: Paint) -> list[str]:
    """What each source gives, if there are several."""
    if len(shares) < 2:
        return []
    width = max(len(each.name) for each in shares)
    lines = ["", paint.head(f"{'source':<{width + 2}}{'rows':>12}{'':8}{'tokens':>14}{'':8}{'weight':>8}")]
    for each in shares:
        weight = f"{each.weight:>8.1%}" if each.weight is not None else ""
        rows, tokens = f"{each.rows:>12,} {each.of_rows:>6.1%}", f"{each.tokens:>14,} {each.of_tokens:>6.1%}"
        lines.append(f"  {each.name:<{width}}{rows} {tokens} {weight}".rstrip())
    return lines


def stats_lines(stats: DataStats, paint: Paint) -> list[str]:
    """Everything of `mm data stats`."""
    pace = paint.soft(f"  ({stats.seconds:.1f} s)")
    lines = [f"{stats.path}: {_rows_read(stats.read, stats.rows, stats.usable)}{pace}"]
    lines += share_lines(stats.shares, paint)
    if stats.denoised:
        lines += ["", paint.head("samples by size (height × width)"), *denoised_lines(stats.denoised)]
    else:
        lines += ["", paint.head("messages")]
        roles = ", ".join(f"{count:,} of {role}" for role, count in stats.roles.items())
        lines.append(f"  {roles or 'none'}")
        if stats.turns:
            lines.append("  turns of the model in a row: " + _distribution(stats.turns))
    if stats.tokens:
        lines += ["", paint.head("tokens of a row") + f"  {named_numbers(stats.tokens)}"]
        lines.append(f"  trained: {stats.trained_share:.1%}")
    if stats.cut:
        lines.append(_cut(stats.cut, stats.samples))
    lines += bars("tokens of a row, before truncation", stats.token_bins, paint, stats.cutoff_len)
    if stats.patches:
        lines += ["", paint.head("patches of a row that has media") + f"  {named_numbers(stats.patches)}"]
        lines += bars("patches of a row", stats.patch_bins, paint)
    for kind in stats.media:
        lines += _media_lines(kind, paint)
    if stats.tokens:
        lines += _batch_lines(stats, paint)
    return lines


def _cut(documents: int, samples: int) -> str:
    return f"  {_count(documents, 'document')} longer than cutoff_len, cut into pieces: {samples:,} samples in all"


def _rows_read(read: int, rows: int, usable: int) -> str:
    part = "" if read == rows else f" of {rows:,}"
    return f"{read:,}{part} rows read, {usable:,} usable"


def _media_lines(media: MediaStats, paint: Paint) -> list[str]:
    lines = ["", paint.head(f"{media.kind}s") + f"  {media.items:,} in {media.rows:,} rows"]
    lines.append(f"  in a row: {_distribution(media.per_row)}")
    if media.sizes:
        sizes = {f"{size.width} × {size.height}": size.items for size in media.sizes}
        lines.append(f"  most frequent sizes (width × height): {', '.join(with_counts(sizes))}")
    if media.pixels:
        lines.append(f"  pixels: {named_numbers(media.pixels)}")
    if media.seconds:
        lines.append("  seconds: " + ", ".join(f"{name} {value:,.1f}" for name, value in media.seconds.items()))
    return lines


def _batch_lines(stats: DataStats, paint: Paint) -> list[str]:
    lines = ["", paint.head("how full batches are"), f"  padded to the longest: {stats.padded_fill:>7.1%} full"]
    for each in stats.packing:
        now = "  ← as configured" if each.tokens == stats.batch_tokens else ""
        lines.append(
            f"  packed, {each.tokens:>9,} tokens: {each.fill:>6.1%} full, {each.packs:,} packs, "
            f"{each.rows_kept:.1%} of the rows fit" + paint.odd(now)
        )
    return lines + [f"  → {text}" for text in stats.suggestions]


def _distribution(counts: dict[int, int], most: int = 8) -> str:
    shown = times_each(counts)[:most]
    if len(counts) > most:
        shown.append("…")
    return ", ".join(shown)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _on_one_line(text: str, most: int = 400) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"
