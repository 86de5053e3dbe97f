"""The commonest words of other trainers (transformers, TRL, LLaMA-Factory, ms-swift, Axolotl, diffusers), and what says
the same here. Asked before words are compared by their spelling."""

from __future__ import annotations

from typing import get_args

from mindspeed_mm.fsdp.params.schema_walk import places_of_name, walk_fields

_BASIC = "data.dataset_param.basic_parameters"
_MEDIA = "data.dataset_param.preprocess_parameters"
_LOADER = "data.dataloader_param"
OTHER_TOOLS: dict[str, str] = {
    "learning_rate": "training.lr",
    "peak_lr": "training.lr",
    "unet_lr": "training.lr",
    "min_lr": "training.lr_min",
    "warmup_ratio": "training.lr_warmup_ratio",
    "warmup_steps": "training.lr_warmup_ratio",
    "num_warmup_steps": "training.lr_warmup_ratio",
    "lr_warmup_steps": "training.lr_warmup_ratio",
    "lr_scheduler": "training.lr_decay_style",
    "lr_scheduler_type": "training.lr_decay_style",
    "optim": "training.optimizer",
    "optimizer_type": "training.optimizer",
    "beta1": "training.adam_beta1",
    "beta2": "training.adam_beta2",
    "adam_epsilon": "training.adam_eps",
    "max_grad_norm": "training.clip_grad",
    "gradient_clipping": "training.clip_grad",
    "batch_size": "training.micro_batch_size",
    "train_batch_size": "training.micro_batch_size",
    "per_device_batch_size": "training.micro_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "per_device_eval_batch_size": "training.val_micro_batch_size",
    "accumulate_grad_batches": "training.gradient_accumulation_steps",
    "num_epochs": "training.train_epochs",
    "num_train_epochs": "training.train_epochs",
    "max_train_epochs": "training.train_epochs",
    "epochs": "training.train_epochs",
    "max_steps": "training.train_iters",
    "max_train_steps": "training.train_iters",
    "num_steps": "training.train_iters",
    "logging_steps": "training.log_interval",
    "eval_steps": "training.val_interval",
    "eval_interval": "training.val_interval",
    "save_steps": "training.save_interval",
    "checkpointing_steps": "training.save_interval",
    "output_dir": "training.save",
    "output_path": "training.save",
    "resume_from_checkpoint": "training.load",
    "checkpoints_total_limit": "training.save_total_limit",
    "early_stopping_patience": "training.evaluate.patience",
    "metric_for_best_model": "training.evaluate.best_metric",
    "load_best_model_at_end": "training.evaluate.best_metric",
    "model": "model.model_name_or_path",
    "base_model": "model.model_name_or_path",
    "model_path": "model.model_name_or_path",
    "model_name": "model.model_name_or_path",
    "pretrained_model_name_or_path": "model.model_name_or_path",
    "attn_impl": "model.attn_implementation",
    "flash_attn": "model.attn_implementation",
    "freeze_vision_tower": "model.freeze",
    "freeze_vit": "model.freeze",
    "freeze_llm": "model.freeze",
    "trainable_models": "model.freeze",
    "datasets": f"{_BASIC}.dataset",
    "train_file": f"{_BASIC}.dataset",
    "data_path": f"{_BASIC}.dataset",
    "instance_data_dir": f"{_BASIC}.dataset",
    "dataset_base_path": f"{_BASIC}.dataset_dir",
    "val_set_size": f"{_BASIC}.val_dataset",
    "eval_dataset": f"{_BASIC}.val_dataset",
    "split_dataset_ratio": f"{_BASIC}.val_dataset",
    "max_length": f"{_BASIC}.cutoff_len",
    "max_seq_len": f"{_BASIC}.cutoff_len",
    "max_seq_length": f"{_BASIC}.cutoff_len",
    "model_max_length": f"{_BASIC}.cutoff_len",
    "seq_length": f"{_BASIC}.cutoff_len",
    "sequence_len": f"{_BASIC}.cutoff_len",
    "sample_packing": f"{_BASIC}.packing",
    "preprocessing_num_workers": f"{_BASIC}.preprocessing_num_workers",
    "dataset_num_proc": f"{_BASIC}.preprocessing_num_workers",
    "max_pixels": f"{_MEDIA}.image_max_pixels",
    "min_pixels": f"{_MEDIA}.image_min_pixels",
    "dataloader_num_workers": f"{_LOADER}.num_workers",
    "dataset_num_workers": f"{_LOADER}.num_workers",
    "dataloader_drop_last": f"{_LOADER}.drop_last",
    "r": "training.lora.rank",
    "lora_r": "training.lora.rank",
    "lora_rank": "training.lora.rank",
    "network_dim": "training.lora.rank",
    "lora_alpha": "training.lora.alpha",
    "network_alpha": "training.lora.alpha",
    "lora_dropout": "training.lora.dropout",
    "lora_target": "training.lora.target_modules",
    "lora_target_modules": "training.lora.target_modules",
    "lora_target_linear": "training.lora.target_modules",
    "lora_layers": "training.lora.target_modules",
    "finetuning_type": "training.lora.enable",
    "train_type": "training.lora.enable",
    "tuner_type": "training.lora.enable",
    "peft_type": "training.lora.enable",
    "use_lora": "training.lora.enable",
    "adapter_name_or_path": "training.lora.pretrained_lora_path",
    "load_in_4bit": "training.lora.quantize",
    "load_in_8bit": "training.lora.quantize",
    "quantization_bit": "training.lora.quantize",
    "quant_bits": "training.lora.quantize",
    "bf16": "parallel.fsdp_plan.param_dtype",
    "fp16": "parallel.fsdp_plan.param_dtype",
    "dtype": "parallel.fsdp_plan.param_dtype",
    "torch_dtype": "parallel.fsdp_plan.param_dtype",
    "mixed_precision": "parallel.fsdp_plan.param_dtype",
    "tf32": "training.allow_hf32",
    "gradient_checkpointing": "features.recompute",
    "use_gradient_checkpointing": "features.recompute",
    "activation_checkpointing": "features.recompute",
    "use_liger_kernel": "features.fused_kernels",
    "enable_liger_kernel": "features.fused_kernels",
    "torch_compile": "features.compile",
    "deepspeed": "parallel.fully_shard_parallel_size",
    "zero_stage": "parallel.fully_shard_parallel_size",
    "fsdp": "parallel.fully_shard_parallel_size",
    "fsdp_config": "parallel.fsdp_plan",
    "sharding_size": "parallel.fully_shard_parallel_size",
    "tensor_parallel": "parallel.tensor_parallel_size",
    "sequence_parallel_size": "parallel.ulysses_parallel_size",
    "sub_modules_to_wrap": "parallel.fsdp_plan.apply_modules",
    "offload_to_cpu": "parallel.fsdp_plan.cpu_offload",
    "loss_scale": "training.initial_loss_scale",
    "beta": "posttrain.dpo.beta",
    "dpo_beta": "posttrain.dpo.beta",
    "pref_beta": "posttrain.dpo.beta",
    "rlhf_type": "posttrain.method",
}
"""Word → the key that says the same."""

COMMANDS: dict[str, str] = {
    "do_train": "mm train trains",
    "do_eval": "training.val_interval validates while training, and mm evaluate scores answers",
    "do_predict": "mm infer answers, and mm evaluate scores answers",
    "stage": "posttrain.method chooses the method; without it a run is supervised",
    "predict_with_generate": "training.evaluate answers held-out questions while training",
    "push_to_hub": "nothing is uploaded; mm export writes a folder",
    "overwrite_output_dir": "a run continues in its folder; name another in training.save",
    "ddp_timeout": "training.step_timeout_s limits the wait for other ranks",
    "nproc_per_node": "mm train --nproc N starts N processes",
    "num_processes": "mm train --nproc N starts N processes",
}
"""Word → a sentence, where no key says the same."""


def key_for(word: str) -> str | None:
    """The key that says what a word of another tool says, or the only key of that name."""
    word = word.replace("-", "_")
    if word in OTHER_TOOLS:
        return OTHER_TOOLS[word]
    places = places_of_name().get(word, [])
    return places[0] if len(places) == 1 else None


def keys_with_value(word: str) -> list[str]:
    """The keys that take a word as their value: `cosine`."""
    return [key for key, info in walk_fields() if word in _words(info.annotation)]


def _words(annotation: object) -> set[object]:
    """Everything that a type lists as a literal."""
    found: set[object] = set()
    for part in get_args(annotation):
        found |= {part} if isinstance(part, str) else _words(part)
    return found
