"""The `parallel` section: how one model and one batch are spread over many devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.fsdp.params.feature_args import RecomputePlan
from mindspeed_mm.fsdp.params.value_types import (
    Dtype,
    Flag,
    Names,
    Natural,
    Patterns,
    Positive,
    Section,
    fault,
    renamed,
    show,
)


def _size_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise fault(f"{show(value)} is neither auto nor a whole number from 1")


def _reshard(value: object) -> object:
    words = {"yes": True, "on": True, "no": False, "off": False}
    found = words.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(found, bool) or (isinstance(found, int) and found >= 1):
        return found
    raise fault(f"{show(value)} is neither true, false nor a group size")


class FsdpPlan(Section):
    """Sharding of parameters, gradients and optimizer state (FSDP2)."""

    apply_modules: Patterns = ()
    """Patterns of the modules that are wrapped one by one before the root. Empty: the model's own plan."""
    ignored_modules: Patterns = ()
    """Patterns of the modules that are left out of sharding and stay whole on every rank."""
    param_dtype: Dtype | None = None
    """Type of the parameters in the forward and backward pass; null: fp32. Master weights stay fp32."""
    reduce_dtype: Dtype | None = None
    """Type in which gradients are summed over ranks."""
    output_dtype: Dtype | None = None
    """Type of the model's output; null: that of the computation."""
    cast_forward_inputs: Flag = True
    """Cast floating-point inputs of the model to `param_dtype`."""
    reshard_after_forward: Annotated[bool | int, BeforeValidator(_reshard)] = True
    """When gathered parameters are freed. true: after the forward pass (ZeRO-3). false: after the backward pass
    (ZeRO-2). A number: after the forward pass they are resharded to groups of that many ranks."""
    num_to_forward_prefetch: Natural = 0
    """Number of modules gathered ahead in the forward pass."""
    num_to_backward_prefetch: Natural = 0
    """Number of modules gathered ahead in the backward pass."""
    hook_modules: Patterns | None = None
    """Patterns of wrapped modules that gather the wrapped modules inside them together with themselves, also when they
    are prefetched: blocks whose experts are spread over ranks, e.g. `model.layers.{*}` under `expert_parallel_size`. A
    gather then overlaps with the attention instead of delaying the experts."""
    pregather: Flag = False
    """Start to gather all parameters before the first micro-batch of a step, overlapping with whatever runs first.
    Needs memory for the whole model in `param_dtype`. An error with pipeline parallelism, whose stages stay gathered
    anyway."""
    cpu_offload: Flag = False
    """Keep parameters, gradients and optimizer state on the host."""
    pin_memory: Flag | None = None
    """Pin the host memory of `cpu_offload`, so that copies overlap with the computation; null: where there is an
    accelerator. Set false where the host has too little memory that may be locked."""

    @property
    def computed_in(self) -> str:
        """The format of products: parameters are kept in fp32 where nothing else is asked for."""
        return self.param_dtype or "fp32"


class TpPlan(Section):
    """Tensor parallelism: which linear layers are split how. All empty: the model's own plan."""

    colwise_parallel: Patterns = ()
    """Patterns of the linear modules split by output features."""
    rowwise_parallel: Patterns = ()
    """Patterns of the linear modules split by input features."""
    sequence_parallel: Patterns = ()
    """Patterns of the modules that run on a slice of the sequence, such as norms."""


class PpPlan(Section):
    """Pipeline parallelism: where the model is cut into stages, and in which order they run."""

    split_points: Names = ()
    """Name of the first module of each further stage; a module behind the layers (`model.norm`) makes a last stage
    without layers. Empty: stages of equal cost, by numbers of parameters."""
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "zbv"] = "1f1b"
    """Order of forward and backward passes. zbv puts two chunks on a rank: the stages run forth through the ranks and
    back again."""
    virtual_stages: Positive = 1
    """Number of model chunks on a rank, with interleaved1f1b."""
    micro_batches: Positive | None = None
    """Number of micro-batches that go through the pipeline together; null: `gradient_accumulation_steps`, all of a
    step. A divisor of `gradient_accumulation_steps` makes several rounds: less memory under gpipe, more idle time of
    ranks."""


class EpPlan(Section):
    """Expert parallelism: which modules hold experts, and how tokens reach them."""

    apply_modules: Patterns = ()
    """Patterns of the expert modules; empty: the model's own."""
    apply_efsdp_modules: Patterns = ()
    """Patterns of the modules that are sharded inside an expert group. Must name the same modules as `apply_modules`,
    or none."""
    dispatcher: Annotated[
        Literal["alltoall", "allgather", "mc2", "deepep"], renamed(eager="alltoall", fused="alltoall")
    ] = "alltoall"
    """How tokens are sent to their experts. deepep needs CUDA, bf16 and the package DeepEP; mc2 is refused. The text
    suite's `eager` and `fused` both mean `alltoall`."""
    use_npu_fused_ops: Flag = True
    """Accepted from files for NPUs and ignored: tokens are permuted by the same operations on every device."""


class EncoderPlan(Section):
    """A layout of its own for vision towers, beside the decoder's. A picture or clip is encoded by one rank, or by one
    team of ranks that share its patches."""

    balance: Flag = False
    """Distribute media over data ranks by cost: a rank with less encoding work encodes some of the others' media.
    Pixels are sent out and features back; loss and gradients stay the same."""
    tensor_parallel_size: Positive | None = None
    """Number of ranks that share each weight matrix of a tower; null: as `tensor_parallel_size`. 1: towers stay whole,
    and the ranks that split the decoder divide its media among them. Other sizes are errors."""
    ring_attention_size: Positive | None = None
    """Number of ranks that share the patches of a tower's media by ring attention; null: as `ring_attention_size`. 1,
    with `ulysses_parallel_size` 1: the ranks that share a sequence of the decoder divide its media among them, each
    medium whole."""
    ulysses_parallel_size: Positive | None = None
    """Number of ranks that share the patches of a tower's media by exchanging heads; null: as `ulysses_parallel_size`.
    With `balance`, they may be ranks of different samples."""


class ParallelArguments(Section):
    """How one model and one batch are spread over many devices.

    Global batch = `micro_batch_size` × data ranks × `gradient_accumulation_steps`.
    """

    data_parallel_size: Positive | None = None
    """Number of data ranks; null: derived as world / (tensor · pipeline · ring · ulysses). Any other value is an
    error."""
    fully_shard_parallel_size: Annotated[Literal["auto"] | int, BeforeValidator(_size_or_auto)] = "auto"
    """Number of ranks in a sharding group, context-parallel ranks included. auto: all of them, world / (tensor ·
    pipeline). Smaller: hybrid sharding, where groups hold copies. 1: every rank holds the whole model (master weights
    stay fp32)."""
    fsdp_plan: FsdpPlan = Field(default_factory=FsdpPlan)
    """How parameters, gradients and optimizer state are sharded over ranks."""
    tensor_parallel_size: Positive = 1
    """Number of ranks that share each weight matrix of a layer."""
    tp_plan: TpPlan = Field(default_factory=TpPlan)
    """The modules that tensor parallelism splits."""
    pipeline_parallel_size: Positive = 1
    """Number of ranks over which the layers are distributed."""
    pp_plan: PpPlan = Field(default_factory=PpPlan)
    """Where the layers are cut into pipeline stages, and in which order these run."""
    ring_attention_size: Positive = 1
    """Number of ranks that share a sequence by passing keys and values around a ring."""
    ulysses_parallel_size: Positive = 1
    """Number of ranks that share a sequence by exchanging heads. With `ring_attention_size` above 1 the two are
    nested."""
    expert_parallel_size: Positive = 1
    """Number of ranks over which the experts of a layer are distributed."""
    expert_fully_shard_parallel_size: Positive | None = None
    """Number of ranks that shard the parameters of one expert group; null: sharding group / `expert_parallel_size`. Has
    no effect where `expert_parallel_size` is 1."""
    ep_plan: EpPlan = Field(default_factory=EpPlan)
    """The modules that expert parallelism distributes, and how tokens reach them."""
    encoder_plan: EncoderPlan = Field(default_factory=EncoderPlan)
    """Layout of vision towers where it differs from the decoder's."""
    recompute: Flag | None = None
    """Same as `features.recompute`; it is an error if the two differ."""
    recompute_plan: RecomputePlan | None = None
    """Same as `features.recompute_plan`; it is an error if the two differ."""
