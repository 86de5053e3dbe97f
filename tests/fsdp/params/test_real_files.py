"""Files as MindSpeed-MM's FSDP2 trainer and the text suite have them load as they stand."""

from pathlib import Path

import pytest

from mindspeed_mm.fsdp.features.speed.low_precision import check_plan
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


def test_generative_file_keeps_what_only_its_plugin_knows() -> None:
    config = load("ltx2")
    arguments = config.arguments
    assert arguments.data.dataset_param.ltx2_dataset_custom["sampling"]["min_shift"] == 0.95  # type: ignore[attr-defined]
    assert arguments.model.transformer is not None
    assert arguments.model.transformer["positional_embedding_max_pos"] == [20, 2048, 2048]
    assert config.unchecked == ()  # the cards of model and data set list them
    assert arguments.features.recompute is True  # enable_gradient_checkpointing, though recompute is false
    assert "model.enable_gradient_checkpointing" in "\n".join(config.warnings)
    assert {"model.checkpoint_path"} <= {problem.key for problem in unbuilt_features(arguments)}


def test_audio_file() -> None:
    config = load("cosyvoice")
    arguments = config.arguments
    assert arguments.training.gradient_accumulation_steps == 1
    assert arguments.data.dataloader_param.shuffle is True
    assert arguments.data.dataloader_param.collate_param.model_name == "custom"
    assert arguments.data.dataset_param.processor == {"batch": {"batch_size": 16}}  # type: ignore[attr-defined]
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
def test_file_of_a_model_with_losses_by_name_loads_and_is_not_trained() -> None:
    arguments = load("speech_tokens").arguments
    assert arguments.features.loss_cfg.loss_type == "dict"
    assert [problem.key for problem in unbuilt_features(arguments)] == ["features.loss_cfg.loss_type"]
