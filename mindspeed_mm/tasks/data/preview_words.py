"""A preview in lines for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.tasks.data.media_views import thumbnail, view_medium
from mindspeed_mm.tasks.data.micro_batch import MicroBatchView, PackedDocument
from mindspeed_mm.tasks.data.paint import Paint
from mindspeed_mm.tasks.data.preview import Preview, ShownRow, TokenizedConversation, media_name
from mindspeed_mm.tasks.data.tokens import TokenSpan

_MOST_DOCUMENTS = 40
_STRIP_CHARACTERS = 64


def preview_lines(found: Preview, paint: Paint, *, tokens: bool = False) -> list[str]:
    """Everything shown."""
    key = "trained tokens are coloured" if paint.colour else "trained tokens stand between « and »"
    has_tokens = any(row.answers for row in found.shown)
    lines = [f"{found.path}: {len(found.shown)} of {found.rows:,} rows" + (f"; {key}" if has_tokens else "")]
    for row in found.shown:
        lines += ["", *_row_lines(row, found, paint, tokens)]
    if found.batch is not None:
        lines += ["", *batch_lines(found.batch, paint)]
    if found.batch_trouble:
        lines += ["", paint.odd("no micro-batch: ") + found.batch_trouble]
    return lines


def _row_lines(row: ShownRow, found: Preview, paint: Paint, tokens: bool) -> Iterator[str]:
    names = [f"row {row.index}"] + [f"id {row.row_id}"] * (row.row_id is not None) + [str(row.when)] * bool(row.when)
    yield paint.head(row.place) + paint.soft("  " + ", ".join(names))
    if row.fault:
        yield "  " + paint.bad("cannot be used: ") + row.fault
    yield from (f"  {_visible(note)}" for note in row.notes)
    for number, (item, count) in enumerate(row.media, 1):
        view = view_medium(found.media, item)
        told = f"  {item.kind} {number}: {media_name(item.source)}  {view.facts or view.trouble}"
        yield paint.medium(told + (f"  → {count:,} tokens" if count else ""))
        if paint.colour and view.images:
            yield from (f"    {line}" for line in thumbnail(view.images[0]))
    for answer in row.answers:
        yield from _answer_lines(answer, paint, tokens)


def _answer_lines(answer: TokenizedConversation, paint: Paint, tokens: bool) -> Iterator[str]:
    name = f"{answer.name}: " if answer.name else ""
    shrunk = ", shortened to fit cutoff_len" if answer.shrunk else ""
    share = answer.trained / max(len(answer.ids), 1)
    yield f"  {name}{len(answer.ids):,} tokens, {answer.trained:,} trained ({share:.1%}){shrunk}"
    if tokens:
        yield from _token_table(answer, paint)
        return
    text = "".join(_stretch_text(stretch, paint) for stretch in answer.stretches)
    yield from (f"  │ {line}" for line in text.split("\n"))


def _stretch_text(stretch: TokenSpan, paint: Paint) -> str:
    if stretch.repeated:
        return paint.medium(f"[{stretch.text} × {stretch.repeated}]")
    text = _visible(stretch.text)
    if not stretch.weight:
        return text
    return paint.trained(text) + (f"(weight {stretch.weight:g})" if stretch.weight != 1 else "")


def _token_table(answer: TokenizedConversation, paint: Paint) -> Iterator[str]:
    yield paint.soft(f"  {'token':>6} {'id':>8} {'weight':>7}  text")
    for stretch in answer.stretches:
        for piece in stretch.pieces:
            ids = " ".join(map(str, piece.ids))
            times = f" × {stretch.repeated}" if stretch.repeated else ""
            text = paint.trained(repr(piece.text)) if piece.weight else repr(piece.text)
            yield f"  {piece.first:>6} {ids:>8} {piece.weight:>7g}  {text}{times}"


def _visible(text: str) -> str:
    """Text without control characters, which could move the cursor or colour the terminal."""
    return "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def batch_lines(batch: MicroBatchView, paint: Paint) -> list[str]:
    """A micro-batch: a strip for each row, and where its samples begin and end."""
    kind = "packed" if batch.is_packed else "padded"
    told = f"{batch.rows} × {batch.length:,} tokens, {kind}, {batch.fill:.1%} full"
    lines = [paint.head("first micro-batch of training") + f"  {told if batch.length else f'{batch.rows} samples'}"]
    shown = [document for document in batch.documents if document.sample_id or batch.is_packed]
    lines += [_document_line(document, batch, paint) for document in shown[:_MOST_DOCUMENTS]]
    if len(shown) > _MOST_DOCUMENTS:
        lines.append(paint.soft(f"  … and {len(shown) - _MOST_DOCUMENTS} more"))
    return [*lines, paint.soft("  " + ", ".join(f"{name} {shape}" for name, shape in batch.shapes.items()))]


def _document_line(document: PackedDocument, batch: MicroBatchView, paint: Paint) -> str:
    """Where a sample stands in its row; dots are padding."""
    scale = _STRIP_CHARACTERS / max(batch.length, 1)
    first, end = round(scale * document.first), max(round(scale * document.end), round(scale * document.first) + 1)
    name = f"{document.sample_id}, {document.trained:,} trained" if document.sample_id else paint.soft("padding")
    filled = ("█" if document.sample_id else "·") * (end - first)
    behind = "" if batch.is_packed else "·" * (_STRIP_CHARACTERS - end)
    strip = " " * first + filled + paint.soft(behind) + " " * (_STRIP_CHARACTERS - end - len(behind))
    return f"  {document.row:>3}: {document.first:>6,}–{document.end - 1:<6,} {strip}  {name}"
