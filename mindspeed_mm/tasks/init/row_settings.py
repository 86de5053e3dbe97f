"""What `mm init` sets for rows: their kind, and a chat format where the model's folder has none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm.core.errors import ConfigError, MMError, ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import placeholders_of
from mindspeed_mm.fsdp.data.data_utils.rendering.templates_builtin import FORMATS
from mindspeed_mm.fsdp.data.data_utils.rows.formats import EXTRAS, PAIRS, RowFormat, recognised
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.data_utils.template import build_template
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of

BASIC = "data.dataset_param.basic_parameters"
_MARK = re.compile(r"<[^<>\s'+]+>|\[gMASK\]")
"""Tokens that a format writes."""
_THINKING = "<think>"
_PLAIN = "default"


_OF_DOCUMENTS = (
    "documents, which have no turns; those longer than cutoff_len are cut into pieces (truncation: split); "
    "conversations among them need stage: sft"
)


class RowSetting(NamedTuple):
    """A value of `basic_parameters`, and why it is set."""

    value: str
    comment: str


def holds_pairs(row: Mapping[str, object]) -> bool:
    """Whether a row has a worse answer beside its answer."""
    return any(row.get(column) for column in PAIRS["rejected"])


def row_settings(model: Path, rows: Sequence[Mapping[str, object]]) -> dict[str, RowSetting]:
    """Key of `basic_parameters` → what the rows need beyond their path.

    Args:
        model: Folder of a language model. Whatever else is wrong with it is left to the check.
        rows: The first ones; none where they cannot be read.

    Raises:
        ConfigError: The folder has no chat template, the row has media, and no built-in format has their placeholders.
    """
    settings: dict[str, RowSetting] = {}
    row: Mapping[str, object] = {}
    if rows:
        row = rows[0]
    if holds_pairs(row):
        settings["stage"] = RowSetting("rm", "rows with a better and a worse answer")
    elif rows and all(map(_is_document, rows)):
        return {"stage": RowSetting("pretrain", _OF_DOCUMENTS)}
    try:
        processor = load_processor(model)
    except MMError:
        return settings
    try:
        build_template(processor, BasicParameters())
    except ModelFolderError:
        shows_media = any(row.get(column) for kind in ("images", "videos", "audios") for column in EXTRAS[kind])
        name = _fitting_format(model, processor, shows_media=shows_media)
        comment = "the folder has no chat template; more formats: docs/data.md, Order of turns"
        settings["template"] = RowSetting(name, comment)
    except MMError:
        return settings
    return settings


def _is_document(row: Mapping[str, object]) -> bool:
    try:
        return recognised(dict(row), RowFormat(), RowLocation("row", 1)).formatting == "text"
    except MMError:
        return False


def _fitting_format(model: Path, processor: object, *, shows_media: bool) -> str:
    """The built-in format whose tokens the tokenizer has, with a name like the model's type; else the plain one."""
    tokenizer = tokenizer_of(processor)
    known = {*tokenizer.get_vocab(), *tokenizer.get_added_vocab()}
    placeholders = {placeholder.text for placeholder in placeholders_of(processor).values()}
    fitting = []
    for name, source in FORMATS.items():
        marks = set(_MARK.findall(source or ""))
        if name == _PLAIN or source is None or name.endswith("_nothink") or not marks <= known:
            continue
        if marks and (placeholders <= marks or not shows_media):
            fitting.append(name)
    if fitting:
        return _nearest(_model_type(model), fitting)
    if shows_media:
        raise ConfigError(
            "the model's folder has no chat template, and no built-in format writes its placeholders of media "
            f"({', '.join(sorted(placeholders)) or 'none'})",
            where=str(model),
            key="--model",
            way_out=f"Copy chat_template.jinja of the original model into it, or add {BASIC}.chat_template=FILE.",
        )
    return _PLAIN


def _nearest(model_type: str, names: Iterable[str]) -> str:
    """Formats that write no thoughts come first."""

    def fits(name: str) -> tuple[bool, float]:
        likeness = difflib.SequenceMatcher(None, model_type, name).ratio()
        return _THINKING not in (FORMATS[name] or ""), likeness

    return max(names, key=fits)


def _model_type(model: Path) -> str:
    try:
        return str(read_json_object(model / "config.json", ModelFolderError).get("model_type", ""))
    except ModelFolderError:
        return ""
