"""`mm verify` takes every pattern that training takes, also one that names layers which its small model has not."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.schema_walk import pattern_keys
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.verify.model import fitting
from tests.helpers.tiny_run import make_tiny_run

pytestmark = pytest.mark.edge("R8")

ABSENT, PRESENT = "model.language_model.layers.{7-9}", "model.language_model.layers.{0-1}"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model has two layers, as small ones have."""
    return make_tiny_run(tmp_path_factory.mktemp("small"))


MOVED = "parallel.recompute_plan.apply_modules"  # read as features.recompute_plan.apply_modules


@pytest.mark.parametrize("key", [key for key in pattern_keys() if key != MOVED])
def test_patterns_of_layers_that_the_small_model_has_not_are_left_out(key: str, yaml: Path) -> None:
    recipe = ["training.quantization_plan.recipe_name=mxfp8"] if "quantization_plan" in key else []
    recipe += ["training.lora.enable=false"] if key.startswith("training.lora.") else []
    arguments = load_with_plugins(yaml, [*recipe, f"{key}=['{ABSENT}','{PRESENT}']"]).arguments
    small, lines = fitting(arguments, ())
    assert reduce(getattr, key.split("."), small) == (PRESENT,)
    assert lines == (f"{key}: without {ABSENT}, layers that the small model does not have",)


def test_patterns_of_adapters_are_kept(yaml: Path) -> None:
    lora = ["training.lora.enable=true", "training.lora.target_modules=[q_proj]"]
    patterns = [f"{layers}.self_attn.q_proj.lora_A.*" for layers in (ABSENT, PRESENT)]
    arguments = load_with_plugins(yaml, [*lora, f"training.no_decay_params={patterns}"]).arguments
    small, _ = fitting(arguments, ())
    assert small.training.no_decay_params == (patterns[1],)
