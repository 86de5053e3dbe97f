"""MindSpeed-MM's files for CosyVoice3 and Fun-ASR: what changes the training acts, what does not is reported by name,
and what is neither is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.cards import is_outside_plugin, plugin_module
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, load_config
from mindspeed_mm.fsdp.params.rules.unbuilt import unbuilt_features

FILES = Path(__file__).parent / "files"


def load(name: str, *overrides: str) -> ResolvedConfig:
    return load_config(FILES / f"{name}.yaml", overrides)


def test_cosyvoice_acts_or_is_reported() -> None:
    config = load("cosyvoice3")
    arguments = config.arguments
    loader = arguments.data.dataloader_param
    assert (loader.dataloader_mode, loader.sampler_type) == ("sampler", "LengthGroupedSampler")  # `sort`
    assert loader.collate_param.model_name is None
    assert arguments.model.get("mix_ratio") == [5, 15]
    assert config.unchecked == () and unbuilt_features(arguments) == []
    assert [is_outside_plugin(name) for name in arguments.training.plugin] == [False, False]
    reported = "\n".join(config.warnings)
    for name in (
        "llm_encoder", "sampling", "shuffle, processor.shuffle", "processor.tokenize", "processor.filter",
        "processor.resample, processor.compute_fbank, processor.parse_embedding, processor.padding",
    ):  # fmt: skip
        assert f"{name} ha" in reported, name
    assert "processor.sort" not in reported and "processor.batch" not in reported


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("model.train_moudule=flow", "'flow' is not trained here"),
        ("model.length_normalized_loss=false", "the loss is the mean over label tokens"),
        ("model.lsm_weight=0.1", "labels are not smoothed"),
        ("model.llm_inputsize=896", "unknown key"),
        ("data.dataset_param.processor.filter.max_len=5", "Did you mean 'max_length'?"),
        ("data.dataset_param.processor.speed=1", "unknown key"),
        ("data.dataset_param.processor.batch.batch_type=dynamic", "counts frames of sound"),
        ("data.dataset_param.processor.batch.batch_size=8", "8 here, but training.micro_batch_size is 16"),
        ("data.dataset_param.processor=5", "is not a section"),
        ("model.frontend_conf={a: 1}", "unknown key"),
    ],
)
def test_what_cosyvoice_does_not_do_is_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("cosyvoice3", given)
    (problem,) = refused.value.problems
    assert problem.key == given.partition("=")[0] and says in str(problem)


def test_sizes_of_a_file_are_those_of_the_folder(tmp_path: Path) -> None:
    config = {"model_type": "cosyvoice3", "llm_config": {"hidden_size": 896}, "speech_token_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = f"model.model_name_or_path={tmp_path}"
    with pytest.raises(ConfigError) as refused:
        load("cosyvoice3", folder)
    (problem,) = refused.value.problems
    assert problem.key == "model.speech_token_size" and "6561" in problem.what and "has 4096" in problem.what
    assert load("cosyvoice3", folder, "model.speech_token_size=4096").arguments.model.get("llm_input_size") == 896


def test_funasr_acts_or_is_reported() -> None:
    config = load("funasr")
    arguments = config.arguments
    assert arguments.data.dataset_param.dataset_type == "funasr"
    basic = arguments.data.dataset_param.basic_parameters
    assert (basic.dataset, basic.val_dataset) == ("/data/speech/train.jsonl", "/data/speech/val.jsonl")
    assert arguments.data.dataloader_param.num_workers == 8
    assert arguments.model.freeze == ("model.audio_tower", "model.multi_modal_projector")
    wrapped = ("model.language_model", "model.language_model.embed_tokens")
    assert arguments.parallel.fsdp_plan.apply_modules == wrapped
    assert config.unchecked == () and unbuilt_features(arguments) == []
    reported = "\n".join(config.warnings)
    for name in (
        "audio_encoder_conf (all but freeze), audio_adaptor_conf (all but freeze), llm_conf (all but freeze), "
        "ctc_decoder_conf",
        "frontend_conf, ctc_conf, ctc_weight, detach_ctc_decoder, length_normalized_loss, lsm_weight",
        "batch_sampler, batch_size, batch_type, batch_size_sample_max, sort_size", "prompt_classes, prompt_conf",
        "max_source_length, max_token_length", "data_split_num, retry", "index_ds, audio_adaptor_downsample_rate",
    ):  # fmt: skip
        assert f"{name} ha" in reported, name
    assert "num_workers" not in reported


def test_parts_of_funasr_are_frozen_beside_what_the_file_freezes() -> None:
    frozen = load("funasr", "model.freeze=lm_head", "model.audio_encoder_conf.freeze=false").arguments.model.freeze
    assert frozen == ("lm_head", "model.multi_modal_projector")
    assert load("funasr", "model.llm_conf.freeze=yes").arguments.model.freeze[2:] == ("model.language_model", "lm_head")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("model.audio_encoder_conf.freez=true", "Did you mean 'freeze'?"),
        ("model.llm_conf.use_lora=true", "training.lora.enable"),
        ("model.ctc_weigth=1", "unknown key"),
        ("data.dataset_param.dataset_conf.batchsize=5", "Did you mean 'batch_size'?"),
        ("data.dataset_param.dataset_conf=5", "is not a section"),
        ("data.dataset_param.dataset_conf.shuffle=false", "false here, but data.dataloader_param.shuffle is true"),
    ],
)
def test_what_funasr_does_not_do_is_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("funasr", given)
    (problem,) = refused.value.problems
    assert problem.key == given.partition("=")[0] and says in str(problem)


def test_a_data_set_of_a_plugin_keeps_its_spelling() -> None:
    arguments = load("funasr", "training.plugin=[mine]", "data.dataset_param.dataset_conf=null").arguments
    assert arguments.data.dataset_param.dataset_type == "FunASR"


@pytest.mark.parametrize(
    ("named", "here"),
    [
        ("models/ltx2/ltx2_fsdp2", "models.ltx2"),
        ("models/ltx2_3/ltx2_3_fsdp2", "models.ltx2"),
        ("models/ltx2_3", "models.ltx2"),
        ("models/wan2_2", "models.wan"),
        ("data/datasets/cosyvoice3", "data.datasets.cosyvoice"),
        ("data/datasets/ltx2_3", "data.datasets.ltx2"),
        ("data/datasets/wan2_2", "data.datasets.generation"),
        ("models/wan/modeling_wan.py", "models.wan.modeling_wan"),
        ("models/ltx2/mine", "models.ltx2.mine"),
    ],
)
def test_packages_of_mindspeed_mm_lead_to_those_here(named: str, here: str) -> None:
    assert plugin_module(f"mindspeed_mm/fsdp/{named}") == f"mindspeed_mm.fsdp.{here}"
