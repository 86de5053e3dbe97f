"""What a run of another tool does without saying so, and an imported one has to do as well: found by comparing setups
that the tools' own repositories have with their sources."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.redaction import redact
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.tasks.importing import importing
from mindspeed_mm.tasks.importing.draft import BASIC, DATASET, DIFFUSION, LORA, MEDIA, VAL_DATASET
from mindspeed_mm.tasks.importing.writing import as_text

KOHYA = "accelerate launch {}_train_network.py --pretrained_model_name_or_path {} --network_module networks.lora_flux "
MUSUBI = "accelerate launch src/musubi_tuner/{}_train_network.py --dit {} --network_module networks.lora "
DREAMBOOTH = "accelerate launch train_{}.py --pretrained_model_name_or_path m --instance_prompt dog "
TARGETS = f"{LORA}.target_modules"


@pytest.fixture(autouse=True)
def _work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def imported(*words: str, **files: str) -> importing.Imported:
    for name, text in files.items():
        Path(name.replace("__", ".")).write_text(text, encoding="utf-8")
    return importing.run(list(words))


def values(*words: str, **files: str) -> dict[str, Any]:
    return dict(imported(*words, **files).values)


def unsupported(*words: str, **files: str) -> dict[str, str]:
    return {each.word: each.note for each in imported(*words, **files).findings if each.kind == "unsupported"}


def folder(name: str, **config: Any) -> None:
    Path(name).mkdir(parents=True)
    (Path(name) / "config.json").write_text(json.dumps(config))


# --- LLaMA-Factory ----------------------------------------------------------------------------------------------------


def test_version_1_of_llamafactory_has_defaults_of_its_own() -> None:
    """v1/config/training_args.py and base_trainer.py: all weights, AdamW of torch, one rate, bf16, whole batches."""
    found = values("a.yaml", a__yaml="model: m\ntrain_dataset: rows.jsonl\ndist_config: {name: fsdp2}\n")
    assert not any(key.startswith(LORA) for key in found)
    assert (found["training.lr"], found["training.lr_decay_style"], found["training.weight_decay"]) == (
        1e-4, "constant", 0.01,
    )  # fmt: skip
    assert found["parallel.fsdp_plan.param_dtype"] == "bf16"
    assert "training.micro_batch_size" not in found  # 1, as here
    assert "data.dataloader_param.drop_last" not in found
    first = values("b.yaml", b__yaml="model_name_or_path: m\ndataset: d\ncutoff_len: 512\n")
    assert first[f"{LORA}.enable"] and first["training.micro_batch_size"] == 8
    assert first["training.lr_decay_style"] == "linear" and first["data.dataloader_param.drop_last"] is False


def test_adapters_and_quantized_weights_of_version_1() -> None:
    parts = "peft_config: {name: lora, r: 16}\nquant_config: {name: bnb, quantization_bit: 4}\n"
    text = f"model: m\ntrain_dataset: d.jsonl\n{parts}"
    found = values("a.yaml", a__yaml=text)
    assert (found[f"{LORA}.enable"], found[f"{LORA}.rank"], found[f"{LORA}.quantize"]) == (True, 16, "nf4")
    assert found.get(f"{LORA}.alpha", 16) == 16 and found[f"{LORA}.dropout"] == 0.05
    batch = values("b.yaml", b__yaml="model: m\ntrain_dataset: d.jsonl\nmicro_batch_size: 2\nglobal_batch_size: 16\n")
    assert batch["training.gradient_accumulation_steps"] == 8


@pytest.mark.parametrize(
    ("text", "frozen"),
    [
        ("model_name_or_path: m\nfinetuning_type: freeze\ndataset: d\n", "0-3"),
        ("model_name_or_path: m\nfinetuning_type: freeze\nfreeze_trainable_layers: -1\ndataset: d\n", "1-5"),
        ("model: m\ntrain_dataset: d\npeft_config: {name: freeze, freeze_trainable_layers: 4}\n", "0-1"),
    ],
)
def test_layers_that_llamafactory_trains_alone(text: str, frozen: str) -> None:
    folder("m", model_type="qwen3", num_hidden_layers=6)
    found = values("a.yaml", a__yaml=text)
    assert found["model.freeze"] == ["model.embed_tokens", f"model.layers.{{{frozen}}}", "model.norm", "lm_head"]
    assert f"{LORA}.enable" not in found


def test_layers_of_a_model_that_is_not_here_are_told() -> None:
    text = "model_name_or_path: m\nfinetuning_type: freeze\ndataset: d\n"
    assert "last 2 layers" in unsupported("a.yaml", a__yaml=text)["finetuning_type"]


def test_templates_without_thoughts() -> None:
    """LLaMA-Factory's `_nothink` writes no thoughts; a folder that can do both has empty ones, left out of the loss."""
    text = "model_name_or_path: m\nfinetuning_type: full\ndataset: d\ntemplate: qwen3_nothink\n"
    key = f"{BASIC}.enable_thinking"
    assert key not in values("a.yaml", a__yaml=text)
    folder("m", model_type="qwen3")
    (Path("m") / "chat_template.jinja").write_text("{% if enable_thinking is false %}{% endif %}")
    found = imported("a.yaml")
    assert found.values[key] is False and "not trained" in found.comments[key]


# --- ms-swift ---------------------------------------------------------------------------------------------------------


def test_megatron_of_ms_swift_trains_all_weights() -> None:
    """MegatronArguments: tuner_type full, and batches that are whole."""
    found = values("megatron sft --model m --dataset d.jsonl --micro_batch_size 4 --global_batch_size 16")
    assert f"{LORA}.enable" not in found and found["training.lr"] == 1e-5
    assert "data.dataloader_param.drop_last" not in found
    assert values("swift sft --model m --dataset d.jsonl")[f"{LORA}.enable"] is True


def test_tower_beside_adapters_is_trained_whole() -> None:
    """lora_llm trains tower and projector whatever `freeze_vit` says, and its adapters have no dropout."""
    found = values("swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --dataset d.jsonl --tuner_type lora_llm")
    assert found[f"{LORA}.modules_to_save"] == ["model.visual"]
    assert f"{LORA}.dropout" not in found


def test_environment_of_ms_swift() -> None:
    """Variables before the command, or below ENV of its YAML; tokens of a picture are squares of 28 or 32 pixels."""
    command = "IMAGE_MAX_TOKEN_NUM=1024 VIDEO_MAX_TOKEN_NUM=128 swift sft --model {} --dataset d.jsonl"
    found = values(command.format("Qwen/Qwen3-VL-4B-Instruct"))
    assert (found[f"{MEDIA}.image_max_pixels"], found[f"{MEDIA}.video_max_pixels"]) == (1024 * 32**2, 128 * 32**2)
    assert values(command.format("Qwen/Qwen2.5-VL-7B-Instruct"))[f"{MEDIA}.image_max_pixels"] == 1024 * 28**2
    folder("vl", model_type="x", vision_config={"patch_size": 8, "spatial_merge_size": 2})
    assert values(command.format("vl"))[f"{MEDIA}.image_max_pixels"] == 1024 * 16**2
    text = "ENV: {MAX_PIXELS: '1003520', CUDA_VISIBLE_DEVICES: '0'}\nmodel: vl\ntuner_type: lora\ndataset: d.jsonl\n"
    assert values("a.yaml", a__yaml=text)[f"{MEDIA}.image_max_pixels"] == 1003520
    assert not unsupported("a.yaml")


def test_new_tokens_of_a_file() -> None:
    command = "swift sft --model m --dataset d.jsonl --new_special_tokens tokens.txt <x>"
    assert values(command, tokens__txt="<|0|>\n<|1|>\n")["model.add_special_tokens"] == ["<|0|>", "<|1|>", "<x>"]
    Path("tokens.txt").unlink()
    assert "new_special_tokens" in unsupported(command)


def test_samples_of_ms_swift_are_as_long_as_the_model_takes() -> None:
    folder("m", model_type="qwen3", max_position_embeddings=40960)
    assert values("swift sft --model m --dataset d.jsonl")[f"{BASIC}.cutoff_len"] == 40960
    assert values("swift sft --model m --dataset d.jsonl --max_length 2048")[f"{BASIC}.cutoff_len"] == 2048


@pytest.mark.parametrize(
    ("scale", "key", "is_told"),
    [
        ("default+ignore_empty_think", f"{BASIC}.mask_empty_thoughts", False),
        ("react", None, True),
        ("last_round+hermes", f"{BASIC}.mask_history", True),
        ("all", f"{BASIC}.train_on_prompt", False),
    ],
)
def test_texts_that_count_more_are_told(scale: str, key: str | None, is_told: bool) -> None:
    command = f"swift sft --model m --dataset d.jsonl --loss_scale {scale}"
    assert ("loss_scale" in unsupported(command)) is is_told
    assert key is None or values(command)[key] is True


def test_empty_thoughts_of_models_that_can_do_both() -> None:
    key = f"{BASIC}.mask_empty_thoughts"
    command = "swift sft --dataset d.jsonl --model {}"
    assert values(command.format("Qwen/Qwen3-8B"))[key] is True
    assert key not in values(command.format("Qwen/Qwen3-4B-Instruct-2507"))
    assert key not in values(command.format("Qwen/Qwen3-8B --disable_ignore_empty_think true"))
    folder("m", model_type="qwen3")
    assert key not in values(command.format("m"))
    (Path("m") / "chat_template.jinja").write_text("{% if enable_thinking is false %}{% endif %}")
    assert values(command.format("m"))[key] is True


# --- axolotl and TRL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "more", "whole"),
    [("llava", "", True), ("qwen2_vl", "", None), ("llava", "role_boundaries: [{role: assistant, start: A}]\n", None)],
)
def test_axolotl_trains_on_questions_about_pictures(template: str, more: str, whole: bool | None) -> None:
    """processing_strategies.py masks questions for the chat templates that it knows, and no others."""
    text = (
        "base_model: llava-hf/llava-1.5-7b-hf\nprocessor_type: AutoProcessor\nsequence_len: 64\n"
        f"chat_template: {template}\ndatasets: [{{path: rows.jsonl, type: chat_template}}]\n{more}"
    )
    assert values("a.yaml", a__yaml=text).get(f"{BASIC}.train_on_prompt") is whole


def test_loftq_of_axolotl() -> None:
    text = (
        "base_model: m\nadapter: lora\nsequence_len: 64\npeft: {loftq_config: {loftq_bits: 4}}\ndatasets: [{path: d}]\n"
    )
    found = values("a.yaml", a__yaml=text)
    assert (found[f"{LORA}.init_lora_weights"], found[f"{LORA}.quantize"]) == ("loftq", "nf4")


def test_the_name_of_a_field_is_no_secret() -> None:
    text = (
        "base_model: m\nsequence_len: 64\n"
        "datasets: [{path: thinking.jsonl, type: chat_template, template_thinking_key: thinking}]\n"
    )
    written = as_text(imported("a.yaml", a__yaml=text))
    assert "thinking.jsonl" in written and "•" not in written
    assert redact({"api_key": "abcdefgh"}) != {"api_key": "abcdefgh"}


def test_commas_behind_the_words_of_a_command() -> None:
    command = "trl sft --model_name_or_path m --dataset_name d --use_peft --lora_target_modules q_proj, v_proj"
    found = imported(command)
    assert found.values[TARGETS] == ["q_proj", "v_proj"] and "commas" in found.comments[TARGETS]


def test_the_lowest_rate_is_a_share_of_the_rate_that_the_tool_takes_by_default() -> None:
    command = (
        "trl sft --model_name_or_path m --dataset_name d --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs "
    )
    found = importing.run([*command.split(), '{"min_lr_rate": 0.1}']).values
    assert (found["training.lr"], found["training.lr_min"]) == (2e-5, 2e-6)


def test_what_the_schedule_or_the_optimizer_does_not_read_is_left_out() -> None:
    """The tools accept it, and a configuration does not."""
    command = "trl sft --model_name_or_path m --dataset_name d --lr_scheduler_type constant --lr_scheduler_kwargs "
    found = importing.run([*command.split(), '{"min_lr": 1e-6}'])
    (idle,) = (each for each in found.findings if each.word == "lr_scheduler_kwargs")
    assert (idle.kind, "training.lr_min" in found.values) == ("idle", False)
    assert idle.note == "training.lr_decay_style: constant does not read it"


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": []}, None),
        ({"text": "a"}, None),
    ],
)
def test_trl_writes_no_template_around_texts(row: dict[str, Any], template: str | None) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    found = values("trl sft --model_name_or_path m --dataset_name rows.jsonl")
    assert found.get(f"{BASIC}.template") == template
    pairs = {"prompt": "a", "chosen": "b", "rejected": "c"}
    Path("pairs.jsonl").write_text(json.dumps(pairs) + "\n")
    assert values("trl dpo --model_name_or_path m --dataset_name pairs.jsonl")[f"{BASIC}.template"] == "completion"


def test_the_cross_entropy_of_orpo_is_told() -> None:
    orpo = imported("python examples/scripts/orpo.py --model_name_or_path m --dataset_name d")
    assert "questions" in orpo.comments["posttrain.dpo.loss_type"]


# --- kohya and musubi-tuner -------------------------------------------------------------------------------------------


def test_noise_levels_of_kohyas_scripts() -> None:
    """sd3_train_utils.py: `training_shift` 1, and u is σ itself; lumina_train_util.py: shift 6, and nextdit_shift of
    uniform numbers."""
    sd3 = values(KOHYA.format("sd3", "sd3") + "--weighting_scheme logit_normal --logit_mean 0.5")
    assert (sd3[f"{DIFFUSION}.shift"], sd3[f"{DIFFUSION}.logit_mean"]) == (1.0, 0.5)
    flux = values(KOHYA.format("flux", "flux") + "--weighting_scheme logit_normal --logit_mean 0.5")
    assert (flux[f"{DIFFUSION}.shift"], flux[f"{DIFFUSION}.logit_mean"]) == (3.0, -0.5)
    assert values(KOHYA.format("lumina", "lumina"))[f"{DIFFUSION}.shift"] == 6.0
    nextdit = values(KOHYA.format("lumina", "lumina") + "--timestep_sampling nextdit_shift")
    assert (nextdit[f"{DIFFUSION}.timestep_density"], nextdit[f"{DIFFUSION}.shift"]) == ("uniform", "resolution")


def test_flux2_shift_of_musubi_is_a_line() -> None:
    """train_utils.get_lin_function: μ 0.5 at 256 tokens and 1.15 at 4096, of 16 × 16 pixels each."""
    toml = "[general]\nresolution = [1024, 1024]\nenable_bucket = true\n[[datasets]]\nimage_directory = 'p'\n"
    command = MUSUBI.format("flux_2", "flux2") + "--timestep_sampling flux2_shift --dataset_config d.toml"
    assert values(command, d__toml=toml)[f"{DIFFUSION}.shift"] == pytest.approx(math.exp(1.15), rel=1e-4)


def test_data_sets_of_kohya_that_validate_or_have_batches_of_their_own() -> None:
    toml = (
        "[[datasets]]\nresolution = 32\nbatch_size = 4\n[[datasets.subsets]]\nimage_dir = 'a'\n"
        "[[datasets.subsets]]\nimage_dir = 'b'\nvalidation_split = 1.0\n"
        "[[datasets]]\nresolution = 32\nbatch_size = 2\n[[datasets.subsets]]\nimage_dir = 'c'\n"
    )
    found = imported(KOHYA.format("flux", "flux") + "--dataset_config d.toml", d__toml=toml)
    assert found.values[DATASET] == [{"path": "a"}, {"path": "c"}]
    assert found.values[VAL_DATASET] == [{"path": "b"}] and f"{BASIC}.val_rate" not in found.values
    assert found.values["training.micro_batch_size"] == 2 and "4, 2" in found.comments["training.micro_batch_size"]
    tags = "[general]\nkeep_tokens = 1\n[[datasets]]\nkeep_tokens = 2\n[[datasets.subsets]]\nimage_dir = 'a'\n"
    kept = imported(KOHYA.format("flux", "flux") + "--dataset_config f.toml", f__toml=tags)
    assert "1 and 2 there" in kept.comments[f"{BASIC}.keep_tags"]
    share = "[[datasets]]\nvalidation_split = 0.1\n[[datasets.subsets]]\nimage_dir = 'a'\n"
    assert values(KOHYA.format("flux", "flux") + "--dataset_config e.toml", e__toml=share)[f"{BASIC}.val_rate"] == 0.1


def test_pictures_of_a_class_are_as_many_as_others() -> None:
    """DreamBoothDataset repeats those of `is_reg`; with a weight of 1 their loss is like any other's."""
    for name, count in (("dog", 6), ("few", 2), ("many", 12)):
        Path(name).mkdir()
        for number in range(count):
            (Path(name) / f"{number}.png").touch()
    toml = (
        "[[datasets]]\nresolution = 32\n[[datasets.subsets]]\nimage_dir = 'dog'\nclass_tokens = 'sks dog'\n"
        "[[datasets.subsets]]\nimage_dir = '{}'\nis_reg = true\nclass_tokens = 'dog'\n"
    )
    command = KOHYA.format("flux", "flux") + "--dataset_config d.toml"
    few = values(command, d__toml=toml.format("few"))[DATASET]
    assert few[1] == {"path": "few", "caption": "dog", "repeats": 3}
    many = values(command, d__toml=toml.format("many"))[DATASET]
    assert many[1] == {"path": "many", "caption": "dog", "max_samples": 6}
    unknown = values(command, d__toml=toml.format("elsewhere"))
    assert unknown[DATASET][1]["prior"] is True and unknown[f"{DIFFUSION}.prior_loss_weight"] == 1.0
    half = values(command + " --prior_loss_weight 0.5", d__toml=toml.format("few"))
    assert half[DATASET][1]["prior"] is True and half[f"{DIFFUSION}.prior_loss_weight"] == 0.5


def test_blocks_that_kohya_counts() -> None:
    command = (
        KOHYA.format("flux", "flux")
        + "--network_args train_double_block_indices=0,1,8-12 train_single_block_indices=none"
    )
    assert values(command)[TARGETS] == ["transformer_blocks.{0,1,8-12}.*"]


def test_frames_that_musubi_takes_of_a_clip() -> None:
    """VideoDataset: a sample for each number of frames, the first frame alone without one, whole clips of `full`."""
    toml = (
        "[general]\nresolution = [32, 32]\n[[datasets]]\nvideo_directory = 'a'\ntarget_frames = [1, 25]\n"
        "[[datasets]]\nvideo_directory = 'b'\n[[datasets]]\nvideo_directory = 'c'\nframe_extraction = 'full'\n"
    )
    found = values(MUSUBI.format("wan", "wan") + "--dataset_config d.toml", d__toml=toml)[DATASET]
    assert [(each["path"], each["sizes"].get("num_frames")) for each in found] == [
        ("a", 1), ("a", 25), ("b", 1), ("c", None),
    ]  # fmt: skip
    one = "[[datasets]]\nvideo_directory = 'a'\n"
    assert values(MUSUBI.format("wan", "wan") + "--dataset_config e.toml", e__toml=one)[f"{MEDIA}.num_frames"] == 1
    edit = "[[datasets]]\nimage_directory = 'a'\ncontrol_directory = 'b'\n"
    pictures = values(MUSUBI.format("flux_kontext", "flux") + "--dataset_config f.toml", f__toml=edit)[DATASET]
    assert pictures == [{"path": "a", "companions": {"source": "b"}}]


def test_the_size_of_pictures_to_edit_is_told() -> None:
    """Qwen-Image-Edit's pipeline takes them at a million pixels whatever `control_resolution` says."""
    toml = "[[datasets]]\nimage_directory = 'a'\ncontrol_directory = 'b'\ncontrol_resolution = [512, 512]\n"
    told = unsupported(MUSUBI.format("qwen_image", "qwen_image") + "--dataset_config d.toml", d__toml=toml)
    assert "a million pixels" in told["datasets[].control_resolution"]


def test_hunyuan_video_1_5_is_no_hunyuan_video() -> None:
    """It has no second kind of blocks, and takes no guidance; lora_hv_1_5.py adapts its modulation, too."""
    found = values(MUSUBI.format("hv_1_5", "m"))
    assert found[TARGETS] == ["transformer_blocks.*"] and f"{DIFFUSION}.guidance" not in found


# --- ai-toolkit and diffusers -----------------------------------------------------------------------------------------


def job(**process: Any) -> str:
    made = {"type": "sd_trainer", "model": {"name_or_path": "FLUX.1-dev"}, "network": {"type": "lora"}, **process}
    return json.dumps({"job": "extension", "config": {"name": "n", "process": [made]}})


def test_optimizers_of_ai_toolkit() -> None:
    """toolkit/optimizer.py gives every Adam an ε of 1e-6."""
    assert values("a.json", a__json=job())["training.adam_eps"] == 1e-6
    given = job(train={"optimizer_params": {"eps": 1e-7}})
    assert values("b.json", b__json=given)["training.adam_eps"] == 1e-7


def test_layers_and_prompts_of_ai_toolkit() -> None:
    network = {
        "type": "lora",
        "network_kwargs": {"only_if_contains": ["transformer.single_transformer_blocks.7.proj_out"]},
    }
    sample = {"prompts": ["a dog --w 512 --d 42"]}
    found = imported("a.json", a__json=job(network=network, sample=sample))
    text = as_text(found)
    assert parse_yaml(text, "").problems == [] and found.values[TARGETS] == ["*single_transformer_blocks.7.proj_out*"]
    assert found.values["training.sampling.prompts"] == ["a dog"]
    edit = job(sample={"prompts": ["smile --ctrl_img a.jpg"]})
    assert "prompts_file" in unsupported("b.json", b__json=edit)["sample.prompts"]


def test_clips_and_adapters_of_ai_toolkit() -> None:
    """Samples of Wan have 4k + 1 frames; one frame is said, for the family's own number is another."""
    model = {"name_or_path": "Wan2.1-T2V-14B", "arch": "wan21"}
    for given, made in ((40, 41), (41, 41), (1, 1)):
        text = job(
            model=model,
            sample={"num_frames": given, "prompts": ["a dog"]},
            datasets=[{"folder_path": "p", "num_frames": 1}],
        )
        found = values("a.json", a__json=text)
        assert (found["training.sampling.num_frames"], found[f"{MEDIA}.num_frames"]) == (made, 1)
    schnell = imported("b.json", b__json=job(model={"name_or_path": "flux", "assistant_lora_path": "ostris/adapter"}))
    assert schnell.values[f"{LORA}.frozen_adapters"] == ["models/adapter"]
    assert any("ostris/adapter" in each for each in schnell.downloads)


def test_control_pictures_of_ai_toolkit() -> None:
    sets = [{"folder_path": "p", "control_path": ["a", "b", "c"]}]
    found = values("a.json", a__json=job(datasets=sets))[DATASET]
    assert found == [{"path": "p", "companions": {"source": "a", "source_2": "b", "source_3": "c"}}]


@pytest.mark.parametrize(
    ("script", "start", "weighting"),
    [
        ("dreambooth_lora_flux", "gaussian", None),
        ("dreambooth_lora_sd3", "gaussian", "sigma_squared"),
        ("dreambooth_sd3", None, "sigma_squared"),
        ("cogvideox_lora", None, None),
    ],
)
def test_first_values_and_losses_of_diffusers(script: str, start: str | None, weighting: str | None) -> None:
    """`init_lora_weights="gaussian"` has entries of about 1 / rank, PEFT's own are smaller; SD3's scripts compare x."""
    found = values(DREAMBOOTH.format(script) + "--instance_data_dir d --rank 4")
    assert found.get(f"{LORA}.init_lora_weights") == start
    assert found.get(f"{DIFFUSION}.loss_weighting") == weighting
    plain = values(DREAMBOOTH.format(script) + "--instance_data_dir d --precondition_outputs 0")
    assert f"{DIFFUSION}.loss_weighting" not in plain
    assert not load_config(importing.run([DREAMBOOTH.format(script) + "--instance_data_dir d"]).sections()).warnings


def test_one_caption_for_rows_with_texts() -> None:
    """Without `--caption_column`, `--instance_prompt` is the caption of all rows, whatever columns they have."""
    column = f"{BASIC}.caption_column"
    assert values(DREAMBOOTH.format("dreambooth_lora_sd3") + "--dataset_name d")[column] == "instance_prompt"
    named = DREAMBOOTH.format("dreambooth_lora_flux") + "--dataset_name d --caption_column text"
    assert values(named)[column] == "text"
    assert column not in values(DREAMBOOTH.format("dreambooth_lora_flux") + "--instance_data_dir d")


def test_clips_of_cogvideox() -> None:
    command = "train_cogvideox_lora.py --pretrained_model_name_or_path m --instance_data_root clips --rank 4 "
    listed = values(command + "--caption_column prompts.txt --video_column videos.txt")
    assert listed[DATASET] == "clips/videos.txt"
    assert not {f"{BASIC}.caption_column", f"{BASIC}.media_column"} & set(listed)
    sizes = [listed[f"{MEDIA}.{name}"] for name in ("height", "width", "num_frames", "fps")]
    assert sizes == [480, 720, 49, 8]
    table = values(command + "--dataset_name table --caption_column text --video_column video")
    assert (table[DATASET], table[f"{BASIC}.data_folder"]) == ("table", "clips")
    assert "instance_data_root" in unsupported(command + "--caption_column c.txt --video_column videos.txt")
