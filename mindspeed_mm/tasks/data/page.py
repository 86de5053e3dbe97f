"""A check, statistics or a preview as one HTML page that needs nothing from outside itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.tasks.data.check import DataCheck
from mindspeed_mm.tasks.data.histogram import Bin
from mindspeed_mm.tasks.data.media_views import (
    FRAME_PIXELS,
    PICTURE_PIXELS,
    MediumView,
    picture_uri,
    sound_uri,
    view_medium,
    wave_points,
)
from mindspeed_mm.tasks.data.micro_batch import MicroBatchView
from mindspeed_mm.tasks.data.preview import Preview, ShownRow, TokenizedConversation, media_name
from mindspeed_mm.tasks.data.stats import DataStats
from mindspeed_mm.tasks.data.words import MEDIA_READ

TEMPLATE = "page.html.j2"
_MOST_TOKENS = 4096
"""Maximum number of tokens shown of a row, each in an element of its own."""


def check_page(result: DataCheck) -> str:
    """The page of `mm data check`."""
    return _render(
        title=f"Data check: {result.path.name}",
        check=result.to_dict(),
        media_read=MEDIA_READ[result.media_read],
        charts=_charts({"Tokens of a row, before truncation": result.tokens, "Patches of a row": result.patches}),
    )


def stats_page(stats: DataStats) -> str:
    """The page of `mm data stats`."""
    return _render(
        title=f"Data: {stats.path.name}",
        stats=stats.to_dict(),
        charts=_charts({"Tokens of a row, before truncation": stats.token_bins, "Patches of a row": stats.patch_bins}),
    )


View = dict[str, Any]
"""What the template shows of something, by the names that it uses."""


def preview_page(found: Preview) -> str:
    """The page of `mm data preview`."""
    return _render(
        title=f"Data preview: {found.path.name}",
        preview={"rows": found.rows, "trouble": found.batch_trouble},
        shown=[shown_row(row, found.media) for row in found.shown],
        batch=found.batch and _batch(found.batch),
    )


def environment() -> jinja2.Environment:
    """Jinja for our own pages: what users wrote is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _render(**content: object) -> str:
    # StrictUndefined raises for a name that the template asks about and nobody gives
    absent = dict.fromkeys(("check", "stats", "preview", "batch"))
    return environment().get_template(TEMPLATE).render(**{**absent, "charts": [], "shown": [], **content})


def _charts(found: dict[str, Sequence[Bin]]) -> list[View]:
    """Bars with their labels; heights in percent of the highest."""
    charts = []
    for title, bins in found.items():
        most = max((each.rows for each in bins), default=0)
        if not most:
            continue
        bars = []
        for each in bins:
            last = each.high - 1
            label = f"{each.low:,}"
            if last > each.low:
                label += f"–{last:,}"
            bars.append({"label": label, "count": each.rows, "share": 100 * each.rows / most})
        charts.append({"title": title, "bars": bars})
    return charts


def shown_row(row: ShownRow, media: MediaLoader | None) -> View:
    """What the template shows of a row."""
    shown_media = []
    for item, tokens in row.media:
        view = _medium(view_medium(media, item))
        shown_media.append({"name": media_name(item.source), "tokens": tokens, **view})
    return {
        "index": row.index,
        "place": row.place,
        "row_id": row.row_id,
        "when": str(row.when or ""),
        "fault": row.fault,
        "notes": row.notes,
        "media": shown_media,
        "answers": [_answer_view(answer) for answer in row.answers],
    }


def _medium(view: MediumView) -> View:
    longest = FRAME_PIXELS if view.kind == "video" else PICTURE_PIXELS
    images = [picture_uri(image, longest) for image in view.images]
    times = [f"{time:.1f} s" for time in view.times_s] or [""] * len(images)
    sound = wave = ""
    if view.sound is not None:
        sound, wave = sound_uri(view.sound, view.rate), wave_points(view.sound)
    return {
        "kind": view.kind,
        "facts": view.facts,
        "trouble": view.trouble,
        "images": list(zip(images, times, strict=True)),
        "small": bool(view.images) and max(view.images[0].size) <= FRAME_PIXELS,
        "sound": sound,
        "wave": wave,
    }


def _answer_view(answer: TokenizedConversation) -> View:
    """Stretches with their tokens; behind the first thousands of tokens a stretch is one piece."""
    stretches = []
    for stretch in answer.stretches:
        pieces = []
        if stretch.first < _MOST_TOKENS and not stretch.repeated:
            for piece in stretch.pieces:
                ids = " ".join(map(str, piece.ids))
                title = f"token {piece.first}, id {ids}, weight {piece.weight:g}"
                pieces.append({"text": piece.text, "title": title})
        else:
            pieces.append({"text": stretch.text, "title": f"from token {stretch.first}"})
        weight = ""  # 0 and 1 are told by the colour
        if stretch.weight not in (0, 1):
            weight = f"{stretch.weight:g}"
        stretches.append(
            {
                "pieces": pieces,
                "trained": stretch.weight != 0,
                "weight": weight,
                "repeated": stretch.repeated,
            }
        )
    return {
        "name": answer.name,
        "tokens": len(answer.ids),
        "trained": answer.trained,
        "share": 100 * answer.trained / max(len(answer.ids), 1),
        "shrunk": answer.shrunk,
        "stretches": stretches,
    }


def _batch(batch: MicroBatchView) -> View:
    """Each row of a micro-batch as parts with widths in percent."""
    rows: list[list[View]] = [[] for _ in range(batch.rows)]
    for document in batch.documents:
        name = document.sample_id or "padding"
        title = f"{name}: tokens {document.first}–{document.end - 1}, {document.trained} trained"
        share = 100 * (document.end - document.first) / max(batch.length, 1)
        rows[document.row].append({"title": title, "share": share, "name": document.sample_id})
    return {**batch.to_dict(), "entries": batch.entries, "bars": rows, "fill": batch.fill}
