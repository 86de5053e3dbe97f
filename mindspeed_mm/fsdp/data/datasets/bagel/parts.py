"""A row as a list of parts, and the parts as arrays along tokens.

A part is a text, a picture that is seen (features of a tower), a picture that is given (latents) or a picture that is
drawn (noised latents, which no later part sees). All tokens of a picture, with its two marks, have one position; a text
goes on by one a token. A drawn picture takes no position of its own: what it is drawn as may follow it, as a picture
that is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.batch import IGNORED_LABEL, LATENT, SEEN
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, Sample
from mindspeed_mm.fsdp.models.diffusion.latents import patchified

PartKind = Literal["text", "seen", "given", "drawn"]


class RowPart(NamedTuple):
    """One part of a row."""

    kind: PartKind
    content: Any
    """A text; or a picture as `MediaLoader` takes it."""
    weight: float = 0.0
    """How much the tokens of a text count in the loss; 0: it is not trained."""
    may_drop: bool = False
    """Whether chance may leave it out, so that guidance can do without it."""


class Marks(NamedTuple):
    """Ids of the tokens that stand around texts and around pictures."""

    text_start: int
    text_end: int
    picture_start: int
    picture_end: int


@dataclass(frozen=True)
class SizeRule:
    """To which size a picture is brought."""

    stride: int
    """Both sides are multiples of it, in pixels."""
    longest: int
    shortest: int
    most_pixels: int

    def __call__(self, height: int, width: int, pictures: int = 1) -> tuple[int, int]:
        """Height and width of a picture among as many of its row: its aspect is kept as far as the stride allows.

        The rule is the published one: the longer side is shortened to `longest`, then the shorter one lengthened to
        `shortest`, and what is too large all the same is scaled down by its area, then by its longer side.
        """
        scale = max(min(self.longest / max(height, width), 1.0), self.shortest / min(height, width))
        size = self._scaled(height, width, scale)
        most = self.most_pixels / pictures
        if size[0] * size[1] > most:
            # By the area's ratio and not its root: as published, so that sizes are those of training there.
            size = self._scaled(*size, most / (size[0] * size[1]))
        if max(size) > self.longest:
            size = self._scaled(*size, self.longest / max(size))
        return size

    def _scaled(self, height: int, width: int, scale: float) -> tuple[int, int]:
        sides = [max(self.stride, round(round(side * scale) / self.stride) * self.stride) for side in (height, width)]
        return sides[0], sides[1]


def parts_of_sample(sample: Sample) -> list[RowPart]:
    """The parts of a conversation whose answers may hold pictures.

    A picture of a question is seen; where the model draws afterwards, it is given as well. A picture of an answer is
    drawn, and where something trained follows, it is given and seen then. One that the row takes out of the loss is
    context like that of a question.

    Raises:
        DataError: A picture counts for a share, or the row has media that are no pictures.
    """
    found: list[RowPart] = []
    media = iter(sample.media)
    for message, weight in zip(sample.messages, sample.weights, strict=True):
        is_answer = message["role"] == "assistant"
        counts = 1.0
        if weight is not None:
            counts = float(weight)
        if not is_answer:
            counts = 0.0
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for piece in content:
            if piece["type"] == "text":
                text = piece["text"]
                if not is_answer:
                    text = text.strip()
                if text.strip():
                    found.append(RowPart("text", text, counts))
                continue
            item = next(media)
            if item.kind != "image":
                raise DataError(f"the row has a {item.kind}, but the model takes pictures only", key=f"{item.kind}s")
            if is_answer and counts not in (0, 1):
                raise DataError(
                    f"a turn with a picture counts {counts:g}, and drawn pictures count 0 or 1",
                    key="weight",
                    way_out=REPAIR,
                )
            kind: PartKind = "seen"
            if counts:
                kind = "drawn"
            found.append(RowPart(kind, item.source))
    return with_context(found)


def with_context(parts: Sequence[RowPart]) -> list[RowPart]:
    """Parts with what later ones need: a picture in front of a drawn one is given and seen, and may be left out.

    Args:
        parts: Texts, pictures that are seen and pictures that are drawn.
    """
    last_drawn = max((number for number, part in enumerate(parts) if part.kind == "drawn"), default=-1)
    last_trained = max((number for number, part in enumerate(parts) if part.kind == "drawn" or part.weight), default=-1)
    found = []
    for number, part in enumerate(parts):
        may_drop = number < last_drawn
        if part.kind == "text":
            found.append(part._replace(may_drop=may_drop and not part.weight))
            continue
        if part.kind == "drawn":
            found.append(part)
        if part.kind == "seen" and not may_drop:
            found.append(part)
        elif number < last_trained:
            found += [
                RowPart("given", part.content, may_drop=may_drop),
                RowPart("seen", part.content, may_drop=may_drop),
            ]
    return found


@dataclass
class TokenRow:
    """A row's arrays along tokens, and its pictures, while parts are added."""

    marks: Marks
    seed: int
    """What noise of its pictures is drawn with."""
    ids: list[int] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    """How much each token counts in the loss."""
    positions: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    patches: list[torch.Tensor] = field(default_factory=list)
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    pixels: list[torch.Tensor] = field(default_factory=list)
    posteriors: list[torch.Tensor] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    position: int = 0

    def add_text(self, ids: Sequence[int], weight: float) -> None:
        """A text between its marks; the last mark is trained with it."""
        whole = [self.marks.text_start, *ids, self.marks.text_end]
        self._add(whole, [0.0, *[weight] * (len(whole) - 1)], 0, [0] * len(whole))
        self.positions += range(self.position, self.position + len(whole))
        self.position += len(whole)

    def add_seen(self, pixels: torch.Tensor, side: int) -> None:
        """A picture (3, H, W) uint8 that is seen in patches of `side` pixels."""
        rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
        # Pixels from -1 to 1, as the tower takes them.
        self.patches.append(patchified(pixels.float() / 127.5 - 1, side))
        self.grids.append((1, rows, columns))
        self._add_picture(rows * columns, SEEN, is_noised=False)

    def add_latents(self, pixels: torch.Tensor, side: int, *, is_drawn: bool) -> None:
        """A picture (3, H, W) uint8 that has latents, a token for each square of `side` pixels."""
        self.pixels.append(pixels.flatten())
        self._add_latents((pixels.shape[1], pixels.shape[2]), side, is_drawn)

    def add_posterior(self, posterior: torch.Tensor, size: tuple[int, int], side: int, *, is_drawn: bool) -> None:
        """The same of a picture of this height and width, whose latents are drawn from (2, C, h, w)."""
        self.posteriors.append(posterior.flatten())
        self._add_latents(size, side, is_drawn)

    def _add_latents(self, size: tuple[int, int], side: int, is_drawn: bool) -> None:
        self.sizes.append(size)
        self.drawn.append(is_drawn)
        self._add_picture((size[0] // side) * (size[1] // side), LATENT, is_noised=is_drawn)

    def pass_over_picture(self) -> None:
        """A picture that is left out: what follows stands where it would stand."""
        self.position += 1

    def arrays(self) -> dict[str, Any]:
        """Under the names of batch keys; keys of pictures only where there are some."""
        ids, counts = np.array(self.ids, dtype=np.int64), np.array(self.counts, dtype=np.float32)
        found: JsonObject = {
            "input_ids": ids,
            "labels": np.where(counts != 0, ids, IGNORED_LABEL),
            "position_ids": np.array(self.positions, dtype=np.int64),
            "part_ids": np.array(self.parts, dtype=np.int64),
            "token_kinds": np.array(self.kinds, dtype=np.int64),
        }
        if np.any((counts != 0) & (counts != 1)):
            found["loss_weights"] = counts
        if self.patches:
            found |= {"pixel_values": torch.cat(self.patches), "image_grid_thw": torch.tensor(self.grids)}
        for name, contents in (("picture_pixels", self.pixels), ("picture_posteriors", self.posteriors)):
            if contents:
                found[name] = torch.cat(contents)
        if self.sizes:
            # 63 bits: a tensor of int64 holds no larger seed.
            seeds = [derive_seed(self.seed, number) >> 1 for number in range(len(self.sizes))]
            found |= {
                "picture_sizes": torch.tensor(self.sizes),
                "picture_is_drawn": torch.tensor(self.drawn),
                "picture_seeds": torch.tensor(seeds),
            }
        return found

    def _add_picture(self, tokens: int, kind: int, *, is_noised: bool) -> None:
        number = len(self.grids) + len(self.sizes)
        ids = [self.marks.picture_start, *[self.marks.picture_end] * (tokens + 1)]  # those inside are never read
        part = number
        if is_noised:  # negative: no later part sees it
            part = -number
        self._add(ids, [0.0] * len(ids), part, [0, *[kind] * tokens, 0])
        self.positions += [self.position] * len(ids)
        # The same picture without noise may follow at this very position.
        self.position += not is_noised

    def _add(self, ids: Sequence[int], counts: Sequence[float], part: int, kinds: Sequence[int]) -> None:
        self.ids += ids
        self.counts += counts
        self.parts += [part] * len(ids)
        self.kinds += kinds


def resized(picture: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """(3, H, W) uint8 of an RGB picture."""
    height, width = size
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture, dtype=np.uint8)).permute(2, 0, 1).contiguous()
