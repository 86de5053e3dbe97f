"""`SoRAModel`: a generator of pictures or clips, of which the transformer is trained."""

from __future__ import annotations

from mindspeed_mm.models.configured import ConfiguredModel


class SoRAModel(ConfiguredModel):
    """The transformer of the folder in diffusers' layout; encoders are loaded when something is encoded."""
