"""The `features` section: losses, and what trades time for memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.fsdp.params.value_types import (
    Flag,
    FlagOrAuto,
    Names,
    Natural,
    Number,
    Patterns,
    Positive,
    Section,
    Whole,
    renamed,
)


class RecomputePlan(Section):
    """Which modules are recomputed in the backward pass."""

    apply_modules: Patterns = ()
    """Patterns of the modules that are recomputed; empty: the model's own plan."""
    use_reentrant: Flag = False
    """Use autograd's re-entrant implementation of checkpointing."""
    mode: Literal["full", "selective"] = "full"
    """How much is recomputed. `full`: whole modules. `selective`: the results of matrix products and attention kernels
    are kept, and the operations between them are recomputed."""
    distribute_saved_activations: FlagOrAuto = "auto"
    """Under tensor parallelism each rank keeps its part of the inputs of recomputed blocks, of which all ranks would
    otherwise keep the whole, and gathers the rest in the backward pass. `auto`: where blocks are recomputed in full and
    not compiled, except blocks under sequence parallelism, which have their own part anyway, and blocks with experts.
    `true`: the same, or refused where no block allows it."""


class LossConfig(Section):
    """What the loss is and how it is normalised."""

    loss_type: (
        Annotated[
            Literal["raw", "default", "per_sample_loss", "per_token_loss", "per_micro_batch_loss", "dict"],
            renamed(custom="raw"),
        ]
        | None
    ) = None
    """How the loss is normalised. `default` and `per_token_loss` are the same: the sum over all label tokens of the
    optimizer step, over all micro-batches and data ranks, divided by their one global number. `per_sample_loss`: the
    mean of each sample's own mean. `per_micro_batch_loss`: the mean of the micro-batches' own means, as Megatron-LM
    trains without `--calculate-per-token-loss`; it depends on which samples share a micro-batch, so it is rejected with
    packing. `raw`: the model's own loss, taken as the mean over the label tokens of a
    micro-batch, which is weighted by their number; a model that accepts this number (`num_items_in_batch`) is given it.
    `dict`: losses by name, each divided by its own global number of labels (MOSS-TTS: text and every codebook). Not
    given: `default` for transformers' language models, `raw` for models that return their own loss; for generators,
    both are the denoising loss."""
    router_aux_loss_coef: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss of the router in mixture-of-experts models."""
    router_aux_loss_offload: Flag = False
    """Keep the tensors that the backward pass of the router's loss needs (probabilities of all tokens and layers) on
    the host until then."""
    z_loss_coef: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the z-loss: the mean over label tokens of (log Σ exp(logits))², which keeps logits from drifting (PaLM,
    arXiv:2204.02311: 1e-4). It is divided by the same number as the loss, and logged separately."""
    text_loss_weight: Annotated[Number, Field(ge=0)] | None = None
    """Weight of the loss of words in models that answer and draw by denoising (BAGEL); null: 0.25, as BAGEL was
    trained. Words and pictures are two terms, each divided by its own number, and logged with their weights."""
    picture_loss_weight: Annotated[Number, Field(ge=0)] | None = None
    """Weight of the loss of drawn pictures in models that answer and draw by denoising (BAGEL); null: 1."""


class ChunkLossPlan(Section):
    """The output head and the loss computed in slices of tokens, so that the logits are never whole."""

    apply_module: str = "lm_head"
    """Name of the output head's module, or the last part of the name."""
    chunk_size: Positive | None = 1024
    """Number of label tokens in a slice (`enable_chunk_loss`); null: 1024. The logits of one slice are in memory at a
    time."""
    total_chunk_size: Positive | None = 4096
    """Maximum number of label tokens whose logits are in memory at once (`enable_dynamic_chunk_loss`); null: 4096. A
    micro-batch with n of them is computed in s = ceil(n / total_chunk_size) slices of ceil(n / s) tokens: as few slices
    as possible, of equal size. The sizes depend on nothing else, so a run gives the same numbers on every device."""


class ActivationOffloadPlan(Section):
    """Activations moved to the host between forward and backward."""

    apply_modules: Patterns = ()
    """Patterns of the modules whose activations are moved; empty: the model's repeated blocks."""


class WeightOffloadPlan(Section):
    """Frozen weights that wait on the host until their module runs."""

    apply_modules: Patterns = ()
    """Patterns of the modules whose frozen weights wait on the host; empty: the model's repeated blocks."""


class ChunkMbsPlan(Section):
    """Modules that run a micro-batch in smaller slices, gathered once for all of them."""

    apply_modules: Patterns = ()
    """Patterns of the modules that run in slices; empty: the model's repeated blocks, except those of encoder
    towers."""
    chunk_mbs: Positive = 1
    """Number of rows in a slice."""
    batch_dim: Natural = 0
    """Dimension that counts the rows in inputs and outputs."""
    chunk_arg_indexs: tuple[Whole, ...] = (0,)
    """Positions of the arguments that are sliced, however they are passed. An argument with one row is given to every
    slice."""
    chunk_kwarg_names: Names = ()
    """Names of the keyword arguments that are sliced. transformers' layers need `attention_mask`, `position_ids` and
    `position_embeddings`; leaving out an argument with as many rows is an error."""


class EpBalancePlan(Section):
    """Limits on the copies of busy experts that `enable_ep_balance` makes."""

    max_dup_experts_num: Natural = 2
    """Maximum number of copies of other ranks' experts that a rank holds."""


class CompilePlan(Section):
    """Modules whose forward passes torch.compile turns into fused kernels."""

    apply_modules: Patterns = ()
    """Patterns of the modules that are compiled; empty: the model's repeated blocks."""
    backend: str = "inductor"
    """Compiler backend: `inductor` generates kernels; `aot_eager` only traces, which shows what cannot be traced."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Optimisation goal of inductor; the two modes with CUDA graphs need inputs of one shape."""
    dynamic: Flag | None = None
    """Whether kernels take sizes as variables. Null: sizes that are seen to change; false: blocks are compiled again
    for each new size."""


class FeatureArguments(Section):
    """Losses, and what trades time for memory."""

    recompute: Flag = False
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_plan: RecomputePlan = Field(default_factory=RecomputePlan)
    """The modules that are recomputed, wholly or in part."""
    loss_cfg: LossConfig = Field(default_factory=LossConfig)
    """The type of the loss and the weights of its auxiliary terms."""
    enable_chunk_loss: FlagOrAuto = "auto"
    """Compute the output head and the cross-entropy in slices of tokens, with liger's kernel where it is installed on
    CUDA or an NPU, so that the logits of a whole micro-batch are never in memory. auto: for vocabularies of 64,000
    tokens and more, unless the head is not a plain linear layer or the model changes its logits in a way that slices
    cannot follow."""
    enable_dynamic_chunk_loss: Flag = False
    """Compute the loss in slices whose size follows the number of label tokens of each micro-batch
    (`total_chunk_size`); takes precedence over `enable_chunk_loss`."""
    chunkloss_plan: ChunkLossPlan = Field(default_factory=ChunkLossPlan)
    """Sizes of the slices in which the loss is computed."""
    enable_activation_offload: Flag = False
    """Move activations to the host between the forward and the backward pass."""
    activation_offload_plan: ActivationOffloadPlan = Field(default_factory=ActivationOffloadPlan)
    """The modules whose activations are moved to the host."""
    enable_weight_offload: Flag = False
    """Keep the frozen weights of blocks on the host, and bring each block's to the device while the one before it
    computes: the device holds those of two blocks at a time. For the training of adapters, together with
    `recompute`."""
    weight_offload_plan: WeightOffloadPlan = Field(default_factory=WeightOffloadPlan)
    """The modules whose frozen weights wait on the host."""
    enable_gradient_offload: Flag = False
    """Move gradients to the host as soon as they are summed over ranks, and accumulate those of several micro-batches
    there."""
    enable_chunk_mbs: Flag = False
    """Run the chosen modules on slices of the micro-batch, one after the other."""
    chunkmbs_plan: ChunkMbsPlan = Field(default_factory=ChunkMbsPlan)
    """The modules that run in slices, and which arguments are sliced."""
    enable_ep_balance: Flag = False
    """Copy busy experts to idle ranks."""
    ep_balance_plan: EpBalancePlan = Field(default_factory=EpBalancePlan)
    """Limits on the copies of busy experts."""
    skip_moe_pad_tokens: Flag = False
    """Do not send padding tokens through experts."""
    compile: FlagOrAuto = "auto"
    """Compile the model's repeated blocks: for the first sizes, and once more with sizes as variables. `auto`: on CUDA
    with triton, for runs of 100 steps and more, unless something else stands against it, which the log names; a block
    that would be compiled a third time computes by plain operations. `true`: compiled or refused."""
    compile_plan: CompilePlan = Field(default_factory=CompilePlan)
    """The modules that are compiled, and the compiler's settings."""
    fused_kernels: FlagOrAuto = "auto"
    """Compute RMS norms, rotary embeddings and gated linear units with fused kernels: liger's on CUDA, or our own by
    triton where liger-kernel is not installed; torch_npu's on NPUs. `auto` uses them where they can be had. `true`:
    used or refused. Unless `false`, rotary embeddings of towers take fewer operations everywhere, to the same bits."""
