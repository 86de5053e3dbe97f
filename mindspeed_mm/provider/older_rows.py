"""data.json of MindSpeed-MM's readers of InternVL, DeepSeek-VL2 and Whisper: its rows and its processor by our keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspeed_mm.fsdp.params.yaml.tree import Node, find, plain, text_at
from mindspeed_mm.provider.json_tree import entries_at, entries_of, place_at
from mindspeed_mm.provider.reading import Reading

_DATASET = "data.dataset_param"
_BASIC, _PREPROCESS = f"{_DATASET}.basic_parameters", f"{_DATASET}.preprocess_parameters"
_THEIRS = "dataset_param.basic_parameters"
_OF_SETS = ("data_path", "data_folder", "repeat_time", "data_storage_mode")


def put_older_rows(reading: Reading, root: Node, kind: str) -> list[str]:
    """Put rows and processor of a file.

    Args:
        reading: Takes keys, notes and problems.
        root: The file.
        kind: Its `dataset_type`, one of `OLDER_ROWS`.

    Returns:
        Dotted names inside `dataset_param` of the settings that are taken.
    """
    reading.draft.put(f"{_DATASET}.dataset_type", "huggingface", place_at(root, "dataset_param.dataset_type"))
    return OLDER_ROWS[kind](reading, root)


def _pictures(reading: Reading, root: Node) -> list[str]:
    """Rows `{"image", "conversations"}`, whose pictures are cut into tiles."""
    taken = [*_put_sets(reading, root), "tokenizer_config"]
    tokenizer = find(root, "dataset_param.tokenizer_config")
    if tokenizer is not None:
        first = tokenizer.node.value[0] if isinstance(tokenizer.node.value, list) else tokenizer.node
        _put_folder(reading, find_text(first, "from_pretrained"))
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
    _put_folder(reading, find_text(root, "dataset_param.processor_path"))
    return [*_put_sets(reading, root), "processor_path"]


def _transcripts(reading: Reading, root: Node) -> list[str]:
    """Rows `{"audio", "sentence"}` of a folder, in a language."""
    draft, section = reading.draft, "dataset_param.preprocess_parameters"
    rows = find_text(root, f"{_THEIRS}.dataset_name_or_path")
    if rows is None:
        where = place_at(root, _THEIRS)
        draft.problem("names no dataset_name_or_path", where, "Name the folder of the rows.")
    else:
        draft.put(f"{_BASIC}.dataset", rows.value, rows.place)
    _put_folder(reading, find_text(root, f"{section}.processor_name_or_path"))
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


OLDER_ROWS: Mapping[str, Callable[[Reading, Node], list[str]]] = {
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


def _set(reading: Reading, name: str, section: Node) -> dict[str, Any]:
    """A set of rows as an entry of `dataset`."""
    path, folder = find_text(section, "data_path"), find_text(section, "data_folder")
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


def find_text(root: Node, key: str) -> Node | None:
    """The node of a text that holds something."""
    entry = find(root, key)
    if entry is None or not isinstance(entry.node.value, str) or not entry.node.value:
        return None
    return entry.node


def _put_folder(reading: Reading, node: Node | None) -> None:
    """The folder of processor and tokenizer, which is the model's."""
    if node is not None:
        reading.draft.put(f"{_PREPROCESS}.model_name_or_path", node.value, node.place)
