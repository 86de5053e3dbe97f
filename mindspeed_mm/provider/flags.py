"""The flags of Megatron-style launch scripts: what each one is, what it does here, or why it does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Kind = Literal["int", "float", "word", "switch", "list"]

_KERNELS = "kernels are chosen for the device at hand"
_OVERLAP = "sharding (FSDP2) overlaps communication with the computation by itself"
_FOLDER = "the model's folder says it"
_NOT_NEEDED = "nothing here needs it"
_LAUNCH = "it is for torchrun, which starts the ranks"
_POSTTRAIN = "preferences and rewards cannot be trained on with flags yet"
_SEARCH = "plans are not searched for from flags; mm check forecasts the memory of a plan"


@dataclass(frozen=True)
class LaunchFlag:
    """One flag. Exactly one of `key`, `rule`, `of_loop`, `idle` and `refused` is given."""

    name: str
    """As scripts write it, without the dashes; `_` and `-` are the same."""
    kind: Kind
    default: Any = None
    """What Megatron takes where the flag is absent."""
    key: str = ""
    """The configuration key that takes the value as it is."""
    rule: str = ""
    """The function of `flag_rules`, `size_rules` or `memory_rules` that reads it."""
    of_loop: str = ""
    """What `mindspeed_mm.training` does with it; it is no part of the configuration."""
    idle: str = ""
    """Why it is accepted and has no effect."""
    refused: str = ""
    """Why it is an error."""
    example: str = ""
    """A value that scripts give, where 2 or a word would not do."""

    @property
    def dest(self) -> str:
        """Its name in the namespace."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """How it may be written."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.dest}", f"--{self.name.replace('_', '-')}")))


def _idle(reason: str, kind: Kind, *names: str) -> tuple[LaunchFlag, ...]:
    return tuple(LaunchFlag(name, kind, False if kind == "switch" else None, idle=reason) for name in names)


def _refused(reason: str, kind: Kind, *names: str) -> tuple[LaunchFlag, ...]:
    return tuple(LaunchFlag(name, kind, False if kind == "switch" else None, refused=reason) for name in names)


_BATCH = (
    LaunchFlag("micro-batch-size", "int", key="training.micro_batch_size"),
    LaunchFlag("global-batch-size", "int", rule="accumulation"),
    LaunchFlag("train-iters", "int", key="training.train_iters"),
    LaunchFlag("seed", "int", 1234, key="training.seed"),
    LaunchFlag("seq-length", "int", rule="longest_sample"),
    LaunchFlag("num-workers", "int", 2, rule="worker_processes"),
)

_PARALLEL = (
    LaunchFlag("nproc_per_node", "int", rule="ranks"),
    LaunchFlag("nnodes", "int", rule="ranks"),
    LaunchFlag("tensor-model-parallel-size", "int", 1, key="parallel.tensor_parallel_size"),
    LaunchFlag("pipeline-model-parallel-size", "int", 1, key="parallel.pipeline_parallel_size"),
    LaunchFlag("virtual-pipeline-model-parallel-size", "int", rule="pipeline_schedule"),
    LaunchFlag("context-parallel-size", "int", 1, rule="context_sizes"),
    LaunchFlag("context-parallel-algo", "word", "megatron_cp_algo", rule="context_sizes", example="ulysses_cp_algo"),
    LaunchFlag("ulysses-degree-in-cp", "int", rule="context_sizes"),
    LaunchFlag("expert-model-parallel-size", "int", 1, key="parallel.expert_parallel_size"),
    LaunchFlag("moe-token-dispatcher-type", "word", "allgather", rule="token_dispatcher", example="alltoall"),
    LaunchFlag("moe-grouped-gemm", "switch", False, key="model.use_grouped_expert_matmul"),
    LaunchFlag("sequence-parallel", "switch", False, rule="sequence_parallel"),
    LaunchFlag("use-distributed-optimizer", "switch", False, rule="sharding"),
    LaunchFlag("layerzero", "switch", False, rule="sharding"),
    LaunchFlag("layerzero-config", "word", rule="sharding", example="zero_config.yaml"),
    LaunchFlag("use-torch-fsdp2", "switch", False, rule="sharding"),
    LaunchFlag("fsdp2-config-path", "word", rule="sharding", example="fsdp2_config.yaml"),
    LaunchFlag("bf16", "switch", False, rule="floating_point_types"),
    LaunchFlag("fp16", "switch", False, rule="floating_point_types"),
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
    LaunchFlag("lr-warmup-iters", "int", 0, rule="warm_up"),
    LaunchFlag("lr-warmup-fraction", "float", rule="warm_up", example="0.1"),
    LaunchFlag("warmup-ratio", "float", rule="warm_up", example="0.1"),
    LaunchFlag("lr_warmup_steps", "int", rule="warm_up"),
    LaunchFlag("lr-decay-style", "word", "linear", rule="decay", example="cosine"),
    LaunchFlag("lr-decay-iters", "int", rule="decay"),
    LaunchFlag("lr-wsd-decay-iters", "int", rule="decay"),
    LaunchFlag("optimizer", "word", "adam", rule="optimizer", example="muon"),
    LaunchFlag("optimizer-selection", "word", "fused_adamw", rule="optimizer", example="fused_ema_adamw"),
    LaunchFlag("weight-decay-exclude-modules", "list", rule="undecayed_parameters"),
    LaunchFlag("lr-scale-modules", "list", rule="scaled_learning_rates"),
    LaunchFlag("lr-mult", "float", 1.0, rule="scaled_learning_rates"),
    LaunchFlag("calculate-per-sample-loss", "switch", False, rule="loss_of_samples"),
    LaunchFlag("calculate-per-token-loss", "switch", False, rule="loss_of_samples"),
)

_CHECKPOINTS = (
    LaunchFlag("load", "word", rule="starting_point"),
    LaunchFlag("load-base-model", "word", rule="starting_point"),
    LaunchFlag("save", "word", key="training.save"),
    LaunchFlag("ckpt-format", "word", "torch_dist", rule="checkpoint_format", example="torch_dcp"),
    LaunchFlag("no-load-optim", "switch", False, key="training.no_load_optim"),
    LaunchFlag("no-load-rng", "switch", False, key="training.no_load_rng"),
    LaunchFlag("no-save-optim", "switch", False, key="training.no_save_optim"),
    LaunchFlag("no-save-rng", "switch", False, key="training.no_save_rng"),
    LaunchFlag("finetune", "switch", False, rule="starting_point"),
    LaunchFlag("save-interval", "int", 0, key="training.save_interval"),
    LaunchFlag("log-interval", "int", 100, key="training.log_interval"),
    LaunchFlag("eval-interval", "int", 1000, rule="validation"),
    LaunchFlag("eval-iters", "int", 100, rule="validation"),
    LaunchFlag("distributed-timeout-minutes", "int", 10, rule="waiting_times"),
    LaunchFlag("log-tps", "switch", False, of_loop="the log line also says tokens per sample"),
)

_MEMORY = (
    LaunchFlag("recompute-granularity", "word", rule="recomputation", example="full"),
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
    LaunchFlag("trust-remote-code", "switch", False, rule="trusted_code"),
    LaunchFlag("lora-target-modules", "list", rule="adapters"),
    LaunchFlag("lora-r", "int", 8, rule="adapters"),
    LaunchFlag("lora-alpha", "int", 16, rule="adapters"),
    LaunchFlag("lora-dropout", "float", 0.0, rule="adapters", example="0.1"),
    LaunchFlag("no-shuffle", "switch", False, rule="order_of_rows"),
    LaunchFlag("data-path", "word", key="data.dataset_param.basic_parameters.dataset"),
    LaunchFlag("data-dir", "word", key="data.dataset_param.basic_parameters.dataset_dir"),
    LaunchFlag("processor-path", "word", key="data.dataset_param.preprocess_parameters.model_name_or_path"),
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
    *_idle("every row brings its own caption", "word", "instance_prompt"),
    LaunchFlag("dataloader_num_workers", "int", key="data.dataloader_param.num_workers", example="5"),
)

_WITHOUT_EFFECT = (
    *_idle(
        "the libraries of the device at hand decide how ranks talk to one another", "word", "distributed-backend"
    ),
    *_idle(
        _KERNELS, "switch", "use-mcore-models", "use-flash-attn", "no-gradient-accumulation-fusion",
        "no-masked-softmax-fusion", "variable-seq-lengths", "unaligned-linear", "moe-permutation-async-comm",
        "moe-permute-fusion", "use-fused-moe-token-permute-and-unpermute",
        "use-multiparameter-pipeline-model-parallel",
    ),
    *_idle(_KERNELS, "int", "optimization-level"),
    *_idle(_OVERLAP, "switch", "overlap-grad-reduce", "overlap-param-gather"),
    *_idle(
        _FOLDER, "switch", "swiglu", "untie-embeddings-and-output-weights", "qk-layernorm", "multi-latent-attention",
        "multi-head-latent-attention",
    ),
    *_idle(
        _FOLDER, "word", "normalization", "position-embedding-type", "attention-mask-type", "rope-scaling-type",
        "tokenizer-type",
    ),
    *_idle(
        _FOLDER, "int", "rotary-base", "kv-lora-rank", "qk-nope-head-dim", "qk-rope-head-dim", "v-head-dim",
        "q-lora-rank", "rope-scaling-beta-fast", "rope-scaling-beta-slow",
        "rope-scaling-original-max-position-embeddings", "num-layers", "hidden-size", "ffn-hidden-size",
        "num-attention-heads", "max-position-embeddings", "vocab-size", "make-vocab-size-divisible-by",
    ),
    *_idle(
        _FOLDER, "float", "rope-scaling-factor", "rope-scaling-mscale", "rope-scaling-mscale-all-dim",
        "attention-dropout", "hidden-dropout",
    ),
    *_idle(
        _NOT_NEEDED, "switch", "use-cpu-initialization", "no-initialization", "reuse-fp32-param",
        "enable-dummy-optimizer", "downcast-to-bf16",
    ),
    *_idle(_NOT_NEEDED, "list", "lora-register-forward-hook"),
    *_idle(_LAUNCH, "int", "node_rank", "master_port", "local-rank"),
    *_idle(_LAUNCH, "word", "master_addr"),
    LaunchFlag("ai-framework", "word", "pytorch", rule="framework", example="pytorch"),
)  # fmt: skip

_REFUSED = (
    *_refused(_POSTTRAIN, "float", "dpo-beta", "dpo-label-smoothing", "pref-ftx"),
    *_refused(_POSTTRAIN, "word", "dpo-loss-type", "ref-model", "hps_reward_save", "cache_dir"),
    *_refused(
        _POSTTRAIN, "float", "adv_clip_max", "cfg", "clip_range", "eta", "sampler_seed", "shift", "timestep_fraction"
    ),
    *_refused(
        _POSTTRAIN, "int", "h", "w", "t", "num_generations", "num_latent_t",
        "sample_batch_size", "sampling_steps", "sp_size", "train_sp_batch_size",
    ),
    *_refused(
        _POSTTRAIN, "switch", "ignore_last", "init_same_noise", "no-save_images", "use_group", "use_hpsv2"
    ),
    *_refused(
        "the square of samples' losses is not a loss that the engine has; give the square in your loss_func",
        "switch", "calculate-per-sample-square-loss",
    ),
    *_refused(_SEARCH, "switch", "auto-parallel", "auto-parallel-mm", "auto-tuning"),
)  # fmt: skip

FLAGS: tuple[LaunchFlag, ...] = (
    *_BATCH,
    *_PARALLEL,
    *_OPTIMIZER,
    *_CHECKPOINTS,
    *_MEMORY,
    *_MODEL_AND_DATA,
    *_DREAMBOOTH,
    *_WITHOUT_EFFECT,
    *_REFUSED,
)
"""Every flag, in the order in which documents group them."""


@cache
def by_dest() -> dict[str, LaunchFlag]:
    """Name in the namespace → flag."""
    return {flag.dest: flag for flag in FLAGS}


@cache
def by_spelling() -> dict[str, LaunchFlag]:
    """How a flag may be written → flag."""
    return {spelling: flag for flag in FLAGS for spelling in flag.spellings}
