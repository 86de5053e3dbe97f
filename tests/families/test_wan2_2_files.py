"""MindSpeed-MM's files of Wan2.2, `wan2_2_container` and `wan2_2`, train as the ordinary file that says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from safetensors.torch import load_file

from tests.helpers.runs import losses, mm, tensors
from tests.helpers.tiny_generator_run import generator_config, make_clips
from tests.helpers.tiny_run import STEADY
from tests.helpers.tiny_video_families import make_tiny_wan2_2

BOUNDARY = 0.75
"""`boundary_ratio` of the tiny folder."""
PARTS = ("transformer", "transformer_2")


def write(config: dict[str, Any], path: Path) -> Path:
    with path.open("w") as file:
        YAML().dump(json.loads(json.dumps(config)), file)
    return path


def container_file(folder: Path, trained: str) -> Path:
    """The sections of the example of MindSpeed-MM, with a folder for the model and clips of a test."""
    model = {
        name: {"from_pretrained": str(folder / "model" / name), "freeze": True} for name in ("vae", "text_encoder")
    }
    config = {
        "parallel": {
            "fsdp_plan": {
                "apply_modules": ["text_encoder", "predictor.blocks.{*}", "predictor.blocks.{*}.self_attn"],
                "ignored_modules": ["ae"], "param_dtype": "fp32",
            },
        },
        "data": {
            "dataset_param": {
                "dataset_type": "wan2_2",
                "preprocess_parameters": {
                    "video_processor_type": "OpensoraplanVideoProcessor", "num_frames": 5, "max_height": 16,
                    "max_width": 16, "train_fps": 8, "cfg": 0.0,
                },
                "basic_parameters": {"data_path": str(folder / "rows.jsonl"), "data_folder": str(folder)},
                "use_text_processer": True,
                "tokenizer_config": {"from_pretrained": str(folder / "model" / "tokenizer")},
            },
            "dataloader_param": {"num_workers": 0, "collate_param": {"model_name": "wan2_2"}},
        },
        "model": {
            "model_id": "wan2_2_container", "task": "t2v",
            "models": {
                "ae": model["vae"], "text_encoder": model["text_encoder"],
                "predictor": {"from_pretrained": str(folder / "model" / trained), "num_layers": 2, "freeze": False},
            },
        },
        "features": {"recompute": True, "recompute_plan": {"apply_modules": ["predictor.blocks.{*}"]},
                     "loss_cfg": {"loss_type": "raw"}},
        "training": {
            **STEADY, "train_iters": 2, "lr": 1e-3, "micro_batch_size": 2, "seed": 7, "save": str(folder / "container"),
            "plugin": ["mindspeed_mm/fsdp/models/wan2_2", "mindspeed_mm/fsdp/data/datasets/wan2_2"],
        },
    }  # fmt: skip
    return write(config, folder / "container.yaml")


@pytest.mark.parametrize("trained", [PARTS[1], pytest.param(PARTS[0], marks=pytest.mark.slow)])
def test_a_container_trains_as_the_ordinary_file(trained: str, tmp_path: Path) -> None:
    make_tiny_wan2_2(tmp_path / "model")
    make_clips(tmp_path, count=4, frames=7)
    said = mm("train", container_file(tmp_path, trained))
    assert said.code == 0, said.err
    (other,) = {*PARTS} - {trained}
    noise = {"timestep_density": "uniform", "loss_weighting": "bell", "shift": 3.0}
    noise["sigma_range"] = [BOUNDARY, 1.0] if trained == PARTS[0] else [0.0, BOUNDARY]
    ordinary = generator_config(
        tmp_path,
        {"height": 16, "width": 16, "num_frames": 5, "fps": 8},
        model={"freeze": [other]},
        training={"train_iters": 2, "diffusion": noise, "save": str(tmp_path / "ordinary")},
    )
    said = mm("train", write(ordinary, tmp_path / "ordinary.yaml"))
    assert said.code == 0, said.err
    assert losses(tmp_path / "container") == pytest.approx(losses(tmp_path / "ordinary"), rel=1e-6)
    one, two = tensors(tmp_path / "container"), tensors(tmp_path / "ordinary")
    assert one.keys() == two.keys()
    for part in PARTS:
        released = load_file(next((tmp_path / "model" / part).glob("*.safetensors")))
        moved = set()
        for name, before in released.items():
            left, right = one[f"model.{part}.{name}"], two[f"model.{part}.{name}"]
            assert left.allclose(right, rtol=1e-4, atol=1e-6)
            moved |= set() if left.equal(before.to(left)) else {name}
        assert bool(moved) == (part == trained)
