"""model.json and data.json of `pretrain_omni.py`: BAGEL, with its rows of words and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.params.yaml.tree import Node, find, plain, text_at, value_at_key
from mindspeed_mm.provider.json_tree import entries_at, place_at
from mindspeed_mm.provider.module_names import ModuleNames
from mindspeed_mm.provider.reading import Reading

_DATASET = "data.dataset_param"
_BASIC, _PREPROCESS = f"{_DATASET}.basic_parameters", f"{_DATASET}.preprocess_parameters"
_THEIRS, _PACKED = "dataset_param.basic_parameters", "dataset_param.packed_parameters"
FOLDER = f"{_PREPROCESS}.model_name_or_path"
_NAMES = ModuleNames(
    "language_model.model",
    "language_model.model.layers",
    head=("language_model.lm_head",),
    vision="vit_model",
    vision_layers="vit_model.vision_model.encoder.layers",
    vision_parts=("vit_model",),
    projector=("connector",),
)
_FREEZES = {
    "image_encoder.vision_encoder.freeze": "tower",
    "image_encoder.vision_projector.freeze": "projector",
    "mllm.freeze_und": "understanding",
}
"""Switch → the part of the card that it freezes."""
_DROPOUT = ("text_cond_dropout_prob", "vae_cond_dropout_prob", "vit_cond_dropout_prob")
_SIZES = {"max_image_size": "max_image_size", "min_image_size": "min_image_size", "max_pixels": "max_pixels"}
_TRANSFORMS = (
    ("t2i_pretrain.image_transform_args", "vae"),
    ("unified_edit.image_transform_args", "vae"),
    ("vlm_sft.image_transform_args", "vit"),
    ("unified_edit.vit_image_transform_args", "vit"),
)
"""How pictures of a group of sets are sized → which of ours; the first that a file has counts."""


def is_of_omni(root: Node) -> bool:
    """Whether a model.json describes a model that answers and draws."""
    return find(root, "mllm") is not None


def put_omni(reading: Reading, root: Node) -> None:
    """Put the model that a file describes: the folder that data.json names, what of it is frozen, its noise levels."""
    draft = reading.draft
    draft.put("model.model_id", "bagel", place_at(root, "model_id"))
    folder = draft.value(FOLDER)
    if folder is not None:
        draft.put("model.model_name_or_path", folder, draft.place(FOLDER))
    reading.names = _NAMES
    for name in ("visual_und", "visual_gen"):
        if value_at_key(root, name) is False:
            draft.problem(f"{name} is false", place_at(root, name), "Set it to true: rows decide what is trained.")
    if value_at_key(root, "ae.freeze") is False:
        draft.problem("ae.freeze is false, and the VAE is not trained", place_at(root, "ae.freeze"), "Set it to true.")
    vae = text_at(root, "ae.from_pretrained")
    if vae is not None and folder is not None and Path(vae).parent != Path(str(folder)):
        draft.note(f"{place_at(root, 'ae.from_pretrained')}: {vae} is not read: the VAE is that of {folder}.")
    (card,) = (card for card in families() if card.name == "bagel")
    frozen = [switch for switch in _FREEZES if value_at_key(root, switch) is True]
    if frozen:
        patterns = [pattern for switch in frozen for pattern in card.freeze[_FREEZES[switch]]]
        draft.put("model.freeze", patterns, place_at(root, frozen[0]))
    shift = find(root, "ae.timestep_shift")
    if shift is not None and plain(shift.node) is not None:
        draft.put("training.diffusion.shift", plain(shift.node), shift.node.place)
    # MindSpeed-MM divides both terms by numbers of all ranks, and adds them as they are.
    draft.put("features.loss_cfg.loss_type", "per_token_loss", place_at(root, "mllm"))
    draft.put("features.loss_cfg.text_loss_weight", 1.0, place_at(root, "mllm"))


def put_omni_rows(reading: Reading, root: Node) -> list[str]:
    """Put the rows of a file, how large their pictures are, and how many tokens a packed row has.

    Returns:
        Dotted names inside `dataset_param` of the settings that are taken.
    """
    draft = reading.draft
    draft.put(f"{_DATASET}.dataset_type", "bagel", place_at(root, "dataset_param.dataset_type"))
    folder = find(root, f"{_THEIRS}.model_path")
    if folder is None:
        draft.problem("names no model_path", place_at(root, _THEIRS), "Name the model's folder.")
    else:
        draft.put(FOLDER, plain(folder.node), folder.node.place)
    taken = ["basic_parameters.model_path", "basic_parameters.available_data"]
    taken += _put_sets(reading, root)
    for name in _DROPOUT:
        entry = find(root, f"{_THEIRS}.{name}")
        if entry is not None:
            taken.append(f"basic_parameters.{name}")
            draft.put(f"{_BASIC}.{name}", plain(entry.node), entry.node.place)
    for where, prefix in _TRANSFORMS:
        for theirs, ours in _SIZES.items():
            entry = find(root, f"{_THEIRS}.{where}.{theirs}")
            # the sets of one kind share our size: the first group that has one decides
            key = f"{_PREPROCESS}.{prefix}_{ours}"
            if entry is not None and not draft.has(key):
                draft.put(key, plain(entry.node), entry.node.place)
    longest = find(root, f"{_PACKED}.max_num_tokens_per_sample")
    if longest is not None:
        taken.append("packed_parameters.max_num_tokens_per_sample")
        draft.put(f"{_BASIC}.cutoff_len", plain(longest.node), longest.node.place)
        draft.put(f"{_BASIC}.packing", True, longest.node.place)
        # a packed row is as long as its samples allow: --seq-length would set cutoff_len again
        reading.settled.add("seq_length")
    return taken


def _put_sets(reading: Reading, root: Node) -> list[str]:
    """The sets of each group that is used, as entries of `dataset`. Returns the names of the groups."""
    groups: Any = value_at_key(root, f"{_THEIRS}.available_data")
    place = place_at(root, f"{_THEIRS}.available_data")
    if not isinstance(groups, list) or not groups:
        reading.draft.problem("names no available_data", place, 'Write ["vlm_sft", "t2i_pretrain"].')
        return []
    entries = []
    for group in groups:
        inside = entries_at(root, f"{_THEIRS}.{group}")
        names: Any = []
        if "dataset_names" in inside:
            names = plain(inside["dataset_names"].node)
        for name in names:
            at = f"{_THEIRS}.{group}.{name}"
            rows = text_at(root, f"{at}.jsonl_path") or text_at(root, f"{at}.data_dir")
            if rows is None:
                reading.draft.problem(f"set '{name}' of {group} names no rows", place_at(root, at), "Name data_dir.")
                continue
            entry = {"path": rows, "name": str(name)}
            if text_at(root, f"{at}.jsonl_path") is not None:
                entry["media_dir"] = text_at(root, f"{at}.data_dir") or ""
            entries.append(entry)
    reading.draft.put(f"{_BASIC}.dataset", entries, place)
    reading.draft.note(
        f"{place}: an epoch has every row of every set once; num_used_data, num_files, weight and is_mandatory, by "
        "which MindSpeed-MM draws sets without end, have no effect. An entry's share takes a part of its rows."
    )
    return [f"basic_parameters.{group}" for group in groups]
