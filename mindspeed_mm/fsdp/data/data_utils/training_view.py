"""How training looked at its rows, kept in the folder of the trained model: what is written there holds wherever
nothing else is given, for inference and evaluation as for further training.

An exported folder's own processor and chat template carry what transformers has settings for (`processor_settings`,
`chat_template_of_view`); the file carries all of it, so that our own commands need no more than the folder.
`view_writer` writes all three.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mm.checkpoint.hf_folder import replace_processor
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.folder_writing import copy_plain
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import TILE_BOUNDS, is_tiled, tile_bounds
from mindspeed_mm.fsdp.data.data_utils.plugins.qwen_patches import frame_limits, pixel_limits
from mindspeed_mm.fsdp.data.data_utils.template import build_template, own_template
from mindspeed_mm.fsdp.models.added_tokens import resolve_added_tokens, write_rows_in_config
from mindspeed_mm.fsdp.params.cards import dataset_modules
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.params.value_types import Section
from mindspeed_mm.fsdp.utils.model_parts import setting_of
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of
from mindspeed_mm.fsdp.utils.register import data_register

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
_TRAINED_WITH, _MEDIA, _ROWS = "trained_with", "media_plugin", "data_set"
"""Keys of what plugins brought: kind of plugin → its name in the registry, and its class."""


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
    found: View = {}
    if folder:
        found = read_view(Path(folder))
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
        raise _broken(path, error) from error
    return sections


def _broken(path: Path, error: Exception) -> ModelFolderError:
    return ModelFolderError(
        f"is broken: {error}", where=str(path), way_out="Export the model again, or remove the file."
    )


# --- plugins that training looked through -----------------------------------------------------------------------------


def check_trained_with(folder: Path, *, reads_rows_itself: bool = True) -> None:
    """Stop where a folder's model was trained with a media plugin that is not there; warn where its rows were those of
    a plugin's data set.

    Args:
        folder: Of a model, or of adapters.
        reads_rows_itself: No configuration says which data set makes the rows.

    Raises:
        ModelFolderError: The file is broken.
        ConfigError: The plugin is not registered: media would be shown to the model in another way than in training.
    """
    trained_with = _trained_with(folder)
    media, rows = trained_with.get(_MEDIA), trained_with.get(_ROWS)
    if media is not None and media["name"] not in MM_PLUGINS:
        raise ConfigError(
            f"the model was trained with the media plugin {media['class']} for {media['name']}, which is not there",
            where=str(folder / VIEW_FILE),
            way_out=f"Name its package: --plugin {media['class'].rpartition('.')[0]}, or --config with a YAML that "
            f"lists it in training.plugin. To do without it, remove '{_MEDIA}' from the file.",
        )
    if rows is not None and reads_rows_itself:
        warnings.warn(
            f"{folder}: the model was trained on rows of the data set '{rows['name']}' ({rows['class']}), and is shown "
            "ordinary rows here; --config with the run's YAML shows it those",
            stacklevel=2,
        )


def _trained_with(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / VIEW_FILE
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_bytes()).get(_TRAINED_WITH, {})
        return {kind: {key: str(entry[key]) for key in ("name", "class")} for kind, entry in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _broken(path, error) from error


def _plugins_of(param: DatasetParam, processor: object) -> dict[str, dict[str, str]]:
    """What a folder says of the plugins that a run looked through; nothing of what the suite has itself."""
    name, rows = type(processor).__name__, param.dataset_type
    found = {}
    if name in MM_PLUGINS and rows == BUILT_IN:
        found[_MEDIA] = _part_entry(name, MM_PLUGINS.get(name))
    if rows in data_register and rows not in dataset_modules():
        found[_ROWS] = _part_entry(rows, data_register.get(rows))
    return found


def _part_entry(name: str, kind: Any) -> dict[str, str]:
    return {"name": name, "class": f"{kind.__module__}.{kind.__qualname__}"}


# --- what is given, and what a folder says ----------------------------------------------------------------------------


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


def _only(keys: Iterable[str], values: Mapping[str, object] | Section) -> JsonObject:
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
    if source.startswith(defaults):  # exported before: writing them twice would change the file each time
        return source
    return defaults + source


# --- into the folder of a trained model -------------------------------------------------------------------------------


TEMPLATE_FILE = "chat_template.jinja"
_PROCESSOR_FILE = "processor_config.json"
_PART_FILES = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
_OLD_NAMES = {"size": ("min_pixels", "max_pixels")}
"""Settings that older files keep under other names, which would win."""
BUILT_IN = "huggingface"

_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE)

WriteView = Callable[[Path], None]
"""Writes into a draft of a model's folder, which holds the files of the folder that training started from."""


def view_writer(dataset_param: DatasetParam, model_folder: Path, *, only_template: bool = False) -> WriteView:
    """What adds a run's view to the folder of its model.

    Args:
        dataset_param: The run's, with the folder of its processor. A plugin's data set decides itself how rows look:
            only the tokens that are added to the tokenizer are written for it.
        model_folder: What training started from.
        only_template: The folder is one of adapters, without a processor whose settings could be changed.
    """
    if dataset_param.dataset_type != BUILT_IN:
        return partial(_write_of_plugin, dataset_param, model_folder, only_template)
    rows_folder = _read_rows_with(dataset_param.preprocess_parameters, model_folder)
    return partial(_write, with_view(dataset_param, rows_folder), model_folder, rows_folder, only_template)


def _read_rows_with(preprocess: PreprocessParameters, model_folder: Path) -> Path:
    """The folder whose processor made the rows: another than the model's where the run named one that is there."""
    named = preprocess.model_name_or_path
    if named is None or not Path(named).is_dir() or Path(named).samefile(model_folder):
        return model_folder
    return Path(named)


def view_of_adapters(folder: Path) -> DatasetParam:
    """The view that a folder of adapters keeps, as a section."""
    template = folder / TEMPLATE_FILE
    param = DatasetParam()
    if template.is_file():
        basic = param.basic_parameters.model_copy(update={"chat_template": str(template)})
        param = param.model_copy(update={"basic_parameters": basic})
    return with_view(param, folder)


def _write_of_plugin(param: DatasetParam, model_folder: Path, only_template: bool, draft: Path) -> None:
    """Of a run whose rows were made by a data set of their own."""
    preprocess = param.preprocess_parameters
    _write_tokens(preprocess, model_folder, model_folder, only_template, draft)
    plugins = _plugins_of(param, None)
    if plugins:
        _store_view(draft, {}, plugins)


def _store_view(draft: Path, view: View, plugins: Mapping[str, object]) -> None:
    told: JsonObject = {name: view.get(name, {}) for name in _SECTIONS}
    if plugins:
        told[_TRAINED_WITH] = plugins
    (draft / VIEW_FILE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _write(param: DatasetParam, model_folder: Path, rows_folder: Path, only_template: bool, draft: Path) -> None:
    is_apart = rows_folder != model_folder
    if is_apart and not only_template:
        # The draft is a copy of the model's folder: its own view is of another processor than the rows'.
        (draft / VIEW_FILE).unlink(missing_ok=True)
        replace_processor(rows_folder, draft)
    is_given = any(view_of(param).values()) or (rows_folder / VIEW_FILE).is_file()
    basic, has_plugins = param.basic_parameters, bool(MM_PLUGINS.loaded())
    if not (is_apart or is_given or has_plugins or basic.template or basic.chat_template or basic.default_system):
        return
    preprocess = param.preprocess_parameters
    processor = view_processor(rows_folder, preprocess)
    plugins = _plugins_of(param, processor)
    _write_tokens(preprocess, model_folder, rows_folder, only_template, draft)
    if is_given or plugins:
        _store_view(draft, told_view(param), plugins)
    if not only_template:
        _write_settings(draft, processor, processor_settings(processor, preprocess))
        if preprocess.fix_mistral_regex:
            _write_tokenizer(draft, processor)
    if param.basic_parameters.stage != "pretrain":
        _write_template(draft, processor, param, is_of_base=not (is_apart and only_template))


def _write_tokens(
    preprocess: PreprocessParameters, model_folder: Path, rows_folder: Path, only_template: bool, draft: Path
) -> None:
    """The tokenizer with the tokens that were added to it, and the number of rows that the model has for them. A folder
    of adapters gets the tokenizer, as PEFT's have it, and no configuration."""
    tokens, special = preprocess.add_tokens, preprocess.add_special_tokens
    if not (tokens or special):
        return
    added = resolve_added_tokens(model_folder, tokens, special, trust_remote_code=preprocess.trust_remote_code)
    if not added.ids:
        return
    if only_template:
        for name in _TOKENIZER_SETTINGS:
            if (rows_folder / name).is_file():
                copy_plain(rows_folder / name, draft / name)
    else:
        write_rows_in_config(draft, model_folder, added)
    processor = view_processor(rows_folder, preprocess)
    _write_tokenizer(draft, processor)
    listed = _read(draft / "tokenizer_config.json")
    if "added_tokens_decoder" in listed:  # of older versions of transformers, which take what it lists
        decoder = tokenizer_of(processor).added_tokens_decoder
        for number in added.ids.values():
            listed["added_tokens_decoder"][str(number)] = decoder[number].__getstate__()
        _store(draft / "tokenizer_config.json", listed)


def _write_tokenizer(draft: Path, processor: Processor) -> None:
    """The tokenizer as it is in memory: with added tokens, or with the corrected rule by which Mistral's split text.
    transformers corrects that as it reads a folder, but only one whose `config.json` is of an older version than what
    trained here writes."""
    from tokenizers import Tokenizer

    backend = setting_of(tokenizer_of(processor), Tokenizer, "backend_tokenizer")
    if backend is not None:
        backend.save(str(draft / "tokenizer.json"))


def _write_template(draft: Path, processor: Processor, param: DatasetParam, *, is_of_base: bool) -> None:
    """The template of the rows, unless it is the processor's own, and that of the folder or of the adapters' base."""
    template = build_template(processor, param.basic_parameters)
    source = chat_template_of_view(template.source, template.enable_thinking)
    if is_of_base and source == own_template(processor):
        return
    (draft / TEMPLATE_FILE).write_text(source, encoding="utf-8")
    # An older place of the same template; two of them could differ.
    (draft / "chat_template.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", _PROCESSOR_FILE):
        if "chat_template" in (content := _read(draft / name)):
            del content["chat_template"]
            _store(draft / name, content)


def _write_settings(draft: Path, processor: Processor, settings: list[Override]) -> None:
    """Into the processor's own file, where transformers looks first, as whole parts: a part that is not there would be
    read from the file of another. The older files say the same."""
    if not settings:
        return
    parts = {name: getattr(processor, name).to_dict() for name in _PART_FILES if getattr(processor, name, None)}
    for setting in settings:
        parts[setting.part][setting.name] = setting.value
        _change_old_file(draft / _PART_FILES[setting.part], setting)
    own = _read(draft / _PROCESSOR_FILE) or {"processor_class": type(processor).__name__}
    _store(draft / _PROCESSOR_FILE, own | parts)


def _change_old_file(path: Path, setting: Override) -> None:
    if content := _read(path):
        for name in _OLD_NAMES.get(setting.name, ()):
            content.pop(name, None)
        _store(path, content | {setting.name: setting.value})


def _read(path: Path) -> JsonObject:
    if path.is_file():
        return parse_json(path.read_text(encoding="utf-8"))
    return {}


def _store(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
