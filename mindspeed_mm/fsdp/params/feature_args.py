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
    Positive,
    Section,
    Whole,
    renamed,
)


class RecomputePlan(Section):
    """Which modules are recomputed in the backward pass."""

    apply_modules: Names = ()
    """Module patterns; empty: the model's own plan."""
    use_reentrant: Flag = False
    """Use autograd's re-entrant checkpoint implementation."""
    mode: Literal["full", "selective"] = "full"
    """`full` recomputes whole modules, `selective` keeps the results of matrix products and attention kernels and
    recomputes what stands between them."""


class LossConfig(Section):
    """What the loss is and how it is normalised."""

    loss_type: (
        Annotated[Literal["raw", "default", "per_sample_loss", "per_token_loss", "dict"], renamed(custom="raw")] | None
    ) = None
    """`default` and `per_token_loss` are the same: the sum over all label tokens of the optimizer step, over all
    micro-batches and data ranks, divided by their one global number. `per_sample_loss`: the mean of each sample's own
    mean. `raw`: the model's own loss, taken as the mean over the label tokens of a micro-batch, which weighs as much
    as it has of them; a model that takes their number (`num_items_in_batch`) is told it. `dict`: losses that the model
    returns by name. Not given: `default` for transformers' language models, `raw` for models that return a loss of
    their own."""
    router_aux_loss_coef: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the router's load-balancing loss of mixture-of-experts models."""
    router_aux_loss_offload: Flag = False
    """Keep what the backward pass of the router's loss needs (probabilities of all tokens and layers) on the host until
    then."""
    z_loss_coef: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the z-loss: the mean over label tokens of (log Σ exp(logits))², which keeps logits from drifting
    (PaLM, arXiv:2204.02311: 1e-4). It has the denominator of the loss, and a line of its own in the log."""


class ChunkLossPlan(Section):
    """The output head and the loss computed in slices of tokens, so that the logits are never whole."""

    apply_module: str = "lm_head"
    """The output head, by its name or the end of it."""
    chunk_size: Positive | None = 1024
    """Label tokens in a slice (`enable_chunk_loss`); null is the default. Logits of one slice are alive at a time."""
    total_chunk_size: Positive | None = 4096
    """Most label tokens alive at once (`enable_dynamic_chunk_loss`); null is the default. A micro-batch with n of them
    goes through in s = ceil(n / total_chunk_size) slices of ceil(n / s): as few as possible, all alike. Nothing else
    is asked, so that a run gives the same numbers on every device."""


class ActivationOffloadPlan(Section):
    """Activations moved to the host between forward and backward."""

    apply_modules: Names = ()
    """Module patterns; empty: the model's repeated blocks."""


class ChunkMbsPlan(Section):
    """Modules that run a micro-batch in smaller slices, gathered once for all of them."""

    apply_modules: Names = ()
    """Module patterns; empty: the model's repeated blocks, those of towers aside."""
    chunk_mbs: Positive = 1
    """Rows in a slice."""
    batch_dim: Natural = 0
    """Dimension of the rows, of inputs and outputs."""
    chunk_arg_indexs: tuple[Whole, ...] = (0,)
    """Positions of the arguments that are sliced, however they are passed. What has one row goes to every slice."""
    chunk_kwarg_names: Names = ()
    """Names of the keyword arguments that are sliced. transformers' layers want `attention_mask`, `position_ids` and
    `position_embeddings`; an argument with as many rows that is left out is an error."""


class EpBalancePlan(Section):
    """Copies of busy experts."""

    max_dup_experts_num: Natural = 2
    """Most copies that a rank holds of other ranks' experts."""


class CompilePlan(Section):
    """Modules whose forward passes torch.compile turns into fused kernels."""

    apply_modules: Names = ()
    """Module patterns; empty: the model's repeated blocks."""
    backend: str = "inductor"
    """Compiler: `inductor` makes kernels, `aot_eager` only traces, for finding out what cannot be traced."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """What inductor spends its time on; the two with CUDA graphs want one shape."""
    dynamic: Flag | None = None
    """Whether sizes are variables of the kernels: null makes them so where they are seen to change, false compiles
    again for each new size."""


class FeatureArguments(Section):
    """Losses, and what trades time for memory."""

    recompute: Flag = False
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_plan: RecomputePlan = Field(default_factory=RecomputePlan)
    """What is recomputed."""
    loss_cfg: LossConfig = Field(default_factory=LossConfig)
    """The loss."""
    enable_chunk_loss: Flag = False
    """Compute output head and cross-entropy in slices of tokens, by liger's kernel where it is installed on CUDA or an
    NPU: the logits of a micro-batch are never held."""
    enable_dynamic_chunk_loss: Flag = False
    """The same with a slice size that follows the label tokens of each micro-batch (`total_chunk_size`); it goes before
    `enable_chunk_loss`."""
    chunkloss_plan: ChunkLossPlan = Field(default_factory=ChunkLossPlan)
    """The slices."""
    enable_activation_offload: Flag = False
    """Move activations to the host."""
    activation_offload_plan: ActivationOffloadPlan = Field(default_factory=ActivationOffloadPlan)
    """Whose activations."""
    enable_gradient_offload: Flag = False
    """Move gradients to the host as soon as they are summed over ranks, and add those of micro-batches up there."""
    enable_chunk_mbs: Flag = False
    """Run some modules on slices of the micro-batch."""
    chunkmbs_plan: ChunkMbsPlan = Field(default_factory=ChunkMbsPlan)
    """Which modules, and how."""
    enable_ep_balance: Flag = False
    """Copy busy experts to idle ranks."""
    ep_balance_plan: EpBalancePlan = Field(default_factory=EpBalancePlan)
    """How many copies."""
    skip_moe_pad_tokens: Flag = False
    """Send no padding tokens through experts."""
    compile: Flag = False
    """Compile the repeated blocks. Packed or padded to a multiple (`collate_param.pad_to_multiple_of`), rows have few
    lengths, and little is compiled again."""
    compile_plan: CompilePlan = Field(default_factory=CompilePlan)
    """Which modules, and by what."""
    fused_kernels: FlagOrAuto = False
    """Compute RMS norms, rotary embeddings and gated linear units by fused kernels: liger's on CUDA, torch_npu's on
    NPUs. `auto` takes none where there are none."""
