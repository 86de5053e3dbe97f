"""The `training` section: optimizer, schedule, steps, saving and loading."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments, EmaArguments, SamplingArguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.value_types import (
    Dtype,
    Flag,
    Names,
    Natural,
    Number,
    PathText,
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


def _listed(value: Any) -> Any:
    """One name, names with commas between them, or a list."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return () if value in (None, ["none"]) else value


class LrScaling(Section):
    """One entry of `lr_scaling_plan`."""

    match: str
    """Regular expression searched in parameter names."""
    scale: NotNegative = 1.0
    """Factor on the learning rate of the parameters that match."""


class QuantizationPlan(Section):
    """Low-precision matrix products."""

    recipe_name: str | None = None
    """Recipe, e.g. mxfp8."""
    apply_modules: Names = ()
    """Module patterns that are quantised."""
    ignored_modules: Names = ()
    """Module patterns that are not."""
    quant_converters: Names = ()
    """Names of the converters."""
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the recipe."""
    enable_fsdp_low_precision_all_gather: Flag = True
    """Gather parameters in the low precision."""
    fsdp_low_precision_all_gather_mode: Literal["on-demand", "all"] = "on-demand"
    """When."""


class TrainingArguments(Section):
    """Optimizer, schedule, steps, saving and loading."""

    lr: NotNegative = 5e-5
    """Highest learning rate. 0: steps are taken and measured, and the weights stay as they are."""
    lr_min: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_start: NotNegative = 0.0
    """Learning rate at the start of the warm-up."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        renamed(constant_with_warmup="constant", warmup_stable_decay="wsd"),
    ] = "constant"
    """Shape of the decay. wsd: warm up, stay, decay."""
    lr_decay_ratio: Annotated[Ratio, Field(gt=0)] = 1.0
    """Share of the steps by which the decay has ended; wsd: share of the steps that decay."""
    lr_warmup_ratio: Ratio = 0.0
    """Share of the steps that warm up."""
    lr_scaling_plan: Annotated[tuple[LrScaling, ...], null_means(())] = ()
    """Factors on the learning rate by parameter name; the first match counts."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay. Norms and biases are not decayed."""
    no_decay_modules: Names = ()
    """Class or module names that are not decayed, besides norms."""
    no_decay_params: Names = ()
    """Parameter names that are not decayed, besides biases."""
    optimizer: Literal["adamw", "adamw_swap", "muon"] = "adamw"
    """Optimizer. adamw_swap: AdamW with its moments on the host, from where they come and go in buckets during the
    update. muon: orthogonal updates of the matrices of the model's blocks (also of each expert), AdamW for the rest."""
    optimizer_state_dtype: Literal["bf16", "int8"] | None = None
    """How AdamW keeps its moments between steps; null: as the weights that it updates, fp32 as a rule. bf16: the second
    one rounded by chance, so that it is right in the mean. int8: in blocks, by torchao."""
    adam_fused: Flag = True
    """Use the fused kernel of AdamW."""
    adam_beta1: Beta = 0.9
    """Decay of the first moment."""
    adam_beta2: Beta = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[Number, Field(gt=0)] = 1e-8
    """Term added to the denominator."""
    mem_fraction_static: Ratio = 0.8
    """adamw_swap and gradient offload: share of the device's memory that may be in use while moments and gradients
    come and go. Their buckets take what is free below it when the update begins, two at a time, each 128 MiB at most
    and no less than 2 million numbers. On a CPU it is a share of the host's memory."""
    matched_adamw_rms: NotNegative = 0.2
    """muon: root mean square of an update at rate 1, to match AdamW's: the direction is multiplied by
    matched_adamw_rms √max(rows, columns). 0: by √max(1, rows / columns) instead, as it was first published."""
    muon_momentum: Beta = 0.95
    """muon: decay of the momentum (Nesterov's)."""
    ns_steps: Positive = 5
    """muon: Newton-Schulz iterations."""
    clip_grad: NotNegative = 1.0
    """Largest gradient norm; 0 only reports it."""
    clip_grad_foreach: Flag = True
    """Clip with multi-tensor kernels."""
    initial_loss_scale: Annotated[Number, Field(gt=0)] = 65536.0
    """fp16: what the loss is multiplied by at first, so that small gradients are not lost. A step whose gradients
    overflow is left out, and the scale halved. It is kept in checkpoints."""
    loss_scale_window: Positive = 2000
    """fp16: steps in a row without overflow after which the loss scale is doubled."""
    min_loss_scale: Annotated[Number, Field(gt=0)] = 1.0
    """fp16: smallest loss scale; gradients that overflow with it are a step that is not finite (`on_nonfinite`)."""
    micro_batch_size: Positive = 1
    """Samples of one forward pass on one data rank."""
    gradient_accumulation_steps: Annotated[Positive, null_means(1)] = 1
    """Forward and backward passes in one optimizer step."""
    train_iters: Positive = 10000
    """Optimizer steps."""
    train_epochs: Positive | None = None
    """Passes over the data; wins over `train_iters`."""
    seed: Natural = 42
    """Seed of everything random."""
    use_deter_comp: Flag = False
    """Only deterministic kernels."""
    allow_hf32: Flag | None = None
    """Let fp32 matrix products use the device's shortened format."""
    init_model_with_meta_device: Flag = False
    """Accepted from older files: models are always built without storage first."""
    load: PathText | None = None
    """Where to start from: a Hugging Face folder, a checkpoint or a run folder."""
    load_format: Literal["auto", "hf", "dcp"] = "auto"
    """Layout of `load`; auto looks."""
    load_strict: Flag = True
    """Weight keys must fit exactly; false: missing ones are initialised, spare ones ignored, with a warning."""
    load_rank0_and_broadcast: Flag = False
    """Rank 0 alone reads the weights and sends them, one tensor at a time: for files that other hosts do not have, or
    a shared disk that many readers would choke. The small files beside them (config.json, the tokenizer's) are needed
    on every host."""
    no_load_optim: Flag = False
    """Start with fresh optimizer state."""
    no_load_rng: Flag = False
    """Start with fresh random states."""
    save: PathText | None = None
    """The run folder."""
    save_format: Literal["auto", "hf", "dcp"] = "auto"
    """Layout of checkpoints; auto is dcp, which can be resumed under any number of ranks. hf: a Hugging Face folder
    beside each of them, in `hf/`."""
    save_interval: Natural = 500
    """Steps between checkpoints; 0: only the last one."""
    save_async: Flag = False
    """Write checkpoints while training goes on."""
    save_ckpt_dtype: Dtype | None = None
    """Type of the weights in checkpoints and Hugging Face folders; null: as trained, so that a resumed run is exact."""
    no_save_optim: Flag = False
    """Leave the optimizer state out."""
    no_save_rng: Flag = False
    """Leave the random states out."""
    save_total_limit: Annotated[Whole, Field(ge=2)] | None = None
    """Checkpoints kept; null: all. At least 2, so that a broken one never is the only one."""
    save_on_signal: Flag = True
    """Save when the run is asked to stop."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What a failed save does."""
    verify_checkpoint: Literal["hash", "size", "none"] = "hash"
    """What is compared with the manifest before a checkpoint is loaded."""
    allow_missing: Names = ()
    """Patterns of weight keys that the folder need not have."""
    allow_unexpected: Names = ()
    """Patterns of weight keys that the folder may have too many."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does; the weights are untouched either way."""
    max_skipped_steps: Natural = 3
    """Steps that may be skipped in a row."""
    setup_timeout_s: Seconds = 600.0
    """Longest wait for other ranks before the first step."""
    step_timeout_s: Seconds = 1800.0
    """Longest wait for other ranks in a step."""
    save_timeout_s: Seconds = 1800.0
    """Longest wait for other ranks in a save."""
    log_interval: Positive = 1
    """Steps between log lines."""
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"], ...], BeforeValidator(_listed)
    ] = ("tensorboard",)
    """Where the logged numbers go beside `metrics.jsonl`; []: nowhere. All but tensorboard come with the extra `track`,
    and each follows its own environment variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI …). One that fails never
    ends the run."""
    val_interval: Natural = 0
    """Steps between validations; 0: none."""
    val_micro_batch_size: Positive | None = None
    """Samples of one validation pass; null: `micro_batch_size`."""
    manual_gc_interval: Natural = 0
    """Steps between garbage collections by hand; 0: Python decides."""
    plugin: Names = ()
    """Packages to import first (`a/b` or `a.b`), which register models and datasets."""
    quantization_plan: QuantizationPlan | None = None
    """Low-precision matrix products."""
    lora: LoraArguments = Field(default_factory=LoraArguments)
    """Adapters."""
    diffusion: DiffusionArguments = Field(default_factory=DiffusionArguments)
    """Noise levels and losses of generators."""
    ema: EmaArguments = Field(default_factory=EmaArguments)
    """Moving average of the weights."""
    sampling: SamplingArguments = Field(default_factory=SamplingArguments)
    """Samples of a generator while it is trained."""
