"""The `parallel` section: how one model and one batch are spread over many devices."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.fsdp.params.feature_args import RecomputePlan
from mindspeed_mm.fsdp.params.value_types import Dtype, Flag, Names, Natural, Positive, Section, fault, renamed, show


def _size_or_auto(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise fault(f"{show(value)} is neither auto nor a whole number from 1")


def _reshard(value: Any) -> Any:
    words = {"yes": True, "on": True, "no": False, "off": False}
    found = words.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(found, bool) or (isinstance(found, int) and found >= 1):
        return found
    raise fault(f"{show(value)} is neither true, false nor a group size")


class FsdpPlan(Section):
    """Sharding of parameters, gradients and optimizer state (FSDP2)."""

    apply_modules: Names = ()
    """Module patterns wrapped one by one before the root. Empty: the model's own plan."""
    ignored_modules: Names = ()
    """Module patterns left out of sharding; they stay whole on every rank."""
    param_dtype: Dtype | None = None
    """Type of the parameters in the forward and backward pass; master weights stay fp32."""
    reduce_dtype: Dtype | None = None
    """Type in which gradients are summed over ranks."""
    output_dtype: Dtype | None = None
    """Type of the model's output."""
    cast_forward_inputs: Flag = True
    """Cast floating-point inputs to `param_dtype`."""
    reshard_after_forward: Annotated[bool | int, BeforeValidator(_reshard)] = True
    """true: parameters are freed after the forward pass (ZeRO-3). false: kept until the backward pass (ZeRO-2). A
    number: resharded to groups of that many ranks."""
    num_to_forward_prefetch: Natural = 0
    """Modules gathered ahead in the forward pass."""
    num_to_backward_prefetch: Natural = 0
    """Modules gathered ahead in the backward pass."""
    hook_modules: Names | None = None
    """Wrapped modules that gather the wrapped modules inside them together with themselves, ahead of their turn too:
    blocks of experts that are spread, e.g. `model.layers.{*}` under `expert_parallel_size`. A gather then runs beside
    the attention instead of before the experts."""
    pregather: Flag = False
    """Begin to gather all parameters before the step's first micro-batch, beside whatever comes first. Costs room for
    the whole model in `param_dtype`. A pipeline's stages stay gathered anyway: an error there."""
    cpu_offload: Flag = False
    """Keep parameters, gradients and optimizer state on the host."""
    pin_memory: Flag | None = None
    """Pin the host memory of `cpu_offload`, so that copies run beside the computation; null: where there is an
    accelerator. false where the host has too little memory that may be locked."""


class TpPlan(Section):
    """Tensor parallelism: which linear layers are split how. All empty: the model's own plan."""

    colwise_parallel: Names = ()
    """Modules split by output features."""
    rowwise_parallel: Names = ()
    """Modules split by input features."""
    sequence_parallel: Names = ()
    """Modules that run on a slice of the sequence (norms)."""


class PpPlan(Section):
    """Pipeline parallelism."""

    split_points: Names = ()
    """First module of each further stage; what stands behind the layers (`model.norm`) makes a last stage without any.
    Empty: stages of equal cost, by numbers of parameters."""
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "zbv"] = "1f1b"
    """Order of forward and backward passes. zbv has two chunks on a rank: stages go forth and back."""
    virtual_stages: Positive = 1
    """Model chunks on a rank, with interleaved1f1b."""
    micro_batches: Positive | None = None
    """Micro-batches that go through the pipeline together; null: `gradient_accumulation_steps`, all of a step. A
    divisor of it makes rounds: less memory under gpipe, more time in which ranks wait."""


class EpPlan(Section):
    """Expert parallelism."""

    apply_modules: Names = ()
    """Expert modules."""
    apply_efsdp_modules: Names = ()
    """Modules sharded inside an expert group. Empty: the same."""
    dispatcher: Annotated[
        Literal["alltoall", "allgather", "mc2", "deepep"], renamed(eager="alltoall", fused="alltoall")
    ] = "alltoall"
    """How tokens travel to their experts. mc2 needs an NPU, deepep CUDA. The text suite's `eager` and `fused` are
    `alltoall`."""
    use_npu_fused_ops: Flag = True
    """Accepted from files for NPUs: tokens are permuted by the same operations on every device."""


class EncoderPlan(Section):
    """A layout of its own for vision towers, beside the decoder's. A picture or clip is encoded by one rank, or by one
    team of ranks that share its patches."""

    balance: Flag = False
    """Share media between data ranks by cost: who has fewer of its own encodes some of the others'. Pixels travel out
    and features back; loss and gradients stay the same."""
    tensor_parallel_size: Positive | None = None
    """Ranks that share one layer's matrices of a tower; null: as `tensor_parallel_size`. 1: towers stay whole, and the
    ranks that split the decoder share its media instead. Other sizes are errors."""
    ring_attention_size: Positive | None = None
    """Ranks that share the patches of a tower's media by ring attention; null: as `ring_attention_size`. 1, with
    `ulysses_parallel_size` 1: the ranks that share a sequence of the decoder share its media, each whole."""
    ulysses_parallel_size: Positive | None = None
    """Ranks that share the patches of a tower's media by exchanging heads; null: as `ulysses_parallel_size`. With
    `balance`, they may be ranks of different samples."""


class ParallelArguments(Section):
    """How one model and one batch are spread over many devices.

    Global batch = `micro_batch_size` × data ranks × `gradient_accumulation_steps`.
    """

    data_parallel_size: Positive | None = None
    """Number of data ranks. Derived: world / (tensor · pipeline · ring · ulysses); another value is an error."""
    fully_shard_parallel_size: Annotated[Literal["auto"] | int, BeforeValidator(_size_or_auto)] = "auto"
    """Ranks in a sharding group, context-parallel ranks included. auto: all, world / (tensor · pipeline). Smaller:
    hybrid sharding, groups hold copies. 1: every rank holds the whole model (master weights stay fp32)."""
    fsdp_plan: FsdpPlan = Field(default_factory=FsdpPlan)
    """Sharding."""
    tensor_parallel_size: Positive = 1
    """Ranks that share one layer's matrices."""
    tp_plan: TpPlan = Field(default_factory=TpPlan)
    """Which matrices."""
    pipeline_parallel_size: Positive = 1
    """Ranks that share the layers."""
    pp_plan: PpPlan = Field(default_factory=PpPlan)
    """Where the layers are cut."""
    ring_attention_size: Positive = 1
    """Ranks that share a sequence, passing keys and values round."""
    ulysses_parallel_size: Positive = 1
    """Ranks that share a sequence, exchanging heads. With ring above 1 as well: both nested."""
    expert_parallel_size: Positive = 1
    """Ranks that share the experts of a layer."""
    expert_fully_shard_parallel_size: Positive | None = None
    """Ranks that shard one expert group's parameters; null: sharding group / `expert_parallel_size`. Without effect
    where that is 1."""
    ep_plan: EpPlan = Field(default_factory=EpPlan)
    """Which experts."""
    encoder_plan: EncoderPlan = Field(default_factory=EncoderPlan)
    """Vision towers, where they are laid out otherwise than the decoder."""
    recompute: Flag | None = None
    """Same as `features.recompute`; giving both differently is an error."""
    recompute_plan: RecomputePlan | None = None
    """Same as `features.recompute_plan`."""
