"""How training looked at its rows, kept in the folder of the trained model: what is written there holds wherever
nothing else is given, for inference and evaluation as for further training.

An exported folder's own processor and chat template carry what transformers has settings for (`processor_settings`,
`chat_template_of_view`); the file carries all of it, so that our own commands need no more than the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import TILE_BOUNDS, is_tiled, tile_bounds
from mindspeed_mm.fsdp.data.data_utils.plugins.qwen_patches import frame_limits, pixel_limits
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.params.value_types import Section
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.fsdp.utils.settings import setting_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

View = dict[str, dict[str, Any]]
"""Section → key → value, of what decides how rows look."""
VIEW_FILE = "training_view.json"
TOKEN_KEYS = ("add_tokens", "add_special_tokens")
"""Keys of `preprocess_parameters` that add tokens; a written folder's tokenizer has them."""
SHAPING_PREPROCESS = (
    *TOKEN_KEYS,
    "use_fast_tokenizer",
    "split_special_tokens",
    "fix_mistral_regex",
    "image_max_pixels",
    "image_min_pixels",
    "image_do_pan_and_scan",
    "crop_to_patches",
    "image_max_tiles",
    "video_max_pixels",
    "video_min_pixels",
    "video_fps",
    "video_maxlen",
    "use_audio_in_video",
    "audio_sampling_rate",
)
"""Keys of `preprocess_parameters` that decide how a row looks."""
_BASIC = ("enable_thinking",)
_SECTIONS = {"preprocess_parameters": SHAPING_PREPROCESS, "basic_parameters": _BASIC}


class Override(NamedTuple):
    """A setting of a processor's part that the configuration changes."""

    part: str
    """Attribute of the processor: `image_processor`, `video_processor`."""
    name: str
    value: object
    before: object
    key: str
    """Key in `preprocess_parameters`."""


def with_view(dataset_param: DatasetParam, folder: str | Path | None) -> DatasetParam:
    """The section with what the folder's file says about keys that are not given.

    Raises:
        ModelFolderError: The file is broken.
    """
    found = read_view(Path(folder)) if folder else {}
    sections = {name: _filled(dataset_param[name], values) for name, values in found.items()}
    return dataset_param.model_copy(update=sections)


def read_view(folder: Path) -> View:
    """What a model's folder says of how training looked at its rows: section → key → value; nothing where it does not.

    Raises:
        ModelFolderError: The file is broken.
    """
    path = folder / VIEW_FILE
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_bytes())
        sections = {name: _only(keys, content[name]) for name, keys in _SECTIONS.items()}
        PreprocessParameters.model_validate(sections["preprocess_parameters"])
        BasicParameters.model_validate(sections["basic_parameters"])
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(
            f"is broken: {error}", where=str(path), way_out="Export the model again, or remove the file."
        ) from error
    return sections


def view_of(dataset_param: DatasetParam) -> View:
    """What is given of what decides how rows look: section → key → value."""
    return {name: _given(dataset_param[name], keys) for name, keys in _SECTIONS.items()}


def told_view(dataset_param: DatasetParam) -> View:
    """What a trained model's folder says: as `view_of`, with the values that are the defaults, since a folder below it
    may say something else."""
    view = {}
    for name, keys in _SECTIONS.items():
        values = _only(keys, dataset_param[name])
        view[name] = {key: value for key, value in values.items() if value is not None}
    return view


def _only(keys: Iterable[str], values: Mapping[str, Any] | Section) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def _given(section: Section, keys: Iterable[str]) -> dict[str, Any]:
    defaults = type(section).model_fields
    return {key: section[key] for key in keys if section[key] != defaults[key].default}


def _filled(section: Section, found: Mapping[str, object]) -> Section:
    """The section with found values for keys that are not given, or are null."""
    is_open = [key for key in found if section[key] is None or key not in section.model_fields_set]
    return section.model_copy(update=_only(is_open, found))


def view_processor(folder: str | Path, preprocess: PreprocessParameters) -> Processor:
    """The processor (of a text model the tokenizer) of a folder, read as the section asks: one that is read otherwise
    would split the same words into other tokens.

    Raises:
        ModelFolderError: As `load_processor`.
    """
    return load_processor(
        folder,
        use_fast=preprocess.use_fast_tokenizer,
        trust_remote_code=preprocess.trust_remote_code,
        add_tokens=preprocess.add_tokens,
        add_special_tokens=preprocess.add_special_tokens,
        fix_mistral_regex=preprocess.fix_mistral_regex,
    )


# --- what processors have settings for -------------------------------------------------------------------------------


def processor_settings(processor: object, preprocess: PreprocessParameters) -> list[Override]:
    """Settings of the processor that make it see what `preprocess_parameters` asks for, where it has such settings.

    Args:
        processor: As the model's folder has it.
        preprocess: The section.
    """
    found = [*_image_settings(processor, preprocess), *_video_settings(processor, preprocess)]
    return [setting for setting in found if setting.value != setting.before]


def _image_settings(processor: object, preprocess: PreprocessParameters) -> list[Override]:
    settings = []
    images: Any = setting_of(processor, object, "image_processor")
    size_keys = _given_of(preprocess, "image_max_pixels", "image_min_pixels")
    if size_keys and type(images).__name__.startswith("Qwen2VLImageProcessor"):
        settings.append(_limits("image_processor", images, pixel_limits(images.size, preprocess), size_keys))
    # Setting → the key that decides it, and the value that it asks for.
    asked: dict[str, tuple[str, int | None]] = {
        "crop_to_patches": ("crop_to_patches", preprocess.crop_to_patches),
        "do_pan_and_scan": ("image_do_pan_and_scan", preprocess.image_do_pan_and_scan),
    }
    if preprocess.crop_to_patches is False and hasattr(images, "crop_to_patches"):
        # Processors may ask for tiles whatever their image processor says: then let there be one.
        asked |= dict.fromkeys(TILE_BOUNDS, ("crop_to_patches", 1))
    elif preprocess.image_max_tiles is not None and is_tiled(images):
        bounds = tile_bounds(images, preprocess.image_max_tiles)
        asked |= {name: ("image_max_tiles", value) for name, value in bounds.items()}
    for name, (key, value) in asked.items():
        if value is not None and hasattr(images, name):
            settings.append(Override("image_processor", name, value, getattr(images, name), key))
    return settings


def _video_settings(processor: object, preprocess: PreprocessParameters) -> list[Override]:
    """Limits of a frame; those of whole clips have no setting that says the same of every clip."""
    videos: Any = setting_of(processor, object, "video_processor")
    keys = _given_of(preprocess, "video_max_pixels", "video_min_pixels")
    is_told = "size" in (setting_of(processor, Mapping, "videos_kwargs") or {})
    if not keys or is_told or type(videos).__name__ != "Qwen2VLVideoProcessor":
        return []
    return [_limits("video_processor", videos, frame_limits(videos.size, preprocess, 1), keys)]


def _given_of(preprocess: PreprocessParameters, *keys: str) -> str:
    return ", ".join(key for key in keys if preprocess[key] is not None)


def _limits(part: str, owner: Any, limits: tuple[int, int], key: str) -> Override:
    asked = dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))
    before = {name: owner.size[name] for name in asked}
    return Override(part, "size", asked, before, key)


def view_notes(dataset_param: DatasetParam, processor: object) -> list[str]:
    """For the log: what is given, and what the model's folder says instead."""
    preprocess = dataset_param.preprocess_parameters
    instead = {}
    for setting in processor_settings(processor, preprocess):
        for key in setting.key.split(", "):
            instead[key] = f"the folder's {setting.part}.{setting.name} is {setting.before}"
    notes = []
    for key, value in view_of(dataset_param)["preprocess_parameters"].items():
        if key in TOKEN_KEYS:
            continue
        said = instead.get(key, "no setting of the folder's processor")
        notes.append(f"{key} {value} ({said})")
    return notes


def chat_template_of_view(source: str, enable_thinking: bool | None) -> str:
    """A chat template that thinks or not as training did, unless who renders it says otherwise."""
    if enable_thinking is None:
        return source
    value, defaults = str(enable_thinking).lower(), ""
    for name in ("enable_thinking", "thinking"):  # families call it either way
        defaults += f"{{%- if {name} is not defined %}}{{% set {name} = {value} %}}{{% endif -%}}\n"
    return source if source.startswith(defaults) else defaults + source
