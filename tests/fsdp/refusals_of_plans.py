"""Refusals of plans: sizes that do not fit, and models that cannot be spread as a plan says."""

from __future__ import annotations

from tests.helpers.refusal import LORA, Refusal

TENSOR, PIPELINE, EXPERT = (f"parallel.{name}_parallel_size" for name in ("tensor", "pipeline", "expert"))
RING, ULYSSES = "parallel.ring_attention_size", "parallel.ulysses_parallel_size"
ENCODER, PP, EP, TP = "parallel.encoder_plan", "parallel.pp_plan", "parallel.ep_plan", "parallel.tp_plan"
FSDP = "parallel.fsdp_plan"
ACCUMULATION = "training.gradient_accumulation_steps"
BLOCKS = "model.language_model.layers.{*}"
TWO_STAGES = (f"{PIPELINE}=2", f"{ACCUMULATION}=2")

SIZES = (
    Refusal(
        "ranks that tensor parallelism leaves over", (f"{TENSOR}=2",), "2 does not divide the 3 ranks", TENSOR, ranks=3
    ),
    Refusal("ranks that a sequence leaves over", (f"{RING}=2",), "2 does not divide the 3 ranks left", RING, ranks=3),
    Refusal(
        "another number of data ranks",
        ("parallel.data_parallel_size=4",),
        "4 data ranks are asked for",
        "parallel.data_parallel_size",
        ranks=2,
    ),
    Refusal(
        "groups larger than the job",
        ("parallel.fully_shard_parallel_size=4",),
        "4 does not divide the 2 ranks left",
        "parallel.fully_shard_parallel_size",
        ranks=2,
    ),
    Refusal(
        "experts over more ranks than a group has",
        (f"{EXPERT}=4",),
        "4 does not divide the 2 ranks of a group",
        EXPERT,
        ranks=2,
        base="moe",
    ),
    Refusal(
        "towers in more parts than there are ranks",
        (f"{ENCODER}.ring_attention_size=3",),
        "3 ranks are to share a medium's patches",
        f"{ENCODER}.ring_attention_size",
        ranks=2,
    ),
    Refusal(
        "towers split otherwise than the decoder",
        (f"{ENCODER}.tensor_parallel_size=3", f"{TENSOR}=2"),
        "3 is neither 1 nor that of the decoder",
        f"{ENCODER}.tensor_parallel_size",
        ranks=2,
    ),
)

PIPELINES = (
    Refusal(
        "two chunks of a schedule with one",
        (*TWO_STAGES, f"{PP}.virtual_stages=2"),
        "runs 1 chunk on a rank",
        f"{PP}.virtual_stages",
        ranks=2,
    ),
    Refusal(
        "one chunk of a schedule with two",
        (*TWO_STAGES, f"{PP}.schedule=interleaved1f1b"),
        "interleaves at least 2 chunks",
        f"{PP}.virtual_stages",
        ranks=2,
    ),
    Refusal(
        "rounds that do not divide a step",
        (f"{PIPELINE}=2", f"{ACCUMULATION}=4", f"{PP}.micro_batches=3"),
        "do not divide the 4 micro-batches",
        f"{PP}.micro_batches",
        ranks=2,
    ),
    Refusal(
        "fewer micro-batches than ranks",
        (f"{PIPELINE}=2", f"{PP}.schedule=1f1b"),
        "are fewer than the 2 ranks",
        ACCUMULATION,
        ranks=2,
    ),
    Refusal(
        "micro-batches that make no equal rounds",
        (f"{PIPELINE}=2", f"{PP}.schedule=interleaved1f1b", f"{PP}.virtual_stages=2", f"{ACCUMULATION}=5"),
        "do not make equal rounds",
        ACCUMULATION,
        ranks=2,
    ),
    Refusal(
        "recompute in two passes",
        (*TWO_STAGES, f"{PP}.schedule=zbv", "features.recompute=true"),
        "splits backward passes",
        "features.recompute",
        ranks=2,
    ),
    Refusal(
        "towers laid out over stages",
        (*TWO_STAGES, f"{ENCODER}.balance=true"),
        "together with 2 stages",
        ENCODER,
        ranks=2,
    ),
    Refusal(
        "offloaded gradients of stages",
        (*TWO_STAGES, "features.enable_gradient_offload=true"),
        "their schedule sums gradients once",
        "features.enable_gradient_offload",
        ranks=2,
    ),
    Refusal(
        "more stages than layers",
        (f"{PIPELINE}=3", f"{ACCUMULATION}=3"),
        "are more stages than the 2 layers",
        PIPELINE,
        ranks=3,
    ),
    Refusal(
        "splits for more stages than there are",
        (*TWO_STAGES, f"{PP}.split_points=[model.language_model.layers.0, model.language_model.layers.1]"),
        "split points make 3 stages",
        f"{PP}.split_points",
        ranks=2,
    ),
    Refusal(
        "a stage that begins nowhere",
        (*TWO_STAGES, f"{PP}.split_points=[lm_tail]"),
        "is not a module that a stage can begin with",
        f"{PP}.split_points",
        ranks=2,
    ),
    Refusal(
        "a wrapped list of layers over stages",
        (*TWO_STAGES, f"{FSDP}.apply_modules=[model.language_model]"),
        "holds the layers that stages are cut of",
        f"{FSDP}.apply_modules",
        ranks=2,
    ),
    Refusal(
        "recompute of all layers at once over stages",
        (*TWO_STAGES, "features.recompute=true", "features.recompute_plan.apply_modules=[model.language_model]"),
        "holds the layers that stages are cut of",
        "features.recompute_plan.apply_modules",
        ranks=2,
    ),
    Refusal(
        "quantised weights over stages",
        (*TWO_STAGES, *LORA, "training.lora.quantize=nf4"),
        "pipeline_parallel_size is 2",
        "training.lora.quantize",
        ranks=2,
    ),
    Refusal(
        "further tokens over stages",
        (*TWO_STAGES, "model.mtp_num_layers=1"),
        "the heads need both ends of a model",
        PIPELINE,
        ranks=2,
    ),
)

TENSORS = (
    Refusal("heads that do not divide", (f"{TENSOR}=3",), "does not divide", TENSOR, ranks=3),
    Refusal(
        "adapters on a fused layer that is split",
        (*LORA, "training.lora.target_modules=[qkv]", f"{TENSOR}=2"),
        "cannot cut the adapter",
        "training.lora.target_modules",
        ranks=2,
    ),
    Refusal(
        "magnitudes of split rows",
        (*LORA, "training.lora.use_dora=true", f"{TENSOR}=2"),
        "a rank that has a part",
        "training.lora.use_dora",
        ranks=2,
    ),
    Refusal(
        "half of a pair of split layers",
        (f"{TENSOR}=2", f"{TP}.colwise_parallel=['{BLOCKS}.mlp.gate_proj']"),
        "no layer near it by input features",
        "",
        ranks=2,
    ),
    Refusal(
        "a layer split both ways",
        (
            f"{TENSOR}=2",
            f"{TP}.colwise_parallel=['{BLOCKS}.mlp.up_proj']",
            f"{TP}.rowwise_parallel=['{BLOCKS}.mlp.up_proj']",
        ),
        "is in colwise_parallel and in rowwise_parallel",
        "",
        ranks=2,
    ),
)


SHARDS = (
    Refusal(
        "hooks of what is not wrapped",
        (f"{FSDP}.hook_modules=[model.visual.merger]",),
        "is not wrapped itself",
        f"{FSDP}.hook_modules",
        ranks=2,
    ),
    Refusal(
        "groups that do not divide",
        (f"{FSDP}.reshard_after_forward=3",),
        "do not divide the 2 ranks",
        f"{FSDP}.reshard_after_forward",
        ranks=2,
    ),
)
"""Sharding alone."""
