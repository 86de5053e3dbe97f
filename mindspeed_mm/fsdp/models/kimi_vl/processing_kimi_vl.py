"""The processor of Kimi-VL: pictures in their own size, padded to whole squares of patches. It reads the released
preprocessor_config.json."""

from __future__ import annotations

from typing import Any

from transformers import Kimi_K25ImageProcessor, Kimi_K25Processor, ProcessorMixin

MOST_PATCHES_A_SIDE = 512


class KimiVLImageProcessor(Kimi_K25ImageProcessor):
    """Kimi-K2.5's, by the released names of its settings.

    Args:
        in_token_limit: Patches beyond which a picture is made smaller.
        merge_kernel_size: Sides, in patches, of the square that becomes one token.
        kwargs: Of the class that it derives from.
    """

    def __init__(self, *, in_token_limit: int = 4096, merge_kernel_size: Any = (2, 2), **kwargs: Any) -> None:
        size = {"max_height": MOST_PATCHES_A_SIDE, "max_width": MOST_PATCHES_A_SIDE}
        own = {"max_patches": in_token_limit, "merge_size": merge_kernel_size[0], "size": size}
        super().__init__(**own | kwargs)
        self.in_token_limit, self.merge_kernel_size = in_token_limit, list(merge_kernel_size)


class KimiVLProcessor(Kimi_K25Processor):
    """Kimi-K2.5's without videos.

    Args:
        image_processor: Of pictures.
        tokenizer: Of the text model.
        chat_template: Jinja text.
        kwargs: Further settings of the released file, which mean nothing here.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        self.image_token = "<|media_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
