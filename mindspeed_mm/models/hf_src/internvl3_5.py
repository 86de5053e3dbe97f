"""InternVL 3.5 for the provider API: the library's class with the hooks of sharding and initialisation."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin

prepare_for_transformers()  # scripts import this class first of all

from transformers import InternVLForConditionalGeneration  # noqa: E402


class InternVLChatModelGeneration(InternVLForConditionalGeneration, FSDP2Mixin, WeightInitMixin):
    """InternVL 3.5; `_init_weights` is the library's.

    Args:
        config: Of transformers.
        vision_model: Not read: parts are built of the configuration.
        language_model: Not read, likewise.
        use_flash_attn: Not read: `attn_implementation` chooses the kernel.
    """

    def __init__(
        self, config: Any, vision_model: Any = None, language_model: Any = None, use_flash_attn: bool = True
    ) -> None:
        super().__init__(config)
