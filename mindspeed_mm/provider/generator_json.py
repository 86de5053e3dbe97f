"""model.json of a generator (SoRAModel): its folder, its noise levels, and how samples are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import EXPERT_PARTS
from mindspeed_mm.fsdp.params.yaml.tree import Node, SourcePosition, find, plain, text_at, value_at_key
from mindspeed_mm.provider.json_tree import place_at
from mindspeed_mm.provider.model_sizes import compare
from mindspeed_mm.provider.module_names import ModuleNames, names_of
from mindspeed_mm.provider.preference_rules import put_media_pairs
from mindspeed_mm.provider.reading import Reading

_COMPONENTS = (*EXPERT_PARTS, "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "image_encoder")
WAN_SIZES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_layers",),
    "num_heads": ("num_attention_heads",),
    "hidden_size": ("hidden_size",),
    "in_dim": ("in_channels",),
    "out_dim": ("out_channels",),
    "ffn_dim": ("ffn_dim",),
    "max_seq_len": ("rope_max_seq_len",),
    "img_dim": ("image_dim",),
    "text_dim": ("text_dim",),
    "freq_dim": ("freq_dim",),
}
"""Key of `predictor` → keys of the transformer's config.json; `hidden_size` is heads x their width there."""
OPENSORAPLAN_SIZES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_layers",),
    "num_heads": ("num_attention_heads",),
    "head_dim": ("attention_head_dim",),
    "in_channels": ("in_channels",),
    "out_channels": ("out_channels",),
    "cross_attention_dim": ("cross_attention_dim",),
    "caption_channels": ("caption_channels",),
    "sparse_n": ("sparse_n",),
    "timestep_embed_dim": ("timestep_embed_dim",),
    "pooled_projection_dim": ("pooled_projection_dim",),
}
"""The same of Open-Sora Plan."""
_OPENSORAPLAN = ("videoditsparse", "videoditsparsei2v", "SparseUMMDiT")
"""`model_id` of `predictor`: 1.3 from text and from a picture, and 1.5."""
_LOGIT_NORMAL = (("logit_normal", None), (None, "lognorm"))
"""What `diffusion` says of logit-normal noise levels: `weighting_scheme`, `snr`."""
_STEP_VIDEO_SIZES: dict[str, tuple[str, ...]] = {
    "num_heads": ("num_attention_heads",),
    "head_dim": ("attention_head_dim",),
    **{
        name: (name,)
        for name in (
            "num_layers", "in_channels", "out_channels", "patch_size", "caption_channels", "use_additional_conditions",
        )
    },
}  # fmt: skip
_SIZES = {"wandit": WAN_SIZES, "stepvideodit": _STEP_VIDEO_SIZES, **dict.fromkeys(_OPENSORAPLAN, OPENSORAPLAN_SIZES)}
"""`predictor.model_id` → what is compared with the folder's file."""
_MOTION_SCORE = 5.0
"""As in `fsdp/models/stepvideo/sizes.py`, whose package takes torch to import."""
_NOISE = "training.diffusion"
_SCORED_BY = {
    "i2v": (
        "VBench's package vbench2_beta_i2v",
        "vbench2_beta_i2v.VBenchI2V(device, 'vbench2_i2v_full_info.json', OUT).evaluate(videos_path=CLIPS, name='i2v', "
        "dimension_list=[…], resolution='16-9') beside its pictures, vbench2_beta_i2v/data/crop/16-9.",
    ),
    "long": (
        "VBench's package vbench2_beta_long",
        "vbench2_beta_long/eval_long.py --videos_path CLIPS --dimension … --mode long_vbench_standard of its "
        "repository, which cuts each clip into short ones.",
    ),
}
"""`eval_type` → what scores it, and how it is called (VBench's repository)."""


def put_generator(reading: Reading, root: Node) -> None:
    """Put the generator that a file describes."""
    reading.is_generator = True
    predictor = find(root, "predictor")
    model_id = text_at(root, "predictor.model_id") or ""
    reading.names = names_of({}, model_id) or ModuleNames("", "", head=())
    layers = value_at_key(root, "predictor.num_layers")
    reading.decoder_layers = layers if isinstance(layers, int) else None
    found = _folder(reading, root)
    if found is not None:
        folder, place = found
        reading.draft.put("model.model_name_or_path", folder, place)
        reading.folder_of_weights = str(PurePosixPath(folder) / "transformer")
        config_file = Path(folder) / "transformer" / "config.json"
        if config_file.is_file() and model_id in _SIZES:
            config = read_json_object(config_file, ConfigError, key="model.model_name_or_path")
            heads, width = config.get("num_attention_heads"), config.get("attention_head_dim")
            if isinstance(heads, int) and isinstance(width, int):
                config = {**config, "hidden_size": heads * width}
            compare(reading, predictor, _SIZES[model_id], config, "predictor", str(config_file))
    elif model_id in _OPENSORAPLAN:
        reading.draft.note(
            f"{place_at(root, 'ae')}: no component lies in a folder in diffusers' layout, which a run starts from: "
            "examples/opensoraplan1.3/README.md and examples/opensoraplan1.5/README.md make one of the released files."
        )
    _check_turned_features(reading, root)
    _put_noise(reading, root)
    _put_samples(reading, root)
    put_media_pairs(reading, root)
    scored = text_at(root, "eval_config.eval_type")
    if scored in _SCORED_BY:
        package, call = _SCORED_BY[scored]
        what = f"'{scored}' is scored by {package}, which is not called here"
        way_out = f"Draw clips named <prompt>-<number>.mp4 with inference_sora.py, and run {call}"
        reading.draft.problem(what, place_at(root, "eval_config.eval_type"), way_out)
    elif scored not in (None, "t2v"):
        way_out = f"Write t2v; {' and '.join(_SCORED_BY)} are scored by packages of their own."
        reading.draft.problem(f"'{scored}' is not known", place_at(root, "eval_config.eval_type"), way_out)


def _check_turned_features(reading: Reading, root: Node) -> None:
    """Step-Video's features that turn with time, height and width are a half and two quarters of a head."""
    entry, width = find(root, "predictor.channel_split"), value_at_key(root, "predictor.head_dim")
    if entry is None or not isinstance(width, int):
        return
    given, known = plain(entry.node), [width // 2, width // 4, width // 4]
    if given != known:
        reading.draft.problem(
            f"channel_split {given}: heads of {width} are split {known}", entry.node.place, f"Write {known}."
        )


def _folder(reading: Reading, root: Node) -> tuple[str, SourcePosition] | None:
    """The folder in diffusers' layout: the one around every component, or around the weights of `--load`."""
    parents: dict[str, SourcePosition] = {}
    for node in _pretrained(root):
        path = PurePosixPath(node.value)
        around = None
        for inside in (path, *path.parents):
            if inside.name in _COMPONENTS:
                around = inside.parent
                break
        if around is not None:
            parents.setdefault(str(around), node.place)
    load = reading.value("load")
    if isinstance(load, str) and PurePosixPath(load).name in EXPERT_PARTS:
        parents.setdefault(str(PurePosixPath(load).parent), reading.place("load"))
    if len(parents) > 1:
        (one, place), (other, elsewhere) = list(parents.items())[:2]
        reading.draft.note(f"{elsewhere}: components lie in {other}, too; all of them are taken from {one}.")
        return one, place
    for folder, place in parents.items():
        return folder, place
    return None


def _pretrained(root: Node) -> Iterator[Node]:
    """Every `from_pretrained` of a component."""
    for name in ("ae", "text_encoder", "image_encoder", "tokenizer"):
        entry = find(root, name)
        if entry is None:
            continue
        several = isinstance(entry.node.value, list) and entry.node.value
        for node in several or [entry.node]:
            given = find(node, "from_pretrained")
            if given is not None and isinstance(given.node.value, str) and given.node.value:
                yield given.node


def _put_noise(reading: Reading, root: Node) -> None:
    """How noise levels are drawn: Wan's flow matching draws them uniformly, weighs them by a bell and shifts them."""
    entry = find(root, "diffusion")
    if entry is None:
        return
    name, draft = text_at(root, "diffusion.model_id") or "", reading.draft
    if name == "wan_flow_match_scheduler":
        draft.put(f"{_NOISE}.timestep_density", "uniform", entry.node.place)
        draft.put(f"{_NOISE}.loss_weighting", "bell", entry.node.place)
    elif (text_at(root, "diffusion.weighting_scheme"), text_at(root, "diffusion.snr")) in _LOGIT_NORMAL:
        draft.put(f"{_NOISE}.timestep_density", "logit_normal", entry.node.place)
    shift = find(root, "diffusion.train_timestep_shift") or find(root, "diffusion.shift")
    shift_by = None
    if shift is not None and plain(shift.node) is not None:
        shift_by = plain(shift.node)
        draft.put(f"{_NOISE}.shift", shift_by, shift.node.place)
    dynamic = find(root, "diffusion.use_dynamic_shifting")
    if dynamic is not None and plain(dynamic.node) is True:
        draft.put(f"{_NOISE}.shift", "resolution", dynamic.node.place)
    gamma = find(root, "diffusion.snr_gamma")
    if gamma is not None and plain(gamma.node) is not None:
        draft.put(f"{_NOISE}.snr_gamma", plain(gamma.node), gamma.node.place)
    _put_expert(reading, root, shift_by)


def _put_expert(reading: Reading, root: Node, shift: Any) -> None:
    """The noise levels of one of Wan2.2's two transformers, and the other one frozen where the folder has both.

    The bounds are shares of the scheduler's steps, counted from pure noise.
    """
    bounds: dict[str, Node] = {}
    for key in ("min", "max"):
        entry = find(root, f"diffusion.{key}_timestep_boundary")
        if entry is not None and plain(entry.node) is not None:
            bounds[key] = entry.node
    if not bounds:
        return
    draft, shares = reading.draft, {"min": 0.0, "max": 1.0}
    for key, node in bounds.items():
        if not _is_number(plain(node)) or not 0 <= plain(node) <= 1:
            way_out = "Give the share of the scheduler's steps, counted from pure noise."
            draft.problem(f"{plain(node)} is not between 0 and 1", node.place, way_out)
            return
        shares[key] = float(plain(node))
    place = next(iter(bounds.values())).place
    if not _is_number(shift) or shares["min"] >= shares["max"]:
        reason = "max is not above min"
        if not _is_number(shift):
            reason = "where a step lies depends on the shift"
        draft.problem(f"timestep boundaries: {reason}", place, "Give diffusion.shift, and 0 ≤ min < max ≤ 1.")
        return
    levels = [round(shifted_level(1 - shares[key], float(shift)), 4) for key in ("max", "min")]
    alone = expert_of(shares)
    folder = Path(str(draft.value("model.model_name_or_path", "")))
    if alone is not None and all((folder / part).is_dir() for part in EXPERT_PARTS):
        draft.put("model.freeze", [part for part in EXPERT_PARTS if part != alone], place)
    if levels != [0.0, 1.0]:
        draft.put(f"{_NOISE}.sigma_range", levels, place)


def shifted_level(level: float, shift: float) -> float:
    """σ of a step of a scheduler that shifts: s·u / (1 + (s − 1)·u) (arXiv 2403.03206, equation 23)."""
    return shift * level / (1 + (shift - 1) * level)


def expert_of(shares: Mapping[str, float]) -> str | None:
    """Of Wan2.2's two transformers the one that has these steps: the first has those from pure noise on."""
    if shares["min"] == 0 and shares["max"] < 1:
        return EXPERT_PARTS[0]
    if shares["min"] > 0 and shares["max"] == 1:
        return EXPERT_PARTS[1]
    return None


def _put_samples(reading: Reading, root: Node) -> None:
    """How samples are drawn, from a file for inference."""
    section = "inference.sampling"
    size = value_at_key(root, "pipeline_config.input_size")
    if isinstance(size, list) and len(size) == 3:
        place = place_at(root, "pipeline_config.input_size")
        for key, value in zip(("num_frames", "height", "width"), size, strict=True):
            reading.draft.put(f"{section}.{key}", value, place)
    prompt = find(root, "prompt")
    if prompt is not None and isinstance(prompt.node.value, str):
        text, place = prompt.node.value, prompt.node.place
        if text.endswith((".txt", ".jsonl")):
            reading.draft.put(f"{section}.prompts_file", text, place)
        else:
            reading.draft.put(f"{section}.prompts", [text], place)
    read = {"fps": "fps", "diffusion.num_inference_steps": "num_inference_steps"}
    read["diffusion.guidance_scale"] = "guidance_scale"
    if text_at(root, "predictor.model_id") == "stepvideodit":
        read |= {"diffusion.num_inference_timesteps": "num_inference_steps"}
        read |= {"pipeline_config.guidance_scale": "guidance_scale"}
        _check_motion(reading, root)
    for theirs, ours in read.items():
        given = find(root, theirs)
        if given is not None and _is_number(plain(given.node)):
            reading.draft.put(f"{section}.{ours}", plain(given.node), given.node.place)


def _check_motion(reading: Reading, root: Node) -> None:
    """Step-Video-TI2V is told one motion score."""
    score = find(root, "pipeline_config.motion_score")
    if score is not None and plain(score.node) not in (None, _MOTION_SCORE):
        what = f"motion_score {plain(score.node)}: samples of another score than {_MOTION_SCORE:g} are not built"
        reading.draft.problem(what, score.node.place, f"Write {_MOTION_SCORE:g}, or leave it out.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
