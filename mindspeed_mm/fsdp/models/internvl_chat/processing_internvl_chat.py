"""The processor of InternVL's original folders with a tokenizer and the settings of a tile; how pictures are cut
into tiles stands in config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GotOcr2ImageProcessor, InternVLProcessor, ProcessorMixin

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, read_json_object

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""The turns that the models were tuned in. The folders' own template knows texts alone."""
_CUT = {"dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12, "downsample_ratio": 0.5}

_COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
"""ImageNet's, as the original code has them."""


def tokens_of_a_tile(vision: JsonMapping, downsample_ratio: float) -> int:
    """How many tokens stand for a tile."""
    side, patch = _side(vision.get("image_size", 448)), _side(vision.get("patch_size", 14))
    return int((side // patch) ** 2 * downsample_ratio**2)


def _side(size: int | Sequence[int]) -> int:
    if isinstance(size, int):
        return size
    return size[0]


class InternVLChatProcessor(InternVLProcessor):
    """transformers' InternVL processor without videos.

    Args:
        image_processor: Cuts pictures into tiles.
        tokenizer: Of the language model.
        chat_template: Jinja text.
        image_seq_length: Tokens of a tile.
        kwargs: Further settings of a file, which mean nothing here.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        image_seq_length: int = 256,
        **kwargs: Any,
    ) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template or CHAT_TEMPLATE)
        self.image_seq_length = image_seq_length
        self.images_kwargs: dict[str, Any] = {}  # whether pictures are cut is said by the folder, not by the class
        self.start_image_token, self.end_image_token, self.image_token = "<img>", "</img>", "<IMG_CONTEXT>"
        self.start_image_token_id, self.end_image_token_id, self.image_token_id = tokenizer.convert_tokens_to_ids(
            [self.start_image_token, self.end_image_token, self.image_token]
        )
        self.multimodal_pattern = re.compile(f"(?P<image>{re.escape(self.image_token)})")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """From the files of an original folder, or from those that a processor of this class has written."""
        folder = Path(pretrained_model_name_or_path)
        if (folder / "processor_config.json").is_file():
            return super().from_pretrained(folder, **kwargs)
        config = _CUT | read_json_object(folder / "config.json", ModelFolderError)
        path = folder / "preprocessor_config.json"
        pixels = dict(_COLOURS)
        if path.is_file():
            pixels |= read_json_object(path, ModelFolderError)
        vision = config.get("vision_config") or {}
        side = config.get("force_image_size") or vision.get("image_size", 448)
        is_cut = bool(config["dynamic_image_size"])
        fewest = most = 1  # transformers 5.17 asks for tiles whatever `crop_to_patches` says: then let there be one
        if is_cut:
            fewest, most = config["min_dynamic_patch"], config["max_dynamic_patch"]
        images = GotOcr2ImageProcessor(
            size={"height": side, "width": side},
            crop_to_patches=is_cut,
            min_patches=fewest,
            max_patches=most,
            image_mean=pixels["image_mean"],
            image_std=pixels["image_std"],
        )
        return cls(
            images,
            AutoTokenizer.from_pretrained(folder, **kwargs),
            chat_template=_own_template(folder),
            image_seq_length=tokens_of_a_tile(vision, config["downsample_ratio"]),
        )


def _own_template(folder: Path) -> str | None:
    """The template beside the model, unless it has no place for pictures: `save_pretrained` of transformers writes the
    released tokenizer's there, which joins texts and refuses the parts of a turn."""
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return None
    template = path.read_text(encoding="utf-8")
    has_place = "image" in template or "<IMG_CONTEXT>" in template
    if has_place:
        return template
    return None
