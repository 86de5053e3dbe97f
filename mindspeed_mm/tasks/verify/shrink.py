"""Makes a model's configuration small without changing what it is made of: the same classes and kinds of layers, fewer
of them and narrower ones, as few and as narrow as the parallel plan can still divide.

Works on `config.json` (or a transformer's of diffusers) as plain data; settings that nothing is known of stay as they
are, the vocabulary among them: the tokenizer is the user's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.core.config_path import dotted

Config = dict[str, Any]


@dataclass(frozen=True)
class Room:
    """What the plan has to divide."""

    stages: int = 1
    """Pieces that the decoder's layers are cut into."""
    tensor: int = 1
    """Ranks that heads and features are cut over."""
    experts: int = 1
    """Ranks that experts are dealt to."""


@dataclass(frozen=True)
class Shrunk:
    """A configuration that was made smaller, and the settings that changed."""

    config: Config
    changes: dict[str, tuple[Any, Any]]
    """Dotted setting → (before, now)."""


FEWEST_LAYERS = 2
NARROW_HEADS, HEADS_OF_THREE_AXES = (16, 32, 64), (24, 48)
MOST_EXPERTS_CHOSEN = 2
FEWEST_EXPERTS = 4

_LAYERS = (
    "num_hidden_layers", "num_layers", "num_single_layers", "depth", "n_layer", "n_layers", "encoder_layers",
    "decoder_layers", "num_encoder_layers", "num_decoder_layers", "vt_num_hidden_layers",
)  # fmt: skip
_UNCUT_LAYERS = ("layers",)
"""Names of counts that stay."""
_PERIODS = (
    "decoder_sparse_step", "full_attention_interval", "sliding_window_pattern", "interleave_moe_layer_step",
    "moe_layer_freq", "attn_layer_period", "expert_layer_period", "no_rope_layer_interval",
)  # fmt: skip
"""Every so many layers one is of another kind."""
_DENSE_ONES = "first_k_dense_replace"
"""How many layers, from the first, have no experts."""
_LAYER_NUMBERS = re.compile(r"(indexes|indices|_layers|layer_ids)$")
"""Names of lists that hold numbers of layers."""
_NAMES_LAYERS = re.compile(r"indexes|indices|layer")
"""Names of lists that may hold numbers of another section's layers, also counted from the last one."""
_COUNTED_FROM_ONE = "linear_attn_config"
"""A section whose lists hold such numbers counted from 1, of the section's layers around it (Kimi Linear, Kimi-K3)."""
_HEADS = ("num_attention_heads", "num_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_WIDTHS = ("head_dim", "attention_head_dim")
_LATENT_ATTENTION = "kv_lora_rank"
"""With it, widths of heads are settings of their own, which stay."""
_ROTARY_PARTS = {"mrope_section": 1, "axes_dims_rope": 2, "axes_dim_rope": 2, "rope_axes_dim": 2, "axes_dims": 2}
"""Lists of widths that make up a head's → what each must be a multiple of."""
_WIDTHS = ("embed_dim", "hidden_size", "dim")
_REPEATED_WIDTHS = ("caption_projection_dim", "cross_attention_dim")
"""Where transformers of generators repeat how wide their layers are."""
_STREAM = "audio_"
"""What settings of a second stream begin with, beside those of the first (LTX-2)."""
_WINDOWED = "swa_"
"""What settings of layers with a window begin with, beside those of the others (MiMo-V2.5)."""
_TEXT_WIDTHS = ("out_hidden_size", "text_hidden_size", "llm_hidden_size", "lm_hidden_size", "output_dim", "hidden_size")
"""Where other sections repeat the width of the text."""
_INNER_WIDTHS = ("intermediate_size", "ffn_dim", "mlp_dim", "ffn_hidden_size")
_EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


def shrink(
    config: Mapping[str, object], room: Room, *, layers: bool = True, heads: int | None = NARROW_HEADS[0]
) -> Shrunk:
    """The smallest configuration with every kind of layer that the plan can divide.

    All layers stay where a list holds numbers of layers that would be gone (Granite 4 Vision's, which a tower feeds).

    Args:
        config: The whole `config.json`.
        room: What the plan divides.
        layers: Whether there may be fewer layers.
        heads: The narrowest width of a head; None: all widths stay.
    """
    small = deepcopy(dict(config))
    if layers:
        for name, part in _parts(small):
            fewest = FEWEST_LAYERS
            if not _is_tower(name):
                fewest = max(FEWEST_LAYERS, room.stages)
            for key in _counts_in(part, _LAYERS):
                _cut_layers(part, key, fewest)
        if _has_lost_layers(small):
            small = deepcopy(dict(config))
    for _, part in _parts(small):
        _cut_experts(part, room.experts)
    if heads is not None:
        _narrow_all(small, room.tensor, heads)
    return Shrunk(small, dict(_differences(config, small)))


def _narrow_all(small: Config, ranks: int, narrowest: int) -> None:
    """Narrow every section, and what other sections repeat of the text's width."""
    parts = list(_parts(small))
    text = small
    for name, part in parts:
        if name.endswith(("text_config", "llm_config")):
            text = part
            break
    text_width = text.get("hidden_size")
    for _, part in parts:
        before = dict(part)
        _narrow(part, ranks, narrowest)
        _narrow_windowed(part, before)
        _narrow_stream(part, ranks, narrowest)
    if text_width is None:
        return
    for part in _tables(small):
        if part is text:
            continue
        for key in _TEXT_WIDTHS:
            if part.get(key) == text_width and key != _width_key(part):
                part[key] = text["hidden_size"]


def without_dropout(config: Mapping[str, object]) -> Shrunk:
    """The configuration with every probability of dropping something at 0."""
    still = deepcopy(dict(config))
    for part in _tables(still):
        for key, value in part.items():
            if is_rate(key, value):
                part[key] = 0.0
    return Shrunk(still, dict(_differences(config, still)))


def is_rate(key: object, value: object) -> bool:
    """Whether a setting is the probability of dropping something, and not 0. Tables of labels have numbers as keys."""
    if not isinstance(key, str) or not any(word in key for word in ("dropout", "drop_path", "layerdrop")):
        return False
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0


def _parts(section: Config, name: str = "") -> Iterator[tuple[str, Config]]:
    """The sections that describe modules, each with the names that lead to it."""
    yield name, section
    for key, value in section.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            yield from _parts(value, dotted(name, key))


def _tables(value: object) -> Iterator[Config]:
    """Every table in a configuration, itself first."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _tables(each)


def _is_tower(name: str) -> bool:
    return re.search("vision|visual|audio", name) is not None


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _counts_in(part: Config, keys: Sequence[str]) -> list[str]:
    """Those of the settings that the section has, as whole numbers above 0."""
    return [key for key in keys if _is_whole_number(part.get(key))]


def _first_count(part: Config, keys: Sequence[str]) -> str | None:
    """Return the first of these keys whose value is a positive integer; None without one."""
    for key in keys:
        if _is_whole_number(part.get(key)):
            return key
    return None


# --- layers -----------------------------------------------------------------------------------------------------------


def _cut_layers(part: Config, key: str, fewest: int) -> None:
    """Keep the first layer of every kind, and as many more from the front as are needed."""
    count = part[key]
    chosen = _chosen_layers(part, count, fewest)
    if len(chosen) == count:
        return
    if _is_whole_number(part.get(_DENSE_ONES)):
        part[_DENSE_ONES] = sum(layer < part[_DENSE_ONES] for layer in chosen)
    for name, value in list(part.items()):
        if _is_list_of_layers(value, count):
            part[name] = [value[layer] for layer in chosen]
        elif _is_list_of_numbers(name, value, count):
            part[name] = [place for place, layer in enumerate(chosen) if layer in value]
    for name, numbers in _lists_from_one(part):
        part[_COUNTED_FROM_ONE][name] = [place for place, layer in enumerate(chosen, start=1) if layer + 1 in numbers]
    part[key] = len(chosen)


def _chosen_layers(part: Config, count: int, fewest: int) -> list[int]:
    period = max((part[key] for key in _counts_in(part, _PERIODS)), default=1)
    kinds = [_kind(part, layer, count) for layer in range(count)]
    firsts = {kinds.index(kind) for kind in kinds}
    if period > 1:  # what repeats counts from the first layer: nothing between may go
        return list(range(min(count, max(fewest, period, max(firsts) + 1))))
    for layer in range(count):
        if len(firsts) >= fewest:
            break
        firsts.add(layer)
    return sorted(firsts)


def _kind(part: Config, layer: int, count: int) -> tuple[object, ...]:
    """What tells a layer from others: layers of one kind are equal in all of it."""
    facts: list[object] = []
    if _is_whole_number(part.get(_DENSE_ONES)):
        facts.append(layer < part[_DENSE_ONES])
    for name, value in part.items():
        if _is_list_of_layers(value, count):
            facts.append(value[layer])
        elif _is_list_of_numbers(name, value, count):
            facts.append(layer in value)
    facts += [layer + 1 in numbers for _, numbers in _lists_from_one(part)]
    return tuple(facts)


def _lists_from_one(part: Config) -> list[tuple[str, list[int]]]:
    """Name and content of lists that hold numbers of layers counted from 1."""
    section = part.get(_COUNTED_FROM_ONE)
    if not isinstance(section, dict):
        return []
    return [(name, value) for name, value in section.items() if isinstance(value, list) and _LAYER_NUMBERS.search(name)]


def _is_list_of_layers(value: object, count: int) -> bool:
    """Whether it has one plain value for each layer."""
    if not isinstance(value, list) or not len(value) == count > 1:
        return False
    return all(each is None or isinstance(each, str | int | float) for each in value)


def _is_list_of_numbers(name: str, value: object, count: int) -> bool:
    """Whether it holds numbers of some of the layers."""
    if not isinstance(value, list) or not _LAYER_NUMBERS.search(name):
        return False
    return 0 < len(value) < count and all(isinstance(each, int) and 0 <= each < count for each in value)


def _has_lost_layers(config: Config) -> bool:
    """Whether a list in a configuration whose layers were cut holds numbers of layers that are gone."""
    most = max((part[key] for _, part in _parts(config) for key in _counts_in(part, _LAYERS)), default=0)
    for table in _tables(config):
        # A section that is not cut has a list of its own layers and their count (DeepSeek-OCR's towers).
        left = max([most, *(table[key] for key in _counts_in(table, _UNCUT_LAYERS))])
        for name, value in table.items():
            if not isinstance(value, list) or not _NAMES_LAYERS.search(name):
                continue
            # Hidden states are one more than layers; from the last one, numbers are negative.
            if any(not -left - 1 <= number <= left for number in _whole_numbers(value)):
                return True
    return False


def _whole_numbers(values: Sequence[object]) -> Iterator[int]:
    """The whole numbers in a list, however nested."""
    for value in values:
        if isinstance(value, list):
            yield from _whole_numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


# --- experts ----------------------------------------------------------------------------------------------------------


def _cut_experts(part: Config, ranks: int) -> None:
    """Fewer experts, of which fewer are chosen; groups of experts, where there are, become fewer too."""
    key = _first_count(part, _EXPERTS)
    if key is None or part[key] % ranks:
        return
    chosen = _first_count(part, _CHOSEN)
    is_grouped = _is_whole_number(part.get("n_group"))
    most = groups = 1
    if chosen:
        most = min(part[chosen], MOST_EXPERTS_CHOSEN)
    if is_grouped:
        groups = min(part["n_group"], 2)
    fewest = _up_to_multiple(max(FEWEST_EXPERTS, 2 * most), math.lcm(ranks, groups))
    if fewest >= part[key]:
        return
    part[key] = fewest
    if chosen:
        part[chosen] = most
    if is_grouped:
        part |= {"n_group": groups, "topk_group": min(part.get("topk_group", 1), groups)}


# --- widths -----------------------------------------------------------------------------------------------------------


def _narrow(part: Config, ranks: int, narrowest: int) -> None:
    """Fewer and narrower heads, and with them narrower layers."""
    heads_key = _first_count(part, _HEADS)
    width_key = _width_key(part)
    head_key = _first_count(part, _HEAD_WIDTHS)
    if heads_key is None:
        return
    if head_key:
        head = part[head_key]
    elif width_key:
        head = part[width_key] // part[heads_key]
    else:
        return
    repeated = [key for key in _counts_in(part, _REPEATED_WIDTHS) if part[key] == part[heads_key] * head]
    heads, key_heads = _fewer_heads(part[heads_key], _key_heads(part), ranks)
    narrow = head if _LATENT_ATTENTION in part else _narrower_head(part, head, narrowest)
    part[heads_key] = heads
    for key in _counts_in(part, _KEY_HEADS):
        part[key] = key_heads
    if head_key:
        part[head_key] = narrow
    _scale_rotary_parts(part, narrow, head)
    width = heads * narrow
    if width_key:
        width = part[width_key] = min(width, part[width_key])
    part |= dict.fromkeys(repeated, width)
    inner = dict.fromkeys(_INNER_WIDTHS, 2 * width) | dict.fromkeys(_EXPERT_WIDTHS, width)
    for key in _counts_in(part, list(inner)):
        if part[key] % ranks == 0:
            part[key] = min(part[key], _up_to_multiple(inner[key], math.lcm(ranks, 8)))


def _narrow_stream(part: Config, ranks: int, narrowest: int) -> None:
    """The same of the second stream in a section."""
    stream = {key.removeprefix(_STREAM): value for key, value in part.items() if key.startswith(_STREAM)}
    _narrow(stream, ranks, narrowest)
    part |= {f"{_STREAM}{key}": value for key, value in stream.items()}


def _narrow_windowed(part: Config, before: Mapping[str, object]) -> None:
    """Settings of layers with a window become smaller as those of the others did."""
    for key in list(part):
        other = key.removeprefix(_WINDOWED)
        if other != key and _is_whole_number(part[key]) and _is_whole_number(before.get(other)):
            part[key] = part[key] * part[other] // before[other]


def _width_key(part: Config) -> str | None:
    """The setting that says how wide a section's own layers are."""
    if _counts_in(part, _HEADS):
        return _first_count(part, _WIDTHS)
    return None


def _key_heads(part: Config) -> int | None:
    key = _first_count(part, _KEY_HEADS)
    if key:
        return part[key]
    return None


def _fewer_heads(heads: int, key_heads: int | None, ranks: int) -> tuple[int, int]:
    """(heads, key-value heads): two of the latter, or as many as the ranks divide; two of the former to each, if there
    were more than one."""
    keys = key_heads or heads
    if keys % ranks or heads % keys:
        return heads, keys  # the plan does not fit: let the trainer say so
    fewer = min(keys, _up_to_multiple(min(2, keys), ranks))
    return fewer * min(2, heads // keys), fewer


def _narrower_head(part: Config, head: int, narrowest: int) -> int:
    """The narrowest head, of `narrowest` features at least, that rotary positions fit: its turned share is an even
    number of features, and each of the parts that they are cut into, scaled with the head, stays a multiple of its
    step."""
    share = part.get("partial_rotary_factor")
    if not isinstance(share, int | float):
        share = 1
    # A multiple of six may be three axes of an even number of features each.
    for width in NARROW_HEADS if head % 6 else HEADS_OF_THREE_AXES:
        turned = width * share
        if not narrowest <= width < head or turned % 2:
            continue
        if all(size * width % (head * step) == 0 for size, step in _rotary_sizes(part)):
            return width
    return head


def _rotary_parts(part: Config) -> Iterator[tuple[Config, str]]:
    """The tables, with the setting, that hold the parts of rotary positions."""
    for table in _own_tables(part):
        for key in _ROTARY_PARTS:
            if isinstance(table.get(key), list):
                yield table, key


def _rotary_sizes(part: Config) -> Iterator[tuple[int, int]]:
    """Each part of rotary positions, and what it must be a multiple of."""
    for table, key in _rotary_parts(part):
        for size in table[key]:
            yield size, _ROTARY_PARTS[key]


def _scale_rotary_parts(part: Config, narrow: int, head: int) -> None:
    for table, key in _rotary_parts(part):
        table[key] = [size * narrow // head for size in table[key]]


def _own_tables(part: Config) -> Iterator[Config]:
    """A section and its tables that are not sections of other modules."""
    yield part
    for key, value in part.items():
        if not key.endswith("_config"):
            yield from _tables(value)


def _up_to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


# --- what changed -----------------------------------------------------------------------------------------------------


def _differences(
    before: Mapping[str, object], now: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in now.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, Mapping):
            yield from _differences(old, value, f"{prefix}{key}.")
        elif value != old:
            yield f"{prefix}{key}", (old, value)
