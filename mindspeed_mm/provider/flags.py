"""The flags of Megatron-style launch scripts: what each one is, what it does here, or why it does nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.provider.idle_flags import REFUSED, WITHOUT_EFFECT
from mindspeed_mm.provider.launch_flag import LaunchFlag, idle

_LIKENESS = 0.75
"""Of a mistyped flag and a known one, at least: their names are long and share words."""

_BATCH = (
    LaunchFlag("micro-batch-size", "int", key="training.micro_batch_size"),
    LaunchFlag("global-batch-size", "int", rule="accumulation", sets="training.gradient_accumulation_steps"),
    LaunchFlag("train-iters", "int", key="training.train_iters"),
    LaunchFlag("seed", "int", 1234, key="training.seed"),
    LaunchFlag("seq-length", "int", rule="longest_sample", sets="data.dataset_param.basic_parameters.cutoff_len"),
    LaunchFlag("num-workers", "int", 2, rule="worker_processes", sets="data.dataloader_param.num_workers"),
)

_PARALLEL = (
    LaunchFlag("nproc_per_node", "int", rule="ranks"),
    LaunchFlag("nnodes", "int", rule="ranks"),
    LaunchFlag("tensor-model-parallel-size", "int", 1, key="parallel.tensor_parallel_size"),
    LaunchFlag("pipeline-model-parallel-size", "int", 1, key="parallel.pipeline_parallel_size"),
    LaunchFlag(
        "virtual-pipeline-model-parallel-size",
        "int",
        rule="pipeline_schedule",
        sets="parallel.pp_plan.virtual_stages",
    ),
    LaunchFlag("num-virtual-stages-per-pipeline-rank", "int", rule="pipeline_schedule"),
    LaunchFlag("context-parallel-size", "int", 1, rule="context_sizes"),
    LaunchFlag("context-parallel-algo", "word", "megatron_cp_algo", rule="context_sizes", example="ulysses_cp_algo"),
    LaunchFlag("ulysses-degree-in-cp", "int", rule="context_sizes"),
    LaunchFlag("expert-model-parallel-size", "int", 1, key="parallel.expert_parallel_size"),
    LaunchFlag("moe-token-dispatcher-type", "word", "allgather", rule="token_dispatcher", example="alltoall"),
    LaunchFlag("moe-grouped-gemm", "switch", False, key="model.use_grouped_expert_matmul"),
    LaunchFlag("expert-tensor-parallel-size", "int", rule="whole_experts", example="1"),
    LaunchFlag("sequence-parallel", "switch", False, rule="sequence_parallel"),
    LaunchFlag("use-distributed-optimizer", "switch", False, rule="sharding"),
    LaunchFlag("layerzero", "switch", False, rule="sharding"),
    LaunchFlag("layerzero-config", "word", rule="sharding", example="zero_config.yaml"),
    LaunchFlag("use-torch-fsdp2", "switch", False, rule="sharding"),
    LaunchFlag("fsdp2-config-path", "word", rule="sharding", example="fsdp2_config.yaml"),
    LaunchFlag("bf16", "switch", False, rule="floating_point_types"),
    LaunchFlag("fp16", "switch", False, rule="floating_point_types"),
    LaunchFlag("grad-reduce-in-bf16", "switch", False, rule="floating_point_types"),
    LaunchFlag("initial-loss-scale", "float", key="training.initial_loss_scale", example="4096"),
    LaunchFlag("min-loss-scale", "float", key="training.min_loss_scale"),
    LaunchFlag("loss-scale-window", "int", key="training.loss_scale_window", example="1000"),
    LaunchFlag("encoder-dp-balance", "switch", False, key="parallel.encoder_plan.balance"),
    LaunchFlag("use-data-balance", "switch", False, key="parallel.encoder_plan.balance"),
)

_OPTIMIZER = (
    LaunchFlag("lr", "float", key="training.lr"),
    LaunchFlag("weight-decay", "float", 0.01, key="training.weight_decay"),
    LaunchFlag("adam-beta1", "float", 0.9, key="training.adam_beta1", example="0.95"),
    LaunchFlag("adam-beta2", "float", 0.999, key="training.adam_beta2", example="0.95"),
    LaunchFlag("adam-eps", "float", 1e-8, key="training.adam_eps"),
    LaunchFlag("clip-grad", "float", 1.0, key="training.clip_grad"),
    LaunchFlag("min-lr", "float", 0.0, key="training.lr_min", example="1e-6"),
    LaunchFlag("lr-warmup-init", "float", 0.0, key="training.lr_start", example="1e-6"),
    LaunchFlag("lr-warmup-iters", "int", 0, rule="warm_up", sets="training.lr_warmup_ratio"),
    LaunchFlag("lr-warmup-fraction", "float", rule="warm_up", example="0.1"),
    LaunchFlag("warmup-ratio", "float", rule="warm_up", example="0.1"),
    LaunchFlag("lr_warmup_steps", "int", rule="warm_up"),
    LaunchFlag("lr-decay-style", "word", "linear", rule="decay", sets="training.lr_decay_style", example="cosine"),
    LaunchFlag("lr-decay-iters", "int", rule="decay", sets="training.lr_decay_ratio"),
    LaunchFlag("lr-wsd-decay-iters", "int", rule="decay"),
    LaunchFlag("lr-wsd-decay-style", "word", "exponential", rule="decay", sets="training.lr_wsd_style"),
    LaunchFlag("optimizer", "word", "adam", rule="optimizer", sets="training.optimizer", example="muon"),
    LaunchFlag("swap-optimizer", "switch", False, rule="optimizer"),
    LaunchFlag("matched-adamw-rms", "float", 0.2, key="training.matched_adamw_rms"),
    LaunchFlag("muon-momentum", "float", 0.95, key="training.muon_momentum"),
    LaunchFlag("ns-steps", "int", 5, key="training.ns_steps"),
    LaunchFlag("start-weight-decay", "float", rule="constant_weight_decay"),
    LaunchFlag("end-weight-decay", "float", rule="constant_weight_decay"),
    LaunchFlag("weight-decay-incr-style", "word", "constant", rule="constant_weight_decay", example="constant"),
    LaunchFlag("moe-aux-loss-coeff", "float", key="features.loss_cfg.router_aux_loss_coef"),
    LaunchFlag("optimizer-selection", "word", "fused_adamw", rule="optimizer", example="fused_ema_adamw"),
    LaunchFlag("weight-decay-exclude-modules", "list", rule="undecayed_parameters"),
    LaunchFlag("lr-scale-modules", "list", rule="scaled_learning_rates"),
    LaunchFlag("lr-mult", "float", 1.0, rule="scaled_learning_rates"),
    LaunchFlag("calculate-per-sample-loss", "switch", False, rule="loss_of_samples"),
    LaunchFlag("calculate-per-token-loss", "switch", False, rule="loss_of_samples"),
)

_CHECKPOINTS = (
    LaunchFlag("load", "word", rule="starting_point", sets="training.load"),
    LaunchFlag("load-base-model", "word", rule="starting_point"),
    LaunchFlag("pretrained-checkpoint", "word", rule="starting_point"),
    LaunchFlag("ckpt-step", "int", rule="starting_point"),
    LaunchFlag("save", "word", key="training.save"),
    LaunchFlag("ckpt-format", "word", "torch_dist", rule="checkpoint_format", example="torch_dcp"),
    LaunchFlag("async-save", "switch", False, key="training.save_async"),
    LaunchFlag("no-load-optim", "switch", False, key="training.no_load_optim"),
    LaunchFlag("no-load-rng", "switch", False, key="training.no_load_rng"),
    LaunchFlag("no-save-optim", "switch", False, key="training.no_save_optim"),
    LaunchFlag("no-save-rng", "switch", False, key="training.no_save_rng"),
    LaunchFlag("finetune", "switch", False, rule="starting_point"),
    LaunchFlag("save-interval", "int", 0, key="training.save_interval"),
    LaunchFlag("log-interval", "int", 100, key="training.log_interval"),
    LaunchFlag("eval-interval", "int", 1000, rule="validation", sets="training.val_interval"),
    LaunchFlag("eval-iters", "int", 100, rule="validation"),
    LaunchFlag("distributed-timeout-minutes", "int", 10, rule="waiting_times", sets="training.step_timeout_s"),
    LaunchFlag("log-tps", "switch", False, of_loop="the log line also says tokens per sample"),
    LaunchFlag("weights-only", "switch", False, of_loop="a checkpoint's weights are taken, the run starts at step 0"),
    LaunchFlag("allow-fresh", "switch", False, of_loop="a run begins again where no checkpoint of its is valid"),
    LaunchFlag("accept-data-change", "switch", False, of_loop="a run goes on although its data are others"),
    LaunchFlag("profile", "switch", False, key="tools.profile.enable"),
    LaunchFlag("profile-step-start", "int", rule="profiled_steps"),
    LaunchFlag("profile-step-end", "int", rule="profiled_steps"),
    LaunchFlag("profile-ranks", "list", rule="profiled_steps", example="1"),
    LaunchFlag("manual-gc-interval", "int", key="training.manual_gc_interval"),
    LaunchFlag("use-deter-comp", "switch", False, key="training.use_deter_comp"),
    LaunchFlag("deterministic-mode", "switch", False, key="training.use_deter_comp"),
    LaunchFlag("npu-deterministic", "switch", False, key="training.use_deter_comp"),
)

_MEMORY = (
    LaunchFlag("recompute-granularity", "word", rule="recomputation", sets="features.recompute", example="full"),
    LaunchFlag("recompute-activations", "switch", False, rule="recomputation"),
    LaunchFlag("recompute-method", "word", rule="recomputation", example="uniform"),
    LaunchFlag("recompute-num-layers", "int", rule="recomputation"),
    LaunchFlag("recompute-skip-core-attention", "switch", False, rule="kept_attention"),
    LaunchFlag("recompute-num-layers-skip-core-attention", "int", rule="kept_attention"),
    LaunchFlag("swap-attention", "switch", False, key="features.enable_activation_offload"),
    LaunchFlag("use-fused-rmsnorm", "switch", False, rule="fused_kernels"),
    LaunchFlag("use-fused-swiglu", "switch", False, rule="fused_kernels"),
    LaunchFlag("use-fused-rotary-pos-emb", "switch", False, rule="fused_kernels"),
    LaunchFlag("allow-tf32", "switch", False, key="training.allow_hf32"),
    LaunchFlag("init-model-with-meta-device", "switch", False, key="training.init_model_with_meta_device"),
)

_MODEL_AND_DATA = (
    LaunchFlag("mm-model", "word", rule="files", example="model.json"),
    LaunchFlag("mm-data", "word", rule="files", example="data.json"),
    LaunchFlag("mm-tool", "word", rule="files", example="tools.json"),
    LaunchFlag("mm-set", "list", rule="settings", example="training.on_nonfinite=skip"),
    LaunchFlag("trust-remote-code", "switch", False, rule="trusted_code", sets="model.trust_remote_code"),
    LaunchFlag("lora-target-modules", "list", rule="adapters"),
    LaunchFlag("lora-r", "int", 8, rule="adapters"),
    LaunchFlag("lora-alpha", "int", 16, rule="adapters"),
    LaunchFlag("lora-dropout", "float", 0.0, rule="adapters", example="0.1"),
    LaunchFlag("no-shuffle", "switch", False, rule="order_of_rows"),
    LaunchFlag("data-path", "word", key="data.dataset_param.basic_parameters.dataset"),
    LaunchFlag("data-dir", "word", key="data.dataset_param.basic_parameters.dataset_dir"),
    LaunchFlag("processor-path", "word", key="data.dataset_param.preprocess_parameters.model_name_or_path"),
)

_PREFERENCES = (
    LaunchFlag("posttrain-method", "word", rule="preferences", sets="posttrain.method", example="dpo"),
    LaunchFlag("dpo-beta", "float", rule="preferences", sets="posttrain.dpo.beta"),
    LaunchFlag("dpo-loss-type", "word", rule="preferences", sets="posttrain.dpo.loss_type", example="hinge"),
    LaunchFlag("dpo-label-smoothing", "float", rule="preferences", sets="posttrain.dpo.label_smoothing"),
    LaunchFlag("pref-ftx", "float", rule="preferences", sets="posttrain.dpo.pref_ftx"),
    LaunchFlag("ref-model", "word", rule="preferences", sets="posttrain.reference.model_name_or_path"),
)

_DREAMBOOTH = (
    LaunchFlag("pretrained_model_name_or_path", "word", key="model.model_name_or_path"),
    LaunchFlag("dataset_name", "word", key="data.dataset_param.basic_parameters.dataset"),
    LaunchFlag("json_path", "word", key="data.dataset_param.basic_parameters.dataset"),
    LaunchFlag("instance_data_dir", "word", key="data.dataset_param.basic_parameters.dataset_dir"),
    LaunchFlag("image_folder", "word", key="data.dataset_param.basic_parameters.dataset_dir"),
    LaunchFlag("resolution", "int", rule="picture_size"),
    LaunchFlag("train_batch_size", "int", key="training.micro_batch_size"),
    LaunchFlag("gradient_accumulation_steps", "int", key="training.gradient_accumulation_steps"),
    LaunchFlag("learning_rate", "float", key="training.lr"),
    LaunchFlag("lr_scheduler", "word", rule="decay", example="cosine"),
    LaunchFlag("max_train_steps", "int", key="training.train_iters"),
    LaunchFlag("checkpointing_steps", "int", key="training.save_interval"),
    LaunchFlag("guidance_scale", "float", key="training.diffusion.guidance"),
    LaunchFlag("weighting_scheme", "word", rule="noise_levels", example="logit_normal"),
    LaunchFlag("max_grad_norm", "float", key="training.clip_grad"),
    LaunchFlag("mixed_precision", "word", rule="floating_point_types", example="bf16"),
    LaunchFlag("gradient_checkpointing", "switch", False, key="features.recompute"),
    LaunchFlag("validation_prompt", "word", rule="samples"),
    LaunchFlag("validation_epochs", "int", rule="samples"),
    LaunchFlag("output_dir", "word", key="training.save"),
    *idle("every row brings its own caption", "word", "instance_prompt"),
    LaunchFlag("dataloader_num_workers", "int", key="data.dataloader_param.num_workers", example="5"),
)

FLAGS: tuple[LaunchFlag, ...] = (
    *_BATCH,
    *_PARALLEL,
    *_OPTIMIZER,
    *_CHECKPOINTS,
    *_MEMORY,
    *_MODEL_AND_DATA,
    *_PREFERENCES,
    *_DREAMBOOTH,
    *WITHOUT_EFFECT,
    *REFUSED,
)
"""Every flag, in the order in which documents group them."""


@cache
def by_dest() -> dict[str, LaunchFlag]:
    """Name in the namespace → flag."""
    return {flag.dest: flag for flag in FLAGS}


@cache
def by_spelling() -> dict[str, LaunchFlag]:
    """How a flag may be written → flag."""
    found: dict[str, LaunchFlag] = {}
    for flag in FLAGS:
        found |= dict.fromkeys(flag.spellings, flag)
    return found


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """The flag that was probably meant by a mistyped one; empty where none is near. Names are compared without their
    dashes, which make all flags alike, and none is offered that would be an error itself.

    Args:
        name: With its dashes or without.
        known: Spellings, with their dashes.
    """
    rows = by_spelling()
    bare: dict[str, str] = {}
    for other in known:
        if other not in rows or not rows[other].refused:
            bare[other.lstrip("-")] = other
    found = nearest(name.lstrip("-"), bare, likeness=_LIKENESS)
    return bare[found[0]] if found else ""
