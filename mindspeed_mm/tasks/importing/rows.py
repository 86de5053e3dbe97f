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
    as_list,
    conversion,
    data_fetch,
    dataset_value,
    default_of,
    idle,
    is_on,
    no,
    only_or_all,
    path_of,
    short_entry,
    texts,
)
from mindspeed_mm.tasks.importing.given import read_file
from mindspeed_mm.tasks.importing.row_counts import first_row
from mindspeed_mm.tasks.importing.run_values import is_of_trl

_HYBRID = re.compile(r"(?i)qwen3-(0\.6|1\.7|4|8|14|32|30|235)b(-a\d+b)?$|qwen3\.[5-9]|glm-4\.[5-7](?!v)|deepseek-v3\.1")
"""Name of a model that thinks or does not, as its prompt says."""
_REASONING = re.compile(
    r"^(qwen3|qwen3_vl|qwen3_5|qwen3_6|glm4_moe|glm4v|hunyuan|deepseekr1|ernie|intern_s1|seed_oss|gpt)(?!.*no_?think)"
)


@conversion(":lf_dataset")
def lf_dataset(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Names of dataset_info.json, which our reader knows, or files; or a YAML that lists data sets (its version 1)."""
    names = [str(each) for each in texts_or_entries(value)]
    if len(names) == 1 and names[0].endswith((".yaml", ".yml")):
        return _listed_sets(draft, row, names[0])
    info = _dataset_info(draft)
    entries = [_of_hub(draft, info[name]) if "hf_hub_url" in info.get(name, {}) else name for name in names]
    return {key_of(row): dataset_value(entries)}


def _dataset_info(draft: PeerSetup) -> JsonObject:
    """The entries of LLaMA-Factory's dataset_info.json; none where it is not here."""
    folder = str(draft.get("dataset_dir", "data"))
    for path in (Path(folder), draft.given.folder / folder):
        try:
            found = parse_json((path / "dataset_info.json").read_bytes())
        except (OSError, ValueError):
            continue
        if not isinstance(found, dict):
            return {}
        return {name: each for name, each in found.items() if isinstance(each, dict)}
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
        made: JsonObject = {"path": str(entry["path"])}
        if entry.get("source", "hf_hub") == "hf_hub":
            made["path"] = draft.folder_of(made["path"], "data", data_fetch)
        if entry.get("size"):
            made["max_samples"] = int(entry["size"])
        weight = float(entry.get("weight") or 1)
        if weight > 1:
            made["repeats"] = round(weight)
        elif weight != 1:
            made["share"] = weight
        if str(entry.get("split", "train")) != "train":
            draft.note(key_of(row), f"split: {entry['split']} there: name the files you want")
        entries.append(short_entry(made))
    return {key_of(row): only_or_all(entries)}


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
    paths = [path_of(each) for each in entries]
    for number, (path, entry) in enumerate(zip(paths, entries, strict=True)):
        has_name = isinstance(entry, dict) and "name" in entry
        if paths.count(path) == 1 or has_name:
            made.append(entry)
            continue
        named = {"path": path, "name": f"{Path(path).name}-{paths[:number].count(path) + 1}"}
        if isinstance(entry, dict):
            named |= entry
        made.append(named)
    draft.out[DATASET] = made


@conversion(":media_dir")
def media_dir(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The folder that relative paths of media start in."""
    if value == draft.get("dataset_dir", "data"):
        return {}
    sets = draft.out.get(f"{BASIC}.dataset")
    if not sets:
        return no("name the folder in media_dir of an entry of basic_parameters.dataset")
    entries = []
    for each in texts_or_entries(sets):
        if not isinstance(each, dict):
            each = {"path": each}
        entries.append({**each, "media_dir": str(value)})
    return {f"{BASIC}.dataset": entries}


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
        hint = "default of TRL: questions are trained on, too"
        if not columns:  # the rows are not here to be looked at
            hint += "; remove it for rows with a prompt and a completion, template: completion for texts"
        draft.note(key, hint)
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
    if draft.method == "sft" and is_of_trl(draft):
        return False
    return None


@conversion(":truncation")
def truncation(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """What happens to samples that are too long. Documents that lose their end have no turns to lose instead."""
    word, are_documents = str(value).lower(), draft.method == "pretrain"
    if word in ("delete", "none"):
        if are_documents:
            return {f"{BASIC}.truncation": "drop"}
        return {}
    if word == "right" and not are_documents:
        return no("tokens are never cut off; basic_parameters.truncation: shrink removes whole turns")
    if word == "left" and are_documents:
        return no("the beginning of a document is never cut off; basic_parameters.truncation: split keeps all of it")
    if word == "split" and draft.method in ("dpo", "grpo"):
        return no("only documents are cut into pieces")
    names = {"raise": "error", "left": "shrink", "right": "shrink", "split": "split"}
    if word in names:
        return {f"{BASIC}.truncation": names[word]}
    return no("the strategy is not known here")


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
    if value == "train":
        return idle("the files of the data set that are trained on are named")
    return no(f"name the files of the part {value} in basic_parameters.dataset")


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
    for word in as_list(value):
        name, _, most = str(word).partition("#")
        name = name.removeprefix("HF::").removeprefix("MS::").removeprefix("hf::").removeprefix("ms::")
        # the colon of `C:\rows.jsonl` begins no subset
        if not re.match(r"[A-Za-z]:[\\/]", name):
            name, colon, subset = name.partition(":")
            if colon:
                draft.note(key_of(row), f"the part {subset} there: name its files")
        folder = draft.folder_of(name, "data", data_fetch)
        if most.isdigit():
            entries.append({"path": folder, "max_samples": int(most)})
        else:
            entries.append(folder)
    return {key_of(row): dataset_value(entries)}


_ATTR = "data.dataset_param.attr"
_OF_SWIFT = {
    "query": "prompt", "response": "response", "system": "system", "messages": "messages", "images": "images",
    "videos": "videos", "audios": "audios", "tools": "tools", "history": "history", "rejected_response": "rejected",
}  # fmt: skip
"""Column of ms-swift → key of `attr`."""


@conversion(":sw_columns")
def sw_columns(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """ms-swift's names of columns: JSON of the data set's name → its own."""
    named = value
    if isinstance(value, str):
        named = parse_json(value.encode())
    if not isinstance(named, dict) or any(theirs not in _OF_SWIFT for theirs in named.values()):
        return no("name the columns in the section data.dataset_param.attr")
    return {f"{_ATTR}.{_OF_SWIFT[theirs]}": str(name) for name, theirs in named.items()}


@conversion(":mix_strategy")
def mix_strategy(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """How several data sets are mixed."""
    if value == "concat":
        return {}
    if draft.has("interleave_probs"):
        return idle("basic_parameters.mix.weights takes the shares")
    return no("write the shares into basic_parameters.mix.weights")


@conversion(":mix_weights")
def mix_weights(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The shares of several data sets."""
    names = [each.strip() for each in str(draft.get("dataset", "")).split(",")]
    shares = [float(each) for each in texts(value)]
    if len(names) != len(shares):
        return no("write the shares into basic_parameters.mix.weights")
    return {f"{BASIC}.mix.weights": dict(zip(names, shares, strict=True))}
