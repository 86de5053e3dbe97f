"""`TransformersModel`: a model of the transformers library, or a class of `ModelHub.MODEL_MAPPINGS`, by its folder."""

from __future__ import annotations

from mindspeed_mm.models.configured import ConfiguredModel


class TransformersModel(ConfiguredModel):
    """What `init_from_hf_path` names, of the class that `model_id` names, or the library's own."""
