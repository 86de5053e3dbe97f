"""Conversions of setups for generators: which media, with which captions, at which sizes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.data_args import CAPTIONS_OF_LISTS
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.tasks.importing.common_values import key_of
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    DATASET,
    DIFFUSION,
    MEDIA,
    VAL_DATASET,
    Outcome,
    PeerSetup,
    conversion,
    data_fetch,
    default_of,
    idle,
    is_on,
    no,
    texts,
)
from mindspeed_mm.tasks.importing.generator_adapters import VIDEO_FAMILIES, family_of, script_of
from mindspeed_mm.tasks.importing.run_values import media_in


@conversion(":di_dataset")
def di_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Pictures with one caption, of a thing and its class; or a folder or data set with captions."""
    name = draft.folder_of(str(value), "data", data_fetch)
    prompt = draft.get("instance_prompt")
    first: JsonObject = {"path": name}
    if prompt:
        first["caption"] = str(prompt)
        if not draft.has("caption_column") and (draft.has("dataset_name") or any(Path(name).glob("*.txt"))):
            draft.put(f"{BASIC}.caption_column", "instance_prompt", "no column: instance_prompt is the caption of all")
    if int(draft.get("repeats", 1)) > 1:
        first["repeats"] = int(draft.get("repeats"))
    entries = [first]
    if is_on(draft.get("with_prior_preservation", False)) and draft.has("class_data_dir"):
        entries.append(
            {"path": str(draft.get("class_data_dir")), "caption": str(draft.get("class_prompt", "")), "prior": True}
        )
    return {DATASET: name if entries == [{"path": name}] else entries}


@conversion(":clips_root")
def clips_root(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Where the clips of a table are; without one, CogVideoX's scripts read a text file of captions and one of paths,
    line by line."""
    if draft.has("dataset_name"):
        return {key_of(row): str(value)}
    listed, captions = (str(draft.get(word)) for word in ("video_column", "caption_column"))
    if not listed.endswith(".txt") or captions not in CAPTIONS_OF_LISTS:
        return no(
            f"name the file of paths in basic_parameters.dataset, and call that of captions {CAPTIONS_OF_LISTS[0]}"
        )
    for name in ("media_column", "caption_column"):
        draft.out.pop(f"{BASIC}.{name}", None)
    return {DATASET: f"{value}/{listed}"}


@conversion(":prior_weight")
def prior_weight(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The weight of the loss of the class, where pictures of it are trained on."""
    entries = draft.out.get(DATASET)
    has_prior = isinstance(entries, list) and any(isinstance(each, dict) and each.get("prior") for each in entries)
    if has_prior:
        return {key_of(row): float(value)}
    return {}


@conversion(":di_resolution")
def di_resolution(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A square, unless buckets or sizes of clips are given."""
    if any(map(draft.has, ("aspect_ratio_buckets", "height", "height_buckets"))):
        return {}
    return {f"{MEDIA}.height": int(value), f"{MEDIA}.width": int(value)}


def _register_size_of_cogvideox(name: str, size: int) -> None:
    default_of(f"{name}_of_cogvideox")(lambda draft: size if "cogvideox" in script_of(draft) else None)


for _name, _size in (("height", 480), ("width", 720), ("frames", 49), ("fps", 8)):
    _register_size_of_cogvideox(_name, _size)


@default_of("resolution_of_diffusers")
def resolution_of_diffusers(draft: PeerSetup) -> int | None:
    """A square of 512, but in the scripts of CogVideoX, which have height, width, frames and rate."""
    if "cogvideox" in script_of(draft):
        return None
    return 512


@conversion(":aspect_buckets")
def aspect_buckets(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Sizes written `height,width;height,width`, as a list of buckets."""
    pairs = [part.split(",") for part in str(value).split(";") if part]
    return {f"{MEDIA}.buckets": [f"{int(height)}x{int(width)}" for height, width in pairs]}


@conversion(":center_crop")
def center_crop(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether media are cut in the middle or at a random place."""
    if is_on(value) or draft.has("height"):
        return {}
    return {f"{MEDIA}.crop": "random"}


@conversion(":ko_dataset")
def ko_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Folders, by `train_data_dir` or by the data set's own TOML; of several sizes, each entry has its own."""
    entries = _subsets(draft)
    if not entries:
        words = [word for word in ("train_data_dir", "reg_data_dir") if draft.has(word)]
        entries = [{"path": str(draft.get(word)), **({"prior": True} if word[0] == "r" else {})} for word in words]
        _mix_regularisation(draft, entries)
    if not entries:
        return no("the data set's file is not here: name the folder of pictures in basic_parameters.dataset")
    if draft.tool.name == "kohya" and any(entry.get("prior") for entry in entries):
        draft.put(f"{DIFFUSION}.prior_loss_weight", float(draft.get("prior_loss_weight", 1.0)))
    if held_out := [entry for entry in entries if entry.pop("is_held_out", False)]:
        entries = [entry for entry in entries if entry not in held_out]
        draft.put(VAL_DATASET, held_out, "validation_split: 1.0")
    return {DATASET: entries[0]["path"] if len(entries) == 1 and len(entries[0]) == 1 else entries}


def _mix_regularisation(draft: PeerSetup, entries: list[JsonObject]) -> None:
    """kohya's scripts read as many pictures of `is_reg` as others (DreamBoothDataset), and with a weight of 1 their
    loss is like any other's: where both can be counted, they are a data set like others, repeated to be as many."""
    counts = [media_in(entry) for entry in entries]
    of_class = [bool(entry.get("prior")) for entry in entries]
    groups = {flag: sum(compress(counts, (each is flag for each in of_class))) for flag in (False, True)}
    if float(draft.get("prior_loss_weight", 1.0)) != 1 or not all(groups.values()):
        return
    share = groups[False] / groups[True]
    for entry, count in zip(entries, counts, strict=True):
        if not entry.pop("prior", False):
            continue
        if share >= 1:
            entry["repeats"] = max(1, round(share * entry.get("repeats", 1)))
        else:
            entry["max_samples"] = max(1, round(share * count))
    draft.note(DATASET, "pictures of is_reg count like others, and are as many")


def _subsets(draft: PeerSetup) -> list[JsonObject]:
    datasets = [each for each in draft.given.tree.get("datasets") or [] if isinstance(each, dict)]
    several = len({str(_resolution(draft, each)) for each in datasets}) > 1
    found = []
    for dataset in datasets:
        entries = []
        for subset in dataset.get("subsets") or []:
            entry: JsonObject = {"path": str(subset.get("image_dir", subset.get("metadata_file", "")))}
            if (repeats := int(subset.get("num_repeats", 1))) > 1:
                entry["repeats"] = repeats
            if subset.get("class_tokens"):
                entry["caption"] = str(subset["class_tokens"])
            if subset.get("is_reg"):
                entry["prior"] = True
            if _held_out(draft, dataset, subset) >= 1:
                entry["is_held_out"] = True
            if several:
                entry["sizes"] = _sizes(draft, dataset)
            entries.append(entry)
        _mix_regularisation(draft, entries)
        found += entries
    return found


def _held_out(draft: PeerSetup, dataset: Mapping[str, object], subset: Mapping[str, object]) -> float:
    """The share of a subset that is validated on; 1 for one that is not trained on."""
    given = (draft.given.tree, draft.given.tree.get("general") or {}, dataset, subset)
    return float(next((each["validation_split"] for each in reversed(given) if "validation_split" in each), 0.0))


@conversion(":ko_validation")
def ko_validation(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The share that is held out of every data set; a data set of validation alone is one here, too."""
    datasets = [each for each in draft.given.tree.get("datasets") or [] if isinstance(each, dict)]
    shares = {_held_out(draft, each, subset) for each in datasets for subset in each.get("subsets") or []} - {1.0}
    if len(shares) > 1:
        return no("name pictures to validate on in basic_parameters.val_dataset: val_rate is of all data sets")
    share = shares.pop() if shares else float(value)
    if 0 < share < 1:
        return {key_of(row): share}
    return {}


def _general(draft: PeerSetup, dataset: Mapping[str, object], word: str, default: object = None) -> Any:
    """A setting of a data set, of all of them, or of the command."""
    general = draft.given.tree.get("general") or {}
    return dataset.get(word, general.get(word, draft.get(word, default)))


def _resolution(draft: PeerSetup, dataset: Mapping[str, object]) -> tuple[int, int]:
    """Width and height that a data set is trained at."""
    default = [960, 544] if draft.tool.name == "musubi" else 512
    given = _general(draft, dataset, "resolution", default)
    numbers = [int(float(each)) for each in (given if isinstance(given, list) else texts(str(given).replace("x", ",")))]
    return numbers[0], numbers[-1]


def _datasets(draft: PeerSetup) -> list[JsonObject]:
    """The data sets of a TOML; musubi-tuner takes a sample of a clip for each of its `target_frames`, so that one of
    several becomes several, and the first frame alone where there are none (VideoDataset)."""
    found: list[JsonObject] = []
    for dataset in (each for each in draft.given.tree.get("datasets") or [] if isinstance(each, dict)):
        is_of_clips = any(word in dataset for word in ("video_directory", "video_jsonl_file"))
        if not is_of_clips or dataset.get("frame_extraction") == "full":
            found.append({name: value for name, value in dataset.items() if name != "target_frames"})
            continue
        counts = dataset.get("target_frames", [1])
        found += [
            {**dataset, "target_frames": int(each)} for each in (counts if isinstance(counts, list) else [counts])
        ]
    return found


def _sizes(draft: PeerSetup, dataset: Mapping[str, object]) -> JsonObject:
    width, height = _resolution(draft, dataset)
    frames = dataset.get("target_frames")
    sizes: JsonObject = (
        {"max_pixels": width * height}
        if is_on(_general(draft, dataset, "enable_bucket", False))
        else {"height": height, "width": width}
    )
    if frames:
        sizes["num_frames"] = frames
    return sizes


@conversion(":ko_resolution")
@conversion(":mu_resolution")
def resolution(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A size, or an area where there are buckets."""
    datasets = _datasets(draft) or [{}]
    if len({str(_sizes(draft, each)) for each in datasets}) > 1:
        return idle("each entry of basic_parameters.dataset has its own sizes")
    return {f"{MEDIA}.{name}": size for name, size in _sizes(draft, datasets[0]).items() if name != "num_frames"}


@conversion(":mu_dataset")
def mu_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Folders and files of pictures and clips; each has its own sizes where they differ."""
    datasets = _datasets(draft)
    several = len({str(_sizes(draft, each)) for each in datasets}) > 1
    entries = []
    for dataset in datasets:
        words = ("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file")
        entry: JsonObject = {"path": next((str(dataset[word]) for word in words if word in dataset), "")}
        if (repeats := int(_general(draft, dataset, "num_repeats", 1))) > 1:
            entry["repeats"] = repeats
        if dataset.get("control_directory"):
            column = "control" if "video_directory" in dataset else "source"
            entry["companions"] = {column: str(dataset["control_directory"])}
        if several:
            entry["sizes"] = _sizes(draft, dataset)
        entries.append(entry)
    if not entries:
        return no("the data set's file is not here: name the folder of media in basic_parameters.dataset")
    return {DATASET: entries[0]["path"] if len(entries) == 1 and len(entries[0]) == 1 else entries}


@conversion(":frames")
def frames(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The number of frames, unless each entry has its own."""
    datasets = _datasets(draft)
    if len({str(_sizes(draft, each)) for each in datasets}) > 1:
        return idle("each entry of basic_parameters.dataset has its own sizes")
    if "target_frames" in datasets[0]:
        return {f"{MEDIA}.num_frames": datasets[0]["target_frames"]}
    return {}


@default_of("frames_of_musubi")
def frames_of_musubi(draft: PeerSetup) -> int | None:
    """1: of a clip without `target_frames`, its first frame."""
    if any("target_frames" in each for each in _datasets(draft)):
        return 1
    return None


@conversion(":frame_extraction")
def frame_extraction(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Which part of a clip is taken."""
    if value == "head":
        return {}
    if value == "full":
        longest = draft.get("datasets[].max_frames", 129)
        return idle(f"clips are trained whole, up to 81 frames here and {longest} there: num_frames limits them")
    return no("preprocess_parameters.clip_position takes start or middle; cut clips beforehand for more parts")


@conversion(":micro_batch")
def micro_batch(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Media of a device at a time; the smallest where data sets have several."""
    given = [int(each.value) for each in draft.given.settings if each.key in row.words and str(each.value).isdigit()]
    if len(set(given)) > 1:
        draft.note(key_of(row), f"{', '.join(map(str, given))} there: one number for all data sets here")
    return {key_of(row): min([int(value), *given])}


@conversion(":ai_datasets")
def ai_datasets(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Folders; an entry of several resolutions becomes several."""
    entries = []
    for dataset in process_of(draft).get("datasets") or []:
        areas = dataset.get("resolution", 512)
        for area in areas if isinstance(areas, list) else [areas]:
            path = str(dataset.get("folder_path", dataset.get("dataset_path", "")))
            entry: JsonObject = {"path": path}
            several = len(_areas(draft)) > 1
            if several:
                entry["name"] = f"{Path(path).name}-{area}"
                entry["sizes"] = {"max_pixels": int(area) ** 2}
            if dataset.get("default_caption"):
                entry["caption"] = str(dataset["default_caption"])
            if int(dataset.get("num_repeats", 1)) > 1:
                entry["repeats"] = int(dataset["num_repeats"])
            if dataset.get("is_reg"):
                entry["prior"] = True
            controls = dataset.get("control_path")
            names = controls if isinstance(controls, list) else [controls] if controls else []
            names += [
                dataset[f"control_path_{number}"] for number in (1, 2, 3) if dataset.get(f"control_path_{number}")
            ]
            if names:
                columns = ("source", "source_2", "source_3")
                entry["companions"] = dict(zip(columns, map(str, names), strict=False))
            entries.append(entry)
    counts = {int(each.get("num_frames", 1)) for each in process_of(draft).get("datasets") or []}
    is_video = family_of(draft) in VIDEO_FAMILIES
    if counts - {1} or (is_video and draft.has("datasets[].num_frames")):
        draft.put(f"{MEDIA}.num_frames", max(counts))
    return {DATASET: entries[0]["path"] if len(entries) == 1 and len(entries[0]) == 1 else entries}


def process_of(draft: PeerSetup) -> JsonObject:
    """The part of a job that trains."""
    processes = (draft.given.tree.get("config") or {}).get("process") or [{}]
    if isinstance(processes[0], dict):
        return processes[0]
    return {}


def _areas(draft: PeerSetup) -> set[int]:
    """Sides of the squares whose areas are trained at."""
    found: set[int] = set()
    for dataset in process_of(draft).get("datasets") or []:
        areas = dataset.get("resolution", 512)
        found |= {int(area) for area in (areas if isinstance(areas, list) else [areas])}
    return found


@conversion(":ai_resolution")
def ai_resolution(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The area of a square; several are in the entries."""
    areas = _areas(draft) or {int(value)}
    if len(areas) > 1:
        return idle("each entry of basic_parameters.dataset has its own sizes")
    return {f"{MEDIA}.max_pixels": areas.pop() ** 2}


@conversion(":ai_crop")
def ai_crop(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether media are cut at a random place."""
    if is_on(value):
        return {f"{MEDIA}.crop": "random"}
    return {}


@conversion(":ds_dataset")
def ds_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A table of media and captions."""
    table = draft.get("dataset_metadata_path")
    entry: JsonObject = {"path": str(table or value)}
    if int(draft.get("dataset_repeat", 1)) > 1:
        entry["repeats"] = int(draft.get("dataset_repeat"))
    return {DATASET: entry["path"] if len(entry) == 1 else [entry], f"{BASIC}.dataset_dir": str(value)}
