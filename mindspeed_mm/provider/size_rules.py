"""Rules for the flags that spread a model and a batch over ranks, and for the files that say how a model is sharded:
fsdp2_config.yaml, and the file of --layerzero-config, by the names that those files use."""

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
from mindspeed_mm.provider.module_names import patterns_of
from mindspeed_mm.provider.reading import Reading, derived

_DISPATCHERS = {
    "allgather": "allgather",
    "alltoall": "alltoall",
    "alltoall_seq": "alltoall",
    "alltoall_mc2": "mc2",
    "flex": "deepep",
}
_SEQUENCE_NORMS = ["*.layers.{*}.input_layernorm", "*.layers.{*}.post_attention_layernorm"]
_ALGORITHMS = ("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo")


def ranks(reading: Reading) -> None:
    """The number of ranks must be a multiple of those that work on the same rows."""
    world, together = reading.given.world_size, reading.model_ranks
    sizes = (
        f"TP {reading.size('tensor_parallel_size')} x PP {reading.size('pipeline_parallel_size')} x "
        f"CP {reading.context} = {together}"
    )
    if world is None:
        return
    if world < together:
        reading.draft.problem(f"{world} ranks are fewer than {sizes}", way_out="Start more ranks, or lower a size.")
    elif world % together:
        reading.draft.problem(f"{world} ranks are not a multiple of {sizes}", way_out="Change one of them.")


def context_sizes(reading: Reading) -> None:
    """Who shares a sequence, and how."""
    size, algorithm = reading.context, reading.value("context_parallel_algo")
    degree = reading.value("ulysses_degree_in_cp")
    if 1 < reading.sharing_stages == size:  # no rank but those of stages shares a sequence
        algorithm = "ulysses_cp_algo"
    elif degree is not None:
        degree *= reading.sharing_stages
    place, draft = reading.place("context_parallel_algo"), reading.draft
    if algorithm not in _ALGORITHMS:
        way_out = f"{did_you_mean(algorithm, _ALGORITHMS)}There are {', '.join(_ALGORITHMS)}."
        draft.problem(f"'{algorithm}' is not built", place, way_out)
        return
    if degree is not None and algorithm != "hybrid_cp_algo":
        draft.note("--ulysses-degree-in-cp acts with --context-parallel-algo hybrid_cp_algo alone.")
    place = derived(f"--context-parallel-size {size}, {algorithm}")
    if reading.sharing_stages > 1:
        stages = f"--pipeline-model-parallel-size {reading.sharing_stages}"
        place = derived(f"{stages} x --context-parallel-size {size // reading.sharing_stages}, {algorithm}")
    if algorithm == "hybrid_cp_algo" and size > 1:
        if not degree or size % degree:
            what = "is not given, but it divides"
            if degree:
                what = f"{degree} does not divide"
            draft.problem(f"{what} --context-parallel-size {size}", reading.place("ulysses_degree_in_cp"))
            return
        draft.put("parallel.ulysses_parallel_size", degree, place)
        draft.put("parallel.ring_attention_size", size // degree, place)
    elif size > 1:
        key = "ring_attention_size"
        if algorithm == "ulysses_cp_algo":
            key = "ulysses_parallel_size"
        draft.put(f"parallel.{key}", size, place)


def accumulation(reading: Reading) -> None:
    """Forward passes in a step: the global batch divided by what all ranks take at once."""
    key, draft = "training.gradient_accumulation_steps", reading.draft
    micro, wanted = draft.value("training.micro_batch_size"), reading.value("global_batch_size")
    if wanted is None or not isinstance(micro, int) or micro < 1:
        return
    # samples of all data ranks in one forward pass
    at_once = micro * reading.data_ranks
    place = reading.place("global_batch_size")
    if reading.given.world_size is None:
        draft.note(
            f"The number of ranks is not given: {reading.model_ranks} is taken, which is one data rank. "
            "Set WORLD_SIZE, or give --nproc_per_node and --nnodes."
        )
    if wanted < 1 or wanted % at_once:
        below, above = wanted // at_once * at_once, (wanted // at_once + 1) * at_once
        nearest = ", ".join(str(size) for size in (below, above) if size > 0)
        what = f"{wanted} is not a multiple of {micro} x {reading.data_ranks} data ranks"
        draft.problem(what, place, f"Nearest: {nearest}.")
        return
    draft.put(key, wanted // at_once, derived(f"{place} {wanted} / ({micro} x {reading.data_ranks} data ranks)"))


def pipeline_schedule(reading: Reading) -> None:
    """Interleaved where chunks are asked for; all forward passes first where micro-batches are fewer than stages."""
    stages, draft = reading.size("pipeline_parallel_size"), reading.draft
    older, newer = "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
    name = older
    if reading.has(newer):
        name = newer
    chunks, place = reading.value(name, 1), reading.place(name)
    if reading.sharing_stages > 1:
        return
    if chunks > 1 and stages == 1:
        draft.problem(f"{chunks}, but there is one pipeline stage", place, "Leave it out.")
    elif chunks > 1:
        draft.put("parallel.pp_plan.schedule", "interleaved1f1b", place)
        draft.put("parallel.pp_plan.virtual_stages", chunks, place)
    elif stages > 1 and draft.value("training.gradient_accumulation_steps", 1) < stages:
        draft.fill("parallel.pp_plan.schedule", "gpipe", f"fewer micro-batches than {stages} stages")


def token_dispatcher(reading: Reading) -> None:
    """How tokens reach experts on other ranks."""
    name, place = reading.value("moe_token_dispatcher_type"), reading.place("moe_token_dispatcher_type")
    if name not in _DISPATCHERS:
        hint = did_you_mean(name, _DISPATCHERS)
        reading.draft.problem(f"'{name}' is not one of {', '.join(_DISPATCHERS)}", place, hint.strip())
    elif reading.has("moe_token_dispatcher_type"):
        reading.draft.put("parallel.ep_plan.dispatcher", _DISPATCHERS[name], place)
    elif reading.size("expert_parallel_size") > 1:
        words = "Megatron's default of --moe-token-dispatcher-type"
        reading.draft.fill("parallel.ep_plan.dispatcher", _DISPATCHERS[name], words)


def whole_experts(reading: Reading) -> None:
    """Each expert lies on one rank of a tensor group."""
    size = reading.value("expert_tensor_parallel_size", 1)
    if size != 1:
        way_out = "Leave it out: --expert-model-parallel-size divides the experts among ranks."
        reading.draft.problem(f"{size} is not built", reading.place("expert_tensor_parallel_size"), way_out)


def sequence_parallel(reading: Reading) -> None:
    """Norms between the layers of a tensor group run on a slice of the sequence."""
    if not reading.value("sequence_parallel"):
        return
    if reading.size("tensor_parallel_size") == 1:
        reading.draft.note("--sequence-parallel has no effect with --tensor-model-parallel-size 1.")
    elif reading.is_generator:
        reading.draft.note(
            "--sequence-parallel has no effect on a generator: its norms see whole sequences. This takes memory, and "
            "changes no number."
        )
    else:
        place = reading.place("sequence_parallel")
        reading.draft.put("parallel.tp_plan.sequence_parallel", _SEQUENCE_NORMS, place)


def sharding(reading: Reading) -> None:
    """Who holds which part of weights, gradients and optimizer states."""
    chosen = reading.set_ones("use_torch_fsdp2", "layerzero")
    for name, file in (("use_torch_fsdp2", "fsdp2_config_path"), ("layerzero", "layerzero_config")):
        if reading.has(file) and name not in chosen:
            what = f"is given without --{name.replace('_', '-')}, which makes it act"
            reading.draft.problem(what, reading.place(file), "Give both, or none.")
    if len(chosen) == 2:
        reading.draft.problem("cannot be combined with --layerzero", reading.place(chosen[0]), "Keep one of them.")
    elif chosen == ["use_torch_fsdp2"]:
        _put_fsdp2_config(reading)
    elif chosen:
        _put_layerzero_config(reading)
    elif reading.value("use_distributed_optimizer"):
        # One rank gathers nothing: what stays gathered would be a copy of its weights in another type.
        if reading.given.world_size is None or reading.data_ranks * reading.context > 1:
            place = reading.place("use_distributed_optimizer")
            reading.draft.put("parallel.fsdp_plan.reshard_after_forward", False, place)
    elif not reading.has("warmup_ratio"):  # scripts of one model, which have it, shard everything
        # Every rank keeps all weights. A sharding group holds the ranks of a sequence, and those of the experts.
        size = math.lcm(reading.context, reading.size("expert_parallel_size"))
        words = "no --use-distributed-optimizer, --use-torch-fsdp2 or --layerzero"
        reading.draft.fill("parallel.fully_shard_parallel_size", size, words)


def floating_point_types(reading: Reading) -> None:
    """The types of the computation and of its sums; fsdp2_config.yaml, which is read before, wins, and it is told."""
    mixed = reading.value("mixed_precision", "no")
    chosen = reading.set_ones("bf16", "fp16")
    if len(chosen) == 2:
        reading.draft.problem("cannot be combined with --fp16", reading.place("bf16"), "Keep one of them.")
    elif mixed not in ("no", "bf16", "fp16"):
        reading.draft.problem(f"'{mixed}' is not one of no, bf16, fp16", reading.place("mixed_precision"))
    elif chosen or mixed != "no":
        if chosen:
            dtype, place = chosen[0], reading.place(chosen[0])
        else:
            dtype, place = mixed, reading.place("mixed_precision")
        sums = "fp32"
        if reading.value("grad_reduce_in_bf16"):
            sums = "bf16"
        for key, value in (("param_dtype", dtype), ("reduce_dtype", sums)):
            held = reading.draft.value(f"parallel.fsdp_plan.{key}")
            if held is None:
                reading.draft.replace(f"parallel.fsdp_plan.{key}", value, place)
            elif key == "param_dtype" and held != value:
                says = reading.draft.place(f"parallel.fsdp_plan.{key}")
                reading.draft.note(f"{place} has no effect: {says} says {key}: {held}.")
    if reading.value("grad_reduce_in_bf16") and not (chosen or mixed != "no"):
        reading.draft.note("--grad-reduce-in-bf16 has no effect without --bf16.")


# --- fsdp2_config.yaml ------------------------------------------------------------------------------------------------

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


def _put_fsdp2_config(reading: Reading) -> None:
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


def _put_layerzero_config(reading: Reading) -> None:
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


def _dtype(value: object) -> Any:
    """A type by our name, where it is one by torch's."""
    if isinstance(value, str):
        return _DTYPES.get(value, value)
    return value


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
        place = node.place
        if size != value:  # rounded up to whole groups
            place = derived(f"{name} {value}")
        reading.draft.put(_SHARDS, size, place)
    else:
        reading.draft.problem(f"{name} is {show(value)}", node.place, "Write auto, or a whole number from 1.")


def _put_patterns(reading: Reading, key: str, node: Node) -> None:
    patterns: dict[str, SourcePosition] = {}
    items = [node]
    if isinstance(node.value, list):
        items = node.value
    for item in items:
        if not isinstance(item.value, str):
            reading.draft.problem(f"{show(plain(item))} is not a pattern", item.place, "Write a list of names.")
            return
        if reading.is_generator and item.value in ("ae", "text_encoder", "image_encoder", "diffusion"):
            continue  # the folder's other parts stand outside of the model that is trained
        patterns |= dict.fromkeys(patterns_of(item.value, reading.names), item.place)
    nodes: list[object] = [Node(pattern, place) for pattern, place in patterns.items()]
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
