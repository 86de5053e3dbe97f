"""Files of MindSpeed-MM's FSDP2 trainer for generators. Of Wan2.2: a container of models, and rows with settings of
their own; of LTX-2: parts that are named apart, and sizes under the names of the authors' code.

`model_id: wan2_2_container` describes each component in `model.models`; here one folder in diffusers' layout has them
all. `dataset_type: wan2_2` reads the rows that `generation` reads.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import EXPERT_PARTS, GENERATOR_INDEX
from mindspeed_mm.fsdp.params.schema_walk import pattern_keys
from mindspeed_mm.fsdp.params.yaml.key_renames import Notes
from mindspeed_mm.fsdp.params.yaml.tree import (
    MappingEntry,
    Node,
    SourcePosition,
    find,
    move,
    plain,
    put,
    take,
    text_at,
    value_at_key,
)

CONTAINER = "wan2_2_container"
DATASET = "wan2_2"
_MODELS = "model.models"
_TRAINED = "predictor"
_NOISE = "training.diffusion"
_NOISE_THERE = {"timestep_density": "uniform", "loss_weighting": "bell", "shift": 3.0}
"""Of the scheduler that the container makes by itself."""
_INSIDE = {"blocks.{*}.self_attn": "blocks.{*}.attn1", "blocks.{*}.cross_attn": "blocks.{*}.attn2", "head": "proj_out"}
"""Modules of the predictor there → here, where the names differ."""
MEDIA_KEYS = {
    "num_frames": "num_frames",
    "frame_interval": "frame_interval",
    "max_height": "height",
    "max_width": "width",
    "train_fps": "fps",
}
"""Keys of `preprocess_parameters` of MindSpeed-MM's generators → here."""
_PREPROCESS_READ_OTHERWISE = (
    "video_processor_type", "video_reader_type", "image_reader_type", "image_processer_type", "min_num_frames",
    "auto_interval", "max_hxw", "min_hxw", "speed_factor", "drop_short_ratio", "hw_stride", "use_aesthetic",
    "force_resolution", "hw_aspect_thr", "truncate_t_by_sp", "train_pipeline",
)  # fmt: skip
_READ_OTHERWISE = (
    *map("preprocess_parameters.{}".format, _PREPROCESS_READ_OTHERWISE),
    "use_text_processer", "enable_text_preprocessing", "text_preprocess_methods", "use_clean_caption",
    "support_chinese", "tokenizer_config",
)  # fmt: skip
"""How media and captions are prepared there: here by the sizes, and as the folder's pipeline does it."""


def settle_generator_files(root: Node, notes: Notes) -> None:
    """Bring a container, rows of its data set, and LTX-2 to the keys that they have here; changes the tree in place."""
    for dataset in ("data.dataset_param", "data.val_dataset_param"):
        if text_at(root, f"{dataset}.dataset_type") == DATASET:
            _settle_rows(root, dataset, notes)
    models = find(root, _MODELS)
    if text_at(root, "model.model_id") == CONTAINER and models is not None and isinstance(models.node.value, dict):
        _settle_models(root, models, notes)
    if text_at(root, "model.model_id") in LTX2:
        _settle_ltx2(root, notes)


def derive_expert_levels(root: Node) -> None:
    """Of two transformers that share the noise levels between them, one that is trained alone is trained on its own."""
    frozen, key = value_at_key(root, "model.freeze"), f"{_NOISE}.sigma_range"
    if not isinstance(frozen, list) or value_at_key(root, key) is not None:
        return
    trained = [part for part in EXPERT_PARTS if part not in frozen]
    index = Path(text_at(root, "model.model_name_or_path") or "") / GENERATOR_INDEX
    if len(trained) != 1 or not index.is_file():
        return
    boundary = read_json_object(index, ConfigError, key="model.model_name_or_path").get("boundary_ratio")
    if isinstance(boundary, int | float):
        # The first transformer draws above the boundary, the second below it.
        is_of_high_noise = trained == [EXPERT_PARTS[0]]
        levels = [boundary, 1.0] if is_of_high_noise else [0.0, boundary]
        put(root, key, levels, "derived: model.freeze")


def _settle_rows(root: Node, dataset: str, notes: Notes) -> None:
    preprocess = f"{dataset}.preprocess_parameters"
    area = find(root, f"{preprocess}.max_hxw")
    is_free = area is not None and isinstance(area.node.value, int)
    if is_free and value_at_key(root, f"{preprocess}.force_resolution") is False:
        move(root, f"{preprocess}.max_hxw", f"{preprocess}.max_pixels")
        take(root, f"{preprocess}.max_height")
        take(root, f"{preprocess}.max_width")
    for theirs, ours in MEDIA_KEYS.items():
        move(root, f"{preprocess}.{theirs}", f"{preprocess}.{ours}")
    move(root, f"{dataset}.basic_parameters.data_path", f"{dataset}.basic_parameters.dataset")
    move(root, f"{preprocess}.cfg", f"{_NOISE}.caption_dropout")
    dropped = [name for name in _READ_OTHERWISE if take(root, f"{dataset}.{name}") is not None]
    if dropped:
        _note(notes, dataset, f"{', '.join(dropped)} have no effect", "docs/generation.md says how media are prepared.")
    find(root, f"{dataset}.dataset_type").node.value = "generation"  # type: ignore[union-attr]


def _settle_models(root: Node, models: MappingEntry, notes: Notes) -> None:
    """The folder around the components, what of them is trained, and the patterns of their modules."""
    take(root, _MODELS)
    find(root, "model.model_id").node.value = DATASET  # type: ignore[union-attr]
    folders: dict[str, SourcePosition] = {}
    for name, component in models.node.value.items():
        given = find(component.node, "from_pretrained")
        if given is not None and isinstance(given.node.value, str):
            folders.setdefault(str(PurePosixPath(given.node.value).parent), given.node.place)
        if name != _TRAINED and value_at_key(component.node, "freeze") is not True:
            what = "is not trained here: only the transformer is"
            notes.problems.append(Problem(what, str(component.key), f"{_MODELS}.{name}", "Set freeze: true."))
    if len(folders) > 1:
        what = f"components lie in {' and '.join(folders)}"
        notes.problems.append(Problem(what, str(models.key), _MODELS, "Name parts of one folder, as released."))
    for folder, place in folders.items():
        put(root, "model.model_name_or_path", folder, place)
    if value_at_key(models.node, "ae.enable_tiling") is True:
        put(root, "model.vae_tiling", True, models.key)
    attention = find(models.node, f"{_TRAINED}.attn_implementation")
    if attention is not None:
        put(root, "model.attn_implementation", plain(attention.node), attention.node.place)
    for key, value in _NOISE_THERE.items():
        put(root, f"{_NOISE}.{key}", value, models.key)
    _note(notes, _MODELS, "of the components their folder is read", "The sizes are read from its files.")
    _settle_parts(root, models)


def _settle_parts(root: Node, models: MappingEntry) -> None:
    """Patterns name the modules of one transformer, or of both where there are two."""
    given = text_at(models.node, f"{_TRAINED}.from_pretrained") or ""
    trained = PurePosixPath(given).name
    is_pair = trained == EXPERT_PARTS[1] or (Path(given).parent / EXPERT_PARTS[1]).is_dir()
    parts = EXPERT_PARTS if is_pair else ("",)
    others = [name for name in models.node.value if name != _TRAINED]
    for key in pattern_keys():
        entry = find(root, key)
        if entry is not None and isinstance(entry.node.value, list):
            here: list[Node] = []
            for node in entry.node.value:
                here += _here(node, parts, others)
            entry.node.value = here
    frozen = value_at_key(models.node, f"{_TRAINED}.freeze")
    patterns: list[str] = []
    if isinstance(frozen, list):
        for name in frozen:
            patterns += _names(f"{_TRAINED}.{name}", (trained,) if is_pair else ("",))
    if is_pair:
        patterns += [part for part in EXPERT_PARTS if part != trained]
    if patterns:
        put(root, "model.freeze", patterns, models.key)


def _here(node: Node, parts: tuple[str, ...], others: list[str]) -> list[Node]:
    """A pattern of the container as those of the model here; none for components that are no part of it."""
    if not isinstance(node.value, str):
        return [node]
    if node.value.partition(".")[0] in others:
        return []
    return [Node(name, node.place) for name in _names(node.value, parts)]


def _names(pattern: str, parts: tuple[str, ...]) -> list[str]:
    first, _, inside = pattern.partition(".")
    if first != _TRAINED:
        return [pattern]
    for theirs, ours in _INSIDE.items():
        if inside == theirs or inside.startswith(f"{theirs}."):
            inside = ours + inside.removeprefix(theirs)
    names = (".".join(filter(None, (part, inside))) for part in parts)
    return list(filter(None, names))


LTX2 = ("ltx2", "ltx2_3")
_LTX2_SIDES = ("pos_embed_max_pos", "base_height", "base_width")
"""The reach of positions in diffusers' configuration: frames, height and width."""


def _settle_ltx2(root: Node, notes: Notes) -> None:
    """The folder has the weights and the text encoder; the sides of positions are three settings of diffusers; features
    without sound make it a model of pictures alone."""
    weights = text_at(root, "model.checkpoint_path")
    if weights is not None and weights == text_at(root, "model.model_name_or_path"):
        take(root, "model.checkpoint_path")
    if value_at_key(root, "model.text_encoder_path") is not None:
        take(root, "model.text_encoder_path")
        _note(notes, "model.text_encoder_path", "has no effect", "The model's folder has the text encoder.")
    key = "model.transformer.positional_embedding_max_pos"
    sides = find(root, key)
    if sides is not None and isinstance(sides.node.value, list) and len(sides.node.value) == len(_LTX2_SIDES):
        take(root, key)
        for name, side in zip(_LTX2_SIDES, sides.node.value, strict=True):
            put(root, f"model.transformer.{name}", plain(side), side.place)
    for name in LTX2:
        sound = find(root, f"data.dataset_param.{name}_dataset_custom.with_audio")
        if sound is not None and sound.node.value is False:
            put(root, "model.task", "t2v", sound.node.place)


def _note(notes: Notes, key: str, what: str, way_out: str) -> None:
    notes.warnings.append(Problem(what, key=key, way_out=way_out))
