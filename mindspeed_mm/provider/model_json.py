"""model.json: which model is trained, which parts of it, and on how many stages its layers lie."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from mindspeed_mm.core.config_path import dotted
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.params.cards import model_cards
from mindspeed_mm.fsdp.params.yaml.tree import Node, find, plain, text_at, value_at_key
from mindspeed_mm.provider.data_json import PROCESSOR, processor_folder
from mindspeed_mm.provider.generator_json import put_generator
from mindspeed_mm.provider.json_tree import entries_at, place_at
from mindspeed_mm.provider.memory_rules import put_recomputation
from mindspeed_mm.provider.model_sizes import compare_language_model, compare_tower, layers_of
from mindspeed_mm.provider.module_names import HubConfig, names_of
from mindspeed_mm.provider.omni_json import is_of_omni, put_omni
from mindspeed_mm.provider.reading import Reading
from mindspeed_mm.provider.reward_json import folder_of_rewards, is_of_rewards, put_rewards

_DECODER, _TOWER = "text_decoder", "image_encoder.vision_encoder"
_PROJECTOR, _AUDIO = "image_encoder.vision_projector", "audio_encoder.audio_encoder"
_SIZES = {
    "tensor_model_parallel_size": "parallel.tensor_parallel_size",
    "pipeline_model_parallel_size": "parallel.pipeline_parallel_size",
}
_FREEZES = {"freeze_vision_model": _TOWER, "freeze_vision_projection": _PROJECTOR, "freeze_language_model": _DECODER}
"""Switch of the whole file → the part that it freezes, whose own `freeze` goes before it."""
_KERNELS = ("gdn_implementation", "causal_conv1d_implementation", "kda_implementation")
"""Keys of `text_decoder` that choose kernels, as keys of `model` do here."""
_OUR_KERNELS = {"torch": "eager", "triton_with_transpose": "triton"}
_ACTING = {
    "": ("init_from_hf_path", "model_id", "freeze", *_FREEZES, "attn_implementation", "loss_cfg", "patch",
         "image_encoder", "text_decoder", "audio_encoder", "text_encoder", "video_encoder"),
    "image_encoder": ("vision_encoder", "vision_projector"),
    "audio_encoder": ("audio_encoder",),
    **dict.fromkeys((_TOWER, _PROJECTOR, _AUDIO, _DECODER), (
        "freeze", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "vocab_size", "pipeline_num_layers", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "context_parallel_size", "recompute_granularity", "recompute_method", "recompute_num_layers",
        "attn_implementation", *_KERNELS, "mtp_num_layers", "moe_ffn_hidden_size", "recompute_mtp_layer",
    )),
}  # fmt: skip
"""Object of the file → keys in it that act, or that upstream's files have where they might be taken for a slip."""
_CHUNKED = {
    "chunk": ("enable_chunk_loss", "chunk_size"),
    "dynamic_chunk": ("enable_dynamic_chunk_loss", "total_chunk_size"),
}
"""`compute_mode` → the switch, and the key of `chunkloss_plan` that takes `chunk_size`."""
_LIKE = 0.85
"""Keys of other systems are passed over in silence; one that is so like a key that acts is a slip."""
_NO_EFFECT_OF_PATCH = ("use_fsdp1", "clip_grad_async", "scale_grad", "bridge_patch", "ae_float32", "infer_fa")
_REFUSED_OF_PATCH = ("layerwise_disaggregated_training",)
_NORM_DECAY = 0.99
"""Of `adaptive_clip_grad_norm` where it does not say its own."""


def is_of_generator(root: Node) -> bool:
    """Whether a file describes a generator (SoRAModel)."""
    return not is_of_omni(root) and any(find(root, name) is not None for name in ("predictor", "diffusion", "ae"))


def put_model(reading: Reading, root: Node) -> None:
    """Put the model that a file describes."""
    _put_patch(reading, root)
    if is_of_omni(root):
        put_omni(reading, root)
        return
    if is_of_generator(root):
        put_generator(reading, root)
        return
    _check_form(reading, root)
    is_library_model = text_at(root, "init_from_hf_path") is not None
    folder = text_at(root, "init_from_hf_path") or _folder_of_data(reading)
    if is_of_rewards(root):
        folder = folder_of_rewards(reading, folder)
    if folder is None:
        if find(root, _DECODER) is not None:
            reading.draft.note(
                f"{root.place.source}: neither it nor data.json names a folder with a config.json (init_from_hf_path, "
                "preprocess_parameters.model_name_or_path): the model is built of the sizes, without weights, unless a "
                "model provider of your own builds it."
            )
    else:
        entry = find(root, "init_from_hf_path")
        place = entry.node.place if entry else reading.draft.place(PROCESSOR)
        if folder == reading.value("load"):
            place = reading.place("load")
        reading.draft.put("model.model_name_or_path", folder, place)
    model_id = text_at(root, "model_id") or ""
    if model_id in model_cards():
        reading.draft.put("model.model_id", model_id, place_at(root, "model_id"))
    config = _config_of(folder)
    # before everything below: sizes, stages and frozen parts are written by names of modules
    reading.names = names_of(config, model_id or text_at(root, f"{_DECODER}.model_id") or "")
    if is_library_model:
        reading.decoder_layers = layers_of(config)
        _put_loss(reading, root)
    else:
        layers = value_at_key(root, f"{_DECODER}.num_layers")
        reading.decoder_layers = layers_of(config)
        if isinstance(layers, int) and layers > 0:
            reading.decoder_layers = layers
        if config:
            where = str(Path(folder or "") / "config.json")
            compare_language_model(reading, find(root, _DECODER), config, where)
            compare_tower(reading, find(root, _TOWER), config, where)
        _put_sizes(reading, root)
        _put_stages(reading, root)
        _put_decoder_loss(reading, root)
    if is_of_rewards(root):
        put_rewards(reading, root)
    _put_frozen(reading, root, with_defaults=not is_library_model and not is_of_rewards(root))
    _put_kernels(reading, root)
    _put_recomputation(reading, root)


def _folder_of_data(reading: Reading) -> str | None:
    """The folder that data.json reads conversations with, unless it holds a processor and no model."""
    folder = processor_folder(reading)
    if folder is None:
        return None
    if Path(folder).is_dir() and not (Path(folder) / "config.json").is_file():
        return None
    return folder


def _config_of(folder: str | None) -> HubConfig:
    """config.json of a folder that is there; whether it is there is checked when the model is built."""
    if folder is None or not (Path(folder) / "config.json").is_file():
        return {}
    return read_json_object(Path(folder) / "config.json", ConfigError, key="model.model_name_or_path")


def _put_patch(reading: Reading, root: Node) -> None:
    for name, entry in entries_at(root, "patch").items():
        is_on = plain(entry.node) not in (False, None)
        if name == "muon_optimizer" and is_on:
            reading.draft.put("training.optimizer", "muon", entry.node.place)
        elif name == "adaptive_clip_grad_norm" and is_on:
            given, decay = find(entry.node, "clip_grad_ema_decay"), _NORM_DECAY
            if given is not None:
                entry, decay = given, plain(given.node)
            if decay:  # 0 clips as ever
                reading.draft.put("training.clip_grad_ema_decay", decay, entry.node.place)
        elif name in _REFUSED_OF_PATCH and is_on:
            reading.draft.problem(f"patch.{name} is not built", entry.node.place, "Take it out.")
        elif is_on and name not in _NO_EFFECT_OF_PATCH:
            reading.draft.note(f"{entry.node.place}: patch.{name} has no effect: nothing is patched here.")


def _put_loss(reading: Reading, root: Node) -> None:
    """`loss_cfg` of a model of transformers."""
    for name, entry in entries_at(root, "loss_cfg").items():
        value, place = plain(entry.node), entry.node.place
        if name == "compute_mode":
            if isinstance(value, str) and value in _CHUNKED:
                reading.draft.put(f"features.{_CHUNKED[value][0]}", True, place)
            elif value != "default":
                reading.draft.problem(f"'{value}' is not one of default, {', '.join(_CHUNKED)}", place)
        elif name == "chunk_size":
            _, key = _CHUNKED.get(text_at(root, "loss_cfg.compute_mode") or "", _CHUNKED["chunk"])
            reading.draft.put(f"features.chunkloss_plan.{key}", value, place)
        elif name == "loss_type" and value == "default":
            continue  # as the flags normalise it
        elif name in ("loss_type", "router_aux_loss_coef"):
            reading.draft.put(f"features.loss_cfg.{name}", value, place)
        else:
            reading.draft.problem(f"'{name}' is not a key of loss_cfg", place)


def _put_decoder_loss(reading: Reading, root: Node) -> None:
    """What `text_decoder` says of the loss: slices of tokens, heads for further tokens, and the router's loss."""
    section = {name: entry.node for name, entry in entries_at(root, _DECODER).items()}
    if "use_chunk_loss" in section and plain(section["use_chunk_loss"]) is True:
        reading.draft.put("features.enable_chunk_loss", True, section["use_chunk_loss"].place)
        if "chunk_size" in section:
            size = section["chunk_size"]
            reading.draft.put("features.chunkloss_plan.chunk_size", plain(size), size.place)
    depths = section.get("mtp_num_layers")
    if depths is not None and plain(depths):
        if reading.model_ranks > 1:
            reading.draft.note(
                f"{depths.place}: mtp_num_layers {plain(depths)} has no effect: heads that predict further tokens are "
                "not trained with tensor, pipeline or context ranks."
            )
        else:
            reading.draft.put("model.mtp_num_layers", plain(depths), depths.place)
            if (factor := section.get("mtp_loss_scaling_factor")) is not None:
                reading.draft.put("model.mtp_loss_scaling_factor", plain(factor), factor.place)
    weight = section.get("moe_aux_loss_coeff")
    balancing = text_at(root, f"{_DECODER}.moe_router_load_balancing_type") or ""
    if weight is not None and plain(weight) and balancing.endswith("aux_loss"):
        reading.draft.put("features.loss_cfg.router_aux_loss_coef", plain(weight), weight.place)


def _put_sizes(reading: Reading, root: Node) -> None:
    """Parallel sizes of the language model, which the flags may not contradict; those of the tower beside it."""
    for name, key in _SIZES.items():
        entry = find(root, f"{_DECODER}.{name}")
        if entry is None or entry.node.value is None:
            continue
        reading.draft.put(key, entry.node.value, entry.node.place)
    decoder = value_at_key(root, f"{_DECODER}.context_parallel_size")
    if decoder not in (None, reading.context):
        reading.draft.problem(
            f"{decoder}, but {reading.place('context_parallel_size')} says {reading.context}",
            place_at(root, f"{_DECODER}.context_parallel_size"),
            "Keep one of them.",
        )
    _put_tower_sizes(reading, root)


def _put_tower_sizes(reading: Reading, root: Node) -> None:
    tensor = find(root, f"{_TOWER}.tensor_model_parallel_size")
    if tensor is not None and plain(tensor.node) not in (None, reading.size("tensor_parallel_size")):
        reading.draft.put("parallel.encoder_plan.tensor_parallel_size", plain(tensor.node), tensor.node.place)
    context = find(root, f"{_TOWER}.context_parallel_size")
    if context is None or plain(context.node) in (None, reading.context):
        return
    if plain(context.node) != 1:
        way_out = f"Write 1, or {reading.context} as the language model has."
        reading.draft.problem(f"{plain(context.node)} ranks for the patches of a tower", context.node.place, way_out)
        return
    for name in ("ring_attention_size", "ulysses_parallel_size"):
        reading.draft.put(f"parallel.encoder_plan.{name}", 1, context.node.place)


def _put_stages(reading: Reading, root: Node) -> None:
    """`pipeline_num_layers`: how many layers lie on each stage."""
    entry = find(root, f"{_DECODER}.pipeline_num_layers")
    stages = reading.size("pipeline_parallel_size")
    if entry is None or entry.node.value is None or stages == 1:
        return
    place, counts = entry.node.place, plain(entry.node)
    flat = _flat(counts)
    chunks = int(reading.value("virtual_pipeline_model_parallel_size", 1))
    total = reading.decoder_layers
    are_counts = all(isinstance(count, int) and count >= 0 for count in flat)
    if not are_counts or len(flat) != stages * chunks:
        what = f"{flat} are not the numbers of layers of {stages * chunks} stages"
        reading.draft.problem(what, place, f"PP {stages} x {chunks} chunks need as many numbers.")
    elif isinstance(total, int) and sum(flat) != total:
        reading.draft.problem(f"{flat} are {sum(flat)} layers, but num_layers is {total}", place, "Change one of them.")
    elif reading.names is None:
        reading.draft.note(f"{place}: the model's layers are not known here, so stages are cut at equal cost.")
    elif any(_flat(value_at_key(root, f"{_TOWER}.pipeline_num_layers"))[1:]):
        reading.draft.note(f"{place}: the vision tower lies on one stage here, so stages are cut at equal cost.")
    elif 0 in flat[1:-1]:
        reading.draft.problem(f"{flat}: a stage between others has no layer", place, "Give it one.")
    else:
        reading.stage_layers = flat
        # A stage begins behind the layers of all before it; the first needs no cut.
        points = [f"{reading.names.layers}.{start}" for start in accumulate(flat[:-1])]
        # the last stage has the norm and the head alone
        if flat[-1] == 0:
            points[-1] = reading.names.of_decoder("norm")
        reading.draft.put("parallel.pp_plan.split_points", points, place)


def _flat(counts: object) -> list[Any]:
    """Numbers of layers of all stages, those of chunks one behind the other."""
    if counts is None:
        return []
    if not isinstance(counts, list):
        return [counts]
    flat: list[Any] = []
    for entry in counts:
        if isinstance(entry, list):
            flat += entry
        else:
            flat.append(entry)
    return flat


def _put_frozen(reading: Reading, root: Node, *, with_defaults: bool) -> None:
    """Which parts are not trained. VLModel freezes towers unless told otherwise, and trains the projector.

    A `freeze` of the whole file names modules by patterns, and goes before what parts say.
    """
    patterns = value_at_key(root, "freeze")
    if patterns is not None:
        if isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns):
            reading.draft.put("model.freeze", patterns, place_at(root, "freeze"))
        else:
            what = f"freeze is {patterns!r}, not a list of patterns"
            reading.draft.problem(what, place_at(root, "freeze"), 'Write ["model.visual"].')
        return
    frozen = _frozen_parts(reading, root, with_defaults=with_defaults)
    if not frozen:
        return
    place = place_at(root, frozen[0])
    names = reading.names
    if names is None:
        if reading.draft.value("model.model_name_or_path"):
            way_out = "Write the YAML with mm config --from-flags, without freeze, and add model.freeze."
            reading.draft.problem("freeze: the parts of this model are not known by name", place, way_out)
        return
    patterns = []
    # Qwen's merger is a module of the tower: the tower's own name covers both
    projector_inside = all(name.startswith(f"{names.vision}.") for name in names.projector)
    if _TOWER in frozen and _PROJECTOR in frozen and projector_inside:
        patterns.append(names.vision)
    else:
        if _TOWER in frozen:
            patterns += names.vision_parts
        if _PROJECTOR in frozen:
            patterns += names.projector
    if _AUDIO in frozen and names.audio:
        patterns.append(names.audio)
    if _DECODER in frozen:
        patterns.append(names.decoder)
    reading.draft.put("model.freeze", patterns, place)


def _frozen_parts(reading: Reading, root: Node, *, with_defaults: bool) -> list[str]:
    """The parts of the file that are not trained: as they say, else towers, where VLModel's defaults hold."""
    frozen = []
    for part in (_TOWER, _PROJECTOR, _AUDIO, _DECODER):
        switches = [switch for switch, freezes in _FREEZES.items() if freezes == part]
        name = next((each for each in (f"{part}.freeze", *switches) if value_at_key(root, each) is not None), part)
        if find(root, name) is None:
            continue
        given = None
        if name != part:
            given = value_at_key(root, name)
        if given is None:
            given = with_defaults and part in (_TOWER, _AUDIO)
        elif not isinstance(given, bool):
            what = f"{name.rpartition('.')[2]} is {given!r}, neither true nor false"
            reading.draft.problem(what, place_at(root, name), "Write true or false, without quotes.")
        if given:
            frozen.append(part)
    return frozen


def _check_form(reading: Reading, root: Node) -> None:
    """Values of another type than what is read from them, and keys that are nearly right."""
    for name in ("init_from_hf_path", "model_id"):
        value, place = value_at_key(root, name), place_at(root, name)
        if value is not None and not isinstance(value, str):
            reading.draft.problem(f"{name} is {value!r}, not text", place, "Write it in quotes.")
    for section, acting in _ACTING.items():
        node = root
        if section:
            entry = find(root, section)
            if entry is None:
                continue
            node = entry.node
        if node.value is None:
            continue
        if not isinstance(node.value, dict):
            what = f"{section} is {plain(node)!r}, not an object"
            reading.draft.problem(what, node.place, "Put its settings into {}.")
            continue
        # a key that is nearly one that is given, too, is another setting
        absent = [name for name in acting if name not in node.value]
        for key in node.value:
            if key in acting:
                continue
            for name in nearest(key, absent, 1, _LIKE):
                where = place_at(root, dotted(section, key))
                reading.draft.problem(f"unknown key '{key}'", where, f"Did you mean '{name}'?")


def _put_kernels(reading: Reading, root: Node) -> None:
    for name in ("attn_implementation", f"{_DECODER}.attn_implementation", f"{_TOWER}.attn_implementation"):
        attention = find(root, name)
        if attention is not None:
            if attention.node.value is not None:
                reading.draft.put("model.attn_implementation", plain(attention.node), attention.node.place)
            break
    for name, key in (
        ("use_npu_fused_moe", "model.use_grouped_expert_matmul"),
        ("activation_offload", "features.enable_activation_offload"),
    ):
        entry = find(root, f"{_DECODER}.{name}")
        if entry is not None and plain(entry.node) is True:
            reading.draft.put(key, True, entry.node.place)
    for name in _KERNELS:
        entry = find(root, f"{_DECODER}.{name}")
        if entry is not None and plain(entry.node) is not None:
            kernel = plain(entry.node)
            reading.draft.put(f"model.{name}", _OUR_KERNELS.get(kernel, kernel), entry.node.place)


def _put_recomputation(reading: Reading, root: Node) -> None:
    """`recompute_granularity` of the language model or of its tower, which goes before the flags."""
    for part in (_DECODER, _TOWER):
        entry = find(root, f"{part}.recompute_granularity")
        if entry is None or entry.node.value is None or reading.value("use_torch_fsdp2"):
            continue
        reading.settled.add("recompute_granularity")
        method = value_at_key(root, f"{part}.recompute_method")
        count = value_at_key(root, f"{part}.recompute_num_layers")
        if part == _TOWER and reading.names is not None and not reading.draft.value("features.recompute"):
            reading.draft.put("features.recompute", True, entry.node.place)
            pattern = f"{reading.names.vision_layers}.{{*}}"
            reading.draft.put("features.recompute_plan.apply_modules", [pattern], entry.node.place)
        elif count is not None and not isinstance(count, int):
            reading.draft.problem(f"{count} is not a whole number", place_at(root, f"{part}.recompute_num_layers"))
        elif part == _DECODER:
            put_recomputation(reading, str(plain(entry.node)), method, count, entry.node.place)
