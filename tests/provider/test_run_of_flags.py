"""A launch script on a real model: what its flags and files name is found in the model, acts, and trains to the bit
like the YAML that it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.provider.launch import read_launch
from mindspeed_mm.provider.translate import from_flags
from tests.helpers.runs import differing, mm, tensors
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows

ROWS_ATTR = {
    "formatting": "sharegpt", "messages": "messages", "images": "images", "role_tag": "role", "content_tag": "content",
    "user_tag": "user", "assistant_tag": "assistant",
}  # fmt: skip
FSDP2 = """\
sharding_size: auto
sub_modules_to_wrap: ["text_decoder.decoder.layers.{*}", "image_encoder.encoder.blocks.layers.{*}"]
recompute_modules: ["text_decoder.decoder.layers.{*}"]
use_reentrant: False
num_to_forward_prefetch: 1
"""
SCRIPT = """\
MBS=2
GPT_ARGS="
    --micro-batch-size $MBS \\
    --global-batch-size $(($MBS * 2)) \\
    --seq-length 256 \\
    --train-iters 3 \\
    --lr 1e-3 \\
    --lr-decay-style cosine \\
    --seed 7 \\
    --num-workers 0 \\
    --log-interval 1 \\
"
torchrun --nproc_per_node 1 pretrain_vlm.py $GPT_ARGS --mm-model model.json --mm-data data.json $@
"""
FROZEN: dict[str, Any] = {
    "text_decoder": {"num_layers": 2},
    "image_encoder": {"vision_encoder": {"freeze": True}, "vision_projector": {"freeze": False}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_tiny_qwen3_vl(tmp_path / "hf")
    make_rows(tmp_path)
    dataset = {
        "attr": ROWS_ATTR,
        "preprocess_parameters": {"model_name_or_path": "./hf"},
        "basic_parameters": {"dataset": "./rows.jsonl", "dataset_dir": "."},
    }
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": dataset}))
    (tmp_path / "model.json").write_text(json.dumps(FROZEN))
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    (tmp_path / "run.sh").write_text(SCRIPT.replace(" $@", ""))
    return tmp_path


def written(*words: str) -> Path:
    said = mm("config", "--from-flags", "run.sh", *words)
    assert said.code == 0, said.err
    Path("run.yaml").write_text(said.out)
    return Path("run.yaml")


@pytest.mark.parametrize(
    "words",
    [
        ("--use-torch-fsdp2", "--fsdp2-config-path", "fsdp2.yaml"),
        ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"),
        ("--lora-target-modules", "linear_qkv", "linear_fc2"),
    ],
    ids=["fsdp2", "recompute", "lora"],
)
def test_parts_are_found_in_the_model(folder: Path, words: tuple[str, ...]) -> None:
    said = mm("check", written(*words))
    assert said.code == 0, said.err


def test_a_part_that_the_model_lacks_is_refused(folder: Path) -> None:
    (folder / "fsdp2.yaml").write_text('sub_modules_to_wrap: ["text_decoder.decoder.layer.{*}"]\n')
    said = mm("check", written("--use-torch-fsdp2", "--fsdp2-config-path", "fsdp2.yaml"))
    assert said.code != 0
    assert "pattern 'model.language_model.decoder.layer.{*}' matches no module" in said.out


def test_both_doors_train_to_the_bit_alike(folder: Path) -> None:
    words = ["run.sh", "--use-torch-fsdp2", "--fsdp2-config-path", "fsdp2.yaml", "--save"]
    said = mm("train", written(*words[1:], "by_yaml"))
    assert said.code == 0, said.err
    config = from_flags(read_launch([*words, "by_flags"], {}).flags, {})
    Trainer(config).train()
    by_yaml, by_flags = tensors(Path("by_yaml")), tensors(Path("by_flags"))
    assert len(by_yaml) > 20
    assert differing(by_yaml, by_flags) == []
    trained = {name for name in by_yaml if "exp_avg" in name}
    assert any("merger" in name for name in trained)
    assert not any("visual.blocks" in name or "patch_embed" in name for name in trained)
