"""data.json: the `data` section as it stands where its rows are conversations, or translated where they are media or
features of a generator."""

from __future__ import annotations

from mindspeed_mm.fsdp.params.data_args import DataloaderParam
from mindspeed_mm.fsdp.params.yaml.tree import Node, find, text_at
from mindspeed_mm.fsdp.params.yaml.wan_files import MEDIA_KEYS
from mindspeed_mm.provider.json_tree import entries_at, place_at
from mindspeed_mm.provider.reading import Reading

_DATASET = "data.dataset_param"
PROCESSOR = f"{_DATASET}.preprocess_parameters.model_name_or_path"
"""The key of the folder that conversations are read with."""
_MEDIA = ("t2v", "i2v", "t2i", "video", "image")
_OLDER = ("multimodal", "deepseekvl2", "lumina", "audio", "bagel", "dancegrpo")


def put_data(reading: Reading, root: Node) -> None:
    """Put the rows that a file names."""
    kind = text_at(root, "dataset_param.dataset_type") or "huggingface"
    if kind == "feature":
        _put_generation(reading, root)
        _put_features(reading, root)
    elif kind in _MEDIA:
        _put_generation(reading, root)
        _put_media(reading, root)
    elif kind in _OLDER:
        reading.draft.problem(
            f"dataset_type '{kind}' reads rows of an older layout",
            place_at(root, "dataset_param.dataset_type"),
            'Write the rows as conversations (docs/data.md) and "dataset_type": "huggingface".',
        )
    else:
        reading.draft.put_node("data", root)


def _put_generation(reading: Reading, root: Node) -> None:
    """What files of generators say of the loader; grouping by size is what ours does anyway."""
    place = place_at(root, "dataset_param.dataset_type")
    reading.draft.put(f"{_DATASET}.dataset_type", "generation", place)
    left_out = []
    for name, entry in entries_at(root, "dataloader_param").items():
        if name in DataloaderParam.model_fields and name != "collate_param":
            reading.draft.put_node(f"data.dataloader_param.{name}", entry.node)
        elif name not in ("collate_param", "initial_global_step_for_sampler"):
            left_out.append(name)
    if left_out:
        reading.draft.note(
            f"{root.place.source}: {', '.join(left_out)} have no effect: a micro-batch of a generator has one size."
        )


def _put_features(reading: Reading, root: Node) -> None:
    """Features that were extracted before: their folder holds the index, too."""
    for name in ("data_folder", "data_path"):
        entry = find(root, f"dataset_param.basic_parameters.{name}")
        if entry is not None and isinstance(entry.node.value, str):
            value = entry.node.value if name == "data_folder" else entry.node.value.rpartition("/")[0] or "."
            reading.draft.put(f"{_DATASET}.basic_parameters.features_dir", value, entry.node.place)
            return
    reading.draft.problem("names no data_folder", root.place, "It is the folder of the features.")


def _put_media(reading: Reading, root: Node) -> None:
    """Clips or pictures with captions."""
    names = {"data_path": "dataset", "data_folder": "dataset_dir", "data_storage_mode": "data_storage_mode"}
    for theirs, ours in names.items():
        entry = find(root, f"dataset_param.basic_parameters.{theirs}")
        if entry is not None and entry.node.value:
            reading.draft.put_node(f"{_DATASET}.basic_parameters.{ours}", entry.node)
    for theirs, ours in MEDIA_KEYS.items():
        entry = find(root, f"dataset_param.preprocess_parameters.{theirs}")
        if entry is not None and entry.node.value is not None:
            reading.draft.put_node(f"{_DATASET}.preprocess_parameters.{ours}", entry.node)


def processor_folder(reading: Reading) -> str | None:
    """The folder that data.json reads conversations with."""
    folder = reading.draft.value(PROCESSOR)
    return folder if isinstance(folder, str) else None
