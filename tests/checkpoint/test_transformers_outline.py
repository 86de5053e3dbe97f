"""Tensors that are to be a model's are compared with the one that its config.json describes, which needs no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Zeros
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline, check_whole_model
from mindspeed_mm.core.errors import ModelFolderError

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 12}
NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
EXTRA = "model.layers.2.extra"
Tensors = dict[str, LazyTensor]


def of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> LazyTensor:
    return Zeros(shape, dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **LAYERS, "vocab_size": 16}))
    return tmp_path


@pytest.fixture
def tensors(folder: Path) -> Tensors:
    outline = TransformersOutline.of(folder)
    assert outline is not None
    return {key: of(shape) for key, shape in outline.hub_shapes().items()}


def test_all_tensors_of_a_model_are_let_through(folder: Path, tensors: Tensors) -> None:
    check_whole_model(tensors, folder, Path("theirs"))


def test_a_configuration_that_is_not_written_yet_is_compared_as_one_that_is(tensors: Tensors) -> None:
    """A converter that makes config.json has no folder of it, and an error names none."""
    config = {**CONFIG, **LAYERS, "vocab_size": 16}
    check_whole_model(tensors, config, Path("theirs"))
    del tensors[NORM]
    with pytest.raises(ModelFolderError, match="is missing") as refused:
        check_whole_model(tensors, config, Path("theirs"))
    assert str(refused.value).startswith(
        "theirs does not hold the model that the configuration for theirs describes, Qwen3ForCausalLM\n"
    )


@pytest.mark.parametrize(
    ("change", "key", "told"),
    [
        (lambda held: held.pop(NORM), NORM, "theirs does not hold .*\\n.*is missing"),
        (lambda held: held.update({DOWN: of((12, 8))}), DOWN, r"\[12, 8\], the model's \[8, 12\]"),
        (lambda held: held.update({DOWN: of((8, 12), torch.float8_e4m3fn)}), DOWN, "float8_e4m3fn: quantised codes"),
        (lambda held: held.update({NORM: of((8,), torch.int8)}), NORM, "int8: quantised codes"),
        (lambda held: held.update({EXTRA: of((1,))}), EXTRA, "theirs holds more than"),
    ],
    ids=["missing", "shape", "codes", "whole numbers", "surplus"],
)
def test_what_is_missing_or_surplus_or_of_another_shape_or_kind_is_named(
    folder: Path, tensors: Tensors, change: Callable[[Tensors], object], key: str, told: str
) -> None:
    change(tensors)
    with pytest.raises(ModelFolderError, match=told) as refused:
        check_whole_model(tensors, folder, Path("theirs"))
    assert [problem.key for problem in refused.value.problems] == [key]


def test_a_class_that_transformers_lacks_is_refused_and_not_passed_over(folder: Path, tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["Glance"]}))
    with pytest.raises(ModelFolderError, match=r"nothing can be compared.*check_same_tensors"):
        check_whole_model(tensors, folder, Path("theirs"))
