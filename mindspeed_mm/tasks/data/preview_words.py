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
    """Return a preview as lines of text: a title, each row, and the first micro-batch or the reason why it is
    missing."""
    title = f"{found.path}: {len(found.shown)} of {found.rows:,} rows"
    if any(row.answers for row in found.shown):
        title += "; trained tokens are coloured" if paint.colour else "; trained tokens stand between « and »"
    lines = [title]
    for row in found.shown:
        lines += ["", *_row_lines(row, found, paint, tokens)]
    if found.batch is not None:
        lines += ["", *batch_lines(found.batch, paint)]
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
        return paint.medium(f"[{stretch.text} × {stretch.repeated}]")
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
    signs = []
    for sign in text:
        is_shown = sign == "\n" or sign.isprintable()
        signs.append(sign if is_shown else f"\\x{ord(sign):02x}")
    return "".join(signs)


def batch_lines(batch: MicroBatchView, paint: Paint) -> list[str]:
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
    rest = " " * behind if batch.is_packed else paint.soft("·" * behind)
    strip = " " * first + mark * (end - first) + rest
    return f"  {document.row:>3}: {document.first:>6,}–{document.end - 1:<6,} {strip}  {name}"
