"""Refusals of sequences, samples, towers and experts spread over ranks, and of layers split."""

from __future__ import annotations

from tests.fsdp.refusals_of_plans import (
    BLOCKS,
    ENCODER,
    EP,
    EXPERT,
    FSDP,
    PIPELINE,
    PP,
    RING,
    TENSOR,
    TP,
    TWO_STAGES,
    ULYSSES,
)
from tests.helpers.refusal import DATA, Refusal, with_config

TWO_EXPERTS = f"{EXPERT}=2"
SEQUENCE = f"{TP}.sequence_parallel"

SEQUENCES = (
    Refusal(
        "a model's own loss of a part",
        (f"{RING}=2", "features.loss_cfg.loss_type=raw"),
        "needs the whole sequence on every rank",
        "features.loss_cfg.loss_type",
        ranks=2,
    ),
    Refusal(
        "attention with dropout in rings",
        (f"{RING}=2",),
        "it would be drawn differently on each rank",
        RING,
        spoil=with_config(attention_dropout=0.1),
        ranks=2,
        base="text",
    ),
    Refusal(
        "attention with dropout over heads",
        (f"{ULYSSES}=2",),
        "it would be drawn differently on each rank",
        ULYSSES,
        spoil=with_config(attention_dropout=0.1),
        ranks=2,
        base="text",
    ),
    Refusal(
        "stages of spread samples",
        (f"{RING}=2", *TWO_STAGES),
        "several are under way at a time",
        PIPELINE,
        ranks=4,
        base="flux",
    ),
    Refusal(
        "fewer tokens than ranks",
        (f"{RING}=32",),
        "a sample of 16 tokens (image) cannot be spread over 32 ranks",
        RING,
        DATA,
        ranks=32,
        base="flux",
    ),
)

TOWERS = (
    Refusal("towers of a text model", (f"{ENCODER}.balance=true",), "there is no tower", ENCODER, ranks=2, base="text"),
    Refusal("towers of a generator", (f"{ENCODER}.balance=true",), "there is no tower", ENCODER, ranks=2, base="flux"),
    Refusal(
        "a whole tower that nothing sums",
        (f"{ENCODER}.tensor_parallel_size=1", f"{TENSOR}=2", f"{FSDP}.ignored_modules=[model.visual]"),
        "nothing would sum the tower's gradients",
        f"{ENCODER}.tensor_parallel_size",
        ranks=2,
    ),
)

EXPERTS = (
    Refusal("experts of a dense model", (TWO_EXPERTS,), "has no experts in fused parameters", EXPERT, ranks=2),
    Refusal(
        "experts that ranks do not divide",
        (f"{EXPERT}=3",),
        "does not divide the 8 experts",
        EXPERT,
        ranks=3,
        base="moe",
    ),
    Refusal(
        "experts of a pattern of nothing",
        (TWO_EXPERTS, f"{EP}.apply_modules=[none]"),
        "matches no module",
        f"{EP}.apply_modules",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "experts that are attention",
        (TWO_EXPERTS, f"{EP}.apply_modules=['model.layers.{{*}}.self_attn']"),
        "holds no fused experts of its own",
        f"{EP}.apply_modules",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "some experts sharded",
        (TWO_EXPERTS, f"{EP}.apply_efsdp_modules=['model.layers.0.mlp.experts']"),
        "is in only one of apply_modules and apply_efsdp_modules",
        f"{EP}.apply_efsdp_modules",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "a dispatcher of another device",
        (TWO_EXPERTS, f"{EP}.dispatcher=deepep"),
        "needs CUDA devices",
        f"{EP}.dispatcher",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "balance of one rank",
        ("features.enable_ep_balance=true",),
        "all ranks hold all experts",
        "features.enable_ep_balance",
        base="moe",
    ),
    Refusal(
        "balance by a dispatcher that cannot",
        (TWO_EXPERTS, f"{EP}.dispatcher=allgather", "features.enable_ep_balance=true"),
        "true, which 'allgather' cannot do",
        "features.enable_ep_balance",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "experts outside of what is wrapped",
        (TWO_EXPERTS, f"{FSDP}.apply_modules=['model.layers.{{*}}.self_attn']"),
        "lies in no module that fsdp_plan.apply_modules wraps",
        f"{FSDP}.apply_modules",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "experts sharded over more ranks than are left",
        (TWO_EXPERTS, "parallel.expert_fully_shard_parallel_size=3"),
        "does not divide the 2 ranks left",
        "parallel.expert_fully_shard_parallel_size",
        ranks=2,
        base="moe",
    ),
)

LAYERS = (
    Refusal(
        "a norm split",
        (f"{TENSOR}=2", f"{TP}.colwise_parallel=['{BLOCKS}.input_layernorm']"),
        "not a linear layer",
        ranks=2,
    ),
    Refusal(
        "nothing split",
        (f"{TENSOR}=2", f"{TP}.colwise_parallel=[none]"),
        "matches no module",
        f"{TP}.colwise_parallel",
        ranks=2,
    ),
    Refusal(
        "a split layer on a slice of the sequence",
        (f"{TENSOR}=2", f"{SEQUENCE}=['{BLOCKS}.mlp.up_proj']"),
        "cannot run on a slice of the sequence",
        "",
        ranks=2,
    ),
    Refusal(
        "a router on a slice of the sequence",
        (
            f"{TENSOR}=2",
            f"{SEQUENCE}=['model.layers.{{*}}.input_layernorm','model.layers.{{*}}.post_attention_layernorm']",
        ),
        "the router's statistics from one rank's tokens",
        SEQUENCE,
        ranks=2,
        base="moe",
    ),
    Refusal(
        "two streams on slices",
        (f"{TENSOR}=2", f"{SEQUENCE}=['transformer_blocks.{{*}}']"),
        "text and image go through the blocks",
        SEQUENCE,
        ranks=2,
        base="flux",
    ),
    Refusal(
        "half of the norms on slices",
        (f"{TENSOR}=2", f"{SEQUENCE}=['{BLOCKS}.input_layernorm']"),
        "runs on a slice of the sequence too",
        "",
        ranks=2,
    ),
    Refusal(
        "a generator's heads that do not divide",
        (f"{TENSOR}=3",),
        "does not divide the 2 heads",
        TENSOR,
        ranks=3,
        base="flux",
    ),
    Refusal(
        "three chunks of a schedule of two",
        (*TWO_STAGES, f"{PP}.schedule=zbv", f"{PP}.virtual_stages=3"),
        "the schedule zbv has 2 chunks on a rank",
        f"{PP}.virtual_stages",
        ranks=2,
    ),
    Refusal(
        "stages in another order than the layers",
        (
            f"{PIPELINE}=3",
            "training.gradient_accumulation_steps=3",
            f"{PP}.split_points=[model.language_model.layers.1,model.language_model.layers.0]",
        ),
        "are not one behind the other",
        f"{PP}.split_points",
        ranks=3,
    ),
)
