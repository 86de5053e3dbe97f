"""What a setup leaves unsaid is what its tool does, wherever that changes the training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.tasks.importing import importing
from mindspeed_mm.tasks.importing.draft import BASIC, DATASET, DIFFUSION, LORA

FLUX = "accelerate launch flux_train_network.py --pretrained_model_name_or_path flux --train_data_dir pictures "
DREAMBOOTH = (
    "accelerate launch train_dreambooth_{}.py --pretrained_model_name_or_path m --instance_data_dir d "
    "--instance_prompt dog "
)
SWIFT = "swift rlhf --model m --dataset d.jsonl --rlhf_type "


def told(command: str) -> importing.Imported:
    return importing.run([command])


def values(command: str) -> dict[str, Any]:
    return dict(told(command).values)


def unsupported(command: str) -> dict[str, str]:
    return {each.word: each.note for each in told(command).findings if each.kind == "unsupported"}


@pytest.mark.parametrize(
    ("row", "options", "whole"),
    [
        ({"messages": []}, "", True),
        ({"messages": []}, "--assistant_only_loss", None),
        ({"prompt": "a", "completion": "b"}, "", None),
        ({"prompt": "a", "completion": "b"}, "--completion_only_loss false", True),
        ({"text": "a"}, "", None),
    ],
)
def test_trl_trains_on_whole_conversations(
    row: dict[str, Any], options: str, whole: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFTTrainer: all tokens, unless the rows have prompt and completion or `assistant_only_loss` is on."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    found = values(f"trl sft --model_name_or_path m --dataset_name rows.jsonl {options}")
    assert found.get(f"{BASIC}.train_on_prompt") == whole


def test_rewards_of_ms_swift() -> None:
    found = values(f"{SWIFT} grpo --reward_funcs accuracy --num_generations 8 --per_device_train_batch_size 2")
    assert (found["posttrain.grpo.beta"], found["posttrain.grpo.loss_type"]) == (0.04, "grpo")
    assert found["posttrain.rollout.temperature"] == 0.9
    assert 2 * found["training.gradient_accumulation_steps"] % 8 == 0  # a group fits into a step of one rank


def test_pairs_of_ms_swift_and_llamafactory(tmp_path: Path) -> None:
    simpo = values(f"{SWIFT} simpo")
    assert (simpo["posttrain.dpo.beta"], simpo["posttrain.dpo.pref_ftx"]) == (2.0, 1.0)
    assert "posttrain.dpo.pref_ftx" not in values(f"{SWIFT} dpo")
    file = tmp_path / "dpo.yaml"
    file.write_text("model_name_or_path: m\nstage: dpo\nfinetuning_type: full\ndataset: d\npref_ftx: 0.5\n")
    found = importing.run([str(file)]).values
    assert (found["posttrain.dpo.pref_ftx"], found["posttrain.dpo.pref_ftx_by"]) == (0.5, "pair")


def test_steps_of_a_rollout_are_optimizer_steps() -> None:
    command = "trl grpo --model_name_or_path m --dataset_name d --num_generations 8 --gradient_accumulation_steps 2 "
    assert values(f"{command} --steps_per_generation 8")["posttrain.grpo.steps_per_generation"] == 4


def test_arithmetic_of_a_script(tmp_path: Path) -> None:
    """ms-swift's scripts keep 16 rows a step by `$(expr 16 / $nproc_per_node)`."""
    script = tmp_path / "a.sh"
    command = "swift sft --model m --dataset d --gradient_accumulation_steps"
    script.write_text(f"nproc=2\n{command} $(expr 16 / $nproc)\n")
    assert importing.run([str(script)]).values["training.gradient_accumulation_steps"] == 8
    script.write_text(f"n=2\n{command} $((16 / n))\n")
    assert importing.run([str(script)]).values["training.gradient_accumulation_steps"] == 8


@pytest.mark.parametrize(
    ("script", "alpha", "density", "shift"),
    [("lora_sd3", 16.0, "logit_normal", None), ("lora_lumina2", 16.0, "uniform", None),
     ("lora_flux", 4.0, "uniform", 1.0), ("lora_qwen_image", 4.0, "uniform", 1.0)],
)  # fmt: skip
def test_scripts_of_diffusers(script: str, alpha: float, density: str, shift: float | None) -> None:
    """`--lora_alpha` is an argument of some; SD3's density is `logit_normal`; a static shift is the folder's."""
    found = importing.run([DREAMBOOTH.format(script) + "--rank 16"])
    assert found.values.get(f"{LORA}.alpha", 16) == alpha
    assert found.values[f"{DIFFUSION}.timestep_density"] == density
    assert found.values.get(f"{DIFFUSION}.shift") == shift


def test_the_shift_is_that_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    for given, shift in (({"shift": 3.0}, 3.0), ({"shift": 3.0, "use_dynamic_shifting": True}, 1.0)):
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(given))
        command = DREAMBOOTH.format("lora_sd3").replace("path m ", f"path {tmp_path} ")
        assert values(command)[f"{DIFFUSION}.shift"] == shift


def test_cogvideox_of_diffusers() -> None:
    found = values(
        "python train_cogvideox_lora.py --pretrained_model_name_or_path m --instance_data_dir d --id_token X"
    )
    assert (found["training.adam_beta2"], found[f"{LORA}.rank"], found[f"{LORA}.alpha"]) == (0.95, 128, 128.0)
    assert found[f"{BASIC}.trigger_word"] == "X"


def test_a_rate_of_one_is_for_optimizers_that_work_theirs_out() -> None:
    command = DREAMBOOTH.format("lora_flux") + "--optimizer prodigy --learning_rate 1.0"
    assert values(command)["training.lr"] == 1e-4
    assert "prodigy" in told(command).comments["training.lr"]


def test_lion_is_not_taken_with_other_decay_rates() -> None:
    """transformers gives it AdamW's, 0.9 and 0.999; its paper has 0.9 and 0.99."""
    command = DREAMBOOTH.format("lora_flux") + "--optimizer Lion_32bit"
    assert "write optimizer: lion, lion_beta1" in unsupported(command)["optimizer"]
    assert "training.optimizer" not in values(command)
    assert (
        "training.optimizer has adamw, adamw_swap, muon, lion"
        in unsupported(DREAMBOOTH.format("lora_flux") + "--optimizer adafactor")["optimizer"]
    )


def test_kohyas_scripts() -> None:
    """The rate of the transformer goes first, AdamW decays by 0.01, and all linear layers of the blocks are adapted."""
    found = values(FLUX + "--network_module networks.lora_flux --unet_lr 1e-4 --learning_rate 5e-5")
    assert (found["training.lr"], found["training.weight_decay"]) == (1e-4, 0.01)
    assert found[f"{LORA}.target_modules"] == ["transformer_blocks.*", "single_transformer_blocks.*"]
    found = values(FLUX + "--network_module networks.lora_flux --optimizer_args weight_decay=0.1 betas=0.9,0.99")
    assert (found["training.weight_decay"], found["training.adam_beta2"]) == (0.1, 0.99)
    found = values(FLUX + "--network_module networks.lora_flux --network_args train_blocks=single loraplus_lr_ratio=4")
    assert found[f"{LORA}.target_modules"] == ["single_transformer_blocks.*"]
    assert found["training.lr_scaling_plan"] == [{"match": "lora_B", "scale": 4.0}]


def test_defaults_of_kohyas_scripts_that_are_not_built_are_told() -> None:
    said = unsupported(FLUX + "--network_module networks.lora_flux")
    assert "sigma_scaled" in said["model_prediction_type"] and "text encoder" in said["network_train_unet_only"]
    options = "--network_module networks.lora_flux --model_prediction_type raw --network_train_unet_only"
    assert unsupported(FLUX + options) == {}


def test_layers_of_musubi_and_ai_toolkit(tmp_path: Path) -> None:
    found = values("python wan_train_network.py --dit wan.safetensors --network_module networks.lora_wan")
    assert found[f"{LORA}.target_modules"] == ["blocks.*"]
    found = values("python qwen_image_train_network.py --dit q.safetensors --network_module networks.lora_qwen_image")
    assert (
        found[f"{LORA}.target_modules"][1] == "transformer_blocks.{*}.img_mlp.*"
    )  # without img_mod, which it leaves out
    file = tmp_path / "job.yaml"
    job = "job: extension\nconfig:\n  process:\n    - type: sd_trainer\n"
    job += "      model: {name_or_path: FLUX.1-dev, is_flux: true}\n"
    file.write_text(job + "      network: {type: lora, linear: 16}\n")
    found = dict(importing.run([str(file)]).values)
    assert found[f"{LORA}.target_modules"] == ["transformer_blocks.*", "single_transformer_blocks.*"]
    assert found[f"{DIFFUSION}.guidance"] == 1.0
    file.write_text(job + "      network: {type: lora, network_kwargs: {only_if_contains: [proj_out]}}\n")
    assert importing.run([str(file)]).values[f"{LORA}.target_modules"] == ["*proj_out*"]


def test_the_list_of_data_sets_of_llamafactory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sets.yaml").write_text(
        "a: {path: a.json, source: local, size: 500}\nb: {path: b.json, source: local}\nc: {path: owner/c, weight: 2}\n"
    )
    Path("v1.yaml").write_text("model: m\ntrain_dataset: sets.yaml\npeft_config: {name: lora}\ncutoff_len: 9\n")
    found = importing.run(["v1.yaml"])
    assert found.values[DATASET] == [{"path": "a.json", "max_samples": 500}, "b.json", {"path": "data/c", "repeats": 2}]
    assert "hf download owner/c" in found.downloads[0]


def test_settings_of_transformers_are_known_to_tools_that_pass_them_on(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "model_name_or_path: m\nfinetuning_type: full\ndataset: d\ngradient_checkpointing: false\n"
        "dataloader_drop_last: true\nlogging_strategy: steps\nddp_find_unused_parameters: false\n"
    )
    found = importing.run([str(file)])
    assert [each.word for each in found.findings if each.kind == "unsupported"] == []
    assert "features.recompute" not in found.values


def test_system_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = f"{BASIC}.default_system"
    assert values("swift sft --model m --dataset d --system 'Be brief.'")[key] == "Be brief."
    Path("system.txt").write_text("Be kind.\n")
    assert values("swift sft --model m --dataset d --system system.txt")[key] == "Be kind."
    Path("a.yaml").write_text("model_name_or_path: m\nfinetuning_type: full\ndataset: d\ndefault_system: Be brief.\n")
    assert importing.run(["a.yaml"]).values[key] == "Be brief."


def test_settings_of_a_data_set_hold_at_any_level_of_kohyas_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`caption_tag_dropout_rate` of all subsets, and `bucket_no_upscale`, whose opposite is our default."""
    monkeypatch.chdir(tmp_path)
    Path("data.toml").write_text(
        "[general]\nresolution = 512\n[[datasets]]\nenable_bucket = true\nbucket_no_upscale = true\n"
        "caption_tag_dropout_rate = 0.1\nenable_wildcard = true\n[[datasets.subsets]]\nimage_dir = 'd'\n"
    )
    command = "python flux_train_network.py --pretrained_model_name_or_path m --dataset_config data.toml"
    found = importing.run([command])
    assert found.values["data.dataset_param.preprocess_parameters.enlarge"] is False
    assert found.values[f"{BASIC}.tag_dropout"] == 0.1
    assert "no setting" not in {each.word: each.note for each in found.findings}["enable_wildcard"]


def test_the_schedule_is_that_of_transformers() -> None:
    """Ten steps, two of them warming up, by the formulas of transformers' optimization.py."""
    decays: dict[str, Callable[[float], float]] = {
        "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": lambda progress: 1 - progress,
        "constant_with_warmup": lambda progress: 1.0,
    }
    options = "--model m --dataset d --max_steps 10 --learning_rate 1e-4 --warmup_ratio 0.2"
    for name, decay in decays.items():
        imported = importing.run([f"swift sft {options} --lr_scheduler_type {name}"])
        training = load_config(imported.sections()).arguments.training
        ours = Schedule(
            training.lr_decay_style, training.lr, training.lr_min, training.lr_start, 10 * training.lr_warmup_ratio,
            training.lr_decay_ratio, 10, warms_from_start=training.lr_warmup_from_start,
        )  # fmt: skip
        theirs = [1e-4 * (step / 2 if step < 2 else decay((step - 2) / 8)) for step in range(10)]
        assert [ours.at(step) for step in range(10)] == pytest.approx(theirs, abs=1e-15), name


def test_prompts_of_base_models(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("base_model: m\nsequence_len: 9\ndatasets: [{path: d.jsonl, type: alpaca}]\n")
    assert importing.run([str(file)]).values[f"{BASIC}.template"] == "alpaca"
    for name in ("llama3", "empty", "default", "alpaca"):
        file.write_text(f"model_name_or_path: m\nfinetuning_type: full\ndataset: d\ntemplate: {name}\n")
        assert importing.run([str(file)]).values[f"{BASIC}.template"] == name


def test_epochs_between_checkpoints_are_counted_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the media of the folders; where they are not here, the comment says so although 500 is our default."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("10_dog", 3), ("1_cat", 2)):
        for number in range(count):
            (tmp_path / "pictures" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "pictures" / name / f"{number}.png").touch()
    found = told(FLUX + "--save_every_n_epochs 2 --train_batch_size 4")
    assert found.values["training.save_interval"] == 16  # 32 pictures an epoch, 4 a step
    found = told(FLUX.replace("pictures", "elsewhere") + "--save_every_n_epochs 2")
    assert found.values["training.save_interval"] == 500
    assert "every 2 epochs there" in found.comments["training.save_interval"]


def test_steps_of_warm_up_of_a_run_of_unknown_length_are_told() -> None:
    found = told("swift sft --model m --dataset gone.jsonl --warmup_steps 20")
    assert (found.values["training.lr_warmup_ratio"], found.comments["training.lr_warmup_ratio"]) == (
        0.03,
        "20 steps there: write 20 / number of steps",
    )


def test_all_linear_layers_of_peft_are_also_those_of_the_tower() -> None:
    command = (
        "trl sft --model_name_or_path org/Qwen2.5-VL-3B --dataset_name d --use_peft --lora_target_modules all-linear"
    )
    assert values(command)[f"{LORA}.target_modules"] == ["all-linear", "model.visual.*"]
    assert f"{LORA}.target_modules" not in values(command.replace("-VL", ""))


def test_adapters_beside_a_tower_that_is_trained_whole() -> None:
    """ms-swift's `lora_llm`."""
    command = "swift sft --model org/Qwen2.5-VL-7B --dataset d --tuner_type lora_llm --freeze_vit false"
    found = values(command)
    assert found[f"{LORA}.modules_to_save"] == ["model.visual"] and f"{LORA}.target_modules" not in found


def test_named_layers_of_a_model_with_a_frozen_tower_are_those_of_the_language_model() -> None:
    command = "swift sft --model org/llava-1.5-7b-hf --dataset d --target_modules q_proj v_proj"
    found = values(command)[f"{LORA}.target_modules"]
    assert found == ["model.language_model.*.q_proj", "model.language_model.*.v_proj"]


def test_layers_of_wan_have_the_names_of_diffusers() -> None:
    command = "python examples/wanvideo/model_training/train.py --dataset_base_path d --lora_base_model dit "
    command += "--model_id_with_origin_paths Wan-AI/Wan2.1-T2V-1.3B:x.safetensors --lora_target_modules q,o,ffn.0"
    assert values(command)[f"{LORA}.target_modules"] == ["to_q", "*.to_out.0", "*.ffn.net.0.proj"]


def test_roles_that_axolotl_trains_on(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    start = "base_model: m\nsequence_len: 9\ndatasets:\n  - path: d\n    type: chat_template\n    "
    for text, is_told in (
        ("roles_to_train: [assistant]", False),
        ("roles_to_train: [assistant, user]", True),
        ("train_on_eos: turn", False),
        ("train_on_eos: last", True),
    ):
        file.write_text(start + text + "\n")
        kinds = {each.word: each.kind for each in importing.run([str(file)]).findings}
        assert (kinds[f"datasets[].{text.partition(':')[0]}"] == "unsupported") is is_told, text


def test_columns_of_ms_swift() -> None:
    command = ["swift", "sft", "--model", "m", "--dataset", "d", "--columns", '{"text1": "query", "text2": "response"}']
    found = importing.run(command).values
    attr = "data.dataset_param.attr"
    assert (found[f"{attr}.prompt"], found[f"{attr}.response"]) == ("text1", "text2")


def test_rows_of_llamafactory_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the columns and tags of dataset_info.json."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    entry = {"hf_hub_url": "org/pairs", "ranking": True, "formatting": "sharegpt", "columns": {"messages": "turns"}}
    Path("data/dataset_info.json").write_text(json.dumps({"pairs": entry, "mine": {"file_name": "mine.json"}}))
    Path("a.yaml").write_text("model_name_or_path: m\nstage: dpo\nfinetuning_type: full\ndataset: pairs,mine\n")
    found = importing.run(["accelerate", "launch", "src/train.py", "a.yaml"])
    attr = {"formatting": "sharegpt", "ranking": True, "messages": "turns"}
    assert found.values[DATASET] == [{"path": "data/pairs", "attr": attr}, "mine"]
    assert found.downloads == ("hf download org/pairs --repo-type dataset --local-dir data/pairs",)


def test_long_documents_are_told(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model_name_or_path: m\nstage: pt\nfinetuning_type: full\ndataset: d\ncutoff_len: 1024\n")
    found = importing.run([str(file)])
    assert found.values[f"{BASIC}.truncation"] == "split" and "joined" in found.comments[f"{BASIC}.truncation"]
    file.write_text(file.read_text() + "streaming: true\nmax_steps: 9\n")
    found = importing.run([str(file)])
    assert f"{BASIC}.truncation" not in found.values and "left out" in found.comments[f"{BASIC}.cutoff_len"]


@pytest.mark.parametrize(
    ("words", "truncation"),
    [
        ("swift pt --model m --dataset d", "drop"),
        ("swift pt --model m --dataset d --truncation_strategy split", "split"),
        ("swift pt --model m --dataset d --truncation_strategy right", "shrink"),
        ("swift sft --model m --dataset d", None),
        ("trl sft --model_name_or_path m --dataset_name d --packing true --packing_strategy wrapped", "split"),
        ("trl sft --model_name_or_path m --dataset_name d --packing true --packing_strategy bfd", None),
    ],
)
def test_long_documents_are_treated_as_there(words: str, truncation: str | None) -> None:
    assert importing.run(words.split()).values.get(f"{BASIC}.truncation") == truncation


def test_entries_of_axolotl(tmp_path: Path) -> None:
    """A share of a split, and the same rows twice, which need names."""
    file = tmp_path / "a.yaml"
    sets = "[{path: d, type: chat_template, split: 'train[:10%]'}, {path: e, type: x}, {path: e, type: y}]"
    file.write_text(f"base_model: m\nsequence_len: 9\ndatasets: {sets}\n")
    assert importing.run([str(file)]).values[DATASET] == [
        {"path": "d", "share": 0.1}, {"path": "e", "name": "e-1"}, {"path": "e", "name": "e-2"},
    ]  # fmt: skip
