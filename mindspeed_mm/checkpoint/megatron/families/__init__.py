"""One description of Megatron-style names, merges, cuts and stages for each family of models."""

from __future__ import annotations

from mindspeed_mm.checkpoint.megatron.families.deepseek_vl import DEEPSEEK_VL
from mindspeed_mm.checkpoint.megatron.families.glm4v import GLM_4V
from mindspeed_mm.checkpoint.megatron.families.internvl import INTERNVL
from mindspeed_mm.checkpoint.megatron.families.language_models import LANGUAGE_MODEL
from mindspeed_mm.checkpoint.megatron.families.qwen2_5_omni import QWEN2_5_OMNI
from mindspeed_mm.checkpoint.megatron.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from mindspeed_mm.checkpoint.megatron.families.qwen3_vl import QWEN3_VL
from mindspeed_mm.checkpoint.megatron.family import Config, MegatronFamily
from mindspeed_mm.core.errors import ModelFolderError

__all__ = [
    "DEEPSEEK_VL",
    "FAMILIES",
    "GLM_4V",
    "INTERNVL",
    "LANGUAGE_MODEL",
    "QWEN2_5_OMNI",
    "QWEN2_5_VL",
    "QWEN2_VL",
    "QWEN3_VL",
    "family_of",
]

FAMILIES = (QWEN2_VL, QWEN2_5_VL, QWEN2_5_OMNI, QWEN3_VL, INTERNVL, GLM_4V, DEEPSEEK_VL, LANGUAGE_MODEL)


def family_of(config: Config, where: str = "", way_out: str = "") -> MegatronFamily:
    """The family of a config.json.

    Args:
        config: Its content.
        where: The file, for errors.
        way_out: What else to do about another family's.

    Raises:
        ModelFolderError: No family has this model type.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise ModelFolderError(
        f"is {model_type!r}, whose Megatron-style names are not known",
        where=where,
        key="model_type",
        way_out=f"Known are {known}. {way_out}".rstrip(),
    )
