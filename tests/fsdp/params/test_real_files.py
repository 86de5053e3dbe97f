"""Files as MindSpeed-MM's FSDP2 trainer and the text suite have them load as they stand."""

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.speed.low_precision import check_plan
from mindspeed_mm.fsdp.params.cards import is_outside_plugin
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, dump_resolved, load_config
from mindspeed_mm.fsdp.params.rules.unbuilt import unbuilt_features

FILES = Path(__file__).parent / "files"


def load(name: str) -> ResolvedConfig:
    return load_config(FILES / f"{name}.yaml")


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_loads_and_survives_being_written_out(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "resolved.yaml"
    copy.write_text(dump_resolved(config))
    assert load_config(copy).arguments == config.arguments


def test_older_vision_file() -> None:
    config = load("qwen3vl_moe_older")
    arguments = config.arguments
    assert arguments.model.model_name_or_path == "/models/a-vision-language-model"
    assert arguments.model.trust_remote_code is True
    assert arguments.training.no_load_optim is True
    assert arguments.tools.profile.static_param.level == 1
    assert arguments.features.loss_cfg.loss_type == "default"
    assert arguments.features.recompute_plan.apply_modules == ("model.language_model.layers.{*}",)
    warned = "\n".join(config.warnings)
    assert "model.loss_cfg" in warned
    assert "It belongs at features.loss_cfg" in warned
    assert "parallel.context_parallel_size" in warned
    assert arguments.features.recompute is True
    assert unbuilt_features(arguments) == []


def test_a_switch_for_the_kernel_of_delta_nets() -> None:
    config = load("qwen3_5_moe_older")
    assert config.arguments.model.gdn_implementation == "triton"
    assert config.arguments.data.dataset_param.basic_parameters.packing is False
    warned = "\n".join(config.warnings)
    assert "qwen3_5_moe_older.yaml:27:3  parallel.moe_impl_type  has no effect" in warned
    assert "training.lora.save_mode  has no effect" in warned and "use_triton_gdn" not in warned
    assert unbuilt_features(config.arguments) == []

    def changed(*words: str) -> str | None:
        return load_config(FILES / "qwen3_5_moe_older.yaml", words).arguments.model.gdn_implementation

    assert changed("model.use_triton_gdn=false") == "eager" and changed("model.use_triton_gdn=yes") == "triton"
    assert changed("model.gdn_implementation=ascendc") == "ascendc"
    for words, says in (("maybe", "'maybe' is not true or false"), ("[1]", "[1] is not true or false")):
        with pytest.raises(ConfigError) as caught:
            changed(f"model.use_triton_gdn={words}")
        assert [(each.key, each.what) for each in caught.value.problems] == [("model.use_triton_gdn", says)]


def test_a_switch_and_the_key_it_stands_for_may_not_disagree(tmp_path: Path) -> None:
    text = (FILES / "qwen3_5_moe_older.yaml").read_text()
    path = tmp_path / "both.yaml"
    for old, new in (
        ("use_triton_gdn: true", "use_triton_gdn: true\n  gdn_implementation: eager"),
        ("packing: false}", "packing: true}"),
    ):
        path.write_text(text.replace(old, new).replace("cutoff_len: 1024", "cutoff_len: 1024\n      packing: false"))
        with pytest.raises(ConfigError, match="They are the same setting"):
            load_config(path)
    path.write_text(text.replace("use_triton_gdn: true", "use_triton_gdn: true\n  gdn_implementation: triton"))
    assert load_config(path).arguments.model.gdn_implementation == "triton"


def test_a_file_of_flags_is_not_read_as_a_configuration(tmp_path: Path) -> None:
    """Its flags would be left out without a word."""
    path = tmp_path / "run.yaml"
    path.write_text("gpt_args: {lr: 1.0e-5, micro_batch_size: &ROWS 4}\nmodel: {freeze: []}\n")
    with pytest.raises(ConfigError, match=r"run.yaml:1:1  gpt_args(.|\n)*--from-flags"):
        load_config(path)


def test_generative_file_keeps_what_only_its_plugin_knows() -> None:
    config = load("ltx2")
    arguments = config.arguments
    assert arguments.data.dataset_param.ltx2_dataset_custom["sampling"]["min_shift"] == 0.95  # type: ignore[attr-defined]
    assert arguments.model.transformer is not None
    sizes = {"num_layers": 48, "pos_embed_max_pos": 20, "base_height": 2048, "base_width": 2048}
    assert arguments.model.transformer == sizes  # the three sides have names of their own in diffusers
    assert config.unchecked == ()  # the cards of model and data set list them
    assert arguments.features.recompute is True  # enable_gradient_checkpointing, though recompute is false
    assert "model.enable_gradient_checkpointing" in "\n".join(config.warnings)
    assert {"model.checkpoint_path"} <= {problem.key for problem in unbuilt_features(arguments)}


def test_a_generator_whose_parts_are_named_apart() -> None:
    """LTX-2: the folder that takes the place of the one file of weights has them all; without sound it is `t2v`."""
    folder = ["model.checkpoint_path=/models/LTX-2", "model.model_name_or_path=/models/LTX-2"]
    config = load_config(FILES / "ltx2.yaml", folder)
    assert unbuilt_features(config.arguments) == []
    assert config.arguments.model.text_encoder_path is None and config.arguments.model.task is None
    assert "model.text_encoder_path  has no effect" in "\n".join(config.warnings)
    silent = "data.dataset_param.ltx2_dataset_custom.with_audio=false"
    assert load_config(FILES / "ltx2.yaml", [silent]).arguments.model.task == "t2v"
    assert load_config(FILES / "ltx2.yaml", [silent, "model.task=i2v"]).arguments.model.task == "i2v"


def test_audio_file() -> None:
    config = load("cosyvoice")
    arguments = config.arguments
    assert arguments.training.gradient_accumulation_steps == 1
    assert arguments.data.dataloader_param.shuffle is True
    assert arguments.data.dataloader_param.collate_param.model_name is None  # `custom`: the suite's own
    assert "audio_encoder_conf has no effect" in "\n".join(config.warnings)
    assert arguments.tools.profile.static_param.start_step == 2
    assert arguments.tools.memory_profile.mem_info is True
    assert config.unchecked == ()  # the cards of model and data set list them
    assert arguments.data.dataset_param.preprocess_parameters.get("mix_ratio") == [5, 15]
    for key in ("global_batch_size", "scheduler", "scheduler_conf", "validate_interval"):
        assert sum(f"training.{key}  " in warning for warning in config.warnings) == 1


def test_expert_file_with_merge_keys() -> None:
    config = load("kimi_moe")
    arguments = config.arguments
    validation = arguments.data.val_dataset_param
    assert validation is not None
    assert validation.basic_parameters.dataset == "/data/val.json"
    assert validation.basic_parameters.template == "kimi_k3"
    assert validation.attr.role_tag == "role"
    assert arguments.data.dataset_param.basic_parameters.dataset == "/data/train.json"
    plan = arguments.training.quantization_plan
    assert plan is not None
    assert (plan.recipe_name, plan.quant_converters) == ("mxfp8", ("quantize.linear.mx",))
    assert plan.extra_args == {"block_size": 32}
    assert not any(problem.key.startswith(("training.quant", "features.")) for problem in unbuilt_features(arguments))
    assert check_plan(plan.model_copy(update={"extra_args": {"block_size": 32, "emulate": True}}))[0] == "mxfp8"


def test_text_suite_file() -> None:
    arguments = load("text_suite").arguments
    assert arguments.model.model_id is None
    assert arguments.model.use_grouped_expert_matmul is True
    assert arguments.parallel.ep_plan.dispatcher == "alltoall"


@pytest.mark.edge("R10")
def test_file_with_older_words_for_kernels_and_slices_of_whole_micro_batches() -> None:
    config = load("kimi_delta")
    arguments = config.arguments
    assert arguments.model.kda_implementation == "triton"
    assert load_config(FILES / "kimi_delta.yaml", ["model.kda_implementation=naive"]).arguments.model == (
        arguments.model.model_copy(update={"kda_implementation": "eager"})
    )
    assert arguments.data.dataset_param.basic_parameters.val_max_samples == 0
    assert arguments.data.dataset_param.preprocess_parameters.fix_mistral_regex is True
    (note,) = config.warnings
    assert "kimi_delta.yaml:33:16  features.chunkmbs_plan.chunk_mbs" in note and "nothing is sliced" in note
    assert unbuilt_features(arguments) == []


@pytest.mark.edge("R10")
def test_file_of_a_model_with_losses_by_name() -> None:
    arguments = load("speech_tokens").arguments
    assert arguments.features.loss_cfg.loss_type == "dict"
    assert unbuilt_features(arguments) == []


def test_a_container_of_models() -> None:
    """Wan2.2: its folder, the transformer that is trained, and the modules of both."""
    config = load("wan2_2")
    arguments = config.arguments
    assert arguments.model.model_id == "wan2_2"
    assert arguments.model.model_name_or_path == "/models/Wan2.2"
    assert arguments.model.freeze == ("transformer",)
    assert arguments.model.vae_tiling and arguments.model.attn_implementation == "flash_attention_2"
    blocks = ("transformer.blocks.{*}", "transformer_2.blocks.{*}")
    assert arguments.features.recompute_plan.apply_modules == blocks
    inside = tuple(f"{block}.attn1" for block in blocks), tuple(f"{block}.ffn" for block in blocks)
    heads = ("transformer.proj_out", "transformer_2.proj_out")
    plan = arguments.parallel.fsdp_plan
    assert plan.apply_modules == (*blocks, *inside[0], *inside[1], *heads) and plan.ignored_modules == ()
    rows = arguments.data.dataset_param
    assert rows.dataset_type == "generation"
    assert rows.basic_parameters.dataset == "./data/clips.txt"
    assert rows.basic_parameters.get("data_storage_mode") == "combine"
    sizes = {name: rows.preprocess_parameters.get(name) for name in ("max_pixels", "height", "num_frames", "fps")}
    assert sizes == {"max_pixels": 399360, "height": None, "num_frames": 81, "fps": 24}
    noise = arguments.training.diffusion
    assert (noise.timestep_density, noise.loss_weighting, noise.shift) == ("uniform", "bell", 3.0)
    assert noise.caption_dropout == 0.1
    assert config.unchecked == ()
    assert any("tokenizer_config have no effect" in warning for warning in config.warnings)
    assert [is_outside_plugin(name) for name in arguments.training.plugin] == [False, False]


def test_a_container_is_no_riddle_when_it_is_off(tmp_path: Path) -> None:
    """Junk on each line of it is reported, and a component that would be trained is named."""
    lines = (FILES / "wan2_2.yaml").read_text().splitlines()
    path, refused = tmp_path / "junk.yaml", 0
    for number, line in enumerate(lines):
        for junk in ("5", "{a: 1}"):
            path.write_text("\n".join([*lines[:number], f"{line.split(':')[0]}: {junk}", *lines[number + 1 :]]))
            try:
                load_config(path)
            except ConfigError:
                refused += 1
    assert refused > len(lines)
    path.write_text("\n".join(lines).replace("meta_init: true\n      freeze: true", "meta_init: true"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert problem.key == "model.models.text_encoder" and "is not trained here" in problem.what
    path.write_text("\n".join(lines).replace("/models/Wan2.2/vae", "/models/Wan2.1/vae"))
    with pytest.raises(ConfigError, match=r"components lie in /models/Wan2.1 and /models/Wan2.2"):
        load_config(path)
