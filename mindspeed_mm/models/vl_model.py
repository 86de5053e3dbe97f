"""`VLModel`: a vision-language or omni model whose parts model.json describes."""

from __future__ import annotations

from mindspeed_mm.models.configured import ConfiguredModel


class VLModel(ConfiguredModel):
    """The library's model of the folder that the data name; the sizes of model.json's parts were compared with it."""
