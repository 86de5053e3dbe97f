"""Released sizes of models, and folders small enough for a test in exactly their keys.

`tests/released/*.json` records for each size what its folder holds: the configuration, the processor's settings, and
every tensor as a pattern of keys (N is a number) with its shape. `certainty` says what was read and what was recalled.

One rule shrinks a configuration (`shrunk`): a size is what its key says, wherever the key stands. A layout follows
(`tiny_layout`): transformers' own names for stored keys tell which parameter of the class each key becomes, and each
length of the released shape is replaced by what the class has there when it is small. So the small folder has the
released names, transpositions and fusions, and none of this package's code took part in making it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file

from mindspeed_mm.fsdp.models.loading.folder import OTHERS
from mindspeed_mm.fsdp.params.cards import own_model_types
from tests.helpers.packed_families import TESTED

import transformers  # isort: skip  (after the guard of the line above)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

RELEASED = Path(__file__).resolve().parents[1] / "released"
Config = dict[str, Any]
Shape = tuple[int, ...]

LAYERS = 2
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers")
_CUT: Config = {
    "first_k_dense_replace": 1,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "full_attention_interval": 2,
    "num_nextn_predict_layers": 0,
}
"""What counts layers, besides their number and lists of an entry for each."""
_SIZES: dict[str, Config] = {
    "": {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "mrope_section": [2, 1, 1], "sliding_window": 8, "d_model": 32,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2, "top_k_experts": 2,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "swa_v_head_dim": 8,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "num_mel_bins": 16, "query_pre_attn_scalar": 8, "projection_dim": 32,
    },
    "vision_config": {
        "hidden_size": 48, "embed_dim": 48, "intermediate_size": 80, "num_heads": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 24, "out_hidden_size": 32, "patch_size": 8, "image_size": 32,
        "num_position_embeddings": 64, "window_size": 32,
    },
    "audio_config": {"output_dim": 32, "downsample_hidden_size": 8},
}  # fmt: skip
"""Section → key → size. Twice the width of an expert is not the hidden size, nor is the width: whoever transposes by
shapes would not be seen."""


@dataclass(frozen=True)
class Release:
    """What is recorded of a released size."""

    name: str
    hub: str
    certainty: str
    config: Config
    layout: tuple[Config, ...]
    """`key` (a pattern), `shape`, `n` (how many), and where they vary `other_shapes`; `dtype` of quantised ones."""

    def shapes(self) -> dict[str, list[Shape]]:
        """Pattern → its shapes, without what only quantised folders hold."""
        found: dict[str, list[Shape]] = {}
        for entry in self.layout:
            key, shapes = entry["key"], [tuple(shape) for shape in (entry["shape"], *entry.get("other_shapes", ()))]
            if key.endswith("_blocks"):  # MXFP4: (experts, out, groups, bytes of two numbers); as numbers turned round
                key, ((experts, out, groups, size), *_) = key.removesuffix("_blocks"), shapes
                shapes = [(experts, 2 * groups * size, out)]
            if not key.endswith(("_scale_inv", "_scales")):
                found[key] = shapes
        return found


def release(name: str) -> Release:
    """The record of a size."""
    record = json.loads((RELEASED / f"{name}.json").read_text(encoding="utf-8"))
    return Release(name, record["hub"], record["certainty"], record["config"], tuple(record["layout"]))


def shallow(config: Config) -> Config:
    """The configuration with two layers of every kind, of the released widths."""
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype", "dtype")}
    depth = max((config[key] for key in _DEPTHS if isinstance(config.get(key), int)), default=0)
    return {key: _cut(key, value, depth) for key, value in config.items()}


def _cut(key: str, value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        return shallow(value)
    if key in _DEPTHS:
        return LAYERS
    if key in _CUT and value:
        return _CUT[key]
    if isinstance(value, list) and len(value) == depth and value:  # an entry for each layer: one of each kind stays
        return [value[0], next((other for other in value if other != value[0]), value[0])]
    return value


def shrunk(config: Config, section: str = "") -> Config:
    """The configuration with every size that `_SIZES` knows made small."""
    small = _SIZES[""] | _SIZES.get(section, {})
    made = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = shrunk(value, key if key.endswith("_config") else section)
        else:
            made[key] = small[key] if key in small and value is not None else value
    return made


def merged(config: Config, changes: Config) -> Config:
    """Changes, section by section; None takes a key out."""
    made = dict(config)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = merged(made[key], value)
        elif value is None:
            made.pop(key, None)
        else:
            made[key] = value
    return made


def require(model_type: str) -> None:
    """Let transformers know a family that is written here; skip the test where an older release lacks the type."""
    for module in own_model_types().get(model_type, ()):
        importlib.import_module(module).tell_transformers()
    if model_type not in CONFIG_MAPPING and Version(transformers.__version__) < TESTED:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


def on_meta(config: Config) -> Any:
    """transformers' model of a configuration, or ours, without weights."""
    require(config["model_type"])
    whole = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    kind = getattr(whole, "thinker_config", whole)
    with torch.device("meta"):
        return class_of(kind)(kind)


def class_of(kind: Any) -> Any:
    """transformers' class of a configuration, or ours where transformers has none."""
    name = (kind.architectures or [""])[0]
    autos = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    known = next((auto._model_mapping for auto in autos if type(kind) in auto._model_mapping), {})
    return getattr(transformers, name, None) or known[type(kind)]


class Names:
    """What transformers makes of stored keys.

    Args:
        model: Of transformers.
    """

    def __init__(self, model: Any) -> None:
        rules = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._known = dict.fromkeys(model.state_dict(), True)

    def parameters(self, key: str) -> list[str]:
        """The parameters or buffers that a stored key is read into: one, or several that it is taken apart into."""
        target, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._known)
        if target in self._known:
            found = [target]
        else:
            first = next((c.target_patterns[0] for c in self._converters if pattern in c.source_patterns), None)
            others = next((c.target_patterns for c in self._converters if pattern in c.source_patterns), ())
            found = [target.replace(first, other) for other in others] if first else []
        return [name for name in found if name in self._known]


def tiny_layout(record: Release, full: Config, tiny: Config) -> dict[str, Shape]:
    """Key → shape of the small folder.

    Args:
        record: Of the released size.
        full: Configuration of the released widths, `shallow`.
        tiny: The same `shrunk`.

    Raises:
        AssertionError: A pattern stands for nothing in the class, or its shape is not the class's.
    """
    wide = {name: tuple(tensor.shape) for name, tensor in on_meta(full).state_dict().items()}
    model = on_meta(tiny)
    small = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = Names(model)
    made: dict[str, Shape] = {}
    for pattern, shapes in record.shapes().items():
        for key in _filled(pattern, _experts(tiny)):
            if targets := names.parameters(key):
                made[key] = _small_shape(key, shapes, [(wide[name], small[name]) for name in targets])
    found = {_pattern(key) for key in made}
    unknown = [key for key in record.shapes() if _pattern(key) not in found]
    ignored = [re.compile(regex) for regex in (*(model._keys_to_ignore_on_load_unexpected or ()), OTHERS)]
    lost = sorted(key for key in unknown if not any(regex.search(key) for regex in ignored))
    assert not lost, f"{record.name}: the class has no place for {lost}"
    beside = {pattern.replace(".N", ".0"): (2,) * len(record.shapes()[pattern][0]) for pattern in unknown}
    return made | beside  # of what the class passes over one tensor of each kind


def _experts(config: Config) -> int:
    text = config.get("thinker_config", config).get("text_config", config)
    return next((text[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0)


def _filled(pattern: str, experts: int) -> Iterator[str]:
    """The keys that a pattern may stand for: two layers, all experts, places 0 to 4 of what is no layer."""
    parts = pattern.split(".")
    choices: list[Sequence[str]] = []
    for number, part in enumerate(parts):
        if part != "N":
            choices.append([part])
        elif parts[number - 1] == "experts":
            choices.append([str(n) for n in range(experts)])
        else:
            choices.append([str(n) for n in range(5)])
    for filled in itertools.product(*choices):
        yield ".".join(filled)


def _pattern(key: str) -> str:
    """A key with N for its numbers, as the records write it."""
    parts = key.split(".")
    return ".".join("N" if part.isdecimal() else part for part in parts)


def _small_shape(key: str, shapes: Sequence[Shape], targets: Sequence[tuple[Shape, Shape]]) -> Shape:
    """The shape of a stored tensor of the small model.

    A shape that is the parameter's is replaced by the small one as a whole. Otherwise, where tensors are fused or
    turned round, each length by what the parameter has for it; a length that is 2 or 3 times one of the parameter's, or
    a half of it, stays so.
    """
    wide, small = targets[0]
    if wide in shapes:
        return small
    for shape in shapes:
        lengths = [_small_length(length, len(shape) - n, wide, small) for n, length in enumerate(shape)]
        if None not in lengths:
            return tuple(length for length in lengths if length is not None)
    raise AssertionError(f"{key} is released with {list(shapes)}, the class has {wide}")


def _small_length(length: int, behind: int, wide: Shape, small: Shape) -> int | None:
    """`behind`: which place the length has, counted from the last one; the parameter's own length of that place is
    looked at first."""
    pairs = list(zip(wide, small, strict=True))
    own = pairs[-behind:][:1] if behind <= len(pairs) else []
    for candidates in (own, pairs):
        for w, s in candidates:
            if length in (w, 2 * w, 3 * w):
                return s * (length // w)
            if 2 * length == w:
                return s // 2
    return 1 if length == 1 else None


def write_weights(folder: Path, layout: Mapping[str, Shape], seed: int = 0, *, gain: float = 0.2) -> None:
    """Random weights under the keys of a layout, fp32; norms are around one."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for key in sorted(layout):
        values = torch.randn(layout[key], generator=draw) * gain
        tensors[key] = values + 1 if len(layout[key]) == 1 and key.endswith("weight") else values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
