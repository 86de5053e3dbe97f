"""The processor of DeepSeek-VL2: pictures become a whole view and tiles, and their placeholders as many tokens as both
take behind the projector. It reads the released processor_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image, ImageOps
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import select_best_resolution
from typing_extensions import override

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object

SAME_NAME: dict[str, type[ProcessorMixin]] = {}
"""Name in `architectures` → processor of another family whose releases name the same class."""
MOST_TILED = 2
"""Pictures of a conversation beyond which none is cut into tiles: each is then the whole view and one tile of it."""
CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content -%}
{%- if part.type == 'image' %}{{ '<image>' }}{% elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- set content = show(message.content) | trim -%}
{%- if message.role == 'user' %}{{ '<|User|>: ' + content + '\\n\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>:' + content + eos_token }}
{%- else %}{{ content }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|Assistant|>:' }}{% endif -%}
"""
"""The format that the model was tuned in, for folders without a template of their own: the released ones have none. It
follows `format_messages_v2` of the released processor: no space before an answer, nothing after the system's words."""


class DeepseekVLV2Processor(ProcessorMixin):
    """Tiles, and tokens for them.

    Args:
        tokenizer: Of the text model.
        candidate_resolutions: (width, height) in pixels of what pictures are fitted into, in whole tiles. The first
            one's shorter side is a tile's.
        patch_size: Side of a patch, in pixels.
        downsample_ratio: Side of a square of patches that becomes one token.
        image_mean: Of each channel, of colours from 0 to 1.
        image_std: Of each channel.
        image_token: What stands for a picture in a text.
        pad_token: Of the tokenizer, where it has none.
        chat_template: Jinja text.
        kwargs: Further settings of the released file, which are kept.

    Raises:
        ValueError: The tokenizer has no token for pictures.
    """

    return_mm_token_type_ids = True
    pictures_seen_alone = MOST_TILED
    images_kwargs_of_many: ClassVar[Mapping[str, Any]] = {"crop_to_patches": False}
    """How `__call__` is asked for one picture of a conversation with more of them."""

    def __init__(
        self,
        tokenizer: Any = None,
        candidate_resolutions: Sequence[Sequence[int]] = ((384, 384),),
        patch_size: int = 14,
        downsample_ratio: int = 2,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        image_token: str = "<image>",
        pad_token: str = "<｜▁pad▁｜>",
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        if image_token not in tokenizer.get_vocab():
            raise ValueError(f"the tokenizer has no token {image_token}")
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": pad_token})
        self.candidate_resolutions = [list(size) for size in candidate_resolutions]
        self.patch_size, self.downsample_ratio = patch_size, downsample_ratio
        self.image_mean, self.image_std = list(image_mean), list(image_std)
        self.image_token, self.pad_token = image_token, pad_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(tokenizer, chat_template=chat_template or CHAT_TEMPLATE)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As every processor; that of the family which `architectures` names."""
        path = Path(pretrained_model_name_or_path) / "config.json"
        config = read_json_object(path, ModelFolderError) if path.is_file() else {}
        for name in config.get("architectures") or ():
            if name in SAME_NAME:
                return SAME_NAME[name].from_pretrained(pretrained_model_name_or_path, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @property
    def tile(self) -> int:
        """Side of a tile, in pixels."""
        return min(self.candidate_resolutions[0])

    @property
    @override
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "images_spatial_crop"]

    def __call__(
        self,
        images: Image.Image | Sequence[Image.Image] | None = None,
        text: str | Sequence[str] | None = None,
        *,
        return_text_replacement_offsets: bool = False,
        return_mm_token_type_ids: bool = True,
        return_tensors: str | None = None,
        images_kwargs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> BatchFeature:
        """Texts and their pictures as the model takes them.

        Args:
            images: Of all texts, in order.
            text: One or more, with a placeholder for each picture.
            return_text_replacement_offsets: Also say what was written in the place of each placeholder.
            return_mm_token_type_ids: Also mark the tokens of pictures.
            return_tensors: `pt` for tensors instead of lists.
            images_kwargs: `crop_to_patches`: whether pictures are cut into tiles; unless given, where a text has at
                most two.
            kwargs: For the tokenizer (`padding` …).

        Raises:
            ValueError: There are more, or fewer, pictures than placeholders.
        """
        texts = [text] if isinstance(text, str) else list(text or ())
        pictures = [images] if isinstance(images, Image.Image) else list(images or ())
        placeholders = sum(each.count(self.image_token) for each in texts)
        if placeholders != len(pictures):
            raise ValueError(f"{placeholders} × {self.image_token} in the text for {len(pictures)} pictures")
        grids: list[tuple[int, int]] = []
        views: list[torch.Tensor] = []
        offsets: list[list[dict[str, str]]] = []
        remaining, cuts = iter(pictures), (images_kwargs or {}).get("crop_to_patches")
        for number, each in enumerate(texts):
            first, *others = each.split(self.image_token)
            parts, written = [first], []
            cuts_here = cuts
            if cuts is None:
                cuts_here = len(others) <= MOST_TILED
            for picture, other in zip(islice(remaining, len(others)), others, strict=True):
                grid = self.grid(picture) if cuts_here else (1, 1)
                grids.append(grid)
                views += self.views(picture, grid)
                replacement = self.image_token * self.tokens(*grid)
                parts += [replacement, other]
                written.append({"type": "image", "replacement": replacement})
            texts[number] = "".join(parts)
            offsets.append(written)
        data: JsonObject = {}
        if views:
            data |= {"pixel_values": torch.stack(views), "images_spatial_crop": torch.tensor(grids)}
        encoded = self.tokenizer(texts, **{"add_special_tokens": False} | kwargs)
        if return_mm_token_type_ids:
            data["mm_token_type_ids"] = self.create_mm_token_type_ids(encoded["input_ids"])
        made = BatchFeature(dict(encoded) | data, tensor_type=return_tensors)
        if return_text_replacement_offsets:
            made["text_replacement_offsets"] = offsets
        return made

    def create_mm_token_type_ids(self, input_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """1 for each token of a picture, 0 for all others."""
        return [[int(token == self.image_token_id) for token in row] for row in input_ids]

    def grid(self, picture: Image.Image) -> tuple[int, int]:
        """Tiles along the width, and along the height, that lose least of a picture's pixels."""
        sizes = [[height, width] for width, height in self.candidate_resolutions]
        height, width = select_best_resolution((picture.height, picture.width), sizes)
        return width // self.tile, height // self.tile

    def views(self, picture: Image.Image, grid: tuple[int, int]) -> list[torch.Tensor]:
        """The whole picture, then its tiles row by row: each (3, side, side), borders filled with the mean colour."""
        across, down = grid
        side, colour = self.tile, tuple(int(255 * mean) for mean in self.image_mean)
        picture = picture.convert("RGB")
        whole = ImageOps.pad(picture, (side, side), color=colour)
        fitted = self._normalised(ImageOps.pad(picture, (side * across, side * down), color=colour))
        # (3, down, side, across, side) → (down, across, 3, side, side)
        tiles = fitted.unflatten(1, (down, side)).unflatten(3, (across, side)).permute(1, 3, 0, 2, 4)
        return [self._normalised(whole), *tiles.flatten(0, 1)]

    def tokens(self, across: int, down: int) -> int:
        """How many tokens stand for a picture with these tiles: rows with a mark at the end, and one between views."""
        side = -(-(self.tile // self.patch_size) // self.downsample_ratio)
        # Each row of tokens has a mark at its end; one mark stands between the whole view and the tiles.
        return side * (side + 1) + 1 + down * side * (across * side + 1)

    def _normalised(self, picture: Image.Image) -> torch.Tensor:
        width, height = picture.size
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3)
        mean, std = torch.tensor(self.image_mean)[:, None, None], torch.tensor(self.image_std)[:, None, None]
        return (pixels.permute(2, 0, 1) / 255 - mean) / std
