"""Questions about a model whose class may lack what is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from mindspeed_mm.fsdp.utils.model_parts import (
    attribute_at,
    base_layer_of,
    decoder_of,
    embedding_of,
    first_of,
    has_all,
    head_of,
    name_of,
    weight_of,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
        self.config = SimpleNamespace(vision=SimpleNamespace(size=7, depth=None), is_false=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner[0]

    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


class Adapted(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_an_attribute_is_found_below_others_and_none_is_absent() -> None:
    model = Model()
    assert attribute_at(model, "config.vision.size") == 7
    assert attribute_at(model, "config.vision.depth", 3) == 3  # None counts as absent
    assert attribute_at(model, "config.audio.size", 3) == 3
    assert attribute_at(model, "config.is_false", True) is False
    assert attribute_at(None, "config") is None


def test_several_attributes_are_asked_for_at_once() -> None:
    vision = SimpleNamespace(size=7, depth=None)
    assert has_all(vision, "size", "depth") and not has_all(vision, "size", "width")
    assert first_of(vision, "width", "depth", "size") == "depth"
    assert first_of(vision, "width") == ""


def test_parts_that_a_class_names_and_parts_that_it_does_not() -> None:
    model = Model()
    assert name_of(model, embedding_of(model)) == "inner.0"
    assert decoder_of(model) is None  # no such getter
    assert head_of(model) is None  # a getter that says so by an exception
    assert name_of(model, nn.Linear(1, 1)) == "" == name_of(model, None)


def test_the_layer_under_an_adapter() -> None:
    layer = nn.Linear(4, 5)
    assert base_layer_of(Adapted(layer)) is layer is base_layer_of(layer)
    assert torch.equal(weight_of(Adapted(layer)), layer.weight)
