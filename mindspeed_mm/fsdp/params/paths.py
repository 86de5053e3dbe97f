"""Paths in a configuration: tried against the working directory first, then against the YAML's folder."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.fsdp.params.yaml_tree import Entry, Node, Place, find, merge, nest, text_at, value_at_key

INPUT_PATHS = (
    "model.model_name_or_path",
    "model.checkpoint_path",
    "model.text_encoder_path",
    *(
        f"data.{dataset}.{key}"
        for dataset in ("dataset_param", "val_dataset_param")
        for key in (
            "basic_parameters.dataset",
            "basic_parameters.dataset_dir",
            "basic_parameters.val_dataset",
            "basic_parameters.chat_template",
            "basic_parameters.media_roots",
            "basic_parameters.data_folder",
            "basic_parameters.features_dir",
            "basic_parameters.val_features_dir",
            "preprocess_parameters.model_name_or_path",
        )
    ),
    "training.load",
    "training.lora.pretrained_lora_path",
    "training.lora.frozen_adapters",
    "training.sampling.prompts_file",
    "inference.sampling.prompts_file",
    "inference.load",
    "inference.adapter",
    "inference.processor_path",
    "inference.data_path",
)
"""Keys whose paths exist already, or may (features are written and read under the same key); others that are written to
are relative to the working directory."""


def resolve_path(config: Path, path: str) -> Path:
    """The path meant: as it is where it exists or is absolute, else beside the YAML if it exists there."""
    given = Path(path).expanduser()
    beside = config.parent / given
    return beside if not given.is_absolute() and not given.exists() and beside.exists() else given


def derive_processor_folder(root: Node) -> None:
    """A dataset that names no processor uses the model's folder; one of generators also what else decides the model."""
    for dataset in ("data.dataset_param", "data.val_dataset_param"):
        if dataset == "data.dataset_param" or value_at_key(root, dataset) is not None:
            of_generators = text_at(root, f"{dataset}.dataset_type") == "generation"
            for key in ("model_name_or_path", *(("model_id", "transformer") if of_generators else ())):
                _derive(root, f"model.{key}", f"{dataset}.preprocess_parameters.{key}", dataset)


def _derive(root: Node, source: str, key: str, dataset: str) -> None:
    given = find(root, source)
    parents = [find(root, parent) for parent in ("data", dataset, key.rpartition(".")[0])]
    if given is None or not given.node.value or value_at_key(root, key) is not None:
        return
    if all(_takes_keys(parent) for parent in parents):
        place = Place(f"derived: {source}")
        merge(root, nest(key, Entry(place, Node(given.node.value, place))))


def _takes_keys(entry: Entry | None) -> bool:
    return entry is None or entry.node.value is None or isinstance(entry.node.value, dict)


def locate_inputs(root: Node, config: Path) -> None:
    """Write input paths that exist only beside the YAML as paths that exist from here."""
    for key in INPUT_PATHS:
        entry = find(root, key)
        if entry is not None:
            _locate(entry.node, config)


def _locate(node: Node, config: Path) -> None:
    if isinstance(node.value, list):
        for item in node.value:
            _locate(item, config)
    elif isinstance(node.value, dict):  # an entry of `dataset` with what is special about it
        if "path" in node.value:
            _locate(node.value["path"].node, config)
    elif isinstance(node.value, str):
        parts = [part.strip() for part in node.value.split(",")]
        is_path = [part != "" and "://" not in part for part in parts]
        located = ",".join(
            str(resolve_path(config, part)) if is_one else part for part, is_one in zip(parts, is_path, strict=True)
        )
        if located != ",".join(parts):
            node.value, node.place = located, Place(f"derived: beside the YAML, {node.place}")
