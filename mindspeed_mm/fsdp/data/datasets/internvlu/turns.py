"""A conversation as InternVL-U reads it: turns of ChatML in a system prompt for each task, pictures as so many tokens.

A picture that is asked for stands behind the answer's words as one `<img>`; it is drawn from the states of the question
and of the answer up to that token. What guidance leaves out is a question of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from mindspeed_mm.core.batch import SEEN
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, read_json_object

Task = Literal["answer", "draw", "edit"]
Left = Literal["", "text", "all"]
LEFT: tuple[Left, ...] = ("", "text", "all")
"""What of a question is left out: nothing, its words, or all of it."""
_NAME = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
SYSTEM: dict[Task, str] = {
    "answer": _NAME,
    "draw": _NAME
    + "请通过详细描述图像中物体和背景的颜色、形状、大小、纹理、数量、文字内容以及空间位置关系等来对图像进行全面描述：",
    "edit": _NAME
    + "请描述输入图像的关键特征（颜色、形状、大小、纹理、物体、背景等），然后解释用户的文本指令应该如何改变或修改图像，"
    "从而生成一个满足用户要求的新图像，并适当保持与原始输入的一致性。：",
}
"""The published system prompt of each task; without words before a picture that is drawn, too."""
_OF_PICTURES = "Generate an image based on reference images."
_OF_NOTHING = ("Here is a random image ", ":")
_ENDS = ".!?,:;"
_MODEL_TYPE = "internvlu"


@dataclass(frozen=True)
class ReadingSizes:
    """What a folder's config.json tells of pictures."""

    seen_pixels: int
    """Pixels along a side of a picture that is seen."""
    seen_side: int
    """Tokens along that side."""
    latent_side: int
    """Pixels along a side of a token of latents."""
    scale: float
    """`video_position_scale_factor`."""
    seen_scale: float
    """`vlm_cond_position_scale_factor`."""
    processor: JsonMapping
    """`processor_config`."""

    @classmethod
    def of(cls, folder: Path) -> ReadingSizes:
        """Of a model's folder.

        Raises:
            ModelFolderError: It is not one of InternVL-U.
        """
        path = folder / "config.json"
        values = read_json_object(path, ModelFolderError)
        if values.get("model_type") != _MODEL_TYPE:
            raise ModelFolderError(
                f"its model_type is {values.get('model_type')!r}, and these rows are for InternVL-U",
                where=str(path),
                key="model_type",
                way_out="Write the released folder anew with `mm-convert InternVLUConverter hf_to_mm`.",
            )
        vision, head = values.get("vision_config") or {}, values.get("generation_decoder_config") or {}
        pixels, patch = (_side(vision.get(key)) for key in ("image_size", "patch_size"))
        square = (head.get("decoder_config") or {}).get("patch_size", 2)
        latent = (values.get("vae_config") or {}).get("downsample", 8)
        ratio = values.get("downsample_ratio", 0.5)
        if not all(isinstance(each, int) and each > 0 for each in (pixels, patch, square, latent)) or not ratio:
            raise ModelFolderError(
                "does not tell of pictures: vision_config, vae_config or generation_decoder_config lacks its sizes",
                where=str(path),
                way_out="Write the released folder anew with `mm-convert InternVLUConverter hf_to_mm`.",
            )
        scale, seen_scale = (head.get(f"{name}_position_scale_factor", 1.0) for name in ("video", "vlm_cond"))
        told = values.get("processor_config") or {}
        return cls(pixels, int(pixels // patch * ratio), square * latent, float(scale), float(seen_scale), told)


def _side(size: object) -> Any:
    """Of squares, which transformers writes as two equal sides."""
    if isinstance(size, list) and size:
        return size[0]
    return size


@dataclass(frozen=True)
class GenerationSize:
    """To which size a picture is brought that has latents, by the published rule: the nearest multiples of the stride,
    unless the area is out of bounds; then the next ones inside."""

    stride: int
    least_pixels: int
    most_pixels: int
    longest: int

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture."""
        if max(height, width) > self.longest:
            scale = self.longest / max(height, width)
            height, width = int(height * scale), int(width * scale)
        height, width = max(height, 1), max(width, 1)
        sides = [round(side / self.stride) * self.stride for side in (height, width)]
        if sides[0] * sides[1] > self.most_pixels:
            scale = (self.most_pixels / (height * width)) ** 0.5
            sides = [int(side * scale / self.stride) * self.stride for side in (height, width)]
        elif sides[0] * sides[1] < self.least_pixels:
            scale = (self.least_pixels / (height * width)) ** 0.5
            sides = [-int(-side * scale // self.stride) * self.stride for side in (height, width)]
        if max(sides) > self.longest:
            scale = self.longest / max(sides)
            sides = [int(side * scale / self.stride) * self.stride for side in sides]
        return max(sides[0], self.stride), max(sides[1], self.stride)


@dataclass
class TurnRow:
    """A row's arrays along tokens, while turns are added."""

    ids: list[int] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    """How much each token counts in the loss."""
    kinds: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    """1 where a token's state is read by what draws."""

    def add(self, ids: Sequence[int], *, weight: float = 0.0, kind: int = 0, is_read: bool = False) -> None:
        """Go on with tokens, all of one kind and weight."""
        self.ids += ids
        self.counts += [weight] * len(ids)
        self.kinds += [kind] * len(ids)
        self.reads += [int(is_read)] * len(ids)


class TurnEncoder:
    """Turns as tokens.

    Args:
        tokenizer: Of the folder.
        folder: For messages.
        picture_tokens: Tokens of a picture that is seen.
    """

    def __init__(self, tokenizer: Any, folder: Path, picture_tokens: int) -> None:
        self._tokenizer, self._picture_tokens = tokenizer, picture_tokens
        known = tokenizer.get_vocab()
        marks = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<img_uncond>")
        missing = [mark for mark in marks if mark not in known]
        if missing:
            raise ModelFolderError(
                f"the tokenizer has no {missing[0]}", where=str(folder), way_out="Take the released model's tokenizer."
            )
        self._start, self.end, self.picture, self._picture_end, self._context, self._nothing = (
            known[mark] for mark in marks
        )

    def begin(self, task: Task, system: str | None = None) -> TurnRow:
        """A row with its system prompt."""
        row = TurnRow()
        self._turn(row, "system", [SYSTEM[task] if system is None else system])
        return row

    def question(self, row: TurnRow, pieces: Sequence[str | None], *, is_read: bool) -> None:
        """Go on with a user's turn, and open the answer.

        Args:
            row: The row.
            pieces: Texts, and None for each picture.
            is_read: Whether a picture is drawn from the turn.
        """
        self._turn(row, "user", _tidied(pieces), is_read=is_read)
        row.add([self._start, *self._ids("assistant\n")], is_read=is_read)

    def left_out(self, row: TurnRow, left: Left, pictures: int) -> int:
        """As `question`, in place of one whose words or all of it are left out. Returns how many pictures are seen."""
        if left == "text" and pictures:
            self._turn(row, "user", [*["", None, "\n"] * pictures, _OF_PICTURES], is_read=True)
        else:
            pictures = 0
            before, behind = (self._ids(text) for text in _OF_NOTHING)
            row.add([self._start, *self._ids("user\n"), *before, self._nothing, *behind, self.end], is_read=True)
            row.add(self._ids("\n"), is_read=True)
        row.add([self._start, *self._ids("assistant\n")], is_read=True)
        return pictures

    def answer(self, row: TurnRow, text: str, weight: float) -> None:
        """Go on with the words of an answer, which end the turn."""
        row.add([*self._ids(text), self.end], weight=weight)
        row.add(self._ids("\n"))

    def drawn(self, row: TurnRow, text: str, weight: float) -> None:
        """Go on with an answer that is a picture, with the words in front of it. Words are trained, and then that the
        picture follows them."""
        ids = self._ids(text) if text.strip() else []
        row.add([*ids, self.picture], weight=weight if ids else 0.0, is_read=True)

    def _turn(self, row: TurnRow, role: str, pieces: Sequence[str | None], *, is_read: bool = False) -> None:
        """A turn that is not trained. Neighbouring texts are one text to the tokenizer."""
        row.add([self._start], is_read=is_read)
        text = f"{role}\n"
        for piece in pieces:
            if piece is not None:
                text += piece
                continue
            row.add([*self._ids(text), self.picture], is_read=is_read)
            row.add([self._context] * self._picture_tokens, kind=SEEN, is_read=is_read)
            row.add([self._picture_end], is_read=is_read)
            text = ""
        row.add([*self._ids(text), self.end, *self._ids("\n")], is_read=is_read)

    def _ids(self, text: str) -> list[int]:
        """Its tokens; marks that are written in it are spelled out."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids


def _tidied(pieces: Sequence[str | None]) -> list[str | None]:
    """A question as the published processor brings it: pictures at its beginning have a line each, a text begins with a
    capital and ends with a stop."""
    found: list[str | None] = []
    for number, piece in enumerate(pieces):
        leads = all(each is None or not each.strip() for each in pieces[:number])
        if piece is None:
            found.append(None)
            if leads:
                found.append("\n")
        elif piece.strip() or not leads:
            found.append(piece.lstrip() if leads else piece)
    while found and found[-1] is not None and not found[-1].strip():
        found.pop()
    if found and found[-1] is not None:
        found[-1] = found[-1].rstrip()
    if found and found[0]:
        found[0] = found[0][0].upper() + found[0][1:]
    last = found[-1] if found else "."
    if last is not None and last[-1] in _ENDS:
        return found
    return [*found, "."]


def seen_pixels(sizes: ReadingSizes, pictures: Sequence[Image.Image]) -> Any:
    """(N, 3, side, side) float32 of RGB pictures, as the folder's `image_processor_kwargs` say."""
    from transformers import GotOcr2ImageProcessor

    given = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    given |= dict(sizes.processor.get("image_processor_kwargs") or {})
    side = sizes.seen_pixels
    prepare = GotOcr2ImageProcessor(
        size={"height": side, "width": side},
        image_mean=given["image_mean"],
        image_std=given["image_std"],
        crop_to_patches=False,
        min_patches=1,
        max_patches=1,
    )
    return prepare(list(pictures), return_tensors="pt")["pixel_values"].float()


def arrays_of(row: TurnRow) -> dict[str, np.ndarray]:
    """Arrays along tokens, under the names of batch keys."""
    return {
        "input_ids": np.array(row.ids, dtype=np.int64),
        "position_ids": np.arange(len(row.ids), dtype=np.int64),
        "part_ids": np.array(row.reads, dtype=np.int64),
        "token_kinds": np.array(row.kinds, dtype=np.int64),
    }
