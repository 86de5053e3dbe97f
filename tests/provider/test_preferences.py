"""Preference pairs by flags: what an entry of older scripts means is what a YAML with `posttrain` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm import posttrain_qwen2vl_dpo
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.rules.posttrain import reference_kind
from mindspeed_mm.provider.launch import flags_of_launch
from mindspeed_mm.provider.translate import from_flags
from tests.helpers.runs import lines, train
from tests.helpers.tiny_pairs import PAIRS, make_tiny_pairs

COMMON = "--micro-batch-size 2 --train-iters 3 --lr 1e-3"
FLAGS = f"""{COMMON} --global-batch-size 2 --lr-decay-style cosine --seed 7 --num-workers 0 --log-interval 1
    --save-interval 3 --mm-model model.json --mm-data data.json --dpo-beta 0.2 --dpo-loss-type sigmoid
    --dpo-label-smoothing 0.1 --pref-ftx 0.5 --ref-model model --load model --save by_flags"""
TRAINING = {
    "micro_batch_size": 2, "gradient_accumulation_steps": 1, "train_iters": 3, "lr": 1e-3, "lr_decay_style": "cosine",
    "lr_min": 0.0, "lr_warmup_ratio": 0.0, "weight_decay": 0.01, "seed": 7, "log_interval": 1, "save_interval": 3,
    "clip_grad": 1.0, "adam_beta2": 0.999,
}  # fmt: skip
DPO = {"beta": 0.2, "loss_type": ["sigmoid"], "label_smoothing": 0.1, "pref_ftx": 0.5}


def write_files(folder: Path) -> None:
    """`model.json` and `data.json` as the scripts of Qwen2-VL have them, which name no stage."""
    dataset = PAIRS | {
        "preprocess_parameters": {"model_name_or_path": "./model"},
        "basic_parameters": {"dataset": "rows.jsonl", "dataset_dir": "."},
    }
    loader = {"collate_param": {"model_name": "qwen2vl_dpo", "ignore_pad_token_for_loss": True}, "shuffle": True}
    (folder / "data.json").write_text(json.dumps({"dataset_param": dataset, "dataloader_param": loader}))
    (folder / "model.json").write_text(json.dumps({"init_from_hf_path": "./model"}))


def losses(run: Path) -> list[dict[str, Any]]:
    names = ("loss", "sft", "rewards/margins", "kl/reference", "grad_norm")
    return [{name: line.get(name, line.get("metrics", {}).get(name)) for name in names}
            for line in lines(run / "metrics.jsonl") if "loss" in line]  # fmt: skip


def test_the_entry_trains_as_the_yaml_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = make_tiny_pairs(tmp_path, posttrain={"method": "dpo", "dpo": DPO}, training=TRAINING)
    write_files(tmp_path)
    train(yaml, "by_yaml")
    monkeypatch.setattr(sys, "argv", ["posttrain_qwen2vl_dpo.py", *FLAGS.split()])
    posttrain_qwen2vl_dpo.main()
    by_flags, by_yaml = losses(Path("by_flags")), losses(Path("by_yaml"))
    assert by_flags == by_yaml and len(by_flags) == 3
    assert by_flags[0]["loss"] != by_flags[2]["loss"]


def test_a_script_s_entry_says_what_it_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    Path("run.sh").write_text(f"torchrun posttrain_qwen2vl_dpo.py {' '.join(FLAGS.split())}\n")
    arguments = from_flags(flags_of_launch(["run.sh"], {}), {}).arguments
    assert arguments.posttrain.method == "dpo" and arguments.posttrain.dpo.pref_ftx == 0.5
    assert arguments.data.dataset_param.basic_parameters.stage == "rm"
    assert reference_kind(arguments) == "frozen" and arguments.posttrain.reference.model_name_or_path is None
    lora = flags_of_launch(["run.sh", "--lora-target-modules", "q_proj"], {})
    assert reference_kind(from_flags(lora, {}).arguments) == "adapters_off"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--dpo-beta 0.1", "--dpo-beta: is for preference pairs"),
        ("--posttrain-method sft", "--posttrain-method: 'sft' is not built"),
        ("--posttrain-method dpo --dpo-beta 0", "--dpo-beta: "),
    ],
)
def test_flags_of_pairs_that_cannot_act(words: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_flags([*COMMON.split(), *words.split()], {})
    assert line in str(raised.value).replace("  ", ": ")
