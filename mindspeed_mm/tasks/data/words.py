"""What a check, the statistics and a preview say, in lines for a terminal or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import click

from mindspeed_mm.tasks.data.check import DataCheck, MediaRead
from mindspeed_mm.tasks.data.denoised import denoised_lines, named_numbers, times_each, with_counts
from mindspeed_mm.tasks.data.findings import DataFinding
from mindspeed_mm.tasks.data.histogram import Bin
from mindspeed_mm.tasks.data.media_views import thumbnail, view_medium
from mindspeed_mm.tasks.data.micro_batch import MicroBatchView, PackedDocument
from mindspeed_mm.tasks.data.preview import Preview, ShownRow, TokenizedConversation, media_name
from mindspeed_mm.tasks.data.stats import DataStats, MediaStats
from mindspeed_mm.tasks.data.tally import SourceShare
from mindspeed_mm.tasks.data.tokens import TokenSpan

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
        lines.append(_words_on_cuts(result.cut, result.samples))
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
    if finding.others:
        yield paint.soft(f"    … and {finding.others:,} more")
    elif finding.others is None and finding.rows > len(finding.examples) > 0:
        yield paint.soft(f"    … and {finding.rows - len(finding.examples):,} more (--bad-rows FILE lists bad rows)")
    for fix in finding.fixes:
        saves = ""
        if fix.saves_rows:
            saves = f"  (saves {_count(fix.saves_rows, 'row')})"
        yield f"    → {fix.what}{paint.good(saves)}"


def share_lines(shares: Sequence[SourceShare], paint: Paint) -> list[str]:
    """What each source gives, if there are several."""
    if len(shares) < 2:
        return []
    width = max(len(each.name) for each in shares)
    lines = ["", paint.head(f"{'source':<{width + 2}}{'rows':>12}{'':8}{'tokens':>14}{'':8}{'weight':>8}")]
    for each in shares:
        weight = ""
        if each.weight is not None:
            weight = f"{each.weight:>8.1%}"
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
        lines.append(_words_on_cuts(stats.cut, stats.samples))
    lines += bars("tokens of a row, before truncation", stats.token_bins, paint, stats.cutoff_len)
    if stats.patches:
        lines += ["", paint.head("patches of a row that has media") + f"  {named_numbers(stats.patches)}"]
        lines += bars("patches of a row", stats.patch_bins, paint)
    for kind in stats.media:
        lines += _media_lines(kind, paint)
    if stats.padded_fill:
        lines += _batch_lines(stats, paint)
    return lines


def _words_on_cuts(documents: int, samples: int) -> str:
    return f"  {_count(documents, 'document')} longer than cutoff_len, cut into pieces: {samples:,} samples in all"


def _rows_read(read: int, rows: int, usable: int) -> str:
    if read == rows:
        return f"{read:,} rows read, {usable:,} usable"
    return f"{read:,} of {rows:,} rows read, {usable:,} usable"


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
    mark = paint.odd("  ← as configured")
    lines = ["", paint.head("how full batches are")]
    lines.append(f"  padded to the longest: {stats.padded_fill:>7.1%} full" + mark * (stats.configured == "padded"))
    for each in stats.packing:
        is_configured = stats.configured == "packed" and each.tokens == stats.batch_tokens
        lines.append(
            f"  packed, {each.tokens:>9,} tokens: {each.fill:>6.1%} full, {each.packs:,} packs, "
            f"{each.rows_kept:.1%} of the rows fit" + mark * is_configured
        )
    return lines + [f"  → {text}" for text in stats.suggestions]


def _distribution(counts: dict[int, int], most: int = 8) -> str:
    shown = times_each(counts)[:most]
    if len(counts) > most:
        shown.append("…")
    return ", ".join(shown)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}s"


def _on_one_line(text: str, most: int = 400) -> str:
    flat = " ".join(text.split())
    if len(flat) <= most:
        return flat
    return f"{flat[: most - 1]}…"


# --- a preview --------------------------------------------------------------------------------------------------------

_MOST_DOCUMENTS = 40
_STRIP_CHARACTERS = 64


def preview_lines(found: Preview, paint: Paint, *, tokens: bool = False) -> list[str]:
    """Return a preview as lines of text: a title, each row, and the first micro-batch or the reason why it is
    missing."""
    title = f"{found.path}: {len(found.shown)} of {found.rows:,} rows"
    if any(row.answers for row in found.shown):
        title += "; trained tokens are coloured" if paint.colour else "; trained tokens stand between « and »"
    lines = [title]
    for row in found.shown:
        lines += ["", *_row_lines(row, found, paint, tokens)]
    if found.batch is not None:
        lines += ["", *_micro_batch_lines(found.batch, paint)]
    if found.batch_trouble:
        lines += ["", paint.odd("no micro-batch: ") + found.batch_trouble]
    return lines


def _row_lines(row: ShownRow, found: Preview, paint: Paint, tokens: bool) -> Iterator[str]:
    names = [f"row {row.index}"]
    if row.row_id is not None:
        names.append(f"id {row.row_id}")
    if row.when:
        names.append(str(row.when))
    yield paint.head(row.place) + paint.soft("  " + ", ".join(names))
    if row.fault:
        yield "  " + paint.bad("cannot be used: ") + row.fault
    for note in row.notes:
        yield f"  {_visible(note)}"
    for number, (item, count) in enumerate(row.media, 1):
        view = view_medium(found.media, item)
        line = f"  {item.kind} {number}: {media_name(item.source)}  {view.facts or view.trouble}"
        if count:
            line += f"  → {count:,} tokens"
        yield paint.medium(line)
        if paint.colour and view.images:
            for line in thumbnail(view.images[0]):
                yield f"    {line}"
    for answer in row.answers:
        yield from _answer_lines(answer, paint, tokens)


def _answer_lines(answer: TokenizedConversation, paint: Paint, tokens: bool) -> Iterator[str]:
    share = answer.trained / max(len(answer.ids), 1)
    told = f"{len(answer.ids):,} tokens, {answer.trained:,} trained ({share:.1%})"
    if answer.name:
        told = f"{answer.name}: {told}"
    if answer.shrunk:
        told += ", shortened to fit cutoff_len"
    yield f"  {told}"
    if tokens:
        yield from _token_table(answer, paint)
        return
    text = "".join(_stretch_text(stretch, paint) for stretch in answer.stretches)
    for line in text.split("\n"):
        yield f"  │ {line}"


def _stretch_text(stretch: TokenSpan, paint: Paint) -> str:
    if stretch.repeated:
        told = f"[{stretch.text} × {stretch.repeated}]"
        if stretch.weight:
            return paint.trained(told)
        return paint.medium(told)
    text = _visible(stretch.text)
    if not stretch.weight:
        return text
    if stretch.weight == 1:
        return paint.trained(text)
    return f"{paint.trained(text)}(weight {stretch.weight:g})"


def _token_table(answer: TokenizedConversation, paint: Paint) -> Iterator[str]:
    yield paint.soft(f"  {'token':>6} {'id':>8} {'weight':>7}  text")
    for stretch in answer.stretches:
        for piece in stretch.pieces:
            ids = " ".join(map(str, piece.ids))
            text = repr(piece.text)
            if piece.weight:
                text = paint.trained(text)
            if stretch.repeated:
                text += f" × {stretch.repeated}"
            yield f"  {piece.first:>6} {ids:>8} {piece.weight:>7g}  {text}"


def _visible(text: str) -> str:
    """Text without control characters, which could move the cursor or colour the terminal."""
    signs = list(text)
    for place, sign in enumerate(signs):
        if sign != "\n" and not sign.isprintable():
            signs[place] = f"\\x{ord(sign):02x}"
    return "".join(signs)


def _micro_batch_lines(batch: MicroBatchView, paint: Paint) -> list[str]:
    """A micro-batch: a strip for each row, and where its samples begin and end."""
    size = f"{batch.rows} samples"
    if batch.length:
        kind = "packed" if batch.is_packed else "padded"
        size = f"{batch.rows} × {batch.length:,} tokens, {kind}, {batch.fill:.1%} full"
    lines = [f"{paint.head('first micro-batch of training')}  {size}"]
    shown = [document for document in batch.documents if document.sample_id or batch.is_packed]
    for document in shown[:_MOST_DOCUMENTS]:
        lines.append(_document_line(document, batch, paint))
    if len(shown) > _MOST_DOCUMENTS:
        lines.append(paint.soft(f"  … and {len(shown) - _MOST_DOCUMENTS} more"))
    shapes = [f"{name} {entry}" for name, entry in batch.entries.items()]
    return [*lines, paint.soft("  " + ", ".join(shapes))]


def _document_line(document: PackedDocument, batch: MicroBatchView, paint: Paint) -> str:
    """Where a sample stands in its row; dots are padding."""
    scale = _STRIP_CHARACTERS / max(batch.length, 1)
    first = round(scale * document.first)
    end = max(round(scale * document.end), first + 1)  # the shortest sample is seen too
    if document.sample_id:
        name, mark = f"{document.sample_id}, {document.trained:,} trained", "█"
    else:
        name, mark = paint.soft("padding"), "·"
    behind = _STRIP_CHARACTERS - end
    rest = " " * behind  # of a pack the padding is a document of its own
    if not batch.is_packed:
        rest = paint.soft("·" * behind)
    strip = " " * first + mark * (end - first) + rest
    return f"  {document.row:>3}: {document.first:>6,}–{document.end - 1:<6,} {strip}  {name}"


# --- colours ----------------------------------------------------------------------------------------------------------

_BAR_CHARACTERS = 40


class Paint:
    """Puts text into colour.

    Args:
        colour: Whether there is any.
    """

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    @classmethod
    def of(cls, stream: TextIO) -> Paint:
        """Colour on a terminal, unless `NO_COLOR` is set."""
        return cls(stream.isatty() and not os.environ.get("NO_COLOR"))

    def _styled(self, text: str, **style: Any) -> str:
        if self.colour:
            return click.style(text, **style)
        return text

    def bad(self, text: str) -> str:
        """Return text in bold red, for what would stop a run; unchanged without colour."""
        return self._styled(text, fg="red", bold=True)

    def odd(self, text: str) -> str:
        """What a person should look at."""
        return self._styled(text, fg="yellow", bold=True)

    def good(self, text: str) -> str:
        """What is as it should be."""
        return self._styled(text, fg="green", bold=True)

    def soft(self, text: str) -> str:
        """What is beside the point."""
        return self._styled(text, dim=True)

    def head(self, text: str) -> str:
        """Return text in bold, for a heading; unchanged without colour."""
        return self._styled(text, bold=True)

    def trained(self, text: str) -> str:
        """Tokens that are trained; « » where there is no colour."""
        if not self.colour:
            return f"«{text}»"
        lines = text.split("\n")
        for number, line in enumerate(lines):
            if line:
                lines[number] = click.style(line, fg="black", bg="green")
        return "\n".join(lines)

    def medium(self, text: str) -> str:
        """Tokens that stand for a medium."""
        return self._styled(text, fg="cyan")


def bars(title: str, found: Sequence[Bin], paint: Paint, mark: int | None = None) -> list[str]:
    """A histogram, a line a range; the range that holds `mark` is pointed at."""
    if not found:
        return []
    most, width = max(each.rows for each in found), len(f"{found[-1].high - 1:,}")
    lines = ["", paint.head(title)]
    for each in _joined_where_empty(found):
        filled = "█" * round(_BAR_CHARACTERS * each.rows / most)
        if each.rows and not filled:
            filled = "▏"  # a few rows are seen too
        place, last = f"{each.low:>{width},}", each.high - 1
        if last > each.low:
            place += f"–{last:<{width},}"
        pointer = ""
        if mark is not None and each.low <= mark < each.high:
            pointer = paint.odd("  ← cutoff_len")
        lines.append(f"  {place:<{2 * width + 1}}  {filled:<{_BAR_CHARACTERS}} {each.rows:,}{pointer}")
    return lines


def _joined_where_empty(found: Sequence[Bin]) -> list[Bin]:
    """The ranges, those without rows joined to one where they stand side by side."""
    joined: list[Bin] = []
    for each in found:
        if joined and not each.rows and not joined[-1].rows:
            joined[-1] = joined[-1]._replace(high=each.high)
        else:
            joined.append(each)
    return joined
