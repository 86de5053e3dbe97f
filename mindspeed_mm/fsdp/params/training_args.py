"""The `training` section: optimizer, schedule, steps, saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments, EmaArguments, SamplingArguments
from mindspeed_mm.fsdp.params.evaluate_args import EvaluateArguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.value_types import (
    Dtype,
    Flag,
    Names,
    Natural,
    Number,
    PathText,
    Patterns,
    Positive,
    Ratio,
    Seconds,
    Section,
    Whole,
    null_means,
    renamed,
)

NotNegative = Annotated[Number, Field(ge=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class OptimizerFacts:
    """What the configuration, checkpoints and the memory forecast must know of an optimizer."""

    state: str
    """Optimizers with the same word go on from each other's checkpoints."""
    launch_name: str | None = None
    """How launch scripts call it, as in Megatron's `--optimizer`; None: they do not."""
    moments: int = 2
    """Numbers that it keeps of each weight, or of those of matrices alone; `optimizer_state_dtype` is about two."""
    moments_on_host: bool = False
    """Whether moments stay on the host, and are copied to the device bucket by bucket."""
    for_matrices: bool = False
    """Whether it is for matrices of blocks alone: AdamW updates the rest, and the factors of adapters."""
    reads: tuple[str, ...] = ()
    """Keys of `training` that change its updates, and not those of every optimizer."""


_OF_ADAMW = ("adam_beta1", "adam_beta2", "adam_eps")
_OF_MUON = ("muon_momentum", "ns_steps", "matched_adamw_rms")

OPTIMIZERS = {
    "adamw": OptimizerFacts("AdamW", "adam", reads=_OF_ADAMW),
    "adamw_swap": OptimizerFacts("AdamW", moments_on_host=True, reads=_OF_ADAMW),
    "muon": OptimizerFacts("Muon", "muon", moments=1, for_matrices=True, reads=(*_OF_ADAMW, *_OF_MUON)),
    "lion": OptimizerFacts("Lion", moments=1, reads=("lion_beta1", "lion_beta2")),
}
"""By their names in `training.optimizer`."""

SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("lr_min", "lr_decay_ratio"),
    "cosine": ("lr_min", "lr_decay_ratio"),
    "wsd": ("lr_min", "lr_decay_ratio", "lr_wsd_style"),
}
"""Values of `training.lr_decay_style` → keys of `training` that shape them, and not every schedule."""


def _listed(value: object) -> object:
    """One name, names with commas between them, or a list."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if value in (None, ["none"]):
        return ()
    return value


class LrScaling(Section):
    """One entry of `lr_scaling_plan`: a factor on the learning rate of the parameters that match."""

    match: str
    """Regular expression that is searched in parameter names."""
    scale: NotNegative = 1.0
    """Factor on the learning rate of the matching parameters."""


class QuantizationPlan(Section):
    """Matrix products in low precision: the recipe, and the modules that it applies to."""

    recipe_name: str | None = None
    """Name of the recipe, e.g. mxfp8."""
    apply_modules: Patterns = ()
    """Patterns of the modules that are quantised."""
    ignored_modules: Patterns = ()
    """Patterns of the modules that are not quantised."""
    quant_converters: Names = ()
    """What is converted: `linear` (also `quantize.linear.float8`, `quantize.linear.mx`) for linear layers, which is all
    when nothing is given, and `quantize.moe.mx` for the grouped products of fused experts, with mxfp8."""
    extra_args: JsonObject = Field(default_factory=dict)
    """Additional settings that the recipe accepts."""
    enable_fsdp_low_precision_all_gather: Flag = True
    """Gather sharded parameters in the low precision. With the recipe `tensorwise` alone; others gather them in the
    plan's type."""
    fsdp_low_precision_all_gather_mode: Literal["on-demand", "all"] = "on-demand"
    """When parameters are gathered in the low precision: on demand, or all at once after the update."""


class TrainingArguments(Section):
    """Optimizer, schedule, steps, saving and loading."""

    lr: NotNegative = 5e-5
    """Peak learning rate. With 0, steps are computed and measured, but the weights do not change."""
    lr_min: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_start: NotNegative = 0.0
    """Learning rate at the start of the warm-up."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        renamed(constant_with_warmup="constant", warmup_stable_decay="wsd"),
    ] = "cosine"
    """Shape of the learning-rate schedule. wsd: warm up, stay constant, decay. Not given: cosine, down to `lr_min`."""
    lr_decay_ratio: Annotated[NotNegative, Field(gt=0)] = 1.0
    """Share of the training steps after which the decay has ended; above 1, the run ends first. For wsd: the share of
    the steps in which the rate decays."""
    lr_wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the decay under `lr_decay_style: wsd`. exponential: 2 · 0.5^x - 1, minus_sqrt: 1 - √x, with x from 0 to
    1."""
    lr_warmup_ratio: Ratio = 0.03
    """Share of the steps in which the learning rate warms up. Not given: 3 %; 0: no warm-up."""
    lr_warmup_from_start: Flag = False
    """Use `lr_start` itself in the first step of the warm-up, as Megatron-LM does; false: the first step is already one
    increment above it, and the last step of the warm-up reaches `lr`."""
    lr_scaling_plan: Annotated[tuple[LrScaling, ...], null_means(())] = ()
    """Factors on the learning rate by parameter name; the first match applies."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay. Norms and biases are not decayed."""
    no_decay_modules: Patterns = ()
    """Class names, module names or patterns of modules whose parameters are not decayed, in addition to norms."""
    no_decay_params: Patterns = ()
    """Names or patterns of parameters that are not decayed, in addition to biases."""
    optimizer: Literal["adamw", "adamw_swap", "muon", "lion"] = "adamw"
    """Optimizer. adamw_swap: AdamW whose moments stay on the host and are copied to the device in buckets during the
    update. muon: orthogonalised updates for the matrices of the model's blocks (also for those of each expert), AdamW
    for the rest. lion: the sign of a momentum, with half of AdamW's states; `lr` is a third to a tenth of AdamW's, and
    `weight_decay` as many times larger."""
    optimizer_state_dtype: Literal["bf16", "int8"] | None = None
    """Type in which AdamW keeps its moments between steps; null: that of the weights it updates, normally fp32. bf16:
    the second moment is stochastically rounded (unbiased). int8: in blocks, by torchao."""
    adam_fused: Flag = True
    """Use the fused kernel of AdamW."""
    adam_beta1: Beta = 0.9
    """Decay rate of AdamW's first moment."""
    adam_beta2: Beta = 0.999
    """Decay rate of AdamW's second moment."""
    adam_eps: Annotated[Number, Field(gt=0)] = 1e-8
    """Term added to AdamW's denominator for numerical stability."""
    mem_fraction_static: Ratio = 0.8
    """Share of the device's memory that may be in use while adamw_swap and gradient offload copy moments and gradients.
    Their buckets take the memory that is free below it when the update begins, two at a time, each at most 128 MiB and
    at least 2 million numbers. On a CPU it is a share of the host's memory."""
    matched_adamw_rms: NotNegative = 0.2
    """Root mean square of muon's updates at learning rate 1, to match AdamW's: the direction is multiplied by
    matched_adamw_rms √max(rows, columns). 0: by √max(1, rows / columns) instead, as first published."""
    muon_momentum: Beta = 0.95
    """Decay rate of muon's Nesterov momentum."""
    lion_beta1: Beta = 0.9
    """Share of the momentum in the direction of lion's update; the rest is the gradient's."""
    lion_beta2: Beta = 0.99
    """Decay rate of lion's momentum."""
    ns_steps: Positive = 5
    """Number of Newton-Schulz iterations in each update of muon."""
    clip_grad: NotNegative = 1.0
    """Maximum gradient norm; 0: the norm is reported and not clipped."""
    clip_grad_ema_decay: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Decay of the moving average that the maximum gradient norm follows: the average and three standard deviations of
    the norms of earlier steps; `clip_grad` bounds the first step alone. null: `clip_grad` bounds every step."""
    clip_grad_foreach: Flag = True
    """Clip gradients with multi-tensor kernels."""
    initial_loss_scale: Annotated[Number, Field(gt=0)] = 65536.0
    """Initial loss scale of fp16 training: the loss is multiplied by it so that small gradients do not underflow. A
    step whose gradients overflow is skipped, and the scale is halved. Checkpoints keep the scale."""
    loss_scale_window: Positive = 2000
    """Number of consecutive fp16 steps without overflow after which the loss scale is doubled."""
    min_loss_scale: Annotated[Number, Field(gt=0)] = 1.0
    """Smallest loss scale of fp16 training; a step whose gradients overflow with it counts as not finite
    (`on_nonfinite`)."""
    micro_batch_size: Positive = 1
    """Number of samples in one forward pass on one data rank."""
    gradient_accumulation_steps: Annotated[Positive, null_means(1)] = 1
    """Number of forward and backward passes in one optimizer step."""
    train_iters: Positive | None = None
    """Number of optimizer steps to train. A run without `train_iters` and `train_epochs` takes one epoch; a generator
    takes 500 steps (CogVideoX 30 epochs), the length of the training commands on diffusers' pages. Streamed rows
    require `train_iters`, because their number is not known."""
    train_epochs: Positive | None = None
    """Number of passes over the data; takes precedence over `train_iters`."""
    seed: Natural = 42
    """Seed of all random numbers of the run."""
    use_deter_comp: Flag = False
    """Use only kernels that are deterministic."""
    allow_hf32: Flag | None = None
    """Let fp32 matrix products use the device's reduced-precision format (TF32, HF32); null: the device's default."""
    init_model_with_meta_device: Flag = False
    """Accepted from older files and ignored: models are always built without storage first."""
    load: PathText | None = None
    """Where training starts from: a Hugging Face folder, one of Megatron's (mp_rank_* or torch_dist), a checkpoint or a
    run folder."""
    load_format: Literal["auto", "hf", "dcp", "megatron"] = "auto"
    """Layout of the weights in `load`; auto detects it."""
    load_strict: Flag = True
    """Require that weight keys match exactly. False: missing weights are initialised and surplus ones ignored, with a
    warning."""
    load_rank0_and_broadcast: Flag = False
    """Let rank 0 alone read the weights and send them to the others, one tensor at a time: for files that other hosts
    do not have, or a shared disk that many readers would overload. The small files beside them (config.json, the
    tokenizer's) are needed on every host."""
    no_load_optim: Flag = False
    """Start with a fresh optimizer state."""
    no_load_rng: Flag = False
    """Start with fresh random-number states."""
    save: PathText | None = None
    """Run folder that checkpoints, logs and reports are written to; null: nothing is saved."""
    save_format: Literal["auto", "hf", "dcp"] = "auto"
    """Layout of checkpoints; auto is dcp, which can be resumed with any number of ranks. hf also writes a Hugging Face
    folder into each checkpoint, in `hf/`."""
    save_interval: Natural = 500
    """Number of steps between checkpoints; 0: only the last one."""
    save_async: Flag = False
    """Write checkpoints in the background while training goes on."""
    save_ckpt_dtype: Dtype | None = None
    """Type of the weights in checkpoints and Hugging Face folders; null: as trained, so that a resumed run is exact."""
    no_save_optim: Flag = False
    """Leave the optimizer state out of checkpoints."""
    no_save_rng: Flag = False
    """Leave the random-number states out of checkpoints."""
    save_total_limit: Annotated[Whole, Field(ge=2)] | None = 2
    """Number of checkpoints that are kept, in addition to the best one (`evaluate.best_metric`). Not given: the newest
    two; null: all. At least 2, so that a damaged one is never the only one."""
    save_on_signal: Flag = True
    """Save a checkpoint when the run is asked to stop."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """Whether the run stops or continues after a failed save."""
    verify_checkpoint: Literal["hash", "size", "none"] = "hash"
    """What is compared with the manifest before a checkpoint is loaded: hashes, sizes or nothing. Of weights that a
    conversion wrote, hashes are compared or nothing."""
    allow_missing: Patterns = ()
    """Patterns of weight keys that may be missing from the folder."""
    allow_unexpected: Patterns = ()
    """Patterns of weight keys that the folder may have in addition."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Whether the run stops or skips the step when a loss or gradient is not finite; the weights do not change either
    way."""
    max_skipped_steps: Natural = 3
    """Maximum number of consecutive steps that may be skipped."""
    setup_timeout_s: Seconds = 600.0
    """Longest wait for other ranks before the first step, in seconds."""
    step_timeout_s: Seconds = 1800.0
    """Longest wait for other ranks within a step, in seconds."""
    save_timeout_s: Seconds = 1800.0
    """Longest wait for other ranks within a save, in seconds."""
    log_interval: Positive = 1
    """Number of steps between log lines."""
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"], ...], BeforeValidator(_listed)
    ] = ("tensorboard",)
    """Trackers that receive the logged numbers in addition to `metrics.jsonl`; []: none. All but tensorboard come with
    the extra `track`, and each follows its own environment variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI …). A
    tracker that fails never ends the run."""
    val_interval: Natural = 0
    """Number of steps between validations; 0: none."""
    val_micro_batch_size: Positive | None = None
    """Number of samples in one validation pass; null: `micro_batch_size`."""
    manual_gc_interval: Natural = 0
    """Number of steps between explicit garbage collections; 0: Python decides."""
    plugin: Names = ()
    """Packages that are imported before anything else (`a/b`, `a.b` or an absolute path) and register models and
    datasets."""
    quantization_plan: QuantizationPlan | None = None
    """Settings of low-precision matrix products; null: none."""
    lora: LoraArguments = Field(default_factory=LoraArguments)
    """Settings of low-rank adapters (LoRA)."""
    diffusion: DiffusionArguments = Field(default_factory=DiffusionArguments)
    """Noise levels and losses with which generators are trained."""
    ema: EmaArguments = Field(default_factory=EmaArguments)
    """Exponential moving average of the trained weights."""
    sampling: SamplingArguments = Field(default_factory=SamplingArguments)
    """Samples that a generator makes while it is trained."""
    evaluate: EvaluateArguments = Field(default_factory=EvaluateArguments)
    """Held-out questions that a language model answers while it is trained, the best checkpoint, and early stopping."""
