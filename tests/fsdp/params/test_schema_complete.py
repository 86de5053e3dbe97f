"""Every key that files may hold is in the schema, with its default, and with help."""

import re
from typing import Any

import pytest

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.unbuilt import BUILT_VALUES
from mindspeed_mm.fsdp.params.schema import json_schema, reference
from mindspeed_mm.fsdp.params.schema_walk import pattern_keys, walk_fields

DEFAULTS: dict[str, Any] = {
    "data_parallel_size": None,
    "fully_shard_parallel_size": "auto",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "ring_attention_size": 1,
    "ulysses_parallel_size": 1,
    "expert_parallel_size": 1,
    "expert_fully_shard_parallel_size": None,
    "recompute": None,
    "recompute_plan": None,
    "fsdp_plan.apply_modules": (),
    "fsdp_plan.ignored_modules": (),
    "fsdp_plan.param_dtype": None,
    "fsdp_plan.reduce_dtype": None,
    "fsdp_plan.output_dtype": None,
    "fsdp_plan.cast_forward_inputs": True,
    "fsdp_plan.reshard_after_forward": True,
    "fsdp_plan.num_to_forward_prefetch": 0,
    "fsdp_plan.num_to_backward_prefetch": 0,
    "fsdp_plan.hook_modules": None,
    "fsdp_plan.pregather": False,
    "fsdp_plan.cpu_offload": False,
    "fsdp_plan.pin_memory": None,
    "ep_plan.dispatcher": "alltoall",
    "ep_plan.use_npu_fused_ops": True,
}
DEFAULTS = {f"parallel.{key}": value for key, value in DEFAULTS.items()} | {
    "model.train_from_scratch": False,
    "model.trust_remote_code": False,
    "model.attn_implementation": None,
    "model.mtp_num_layers": 0,
    "model.mtp_loss_scaling_factor": 0.1,
    "data.dataset_param.attr.formatting": "sharegpt",
    "data.dataset_param.attr.messages": "conversations",
    "data.dataset_param.attr.role_tag": "from",
    "data.dataset_param.attr.content_tag": "value",
    "data.dataset_param.attr.user_tag": "human",
    "data.dataset_param.attr.assistant_tag": "gpt",
    "data.dataset_param.attr.observation_tag": "observation",
    "data.dataset_param.attr.function_tag": "function_call",
    "data.dataset_param.attr.system_tag": "system",
    "data.dataset_param.basic_parameters.dataset_dir": None,
    "data.dataset_param.basic_parameters.enable_thinking": None,
    "data.dataset_param.basic_parameters.cutoff_len": 1024,
    "data.dataset_param.basic_parameters.preprocessing_batch_size": 1000,
    "data.dataset_param.basic_parameters.preprocess_on_fly": True,
    "data.dataset_param.basic_parameters.stage": "sft",
    "data.dataset_param.basic_parameters.max_bad_fraction": 0.001,
    "data.dataset_param.preprocess_parameters.image_max_pixels": None,
    "data.dataset_param.preprocess_parameters.image_min_pixels": None,
    "data.dataset_param.preprocess_parameters.video_max_pixels": None,
    "data.dataset_param.preprocess_parameters.video_min_pixels": None,
    "data.dataset_param.preprocess_parameters.video_fps": None,
    "data.dataset_param.preprocess_parameters.video_maxlen": None,
    "data.dataset_param.preprocess_parameters.audio_sampling_rate": None,
    "data.dataloader_param.num_workers": 2,
    "data.dataloader_param.enable_preload": False,
    "data.dataloader_param.collate_param.pad_to_multiple_of": None,
    "features.recompute": False,
    "features.chunkloss_plan.apply_module": "lm_head",
    "features.chunkloss_plan.chunk_size": 1024,
    "features.chunkloss_plan.total_chunk_size": 4096,
    "features.enable_gradient_offload": False,
    "features.chunkmbs_plan.chunk_mbs": 1,
    "features.chunkmbs_plan.batch_dim": 0,
    "features.chunkmbs_plan.chunk_arg_indexs": (0,),
    "features.chunkmbs_plan.chunk_kwarg_names": (),
    "features.ep_balance_plan.max_dup_experts_num": 2,
    "features.loss_cfg.loss_type": None,
    "features.loss_cfg.router_aux_loss_coef": 0.0,
    "training.lr": 5e-5,
    "training.lr_min": 0,
    "training.lr_start": 0,
    "training.lr_decay_ratio": 1.0,
    "training.weight_decay": 0,
    "training.optimizer": "adamw",
    "training.optimizer_state_dtype": None,
    "training.adam_fused": True,
    "training.adam_beta1": 0.9,
    "training.adam_beta2": 0.999,
    "training.adam_eps": 1e-8,
    "training.mem_fraction_static": 0.8,
    "training.matched_adamw_rms": 0.2,
    "training.muon_momentum": 0.95,
    "training.lion_beta1": 0.9,
    "training.lion_beta2": 0.99,
    "training.ns_steps": 5,
    "training.clip_grad": 1.0,
    "training.clip_grad_ema_decay": None,
    "training.clip_grad_foreach": True,
    "training.micro_batch_size": 1,
    "training.train_iters": None,
    "training.lr_decay_style": "cosine",
    "training.lr_warmup_ratio": 0.03,
    "training.save_total_limit": 2,
    "training.seed": 42,
    "training.load_strict": True,
    "training.save_interval": 500,
    "training.save_async": False,
    "training.save_on_signal": True,
    "training.max_skipped_steps": 3,
    "training.log_interval": 1,
    "training.val_interval": 0,
    "training.manual_gc_interval": 0,
    "training.lora.enable": False,
    "training.lora.rank": 8,
    "training.lora.alpha": 16,
    "training.lora.target_modules": None,
    "training.lora.dropout": 0.0,
    "training.lora.disable_peft_moe_conversion": True,
    "tools.profile.enable": False,
    "tools.profile.ranks": (0,),
    "tools.profile.static_param.start_step": 10,
    "tools.profile.static_param.end_step": 11,
    "tools.profile.static_param.analyse_flag": True,
    "tools.memory_profile.start_step": 1,
    "tools.memory_profile.end_step": 2,
    "tools.memory_profile.dump_ranks": (0,),
    "tools.memory_profile.mem_info": False,
    "inference.load_format": "hf",
    "inference.enable_thinking": False,
    "inference.generation.max_new_tokens": 512,
    "inference.generation.do_sample": False,
    "inference.generation.repetition_penalty": 1.0,
    "inference.generation.use_cache": True,
}

KEYS = {
    "parallel.tp_plan": "colwise_parallel rowwise_parallel sequence_parallel",
    "parallel.pp_plan": "split_points schedule virtual_stages micro_batches",
    "parallel.ep_plan": "apply_modules apply_efsdp_modules",
    "model": (
        "model_id model_name_or_path freeze gdn_implementation causal_conv1d_implementation "
        "kda_implementation skip_flash_attn_recompute skip_gdn_recompute skip_kda_recompute "
        "use_grouped_expert_matmul checkpoint_path text_encoder_path transformer"
    ),
    "data": "dataset_param val_dataset_param dataloader_param",
    "data.dataset_param": "dataset_type attr basic_parameters preprocess_parameters",
    "data.dataset_param.attr": (
        "ranking system images videos audios tools prompt query response history chosen rejected"
    ),
    "data.dataset_param.basic_parameters": (
        "dataset cache_dir template chat_template train_on_prompt mask_history streaming overwrite_cache "
        "preprocessing_num_workers max_samples tool_format val_dataset val_max_samples val_rate packing "
        "neat_packing async_preprocess async_preprocess_buffer_size mix truncation on_bad_sample "
        "allow_remote_media media_roots"
    ),
    "data.dataset_param.preprocess_parameters": (
        "model_name_or_path use_fast_tokenizer split_special_tokens image_do_pan_and_scan crop_to_patches "
        "use_audio_in_video trust_remote_code image_resolution video_resolution"
    ),
    "data.dataloader_param": (
        "dataloader_mode sampler_type shuffle drop_last pin_memory prefetch_factor collate_param"
    ),
    "data.dataloader_param.collate_param": "model_name ignore_pad_token_for_loss",
    "features": (
        "enable_chunk_loss enable_dynamic_chunk_loss enable_activation_offload enable_chunk_mbs "
        "enable_ep_balance skip_moe_pad_tokens"
    ),
    "features.recompute_plan": "apply_modules use_reentrant mode",
    "features.loss_cfg": "router_aux_loss_offload",
    "features.activation_offload_plan": "apply_modules",
    "features.chunkmbs_plan": "apply_modules",
    "training": (
        "lr_decay_style no_decay_modules no_decay_params gradient_accumulation_steps train_epochs "
        "use_deter_comp allow_hf32 init_model_with_meta_device load load_format load_rank0_and_broadcast "
        "no_load_optim no_load_rng save save_format save_ckpt_dtype no_save_optim no_save_rng "
        "save_total_limit on_save_error verify_checkpoint allow_missing allow_unexpected on_nonfinite "
        "setup_timeout_s step_timeout_s save_timeout_s val_micro_batch_size plugin lr_scaling_plan "
        "quantization_plan lora"
    ),
    "training.lr_scaling_plan": "match scale",
    "training.quantization_plan": (
        "recipe_name apply_modules ignored_modules quant_converters extra_args "
        "enable_fsdp_low_precision_all_gather fsdp_low_precision_all_gather_mode"
    ),
    "training.lora": (
        "init_lora_weights pretrained_lora_path lora_target_modules_support modules_to_save use_dora quantize "
        "frozen_adapters init_batches"
    ),
    "tools.profile": "profile_type",
    "tools.profile.static_param": (
        "level with_stack with_memory record_shapes with_cpu save_path data_simplification aic_metrics_type"
    ),
    "tools.profile.dynamic_param": "config_path",
    "tools.memory_profile": "enable save_path stacks max_entries",
    "inference": "load seed use_deter_comp init_model_with_meta_device plugin adapter processor_path data_path",
    "inference.generation": "temperature top_p top_k",
}
NAMED = {f"{section}.{name}" for section, names in KEYS.items() for name in names.split()} | DEFAULTS.keys()
SCHEMA = {key for key, _ in walk_fields()}


def test_every_documented_key_is_in_the_schema() -> None:
    assert sorted(NAMED - SCHEMA) == []


def test_defaults_are_the_documented_ones() -> None:
    arguments = Arguments()
    found = {key: value_at(arguments, key) for key in DEFAULTS}
    assert found == DEFAULTS
    booleans = {key for key, value in DEFAULTS.items() if isinstance(value, bool)}  # of which 0 and 1 are equals
    assert {key for key, value in found.items() if isinstance(value, bool)} == booleans


def test_sections_are_the_documented_ones() -> None:
    documented = {"model", "data", "parallel", "training", "features", "tools"}
    assert set(Arguments.model_fields) == documented | {"inference", "posttrain"}


def test_every_key_has_help() -> None:
    assert [entry.key for entry in reference() if not entry.help] == []


def test_every_key_whose_help_speaks_of_patterns_has_its_patterns_checked() -> None:
    speaking = [key for key, info in walk_fields() if re.search(r"[Pp]atterns of ", info.description or "")]
    assert "features.compile_plan.apply_modules" in speaking
    assert "training.quantization_plan.ignored_modules" in speaking
    assert set(speaking) == set(pattern_keys())


def test_json_schema_carries_the_help() -> None:
    training = json_schema()["$defs"]["TrainingArguments"]["properties"]
    assert training["lr_min"]["description"] == "Learning rate at the end of the decay."


def test_the_table_of_unbuilt_features_names_real_keys_whose_defaults_are_built() -> None:
    for key, built in BUILT_VALUES.items():
        assert key in SCHEMA, key
        if not key.startswith("data.val_dataset_param."):
            assert value_at(Arguments(), key) in built, key


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Arguments().training.lr = 1.0  # type: ignore[misc]
