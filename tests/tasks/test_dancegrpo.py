"""`posttrain_flux_dancegrpo.py`: MindSpeed-MM's flags and JSON train as the YAML does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ExitCode, MMError, UsageError
from mindspeed_mm.tasks.dancegrpo.run import CONFIGURATION, configuration, notes_on_data, read_flags, run
from tests.helpers.runs import lines, mm
from tests.helpers.tiny_clip import make_tiny_clip, write_open_clip
from tests.helpers.tiny_generators import make_tiny_flux


def words(folder: Path, *more: str) -> list[str]:
    """As examples/dancegrpo starts it, smaller."""
    given = {
        "seed": 42, "load": folder / "flux", "lr": 1e-3, "train-iters": 2, "weight-decay": 1e-4,
        "mm-data": folder / "data.json", "mm-model": folder / "model.json", "log-interval": 1,
        "save-interval": 10000, "save": folder / "run", "train_batch_size": 2, "gradient_accumulation_steps": 4,
        "mixed_precision": "no", "h": 16, "w": 16, "t": 1, "sampling_steps": 4, "eta": 0.3, "lr_warmup_steps": 0,
        "max_grad_norm": 1.0, "num_generations": 4, "shift": 3, "timestep_fraction": 0.6, "clip_range": 1e-4,
        "adv_clip_max": 5.0, "hps_reward_save": folder / "hps.txt", "sample_batch_size": 2,
    }  # fmt: skip
    flags = ["--use_hpsv2", "--use_group", "--ignore_last", "--init_same_noise", "--cfg", "0.0", "--sampler_seed=3"]
    return [*(word for name, value in given.items() for word in (f"--{name}", str(value))), *flags, *more]


def files(folder: Path) -> None:
    weights = {"model_id": "CLIP-ViT-H-14", "ckpt_dir": str(folder / "hps"), "load_pt": "HPS_v2.1_compressed.pt"}
    (folder / "model.json").write_text(json.dumps({"task": "t2i", "reward": weights}))
    basic = {"data_path": str(folder / "videos2caption.json")}
    (folder / "data.json").write_text(json.dumps({"dataset_param": {"basic_parameters": basic}}))


def by_hand(folder: Path) -> dict[str, Any]:
    """The YAML that these flags mean."""
    return {
        "model": {"model_name_or_path": str(folder / "flux"), "model_id": "flux"},
        "data": {
            "dataset_param": {
                "dataset_type": "generation_prompts",
                "basic_parameters": {"dataset": str(folder / "videos2caption.json")},
                "preprocess_parameters": {"height": 16, "width": 16},
            }
        },
        "training": {
            "lr": 1e-3, "weight_decay": 1e-4, "lr_decay_style": "constant", "clip_grad": 1.0, "train_iters": 2,
            "micro_batch_size": 2, "gradient_accumulation_steps": 4, "seed": 42, "log_interval": 1,
            "diffusion": {"shift": 3.0, "guidance": 3.5},
        },
        "posttrain": {
            "method": "grpo",
            "grpo": {"num_generations": 4, "clip_range": 1e-4, "adv_clip_max": 5.0},
            "flow": {"sde": "dance", "noise_level": 0.3, "num_inference_steps": 4, "timestep_fraction": 0.6,
                     "same_noise": True},
            "rewards": [{"name": "hps_v2", "settings": {"path": str(folder / "hps" / "HPS_v2.1_compressed.pt"),
                                                        "tokenizer": str(folder / "flux" / "tokenizer")}}],
        },
    }  # fmt: skip


def test_settings_of_data_json_that_do_nothing_are_named(tmp_path: Path) -> None:
    files(tmp_path)
    assert not notes_on_data(tmp_path / "data.json")
    dataset = {"dataset_type": "dancegrpo", "basic_parameters": {"data_path": "p", "data_folder": "d"}, "height": 8}
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": dataset, "dataloader_param": {}}))
    (note,) = notes_on_data(tmp_path / "data.json")
    assert "basic_parameters.data_folder, height, dataloader_param have no effect" in note


def test_flags_mean_a_yaml(tmp_path: Path) -> None:
    files(tmp_path)
    found, expected = configuration(read_flags(words(tmp_path)).options), by_hand(tmp_path)
    for section in ("model", "data", "posttrain"):
        assert found[section] == expected[section]
    of_the_run = {"save": str(tmp_path / "run"), "save_interval": 10000, "lr_warmup_ratio": 0.0}
    assert found["training"] == expected["training"] | of_the_run


def test_a_file_of_somebody_elses_is_not_written_over(tmp_path: Path) -> None:
    files(tmp_path)
    (tmp_path / "hps.txt").write_text("my notes\n")
    with pytest.raises(UsageError, match=r"hps_reward_save.*this command did not write"):
        run(words(tmp_path))
    assert (tmp_path / "hps.txt").read_text() == "my notes\n" and not (tmp_path / f"run.{CONFIGURATION}").exists()


def test_a_launch_without_a_reward_names_the_flag(tmp_path: Path) -> None:
    given = [word for word in words(tmp_path) if word != "--use_hpsv2"]
    with pytest.raises(UsageError, match=r"--use_hpsv2.*jpeg_size"):
        read_flags(given)
    read_flags([*given, "posttrain.rewards=[{name: jpeg_size}]"])


@pytest.mark.slow
def test_flags_train_as_a_yaml_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ruamel.yaml import YAML
    from transformers import CLIPModel

    make_tiny_flux(tmp_path / "flux")
    make_tiny_clip(tmp_path / "clip")
    (tmp_path / "hps").mkdir()
    write_open_clip(CLIPModel.from_pretrained(tmp_path / "clip"), tmp_path / "hps" / "HPS_v2.1_compressed.pt")
    files(tmp_path)
    prompts = [{"caption": prompt} for prompt in ("a red box", "two blue lines", "a seven", "grain, large")]
    (tmp_path / "videos2caption.json").write_text(json.dumps(prompts))
    run(words(tmp_path))
    told = capsys.readouterr().err
    assert "--cfg has no effect" in told and "--sampler_seed has no effect" in told and "make one step" in told

    with (tmp_path / "run.yaml").open("w") as file:
        YAML().dump(by_hand(tmp_path), file)
    said = mm("train", tmp_path / "run.yaml", f"training.save={tmp_path / 'other'}")
    assert said.code == ExitCode.OK, said.err
    one, other = (
        [
            (line["loss"], line["grad_norm"], line["reward"])
            for line in lines(folder / "metrics.jsonl")
            if "loss" in line
        ]
        for folder in (tmp_path / "run", tmp_path / "other")
    )
    assert len(one) == 2 and one == other and all(norm > 0 for _, norm, _ in one)
    assert [float(line) for line in (tmp_path / "hps.txt").read_text().splitlines()] == [each[2] for each in one]
    assert (tmp_path / f"run.{CONFIGURATION}").is_file()


def test_plans_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path)
    options = read_flags(words(tmp_path, "--sp_size=2", "--gradient_checkpointing", "--mixed_precision=bf16")).options
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = configuration(options)
    assert found["parallel"] == {
        "fsdp_plan": {"param_dtype": "bf16", "cpu_offload": False}, "ulysses_parallel_size": 2,
        "fully_shard_parallel_size": 8,
    }  # fmt: skip
    assert found["features"] == {"recompute": True}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sample_batch_size=3"], r"--sample_batch_size  3 does not divide the 8 samples"),
        (["--no_such=1"], "no such flag"),
        (["--t=5"], "invalid choice"),
        (["stray"], "belongs to no flag"),
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_flags(words(tmp_path, *more))
    without = [word for word in words(tmp_path) if word != "--use_group"]
    with pytest.raises(UsageError, match="--use_group"):
        read_flags(without)
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(MMError, match=r"dataset_param\.basic_parameters\.data_path"):
        configuration(read_flags(words(tmp_path)).options)
