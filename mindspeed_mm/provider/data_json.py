"""data.json: the `data` section as it stands where its rows are conversations, or translated where they are media or
features of a generator, or rows of MindSpeed-MM's readers of InternVL, DeepSeek-VL2 and Whisper."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam
from mindspeed_mm.fsdp.params.yaml.generator_files import MEDIA_KEYS
from mindspeed_mm.fsdp.params.yaml.tree import Node, find, plain, text_at
from mindspeed_mm.provider.json_tree import entries_at, entries_of, place_at
from mindspeed_mm.provider.omni_json import put_omni_rows
from mindspeed_mm.provider.reading import Reading
from mindspeed_mm.provider.reward_json import put_pairs_of_videos

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
    elif kind in _OLDER_ROWS:
        left_out = _put_loader(reading, root)
        if left_out:
            reading.draft.note(f"{root.place.source}: {', '.join(left_out)} have no effect: rows are dealt otherwise.")
        taken = _put_older_rows(reading, root, kind)
        _note_left_out(reading, root, taken, "the processor and the chat template of the model's folder say it")
        _note_bounds(reading)
    elif kind == "bagel":
        left_out = _put_loader(reading, root)
        if left_out:
            reading.draft.note(f"{root.place.source}: {', '.join(left_out)} have no effect: rows are dealt otherwise.")
        _note_left_out(reading, root, put_omni_rows(reading, root), "the model's folder says it")
    elif kind == "rewardvideo":
        left_out = _put_loader(reading, root)
        if left_out:
            reading.draft.note(f"{root.place.source}: {', '.join(left_out)} have no effect: rows are dealt otherwise.")
        _note_left_out(reading, root, put_pairs_of_videos(reading, root), "videos are seen as the released model does")
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
    if isinstance(folder, str):
        return folder
    return None


# --- rows of older readers --------------------------------------------------------------------------------------------

_BASIC, _PREPROCESS = f"{_DATASET}.basic_parameters", f"{_DATASET}.preprocess_parameters"
_THEIRS = "dataset_param.basic_parameters"
_OF_SETS = ("data_path", "data_folder", "repeat_time", "data_storage_mode")


def _put_older_rows(reading: Reading, root: Node, kind: str) -> list[str]:
    """Put rows and processor of a file.

    Args:
        reading: Takes keys, notes and problems.
        root: The file.
        kind: Its `dataset_type`, one of `_OLDER_ROWS`.

    Returns:
        Dotted names inside `dataset_param` of the settings that are taken.
    """
    reading.draft.put(f"{_DATASET}.dataset_type", "huggingface", place_at(root, "dataset_param.dataset_type"))
    return _OLDER_ROWS[kind](reading, root)


def _pictures(reading: Reading, root: Node) -> list[str]:
    """Rows `{"image", "conversations"}`, whose pictures are cut into tiles."""
    taken = [*_put_sets(reading, root), "tokenizer_config"]
    tokenizer = find(root, "dataset_param.tokenizer_config")
    if tokenizer is not None:
        first = tokenizer.node.value[0] if isinstance(tokenizer.node.value, list) else tokenizer.node
        _put_folder(reading, _find_text(first, "from_pretrained"))
    taken += _put_tiles(reading, root)
    frames = find(root, "dataset_param.max_num_frame")
    if frames is not None:
        taken.append("max_num_frame")
        reading.draft.put(f"{_PREPROCESS}.video_maxlen", plain(frames.node), frames.node.place)
    return taken


def _put_tiles(reading: Reading, root: Node) -> list[str]:
    """Into how many tiles a picture is cut."""
    given = {name: entry.node for name, entry in entries_at(root, "dataset_param").items()}
    draft = reading.draft
    is_cut = given.get("dynamic_image_size")
    cuts = is_cut is not None and plain(is_cut) is True
    if is_cut is not None:
        draft.put(f"{_PREPROCESS}.crop_to_patches", plain(is_cut), is_cut.place)
    most = given.get("max_dynamic_patch")
    if cuts and most is not None:
        draft.put(f"{_PREPROCESS}.image_max_tiles", plain(most), most.place)
        draft.note(
            f"{most.place}: max_dynamic_patch {plain(most)} holds for each image of a row; MindSpeed-MM divides it by "
            "the number of images in the row."
        )
    least = given.get("min_dynamic_patch")
    if cuts and least is not None and plain(least) != 1:
        draft.problem(
            f"min_dynamic_patch is {plain(least)}",
            least.place,
            "Set it to 1, or set min_patches in preprocessor_config.json of the model's folder.",
        )
    view = given.get("use_thumbnail")
    if cuts and view is not None and plain(view) is not True:
        what = "use_thumbnail is false, but a small view of the whole image always follows its tiles"
        draft.problem(what, view.place, "Set it to true, or dynamic_image_size to false.")
    return ["dynamic_image_size", "max_dynamic_patch", "min_dynamic_patch", "use_thumbnail"]


def _turns_with_pictures(reading: Reading, root: Node) -> list[str]:
    """Rows whose turns list their pictures: `{"conversations": [{"role": "<|User|>", "content", "images"}, …]}`."""
    _put_folder(reading, _find_text(root, "dataset_param.processor_path"))
    return [*_put_sets(reading, root), "processor_path"]


def _transcripts(reading: Reading, root: Node) -> list[str]:
    """Rows `{"audio", "sentence"}` of a folder, in a language."""
    draft, section = reading.draft, "dataset_param.preprocess_parameters"
    rows = _find_text(root, f"{_THEIRS}.dataset_name_or_path")
    if rows is None:
        where = place_at(root, _THEIRS)
        draft.problem("names no dataset_name_or_path", where, "Name the folder of the rows.")
    else:
        draft.put(f"{_BASIC}.dataset", rows.value, rows.place)
    _put_folder(reading, _find_text(root, f"{section}.processor_name_or_path"))
    spoken = {name: text_at(root, f"{section}.{name}") for name in ("language", "task")}
    said = ", ".join(f"{name} {value}" for name, value in spoken.items() if value)
    if said:
        draft.note(
            f"{place_at(root, section)}: {said}: transcripts begin as generation_config.json of the model's folder "
            "says, while training and when the model is asked; write them there."
        )
    names = ("basic_parameters.dataset_name_or_path", "basic_parameters.language")
    inside = ("processor_name_or_path", *spoken)
    return [*names, *(f"preprocess_parameters.{name}" for name in inside)]


_OLDER_ROWS: Mapping[str, Callable[[Reading, Node], list[str]]] = {
    "multimodal": _pictures,
    "deepseekvl2": _turns_with_pictures,
    "audio": _transcripts,
}
"""`dataset_type` → what puts its rows."""


def _put_sets(reading: Reading, root: Node) -> list[str]:
    """One set of rows, or several in a list or under names, each with its media folder and how often it is read."""
    sets = list(_sets(root))
    entries = [_set(reading, name, node) for name, node in sets]
    place = place_at(root, _THEIRS)
    if len(entries) == 1 and not {"share", "repeats", "name"} & entries[0].keys():
        for theirs, ours, key in (("data_path", "dataset", "path"), ("data_folder", "dataset_dir", "media_dir")):
            if key in entries[0]:
                reading.draft.put(f"{_BASIC}.{ours}", entries[0][key], place_at(sets[0][1], theirs))
    elif entries:
        reading.draft.put(f"{_BASIC}.dataset", entries, place)
    return [f"basic_parameters.{name}" for name in (*_OF_SETS, *(name for name, _ in sets if name))]


def _sets(root: Node) -> Iterator[tuple[str, Node]]:
    """(name, section) of each set; names are empty where the file has none."""
    entry = find(root, _THEIRS)
    if entry is None:
        return
    inside = entries_of(entry.node)
    paths = inside["data_path"].node if "data_path" in inside else entry.node
    if isinstance(entry.node.value, list):
        yield from (("", node) for node in entry.node.value)
    elif entries_of(paths):  # of `data_path`, or of the section itself, which names no path
        yield from ((name, each.node) for name, each in entries_of(paths).items())
    else:
        yield "", entry.node


def _set(reading: Reading, name: str, section: Node) -> JsonObject:
    """A set of rows as an entry of `dataset`."""
    path, folder = _find_text(section, "data_path"), _find_text(section, "data_folder")
    if path is None:
        reading.draft.problem("names no data_path", section.place, "Name the file of the rows.")
    entry = {"path": path.value if path else "", "name": name, "media_dir": folder.value if folder else ""}
    times = find(section, "repeat_time")
    value = plain(times.node) if times is not None else 1
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if times is not None and not (is_number and value > 0 and (value < 1 or value % 1 == 0)):
        what = f"repeat_time is {value!r}, neither a share of the rows nor a whole number of times"
        reading.draft.problem(what, times.node.place, "Write a number from 0 to 1, or 2, 3 and so on.")
    elif value < 1:
        entry["share"] = value
    elif value > 1:
        entry["repeats"] = int(value)
    return {key: each for key, each in entry.items() if each}


def _find_text(root: Node, key: str) -> Node | None:
    """The node of a text that holds something."""
    entry = find(root, key)
    if entry is None or not isinstance(entry.node.value, str) or not entry.node.value:
        return None
    return entry.node


def _put_folder(reading: Reading, node: Node | None) -> None:
    """The folder of processor and tokenizer, which is the model's."""
    if node is not None:
        reading.draft.put(f"{_PREPROCESS}.model_name_or_path", node.value, node.place)
