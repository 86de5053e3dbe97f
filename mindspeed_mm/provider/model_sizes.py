"""The sizes that model.json repeats, compared with the config.json of the model's folder, which is what is built."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_mm.fsdp.params.yaml.tree import MappingEntry, find, plain
from mindspeed_mm.provider.module_names import HubConfig
from mindspeed_mm.provider.reading import Reading

LANGUAGE_SIZES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "vocab_size": ("vocab_size",),
    "kv_channels": ("head_dim",),
    "num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "rope_theta": ("rope_theta",),
    "layernorm_epsilon": ("rms_norm_eps",),
}
"""Key of `text_decoder` → keys of config.json."""
_VISION: dict[str, tuple[str, ...]] = {
    "num_layers": ("depth", "num_hidden_layers"),
    "hidden_size": ("embed_dim", "hidden_size"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
    "ffn_hidden_size": ("intermediate_size",),
    "window_attn_size": ("window_size",),
}
_ONLY_NOTED = frozenset({"layernorm_epsilon", "rope_theta", "ffn_hidden_size of the tower"})
"""What files copy from one another; the folder's value counts, and a person is told."""


def layers_of(config: HubConfig) -> int | None:
    """Number of layers of the language model in a config.json."""
    layers = text_config(config).get("num_hidden_layers")
    if isinstance(layers, int):
        return layers
    return None


def text_config(config: HubConfig) -> HubConfig:
    """The part of a config.json that describes the language model."""
    inner = config.get("thinker_config", config)
    if not isinstance(inner, Mapping):
        return {}
    for name in ("text_config", "language_config", "llm_config"):
        part = inner.get(name)
        if isinstance(part, Mapping):
            return part
    return inner


def compare_language_model(reading: Reading, entry: MappingEntry | None, config: HubConfig, where: str) -> None:
    """Report each size of `text_decoder` that differs from the language model's in the folder's config.json."""
    compare(reading, entry, LANGUAGE_SIZES, text_config(config), "text_decoder", where)


def compare_tower(reading: Reading, entry: MappingEntry | None, config: HubConfig, where: str) -> None:
    """Report each size of `vision_encoder` that differs from `vision_config` in the folder's config.json. Nothing is
    compared where the file has no such section."""
    inner = config.get("thinker_config", config)
    vision = inner.get("vision_config") if isinstance(inner, Mapping) else None
    if isinstance(vision, Mapping):
        compare(reading, entry, _VISION, vision, "image_encoder.vision_encoder", where)


def compare(
    reading: Reading,
    entry: MappingEntry | None,
    table: Mapping[str, tuple[str, ...]],
    config: HubConfig,
    part: str,
    where: str,
) -> None:
    """Name every size of a part of model.json that a folder has otherwise.

    Args:
        reading: Takes the problems.
        entry: The part.
        table: Name in model.json → names in the folder's file.
        config: The folder's file.
        part: The part's name, for messages.
        where: The folder's file, for messages.
    """
    if entry is None:
        return
    for name, others in table.items():
        given = find(entry.node, name)
        known = [config[other] for other in others if config.get(other) is not None]
        if given is None or not known or plain(given.node) in (None, known[0]):
            continue
        tells = f"{part}.{name}  {plain(given.node)}, {where} says {known[0]}"
        of_tower = "" if part == "text_decoder" else " of the tower"
        if {name, f"{name}{of_tower}"} & _ONLY_NOTED:
            reading.draft.note(f"{given.node.place}  {tells}; the folder's value counts.")
        else:
            reading.draft.problem(tells, given.node.place, "The folder is what is built: change model.json.")
