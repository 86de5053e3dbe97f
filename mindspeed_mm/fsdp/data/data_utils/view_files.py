"""Writes into a trained model's folder how training looked at its rows: the processor's settings, the chat template,
and the file that our own commands read (`training_view`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.folder_writing import copy_plain
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.template import build_template, own_template
from mindspeed_mm.fsdp.data.data_utils.training_view import (
    VIEW_FILE,
    Override,
    chat_template_of_view,
    processor_settings,
    told_view,
    view_of,
    view_processor,
    with_view,
)
from mindspeed_mm.fsdp.models.added_tokens import resolve_added_tokens, write_rows_in_config
from mindspeed_mm.fsdp.params.data_args import DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.settings import setting_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

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
        dataset_param: The run's; a plugin's data set decides itself how rows look: only the tokens that are added to
            the tokenizer are written for it.
        model_folder: What training started from.
        only_template: The folder is one of adapters, without a processor whose settings could be changed.
    """
    if dataset_param.dataset_type != BUILT_IN:
        return partial(_write_tokens, dataset_param.preprocess_parameters, model_folder, only_template)
    return partial(_write, with_view(dataset_param, model_folder), model_folder, only_template)


def view_of_adapters(folder: Path) -> DatasetParam:
    """The view that a folder of adapters keeps, as a section."""
    template = folder / TEMPLATE_FILE
    param = DatasetParam()
    if template.is_file():
        basic = param.basic_parameters.model_copy(update={"chat_template": str(template)})
        param = param.model_copy(update={"basic_parameters": basic})
    return with_view(param, folder)


def _write(param: DatasetParam, model_folder: Path, only_template: bool, draft: Path) -> None:
    is_given = any(view_of(param).values()) or (model_folder / VIEW_FILE).is_file()
    names_template = param.basic_parameters.template or param.basic_parameters.chat_template
    if not is_given and not names_template:
        return
    preprocess = param.preprocess_parameters
    processor = view_processor(model_folder, preprocess)
    _write_tokens(preprocess, model_folder, only_template, draft)
    if is_given:
        (draft / VIEW_FILE).write_text(json.dumps(told_view(param), indent=2) + "\n", encoding="utf-8")
    if not only_template:
        _write_settings(draft, processor, processor_settings(processor, preprocess))
        if preprocess.fix_mistral_regex:
            _write_tokenizer(draft, processor)
    if param.basic_parameters.stage != "pretrain":
        _write_template(draft, processor, param)


def _write_tokens(preprocess: PreprocessParameters, model_folder: Path, only_template: bool, draft: Path) -> None:
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
            if (model_folder / name).is_file():
                copy_plain(model_folder / name, draft / name)
    else:
        write_rows_in_config(draft, model_folder, added)
    processor = view_processor(model_folder, preprocess)
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


def _write_template(draft: Path, processor: Processor, param: DatasetParam) -> None:
    template = build_template(processor, param.basic_parameters)
    source = chat_template_of_view(template.source, template.enable_thinking)
    if source == own_template(processor):
        return
    (draft / TEMPLATE_FILE).write_text(source, encoding="utf-8")
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


def _read(path: Path) -> dict[str, Any]:
    return parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _store(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
