"""Conversions of setups for language models: which rows, in which columns, and what of them is trained on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.params.data_args import DatasetAttr
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.tasks.importing.common_values import key_of
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    DATASET,
    MODEL,
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
from mindspeed_mm.tasks.importing.given import read_file
from mindspeed_mm.tasks.importing.run_values import first_row, is_of_trl

_HYBRID = re.compile(r"(?i)qwen3-(0\.6|1\.7|4|8|14|32|30|235)b(-a\d+b)?$|qwen3\.[5-9]|glm-4\.[5-7](?!v)|deepseek-v3\.1")
"""Name of a model that thinks or does not, as its prompt says."""
_REASONING = re.compile(
    r"^(qwen3|qwen3_vl|qwen3_5|qwen3_6|glm4_moe|glm4v|hunyuan|deepseekr1|ernie|intern_s1|seed_oss|gpt)(?!.*no_?think)"
)


@conversion(":lf_dataset")
def lf_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Names of dataset_info.json, which our reader knows, or files; or a YAML that lists data sets (its version 1)."""
    names = texts(value) if isinstance(value, list) else [each.strip() for each in str(value).split(",")]
    if len(names) == 1 and names[0].endswith((".yaml", ".yml")):
        return _listed_sets(draft, row, names[0])
    info = _dataset_info(draft)
    entries = [_of_hub(draft, info[name]) if "hf_hub_url" in info.get(name, {}) else name for name in names]
    return {key_of(row): entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries}


def _dataset_info(draft: PeerSetup) -> JsonObject:
    """The entries of LLaMA-Factory's dataset_info.json; none where it is not here."""
    folder = str(draft.get("dataset_dir", "data"))
    for path in (Path(folder), draft.given.folder / folder):
        try:
            found = parse_json((path / "dataset_info.json").read_bytes())
        except (OSError, ValueError):
            continue
        return {name: each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}
    return {}


def _of_hub(draft: PeerSetup, entry: JsonObject) -> object:
    """An entry of dataset_info.json whose rows are on a hub, as a folder that is downloaded first."""
    path = draft.folder_of(str(entry["hf_hub_url"]), "data", data_fetch)
    named = {**entry, **(entry.get("columns") or {}), **(entry.get("tags") or {})}
    attr = {key: named[key] for key in DatasetAttr.model_fields if named.get(key)}
    if attr:
        return {"path": path, "attr": attr}
    return path


def _listed_sets(draft: PeerSetup, row: PeerRow, name: str) -> Outcome:
    """The data sets of LLaMA-Factory's YAML: name → path, source, size and weight (v1/core/data_engine.py)."""
    path = draft.file_of(name)
    if path is None:
        return no(f"{name} is not here: list its files in basic_parameters.dataset")
    entries: list[object] = []
    for title, entry in read_file(path).tree.items():
        if not isinstance(entry, dict) or "path" not in entry:
            raise ConfigError("a data set without a path", where=str(path), key=title, way_out="Write path: FILE.")
        source = str(entry["path"])
        is_local = entry.get("source", "hf_hub") != "hf_hub"
        made: JsonObject = {"path": source if is_local else draft.folder_of(source, "data", data_fetch)}
        if entry.get("size"):
            made["max_samples"] = int(entry["size"])
        if (weight := float(entry.get("weight") or 1)) != 1:
            made |= {"repeats": round(weight)} if weight > 1 else {"share": weight}
        if str(entry.get("split", "train")) != "train":
            draft.note(key_of(row), f"split: {entry['split']} there: name the files you want")
        entries.append(made["path"] if len(made) == 1 else made)
    return {key_of(row): entries[0] if len(entries) == 1 else entries}


def texts_or_entries(sets: object) -> list[object]:
    """The entries of `dataset`: a list as it is, or the names in a text."""
    if isinstance(sets, list):
        return sets
    return [each.strip() for each in str(sets).split(",")]


def name_apart(draft: PeerSetup) -> None:
    """Entries of the same rows get names of their own, by which reports tell them apart."""
    entries = draft.out.get(DATASET)
    if not isinstance(entries, list):
        return
    made: list[Any] = []
    paths = [each["path"] if isinstance(each, dict) else each for each in entries]
    for number, (path, entry) in enumerate(zip(paths, entries, strict=True)):
        has_name = isinstance(entry, dict) and "name" in entry
        if paths.count(path) == 1 or has_name:
            made.append(entry)
        else:
            name = f"{Path(str(path)).name}-{paths[:number].count(path) + 1}"
            made.append({"path": path, "name": name, **(entry if isinstance(entry, dict) else {})})
    draft.out[DATASET] = made


@conversion(":media_dir")
def media_dir(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The folder that relative paths of media start in."""
    if value == draft.get("dataset_dir", "data"):
        return {}
    sets = draft.out.get(f"{BASIC}.dataset")
    if not sets:
        return no("name the folder in media_dir of an entry of basic_parameters.dataset")
    entries = [each if isinstance(each, dict) else {"path": each} for each in texts_or_entries(sets)]
    return {f"{BASIC}.dataset": [{**each, "media_dir": str(value)} for each in entries]}


@conversion(":template")
def template(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The chat template of the folder is used; formats that base models are trained with are ours, too."""
    if str(value) in ("default", "empty", "llama3", "alpaca") and draft.tool.name == "llamafactory":
        if value == "default":
            draft.note(key_of(row), "there, an end token stands behind questions, too")
        return {key_of(row): str(value)}
    if str(value).endswith("_nothink") and _can_do_both(draft):
        draft.note(
            f"{BASIC}.enable_thinking", f"{value} writes no thoughts there; here they are empty, and not trained on"
        )
        return {f"{BASIC}.enable_thinking": False}
    return idle("the model's own chat template is used; basic_parameters.template names another")


@conversion(":thinking")
def thinking(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """LLaMA-Factory's switch, which its reasoning templates obey."""
    if not _REASONING.match(str(draft.get("template", ""))):
        return idle("the template has no thoughts")
    return {key_of(row): is_on(value)}


@conversion(":sw_system")
def sw_system(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """ms-swift's system prompt, or the text file that holds it."""
    text = str(value)
    if text.endswith(".txt"):
        file = draft.file_of(text)
        if file is None:
            return no(f"{text} is not here: write its text into basic_parameters.default_system")
        text = read_config_text(file).strip()
    if text:
        return {key_of(row): text}
    return {}


@conversion(":loss_scale")
def loss_scale(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """What of a conversation is trained on."""
    of_turns = {"default": {}, "all": {f"{BASIC}.train_on_prompt": True}, "last_round": {f"{BASIC}.mask_history": True}}
    names = str(value).split("+")
    if "ignore_empty_think" not in names and _can_do_both(draft):
        names.append("ignore_empty_think")
    of_turns["ignore_empty_think"] = {f"{BASIC}.mask_empty_thoughts": True}
    found = {key: each for name in names for key, each in of_turns.get(name, {}).items()}
    if others := [name for name in names if name not in of_turns]:
        draft.out |= found
        what = f"{others[0]}: some texts of an answer count more than others there"
        return no(f"{what}; all of its tokens count alike here")
    return found


def _can_do_both(draft: PeerSetup) -> bool:
    """Whether the model thinks or does not, as it is told: ms-swift leaves its empty thoughts out of the loss
    (TemplateArguments._set_loss_scale)."""
    if is_on(draft.get("disable_ignore_empty_think", False)) or draft.method not in ("sft", "dpo"):
        return False
    folder = Path(str(draft.out.get(MODEL, draft.model_name)))
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            if "chat_template" in name or "chat_template" in text:
                return "enable_thinking" in text
    return bool(_HYBRID.search(draft.model_name))


@conversion(":trl_answers")
def trl_answers(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """TRL trains on whole conversations unless `assistant_only_loss` is on, and on completions alone of rows with a
    prompt and a completion unless `completion_only_loss` is off (SFTTrainer)."""
    if draft.method != "sft":
        return idle("answers are compared; nothing else is trained on")
    columns = set(first_row(draft))
    if is_on(value) or columns == {"text"}:
        return {}
    has_completions = is_on(draft.get("completion_only_loss", columns >= {"prompt", "completion"}))
    if has_completions and (draft.has("completion_only_loss") or columns):
        return {}
    key = key_of(row)
    if not draft.has("assistant_only_loss"):
        hint = "" if columns else "; remove it for rows with a prompt and a completion, template: completion for texts"
        draft.note(key, f"default of TRL: questions are trained on, too{hint}")
    return {key: True}


@default_of("template_of_trl")
def template_of_trl(draft: PeerSetup) -> str | None:
    """TRL writes a chat template around messages alone: a prompt that is a text is followed by its completion."""
    is_text = is_of_trl(draft) and draft.method != "pretrain" and isinstance(first_row(draft).get("prompt"), str)
    if is_text and not draft.has("chat_template_path"):
        return "completion"
    return None


@default_of("answers_of_trl")
def answers_of_trl(draft: PeerSetup) -> bool | None:
    """Off for TRL's trainers; transformers' own trains on the labels that it is given."""
    return False if draft.method == "sft" and is_of_trl(draft) else None


@conversion(":truncation")
def truncation(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """What happens to samples that are too long. Documents that lose their end have no turns to lose instead."""
    word, are_documents = str(value).lower(), draft.method == "pretrain"
    if word in ("delete", "none"):
        return {f"{BASIC}.truncation": "drop"} if are_documents else {}
    if word == "right" and not are_documents:
        return no("tokens are never cut off; basic_parameters.truncation: shrink removes whole turns")
    if word == "left" and are_documents:
        return no("the beginning of a document is never cut off; basic_parameters.truncation: split keeps all of it")
    if word == "split" and draft.method in ("dpo", "grpo"):
        return no("only documents are cut into pieces")
    names = {"raise": "error", "left": "shrink", "right": "shrink", "split": "split"}
    return {f"{BASIC}.truncation": names[word]} if word in names else no("the strategy is not known here")


@conversion(":packing_strategy")
def packing_strategy(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """How TRL fills packs, and whether what is longer than one is kept (`wrapped`, `bfd_split`) or loses its end."""
    if str(value).lower() in ("wrapped", "bfd_split", "bfd-requeue"):
        return {f"{BASIC}.truncation": "split"}
    return idle("rows are packed by length, no sample attends to another")


_CUT = {
    "llamafactory": "there, documents are joined before they are cut",
    "axolotl": "documents are cut, as there",
}
"""Tool that cuts long documents unless it is told otherwise → how."""


def settle_long_documents(draft: PeerSetup) -> None:
    """What becomes of documents that are longer than a sample may be, once stage and streaming are known."""
    if draft.out.get(f"{BASIC}.stage") == "pretrain" and draft.tool.name in _CUT:
        draft.put(f"{BASIC}.truncation", "split", _CUT[draft.tool.name])
    if draft.out.get(f"{BASIC}.streaming") and draft.out.get(f"{BASIC}.truncation") == "split":
        del draft.out[f"{BASIC}.truncation"]
        told = "longer documents are left out while rows are streamed; there, they are cut into pieces"
        draft.note(f"{BASIC}.cutoff_len", told)


@conversion(":hub_dataset")
def hub_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A data set of a hub, which is downloaded first, or a path."""
    return {key_of(row): draft.folder_of(str(value), "data", data_fetch)}


@conversion(":split")
def split(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The part of a data set that is trained on."""
    return (
        idle("the files of the data set that are trained on are named")
        if value == "train"
        else no(f"name the files of the part {value} in basic_parameters.dataset")
    )


@conversion(":test_split")
def test_split(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The part that is held out."""
    return no(f"name the files of the part {value} in basic_parameters.val_dataset")


@conversion(":trl_mixture")
def trl_mixture(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """TRL's list of data sets."""
    entries = draft.given.tree.get("datasets")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "path" in entry for entry in entries):
        return no("name files or folders in basic_parameters.dataset")
    return {f"{BASIC}.dataset": [draft.folder_of(str(entry["path"]), "data", data_fetch) for entry in entries]}


@conversion(":sw_dataset")
def sw_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """ms-swift's names: `HF::owner/name:subset#1000`, or a file."""
    entries: list[object] = []
    for word in value if isinstance(value, list) else [value]:
        name, _, most = str(word).partition("#")
        name = name.removeprefix("HF::").removeprefix("MS::").removeprefix("hf::").removeprefix("ms::")
        if not re.match(r"[A-Za-z]:[\\/]", name):
            name, colon, subset = name.partition(":")
            if colon:
                draft.note(key_of(row), f"the part {subset} there: name its files")
        folder = draft.folder_of(name, "data", data_fetch)
        entries.append({"path": folder, "max_samples": int(most)} if most.isdigit() else folder)
    return {key_of(row): entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries}


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


_ATTR = "data.dataset_param.attr"
_OF_SWIFT = {
    "query": "prompt", "response": "response", "system": "system", "messages": "messages", "images": "images",
    "videos": "videos", "audios": "audios", "tools": "tools", "history": "history", "rejected_response": "rejected",
}  # fmt: skip
"""Column of ms-swift → key of `attr`."""


@conversion(":sw_columns")
def sw_columns(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """ms-swift's names of columns: JSON of the data set's name → its own."""
    named = parse_json(value.encode()) if isinstance(value, str) else value
    if not isinstance(named, dict) or any(theirs not in _OF_SWIFT for theirs in named.values()):
        return no("name the columns in the section data.dataset_param.attr")
    return {f"{_ATTR}.{_OF_SWIFT[theirs]}": str(name) for name, theirs in named.items()}


@conversion(":ax_datasets")
def ax_datasets(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """axolotl's entries, with the columns that they name."""
    holder = "test_datasets" if row.words[0].startswith("test_") else "datasets"
    entries = [_ax_entry(draft, entry) for entry in _entries(draft.given.tree.get(holder))]
    if holder == "datasets" and all(
        "completion" in str(each.get("type", "")) for each in _entries(draft.given.tree.get(holder))
    ):
        draft.put(f"{BASIC}.stage", "pretrain", "type: completion")
    return {key_of(row): entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries}


@conversion(":ax_pretraining")
def ax_pretraining(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """axolotl's documents. It streams them; here they are indexed, so that long ones can be cut."""
    given = draft.given.tree.get("pretraining_dataset")
    entries = [_ax_entry(draft, entry) for entry in _entries(given)]
    entries = entries or ([draft.folder_of(str(given), "data", data_fetch)] if isinstance(given, str) else [])
    return {f"{BASIC}.dataset": entries[0] if len(entries) == 1 else entries, f"{BASIC}.stage": "pretrain"}


def _entries(value: object) -> list[JsonObject]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _ax_entry(draft: PeerSetup, entry: JsonObject) -> object:
    path = draft.folder_of(str(entry.get("path", "")), "data", data_fetch)
    files = entry.get("data_files")
    if path in ("json", "parquet", "csv", "text") and files:
        path = str(files[0] if isinstance(files, list) else files)
    elif isinstance(files, str):
        path = str(Path(path) / files)
    cut = re.fullmatch(r"(\w+)\[:(\d+)(%?)\]", str(entry.get("split", "")))
    made: JsonObject = {"path": path}
    if cut and not cut[3]:
        made["max_samples"] = int(cut[2])
    elif cut and int(cut[2]):
        made["share"] = int(cut[2]) / 100
    elif cut or str(entry.get("split", "train")) != "train":
        draft.note(f"{BASIC}.dataset", f"split: {entry['split']} there: name the files you want, or set max_samples")
    if attr := _columns(entry):
        made["attr"] = attr
    return path if len(made) == 1 else made


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


@conversion(":mix_strategy")
def mix_strategy(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """How several data sets are mixed."""
    if value == "concat":
        return {}
    return (
        idle("basic_parameters.mix.weights takes the shares")
        if draft.has("interleave_probs")
        else no("write the shares into basic_parameters.mix.weights")
    )


@conversion(":mix_weights")
def mix_weights(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The shares of several data sets."""
    names = [each.strip() for each in str(draft.get("dataset", "")).split(",")]
    shares = [float(each) for each in texts(value)]
    if len(names) != len(shares):
        return no("write the shares into basic_parameters.mix.weights")
    return {f"{BASIC}.mix.weights": dict(zip(names, shares, strict=True))}
