"""The smallest YAML that trains a model: `mm init` fills it in, `mm models` and `mm route` print it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.params.cards import ModelCard
from mindspeed_mm.tasks.requests.init import Method

Sections = dict[str, dict[str, Any]]
"""Section of a YAML → its content."""

ROOM = 0.9
"""Share of a device's memory that a forecast may take: allocators and libraries want some, too."""
RATES: Mapping[Method, float] = {"full": 1e-5, "lora": 1e-4, "qlora": 1e-4}
RATES_OF_PAIRS: Mapping[Method, float] = {"full": 1e-6, "lora": 5e-6, "qlora": 5e-6}
"""Of DPO: TRL's default, and that of LLaMA-Factory's example for adapters."""
_WIDTH = 88
_NOT_WORDS = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))
_PLAIN = re.compile(r"[\w.-]*[A-Za-z][\w.-]*/[\w./-]+|/[\w./-]+|[A-Za-z][A-Za-z_][\w.-]*")
_SMALL = 1e-3
"""Numbers below this one are written with an exponent."""
_STEPS = 2000
"""Optimizer steps of adapters for a generator, as the pages on generators have them."""


def sections_for(
    model: str | Path, dataset: str | Path, dataset_dir: str | Path, *, method: Method, save: str, dtype: str | None
) -> Sections:
    """The keys that every configuration has.

    Args:
        model: Folder of the model.
        dataset: Rows.
        dataset_dir: Where relative paths of media start.
        method: What is trained.
        save: The run folder.
        dtype: What devices compute in; None: what the folder is stored in.
    """
    basic = {"dataset": str(dataset), "dataset_dir": str(dataset_dir)}
    training: JsonObject = {"lr": RATES[method], "train_epochs": 1, "save": save}
    if method != "full":
        training["lora"] = adapters(method)
    sections: Sections = {
        "model": {"model_name_or_path": str(model)},
        "data": {"dataset_param": {"basic_parameters": basic}},
    }
    if dtype is not None:
        sections["parallel"] = {"fsdp_plan": {"param_dtype": dtype}}
    sections["training"] = training
    return sections


def adapters(method: Method) -> JsonObject:
    """`training.lora` of a method that trains adapters."""
    lora: JsonObject = {"enable": True, "rank": 16, "alpha": 32}
    return lora | ({"quantize": "nf4"} if method == "qlora" else {})


def smallest(card: ModelCard | None, method: Method | None = None) -> Sections:
    """The smallest configuration of a family, with placeholders for folders and rows.

    Args:
        card: The family; None: any model of transformers.
        method: What is trained; None: all weights, and of a generator adapters, as its users do.
    """
    generates = card is not None and card.generates
    chosen: Method = method or ("lora" if generates else "full")
    name = next(iter(card.released)).partition("/")[2] if card is not None else "MODEL"
    folder = "data"
    if card is not None and generates:
        folder = "clips" if card.task == "film" else "pictures"
    rows = f"{folder}/rows.jsonl"
    sections = sections_for(f"models/{name}", rows, folder, method=chosen, save="runs/mine", dtype="bf16")
    if generates:
        sections = merged(sections, {"training": {"train_epochs": None, "train_iters": _STEPS}})
    if card is not None:
        return merged(sections, card.smallest)
    return sections


def merged(base: JsonMapping, changes: JsonMapping) -> JsonObject:
    """A mapping with another one's keys set in it, level by level; None takes a key out."""
    made = dict(base)
    for key, value in changes.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, Mapping):
            made[key] = merged(made.get(key) or {}, value)
        else:
            made[key] = value
    return made


def as_yaml(sections: Mapping[str, object]) -> str:
    """The YAML, each key on one line where that is short."""
    return "\n".join(_lines(sections, ""))


def _lines(mapping: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        line = f"{indent}{key}: {flow(value)}"
        if len(line) <= _WIDTH or not isinstance(value, Mapping):
            yield line
        else:
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")


def flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(flow, value))}]"
    return scalar(value)


def scalar(value: object) -> str:
    """A value as YAML takes it: text in quotes where it might be read as something else, such as a number; a small
    number with a point, without which some readers take it for text."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        if not 0 < abs(value) < _SMALL:
            return f"{value:g}"
        digits, exponent = f"{value:e}".split("e")
        return f"{float(digits)}e{int(exponent)}"
    text = str(value)
    if isinstance(value, int) or (_PLAIN.fullmatch(text) and text.lower() not in _NOT_WORDS):
        return text
    return json.dumps(text, ensure_ascii=False)
