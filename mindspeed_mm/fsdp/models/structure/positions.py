"""How many tokens a model takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.model_parts import attribute_at

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_STRETCHED = ("linear", "dynamic", "yarn")


def longest_of(config: PreTrainedConfig) -> int | None:
    """Positions of the language model, question and answer together; None where its configuration does not say.

    Rotary positions that are stretched by a factor reach further than `max_position_embeddings`, which some
    configurations keep as it was trained: counted is what vLLM counts.
    """
    text = config.get_text_config()
    longest = attribute_at(text, "max_position_embeddings")
    if not longest:
        return None
    rope = attribute_at(text, "rope_parameters", {})
    if rope.get("rope_type") in _STRETCHED and rope.get("factor"):
        trained = rope.get("original_max_position_embeddings") or longest
        return max(int(longest), int(trained * rope["factor"]))
    return int(longest)


def rope_border(config: PreTrainedConfig) -> int | None:
    """Positions up to which rows of a pass do not change one another's rotary frequencies; None where they never do.

    transformers takes those of `dynamic` and `longrope` from the largest position of the whole batch.
    """
    text = config.get_text_config()
    rope = attribute_at(text, "rope_parameters", {}) or {}
    of_layer_types = [value for value in rope.values() if isinstance(value, dict)]
    borders = []
    for each in (rope, *of_layer_types):
        if "dynamic" in str(each.get("rope_type")):
            borders.append(int(text.max_position_embeddings))
        elif each.get("rope_type") == "longrope":
            borders.append(int(each.get("original_max_position_embeddings") or text.max_position_embeddings))
    return min(borders, default=None)
