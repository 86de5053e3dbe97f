"""Preference pairs by flags: what an entry of older scripts means is what a YAML with `posttrain` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm import posttrain_qwen2vl_dpo, posttrain_sora_dpo
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.rules.posttrain import reference_kind
from mindspeed_mm.provider.launch import read_launch
from mindspeed_mm.provider.parse import parse
from mindspeed_mm.provider.translate import from_flags, translate
from tests.helpers.runs import lines, train
from tests.helpers.tiny_media_pairs import make_tiny_media_pairs
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
DPO = {"beta": 0.2, "loss_type": ["sigmoid"], "label_smoothing": 0.1, "pref_ftx": 0.5, "pref_ftx_by": "pair"}


def write_files(folder: Path, collator: str = "qwen2vl_dpo") -> None:
    """`model.json` and `data.json` as the scripts of Qwen2-VL have them, which name no stage."""
    dataset = PAIRS | {
        "preprocess_parameters": {"model_name_or_path": "./model"},
        "basic_parameters": {"dataset": "rows.jsonl", "dataset_dir": "."},
    }
    loader = {"collate_param": {"model_name": collator, "ignore_pad_token_for_loss": True}, "shuffle": True}
    (folder / "data.json").write_text(json.dumps({"dataset_param": dataset, "dataloader_param": loader}))
    (folder / "model.json").write_text(json.dumps({"init_from_hf_path": "./model"}))


def losses(run: Path) -> list[dict[str, Any]]:
    names = ("loss", "loss/sft_by_pair", "rewards/margins", "kl/reference", "grad_norm")
    return [{name: line.get(name, line.get("metrics", {}).get(name)) for name in names}
            for line in lines(run / "metrics.jsonl") if "loss" in line]  # fmt: skip


@pytest.mark.edge("BN8")
def test_the_entry_trains_as_the_yaml_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = make_tiny_pairs(tmp_path, posttrain={"method": "dpo", "dpo": DPO}, training=TRAINING)
    write_files(tmp_path, collator="qwen2vl")  # that of single answers, which other stages of such files name
    train(yaml, "by_yaml")
    monkeypatch.setattr(sys, "argv", ["posttrain_qwen2vl_dpo.py", *FLAGS.split()])
    posttrain_qwen2vl_dpo.main()
    by_flags, by_yaml = losses(Path("by_flags")), losses(Path("by_yaml"))
    assert by_flags == by_yaml and len(by_flags) == 3
    assert by_flags[0]["loss"] != by_flags[2]["loss"] and all(line["loss/sft_by_pair"] for line in by_flags)


def test_a_launch_that_is_refused_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)

    def said(flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["posttrain_qwen2vl_dpo.py", *flags.split()])
        with pytest.raises(SystemExit):
            posttrain_qwen2vl_dpo.main()
        assert not Path("by_flags").exists()
        return capsys.readouterr().err

    assert "--mm-data  is not given: there is nothing to train on" in said(FLAGS.replace("--mm-data data.json", ""))
    assert "--ref-model  'nothing' does not exist" in said(FLAGS.replace("--ref-model model", "--ref-model nothing"))
    assert "rows.jsonl" in said(FLAGS)


def test_a_script_s_entry_says_what_it_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    Path("run.sh").write_text(f"torchrun posttrain_qwen2vl_dpo.py {' '.join(FLAGS.split())}\n")
    arguments = from_flags(read_launch(["run.sh"], {}).flags, {}).arguments
    assert arguments.posttrain.method == "dpo" and arguments.posttrain.dpo.pref_ftx == 0.5
    assert arguments.data.dataset_param.basic_parameters.stage == "rm"
    assert reference_kind(arguments) == "frozen" and arguments.posttrain.reference.model_name_or_path is None
    lora = read_launch(["run.sh", "--lora-target-modules", "q_proj"], {}).flags
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


MEDIA_FLAGS = f"""{COMMON} --global-batch-size 2 --lr-decay-style constant --seed 7 --num-workers 0 --log-interval 1
    --save-interval 3 --mm-model model.json --mm-data data.json --load model/transformer --save by_flags"""
MEDIA_TRAINING = TRAINING | {"lr_decay_style": "constant", "diffusion": {"caption_dropout": 0.0}}
HISTOGRAM = {"0.0-0.5": 3, "0.5-1.0": 5, "total_num": 8, "max_num": 5, "min_bin": 0, "max_bin": 2, "bin_width": 0.5,
             "bin_size": 2}  # fmt: skip


def write_media_files(folder: Path, alpha: float) -> None:
    """As the scripts of StepVideo have them; FLUX's rows are pictures."""
    dpo = {"histogram_path": str(folder / "scores.json"), "weight_alpha": alpha, "weight_beta": None, "loss_beta": 50}
    model = {"dpo": dpo, "predictor": {"model_id": "flux"}, "task": "t2i"}
    basic = {"data_path": str(folder / "rows.jsonl"), "data_folder": str(folder), "data_storage_mode": "standard"}
    sizes = {"max_height": 16, "max_width": 16}
    data = {"dataset_param": {"dataset_type": "t2i", "basic_parameters": basic, "preprocess_parameters": sizes}}
    for name, content in {"model": model, "data": data, "scores": HISTOGRAM}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def media_losses(run: Path) -> list[tuple[float, float, float]]:
    return [(line["loss"], line["rewards/margins"], line["grad_norm"]) for line in lines(run / "metrics.jsonl")]


@pytest.mark.slow
def test_the_entry_of_generators_trains_as_the_yaml_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dpo = {
        "beta": 100,
        "timestep_weight": "sigma",
        "weight_alpha": 0.5,
        "histogram_path": str(tmp_path / "scores.json"),
    }
    yaml = make_tiny_media_pairs(tmp_path, posttrain={"method": "dpo", "dpo": dpo}, training=MEDIA_TRAINING)
    write_media_files(tmp_path, 0.5)
    train(yaml, "by_yaml", "data.dataset_param.basic_parameters.stage=rm")
    monkeypatch.setattr(sys, "argv", ["posttrain_sora_dpo.py", *MEDIA_FLAGS.split(), "--dpo-beta", "0.2"])
    posttrain_sora_dpo.main()
    by_flags, by_yaml = media_losses(Path("by_flags")), media_losses(Path("by_yaml"))
    assert by_flags == by_yaml and len(by_flags) == 3 and by_flags[2][1] != 0


def test_ranks_of_stages_share_the_sequences_of_a_generator_s_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_media_files(tmp_path, 0.0)
    words = MEDIA_FLAGS.replace("--global-batch-size 2", "--global-batch-size 4").split()
    words += ["--posttrain-method", "dpo", "--pipeline-model-parallel-size", "2"]
    words += ["--virtual-pipeline-model-parallel-size", "2"]
    translated = translate(parse(words, {"WORLD_SIZE": "4"}))
    parallel, training = translated.arguments.parallel, translated.arguments.training
    assert (parallel.pipeline_parallel_size, parallel.ulysses_parallel_size, parallel.ring_attention_size) == (1, 2, 1)
    assert training.gradient_accumulation_steps == 1  # of 4 samples: 2 ranks read 2 each, as with 2 stages
    assert "these ranks share each sequence" in "".join(translated.notes)
    words += ["--context-parallel-size", "2", "--context-parallel-algo", "megatron_cp_algo"]
    parallel = translate(parse(words, {"WORLD_SIZE": "8"})).arguments.parallel
    assert (parallel.pipeline_parallel_size, parallel.ulysses_parallel_size, parallel.ring_attention_size) == (1, 1, 4)


def test_a_script_s_entry_of_generators_says_what_it_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_media_files(tmp_path, 0.5)
    weighted = translate(parse([*MEDIA_FLAGS.split(), "--posttrain-method", "dpo", "--dpo-beta", "0.2"], {}))
    dpo = weighted.arguments.posttrain.dpo
    assert (dpo.beta, dpo.timestep_weight, dpo.weight_alpha) == (100, "sigma", 0.5)
    assert dpo.histogram_path == str(tmp_path / "scores.json")
    write_media_files(tmp_path, 0.0)
    unweighted = translate(parse([*MEDIA_FLAGS.split(), "--posttrain-method", "dpo"], {}))
    assert unweighted.arguments.posttrain.dpo.histogram_path is None
    assert "histogram_path has no effect" in "".join(unweighted.notes)
    assert unweighted.arguments.posttrain.dpo.beta == 50
    without = translate(parse(MEDIA_FLAGS.split(), {}))
    assert without.arguments.posttrain.method is None and "trains without pairs" in "".join(without.notes)
