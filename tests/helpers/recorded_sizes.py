"""A model of a recorded size (`tests/released`), without weights, beside what the record says of its folder."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from mindspeed_mm.fsdp.checkpoint.hf import hub_tensors, live_tensors
from tests.helpers.released_layouts import RELEASED


def model_of_record(model_class: Any, name: str) -> tuple[Any, list[dict[str, Any]]]:
    """The model on meta, and the layout entries of the record that it does not make: pattern, shape and number of
    tensors all have to be the same."""
    record = json.loads((RELEASED / f"{name}.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(record["config"]))
    made: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in hub_tensors(model, live_tensors(model)).items():
        made.setdefault(_without_numbers(key), {})[key] = tuple(tensor.shape)
    return model, [entry for entry in record["layout"] if not _is_made(entry, made)]


def _without_numbers(key: str) -> str:
    """`layers.3.mlp` → `layers.N.mlp`. Experts of large models are tens of thousands of tensors: each is compared with
    the few entries that look like it."""
    return re.sub(r"\.\d+(?=\.)", ".N", key)


def _is_made(entry: dict[str, Any], made: dict[str, dict[str, tuple[int, ...]]]) -> bool:
    pattern = re.compile(re.escape(entry["key"]).replace(r"\.N\.", r"\.\d+\."))
    alike = made.get(_without_numbers(entry["key"]), {})
    shapes = [shape for key, shape in alike.items() if pattern.fullmatch(key)]
    known = {tuple(shape) for shape in (entry["shape"], *entry.get("other_shapes", ()))}
    return len(shapes) == entry["n"] and set(shapes) == known


def billions(model: Any) -> float:
    """Parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9
