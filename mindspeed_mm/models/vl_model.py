"""`VLModel`: a vision-language or omni model whose parts model.json describes."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.models.configured import ConfiguredModel


class VLModel(ConfiguredModel):
    """The library's model of the folder that the data name; the sizes of model.json's parts were compared with it."""

    add_image_encoder = False
    """Whether this stage hands on what towers of other stages need, which scripts ask for: stages see to that here."""

    def freeze(self, **_parts: bool) -> None:
        """Nothing: `freeze` of model.json is part of the configuration, which is applied when the model is planned."""

    def forward(self, *args: Any, tranfer: None = None, **kwargs: Any) -> Any:
        """As of `ConfiguredModel`.

        Args:
            args: Of the model.
            tranfer: What MindSpeed-MM's scripts add to each batch (their spelling).
            kwargs: Of the model.
        """
        return super().forward(*args, **kwargs)
