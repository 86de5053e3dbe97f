"""Qwen3-VL: registered under the plugin path of older files, described by its card, computes what transformers does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForImageTextToText

import mindspeed_mm.fsdp.models as models_package
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.fsdp.utils.register import import_plugin, model_register

FOLDER = Path(models_package.__file__).parent / "qwen3vl"


def test_the_documented_plugin_path_imports() -> None:
    import_plugin(["mindspeed_mm/fsdp/models/qwen3vl"])
    assert model_register.get("qwen3_vl")().__name__ == "Qwen3VLForConditionalGeneration"


def test_registration_can_be_found_by_grep() -> None:
    assert '@model_register.register("qwen3_vl")' in (FOLDER / "modeling_qwen3vl.py").read_text()


def test_card_names_what_is_there() -> None:
    card = YAML(typ="safe").load(FOLDER / "card.yaml")
    assert all(name in model_register for name in card["ids"])
    module, _, name = card["class"].rpartition(".")
    assert getattr(importlib.import_module(module), name).__name__ == name


@pytest.mark.parametrize("attention", ["eager", "sdpa", "mm_varlen"])
def test_logits_are_those_of_transformers(attention: str, folders: dict[str, Path]) -> None:
    from PIL import Image

    folder = folders["vision"]
    processor = load_processor(folder)
    text = "<|vision_start|><|image_pad|><|vision_end|>Which digit?"
    image = Image.linear_gradient("L").resize((40, 48)).convert("RGB")
    batch = processor(text=[text], images=[image], return_tensors="pt")
    args = ModelArguments.model_validate(
        {"model_id": "qwen3_vl", "model_name_or_path": str(folder), "attn_implementation": attention}
    )
    model = ModelHub.build(args, param_dtype=torch.float64)
    ModelHub.load_weights(model, args, seed=0, device=torch.device("cpu"))
    theirs = "eager" if attention == "eager" else "sdpa"  # eager takes its softmax in fp32
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation=theirs)
    with torch.no_grad():
        difference = model(**batch).logits - reference(**batch).logits
    assert difference.abs().max() < 1e-10
