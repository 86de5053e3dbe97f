"""Conversions of axolotl's rows: which data sets, in which columns, and whose turns are trained on."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.tasks.importing.common_values import key_of
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    Outcome,
    PeerSetup,
    as_list,
    conversion,
    data_fetch,
    dataset_value,
    idle,
    no,
    only_or_all,
    short_entry,
    texts,
)


@conversion(":ax_roles")
def ax_roles(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whose turns are trained on: the model's own; others are marked in the rows."""
    roles = set(texts(value))
    if roles and roles <= {"assistant", "gpt", "model", "bot"}:
        return idle("the model's own turns are trained on, with their end marks")
    return no("the model's own turns are trained on: train_on_prompt adds all others, weight: 0 takes turns out")


@conversion(":ax_ends")
def ax_ends(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether the end marks of turns are trained on: those of trained turns are."""
    if str(value).lower() in ("turn", "true"):
        return idle("the model's own turns are trained on, with their end marks")
    return no(f"{value}: the end marks of trained turns are trained on, and no others")


@conversion(":ax_type")
def ax_type(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """How axolotl writes a row: prompts of its own, such as Alpaca's, become the model's chat template."""
    kinds = {str(each.value) for each in draft.given.settings if each.key == "datasets[].type"}
    if kinds <= {"alpaca", "alpaca_w_system"} and not draft.has("chat_template"):
        return {f"{BASIC}.template": "alpaca"}
    if re.match(r"chat_template|completion|pretrain|input_output", str(value)):
        return {}
    return idle("the model's own chat template writes the prompt; basic_parameters.template names another")


@conversion(":ax_datasets")
def ax_datasets(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """axolotl's entries, with the columns that they name."""
    holder = "test_datasets" if row.words[0].startswith("test_") else "datasets"
    entries = [_ax_entry(draft, entry) for entry in _entries(draft.given.tree.get(holder))]
    if holder == "datasets" and all(
        "completion" in str(each.get("type", "")) for each in _entries(draft.given.tree.get(holder))
    ):
        draft.put(f"{BASIC}.stage", "pretrain", "type: completion")
    return {key_of(row): dataset_value(entries)}


@conversion(":ax_pretraining")
def ax_pretraining(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """axolotl's documents. It streams them; here they are indexed, so that long ones can be cut."""
    given = draft.given.tree.get("pretraining_dataset")
    entries = [_ax_entry(draft, entry) for entry in _entries(given)]
    if not entries and isinstance(given, str):
        entries = [draft.folder_of(given, "data", data_fetch)]
    return {f"{BASIC}.dataset": only_or_all(entries), f"{BASIC}.stage": "pretrain"}


def _entries(value: object) -> list[JsonObject]:
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict)]


def _ax_entry(draft: PeerSetup, entry: JsonObject) -> object:
    path = draft.folder_of(str(entry.get("path", "")), "data", data_fetch)
    files = entry.get("data_files")
    if path in ("json", "parquet", "csv", "text") and files:
        path = str(as_list(files)[0])  # `path: json` names a loader of datasets
    elif isinstance(files, str):
        path = str(Path(path) / files)
    cut = re.fullmatch(r"(\w+)\[:(\d+)(%?)\]", str(entry.get("split", "")))  # `train[:10%]`
    made: JsonObject = {"path": path}
    if cut and not cut[3]:
        made["max_samples"] = int(cut[2])
    elif cut and int(cut[2]):
        made["share"] = int(cut[2]) / 100
    elif cut or str(entry.get("split", "train")) != "train":
        draft.note(f"{BASIC}.dataset", f"split: {entry['split']} there: name the files you want, or set max_samples")
    if attr := _columns(entry):
        made["attr"] = attr
    return short_entry(made)


def _columns(entry: JsonObject) -> dict[str, str]:
    """Columns and tags of an entry whose names our reader would not find by itself."""
    mappings = entry.get("message_property_mappings") or {}
    named = {
        "messages": entry.get("field_messages"),
        "role_tag": mappings.get("role", entry.get("message_field_role")),
        "content_tag": mappings.get("content", entry.get("message_field_content")),
        "chosen": entry.get("field_chosen"),
        "rejected": entry.get("field_rejected"),
        "prompt": entry.get("field_instruction", entry.get("field")),
        "response": entry.get("field_output"),
        "query": entry.get("field_input"),
        "system": entry.get("field_system"),
    }
    found_by_name = {
        "conversations", "messages", "conversation", "from", "value", "role", "content", "chosen", "rejected", "text",
        "instruction", "output", "input", "system", "prompt", "response", "question", "answer",
    }  # fmt: skip
    return {key: str(name) for key, name in named.items() if name and name not in found_by_name}
