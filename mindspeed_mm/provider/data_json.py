"""data.json: the `data` section as it stands where its rows are conversations, or translated where they are media or
features of a generator."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam
from mindspeed_mm.fsdp.params.yaml.generator_files import MEDIA_KEYS
from mindspeed_mm.fsdp.params.yaml.tree import Node, find, plain, text_at
from mindspeed_mm.provider.json_tree import entries_at, entries_of, place_at
from mindspeed_mm.provider.older_rows import OLDER_ROWS, put_older_rows
from mindspeed_mm.provider.omni_json import put_omni_rows
from mindspeed_mm.provider.reading import Reading

_DATASET = "data.dataset_param"
PROCESSOR = f"{_DATASET}.preprocess_parameters.model_name_or_path"
"""The key of the folder that conversations are read with."""
_ROWS = {"data_path": "dataset", "data_folder": "dataset_dir"}
"""Keys of `basic_parameters` of MindSpeed-MM's generators → here, where the names differ."""
_BOUNDS = (
    "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "crop_to_patches",
    "image_max_tiles",
)  # fmt: skip
_MEDIA = ("t2v", "i2v", "t2i", "video", "image", "vace")
_STORED = {"vace": "combine", "sorafeatured": "combine"}
"""`data_storage_mode` of MindSpeed-MM → here, where the names differ."""
_NOT_READ = {
    "lumina": "rows of tokens that Lumina-mGPT 2.0's own encoder made; dataset_type lumina_mgpt trains on pictures "
    "themselves (docs/data.md)",
    "rewardvideo": "rows of VideoAlign, which is not built",
    "dt2v": "media of Open-Sora 2.0, which is not built",
    "dancegrpo": "prompts of posttrain_flux_dancegrpo.py, which reads its flags itself",
}
"""`dataset_type` → what its rows are, which this door does not read."""


def put_data(reading: Reading, root: Node) -> None:
    """Put the rows that a file names."""
    kind = text_at(root, "dataset_param.dataset_type") or "huggingface"
    if kind == "feature":
        _put_generation(reading, root)
        _note_left_out(reading, root, _put_features(reading, root), "media were prepared when they were extracted")
    elif kind in _MEDIA:
        _put_generation(reading, root)
        _note_left_out(reading, root, _put_media(reading, root), "docs/generation.md says how media are prepared")
        if kind == "vace":
            reading.draft.fill("model.task", kind, "rows of VACE: src_video, src_video_mask, src_ref_images")
    elif kind in OLDER_ROWS:
        left_out = _put_loader(reading, root)
        if left_out:
            reading.draft.note(f"{root.place.source}: {', '.join(left_out)} have no effect: rows are dealt otherwise.")
        taken = put_older_rows(reading, root, kind)
        _note_left_out(reading, root, taken, "the processor and the chat template of the model's folder say it")
        _note_bounds(reading)
    elif kind == "bagel":
        left_out = _put_loader(reading, root)
        if left_out:
            reading.draft.note(f"{root.place.source}: {', '.join(left_out)} have no effect: rows are dealt otherwise.")
        _note_left_out(reading, root, put_omni_rows(reading, root), "the model's folder says it")
    elif kind in _NOT_READ:
        reading.draft.problem(
            f"dataset_type '{kind}' is for {_NOT_READ[kind]}",
            place_at(root, "dataset_param.dataset_type"),
            'Conversations of any usual layout are "dataset_type": "huggingface" (docs/data.md).',
        )
    else:
        reading.draft.put_node("data", root)
        _note_bounds(reading)


def _note_bounds(reading: Reading) -> None:
    """Tell that sizes of media which are given for training hold afterwards, too."""
    section = f"{_DATASET}.preprocess_parameters"
    given = [name for name in _BOUNDS if reading.draft.value(f"{section}.{name}") is not None]
    if given:
        said = ", ".join(f"{name} {reading.draft.value(f'{section}.{name}')}" for name in given)
        reading.draft.note(
            f"{reading.draft.place(f'{section}.{given[0]}')}: {said}: these sizes also hold in inference, evaluation "
            "and the exported folder."
        )


def _put_generation(reading: Reading, root: Node) -> None:
    """What files of generators say of the loader; grouping by size is what ours does anyway."""
    place = place_at(root, "dataset_param.dataset_type")
    reading.draft.put(f"{_DATASET}.dataset_type", "generation", place)
    left_out = _put_loader(reading, root)
    if left_out:
        reading.draft.note(
            f"{root.place.source}: {', '.join(left_out)} have no effect: a micro-batch of a generator has one size."
        )


def _put_loader(reading: Reading, root: Node) -> list[str]:
    """Order and processes of the loader; the collator is ours. Returns the names of what is left out."""
    left_out = []
    for name, entry in entries_at(root, "dataloader_param").items():
        if name in DataloaderParam.model_fields and name != "collate_param":
            reading.draft.put_node(f"data.dataloader_param.{name}", entry.node)
        elif name not in ("collate_param", "initial_global_step_for_sampler"):
            left_out.append(name)
    return left_out


def _put_features(reading: Reading, root: Node) -> Collection[str]:
    """Features that were extracted before: their folder holds the index, too. Returns the names of what is taken."""
    names = ("data_folder", "data_path")
    for name in names:
        entry = find(root, f"dataset_param.basic_parameters.{name}")
        if entry is not None and isinstance(entry.node.value, str):
            value = entry.node.value if name == "data_folder" else entry.node.value.rpartition("/")[0] or "."
            reading.draft.put(f"{_DATASET}.basic_parameters.features_dir", value, entry.node.place)
            break
    else:
        reading.draft.problem("names no data_folder", root.place, "It is the folder of the features.")
    return [f"basic_parameters.{name}" for name in names]


def _put_media(reading: Reading, root: Node) -> Collection[str]:
    """Clips or pictures with captions, by MindSpeed-MM's names or by ours. Returns the names of what is taken."""
    ours = {*dataset_cards()["generation"], *map("basic_parameters.{}".format, BasicParameters.model_fields)}
    taken = []
    for section, names in (("basic_parameters", _ROWS), ("preprocess_parameters", MEDIA_KEYS)):
        for theirs, entry in entries_at(root, f"dataset_param.{section}").items():
            key = f"{section}.{names.get(theirs, theirs)}"
            if theirs not in names and key not in ours:
                continue
            taken.append(f"{section}.{theirs}")
            value = plain(entry.node)
            if theirs == "data_storage_mode" and isinstance(value, str):
                value = _STORED.get(value, value)
            if value not in (None, ""):
                reading.draft.put(f"{_DATASET}.{key}", value, entry.node.place)
    return taken


def _note_left_out(reading: Reading, root: Node, taken: Collection[str], reason: str) -> None:
    """Name the settings of rows that nothing has taken: one that is misspelt would be missed otherwise."""
    left_out = [name for name in _settings(root) if name not in taken]
    if left_out:
        have = "has" if len(left_out) == 1 else "have"
        reading.draft.note(f"{root.place.source}: {', '.join(left_out)} {have} no effect: {reason}.")


def _settings(root: Node) -> Iterator[str]:
    """Every setting of the file but those of the loader, as a dotted name inside `dataset_param`."""
    for name, entry in entries_at(root, "dataset_param").items():
        if name.endswith("_parameters"):
            yield from (f"{name}.{inside}" for inside in entries_of(entry.node))
        elif name != "dataset_type":
            yield name
    yield from (name for name in entries_of(root) if name not in ("dataset_param", "dataloader_param"))


def processor_folder(reading: Reading) -> str | None:
    """The folder that data.json reads conversations with."""
    folder = reading.draft.value(PROCESSOR)
    return folder if isinstance(folder, str) else None
