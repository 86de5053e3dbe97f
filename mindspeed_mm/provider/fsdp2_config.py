"""fsdp2_config.yaml, and the file of --layerzero-config: how a model is sharded, by the names that those files use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import Node, SourcePosition, plain
from mindspeed_mm.provider.draft import derived
from mindspeed_mm.provider.module_names import patterns_of
from mindspeed_mm.provider.reading import Reading

_PLAN = "parallel.fsdp_plan"
_SHARDS = "parallel.fully_shard_parallel_size"

_AS_THEY_ARE = {
    "param_dtype": f"{_PLAN}.param_dtype",
    "reduce_dtype": f"{_PLAN}.reduce_dtype",
    "output_dtype": f"{_PLAN}.output_dtype",
    "cast_forward_inputs": f"{_PLAN}.cast_forward_inputs",
    "reshard_after_forward": f"{_PLAN}.reshard_after_forward",
    "offload_to_cpu": f"{_PLAN}.cpu_offload",
    "pin_memory": f"{_PLAN}.pin_memory",
    "num_to_forward_prefetch": f"{_PLAN}.num_to_forward_prefetch",
    "num_to_backward_prefetch": f"{_PLAN}.num_to_backward_prefetch",
    "expert_parallel_size": "parallel.expert_parallel_size",
}
_PATTERNS = {
    "sub_modules_to_wrap": f"{_PLAN}.apply_modules",
    "ignored_modules": f"{_PLAN}.ignored_modules",
    "recompute_modules": "features.recompute_plan.apply_modules",
    "moe_modules": "parallel.ep_plan.apply_modules",
}
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "bfloat16": "bf16"}
FSDP2_KEYS = (
    *_AS_THEY_ARE,
    *_PATTERNS,
    "sharding_size",
    "use_reentrant",
    "reshard_local_experts",
    "align_fsdp_param_groups",
)
"""Every key of fsdp2_config.yaml."""


def put_fsdp2_config(reading: Reading) -> None:
    """What fsdp2_config.yaml asks for; without a file, its defaults."""
    given = _settings(reading, "fsdp2_config_path", FSDP2_KEYS)
    for name, key in _AS_THEY_ARE.items():
        if name in given:
            node = given[name]
            reading.draft.put(key, _dtype(plain(node)), node.place)
    _put_group_size(reading, given.get("sharding_size"), "sharding_size")
    for name, key in _PATTERNS.items():
        if name in given:
            _put_patterns(reading, key, given[name])
    _put_recomputation(reading, given)
    local = given.get("reshard_local_experts")
    if local is not None and plain(local) is False:
        reading.draft.put("parallel.expert_fully_shard_parallel_size", 1, local.place)


def put_layerzero_config(reading: Reading) -> None:
    """What the file of --layerzero-config asks for."""
    known = ("zero3_size", "transformer_layers", "backward_prefetch", "param_dtype", "reduce_dtype", "forward_prefetch",
             "limit_all_gathers", "ignored_modules", "offload_grads", "ckpt_load_path", "autocast_input",
             "autocast_output", "buffer_dtype", "layerzero_modules", "verify_module_states")  # fmt: skip
    given = _settings(reading, "layerzero_config", known)
    draft = reading.draft
    _put_group_size(reading, given.get("zero3_size"), "zero3_size")
    for name in ("param_dtype", "reduce_dtype"):
        if name in given:
            draft.replace(_AS_THEY_ARE[name], _dtype(plain(given[name])), given[name].place)
    if "forward_prefetch" in given:
        ahead = int(plain(given["forward_prefetch"]) is True)
        draft.replace(f"{_PLAN}.num_to_forward_prefetch", ahead, given["forward_prefetch"].place)
    if plain(given.get("backward_prefetch", Node(None, draft.root.place))) == "BACKWARD_PRE":
        draft.replace(f"{_PLAN}.num_to_backward_prefetch", 1, given["backward_prefetch"].place)
    if "ignored_modules" in given:
        _put_patterns(reading, f"{_PLAN}.ignored_modules", given["ignored_modules"])


def _settings(reading: Reading, flag: str, known: tuple[str, ...]) -> dict[str, Node]:
    """The keys of a file that are given, each with its place; unknown ones are problems."""
    path = reading.value(flag)
    if path is None:
        return {}
    try:
        root = parse_yaml(read_config_text(Path(path)), path).root
    except ConfigError as error:
        reading.draft.problems += error.problems
        return {}
    if not isinstance(root.value, dict):
        reading.draft.problem("holds no keys", root.place, "It begins with 'sharding_size:' …")
        return {}
    given = {}
    for name, entry in root.value.items():
        if name not in known:
            reading.draft.problem(f"'{name}' is not a key of this file", entry.key, did_you_mean(name, known).strip())
        elif entry.node.value is not None:
            given[name] = entry.node
    return given


def _dtype(value: Any) -> Any:
    """A type by our name, where it is one by torch's."""
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _put_group_size(reading: Reading, node: Node | None, name: str) -> None:
    """The ranks of a sharding group; ours holds all ranks of a sequence, and of experts."""
    of_both = math.lcm(reading.context, reading.size("expert_parallel_size"))
    if node is None:
        reading.draft.put(_SHARDS, of_both, derived(f"{name} 1"))
        reading.draft.note(f"{name} is not given: 1, every rank holds the whole model. auto shards it over all.")
        return
    value = plain(node)
    if value == "auto":
        reading.draft.put(_SHARDS, "auto", node.place)
    elif isinstance(value, int) and value >= 1:
        size = math.lcm(value, of_both)
        place = node.place if size == value else derived(f"{name} {value}")
        reading.draft.put(_SHARDS, size, place)
    else:
        reading.draft.problem(f"{name} is {show(value)}", node.place, "Write auto, or a whole number from 1.")


def _put_patterns(reading: Reading, key: str, node: Node) -> None:
    patterns: dict[str, SourcePosition] = {}
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str):
            reading.draft.problem(f"{show(plain(item))} is not a pattern", item.place, "Write a list of names.")
            return
        if reading.is_generator and item.value in ("ae", "text_encoder", "image_encoder", "diffusion"):
            continue  # the folder's other parts stand outside of the model that is trained
        patterns |= dict.fromkeys(patterns_of(item.value, reading.names), item.place)
    nodes: list[Any] = [Node(pattern, place) for pattern, place in patterns.items()]
    if nodes:
        reading.draft.replace(key, Node(nodes, node.place), node.place)


def _put_recomputation(reading: Reading, given: dict[str, Node]) -> None:
    modules = given.get("recompute_modules")
    if modules is None:
        return
    reading.draft.put("features.recompute", True, modules.place)
    reentrant = given.get("use_reentrant")
    if reentrant is not None:
        reading.draft.put("features.recompute_plan.use_reentrant", plain(reentrant), reentrant.place)
    else:
        reading.draft.fill("features.recompute_plan.use_reentrant", True, "the default of use_reentrant")
