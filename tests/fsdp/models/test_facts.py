"""The record of what is known about a model goes wherever the model goes."""

from __future__ import annotations

import ast
import copy
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.stages import Share, meta_copy

PACKAGE = Path(__file__).parents[3] / "mindspeed_mm"


class Note:
    """A fact of a room above the models."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


def test_a_model_that_nobody_has_noted_anything_about_has_an_empty_record(model: nn.Module) -> None:
    assert facts_of(model).adapter is None and facts_of(model).noted(Note) is None
    assert not model.state_dict().keys() - {"0.weight", "0.bias"}


def test_a_deep_copy_has_a_record_of_its_own_about_its_own_modules(model: nn.Module) -> None:
    facts_of(model).note(Note(model[0]))  # type: ignore[index]
    copied = copy.deepcopy(model)
    note = facts_of(copied).noted(Note)
    assert note is not None and note.layer is copied[0]
    facts_of(copied).conversion_rules = []
    assert facts_of(model).conversion_rules is None


def test_a_model_that_was_saved_and_read_again_has_its_record(model: nn.Module) -> None:
    facts_of(model).conversion_rules = ["a rule"]
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    assert facts_of(torch.load(stored, weights_only=False)).conversion_rules == ["a rule"]


def test_a_sharded_model_whose_class_was_changed_keeps_its_record(model: nn.Module) -> None:
    facts, before = facts_of(model), type(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert type(model) is not before and facts_of(model) is facts


def test_a_whole_model_that_a_part_knows_of_is_no_submodule(model: nn.Module) -> None:
    facts_of(model).share = Share(meta_copy(model), {}, None)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]


def private_attributes(source: str) -> list[str]:
    """Attributes `_mm_…` that are read, written or asked for by name."""
    found: list[object] = []
    if "_mm_" not in source:  # parsing takes longer
        return []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            found += [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return [name for name in found if isinstance(name, str) and re.fullmatch("_mm_[a-z_]+", name)]


def test_no_source_puts_attributes_of_its_own_on_a_model() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not private_attributes(path.read_text()), path


@pytest.mark.parametrize("source", ["model._mm_adapter = 1", "getattr(model, '_mm_adapter', None)"])
def test_an_attribute_on_a_model_is_found(source: str) -> None:
    assert private_attributes(source) == ["_mm_adapter"]
