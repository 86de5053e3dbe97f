"""`mm config --from` finds out what a setup trains, and rejects what is not built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.tasks.importing import importing

TRL = "python examples/scripts/{}.py --model_name_or_path models/text --dataset_name data/rows.jsonl"


def values(command: str) -> dict[str, Any]:
    return dict(importing.run([command]).values)


@pytest.mark.parametrize(
    ("script", "method"),
    [
        ("sft_vlm", None),
        ("dpo_vlm", "dpo"),
        ("mpo_vlm", "dpo"),
        ("grpo_vlm", "grpo"),
        ("gspo", "grpo"),
        ("orpo", "dpo"),
    ],
)
def test_a_script_of_trl_is_named_after_its_method(script: str, method: str | None) -> None:
    assert values(TRL.format(script)).get("posttrain.method") == method


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("reward_modeling", "REWARD_MODELING is not built"),
        ("online_dpo_vlm", "ONLINE_DPO is not built"),
        ("dpo_online", "DPO_ONLINE is not built"),
        ("nash_md", "NASH_MD is not built"),
        ("xpo", "XPO is not built"),
        ("bco", "BCO is not built"),
        ("prm", "PRM is not built"),
        ("distillation", "DISTILLATION is not built"),
        ("ppo/ppo_tldr", "PPO is not built"),
        ("rloo", "RLOO is not built"),
        ("openenv/wordle", "what wordle.py trains is in its code"),
    ],
)
def test_other_methods_of_trl_are_rejected(script: str, told: str) -> None:
    with pytest.raises(MMError, match=told):
        importing.run([TRL.format(script)])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "base_model: m\nsequence_len: 9\nreward_model: true\n",
            r"a.yaml:3:1  reward_model  REWARD_MODEL is not built",
        ),
        ("base_model: m\nsequence_len: 9\ndiffusion:\n  eps: 0.1\n", "TEXT_DIFFUSION is not built"),
        ("job: extract\nconfig:\n  process: [{type: lora}]\n", "job extract does not train"),
        ("job: train\nconfig:\n  process: [{type: slider, model: {name_or_path: m}}]\n", "slider is not built"),
    ],
)
def test_files_that_train_something_else_are_rejected(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(MMError, match=told):
        importing.run([str(file)])


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("train_controlnet_flux", "controlnet is not built"),
        ("train_control_lora_flux", "control is not built"),
        ("train_instruct_pix2pix", "instruct_pix2pix is not built"),
        ("sdxl_train_control_net_lllite", "control_net is not built"),
    ],
)
def test_scripts_that_train_another_part_of_a_generator_are_rejected(script: str, told: str) -> None:
    with pytest.raises(MMError, match=told):
        importing.run([f"accelerate launch {script}.py --pretrained_model_name_or_path m --train_data_dir d"])


def test_a_script_of_ones_own_is_not_kohyas() -> None:
    with pytest.raises(MMError, match="no setup of a trainer that is known"):
        importing.run(["accelerate launch train_everything.py --colour red"])


def test_the_loss_follows_from_the_method(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base_model: m\nsequence_len: 9\nrl: ipo\nrl_beta: 0.2\n")
    found = importing.run([str(file)]).values
    assert (found["posttrain.dpo.loss_type"], found["posttrain.dpo.beta"]) == (["ipo"], 0.2)
    file.write_text("base_model: m\nsequence_len: 9\nrl: orpo\norpo_alpha: 0.3\n")
    found = importing.run([str(file)]).values
    assert (found["posttrain.dpo.loss_type"], found["posttrain.dpo.beta"]) == (["orpo"], 0.3)
