"""Rules between keys of what is trained: added tokens, heads for further tokens, adapters."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import (
    FeatureArguments,
    ModelArguments,
    ParallelArguments,
    PosttrainArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.lora_args import LoraArguments


def token_problems(model: ModelArguments, posttrain: PosttrainArguments) -> Iterator[Problem]:
    """What does not go with added tokens; nothing where none are added."""
    rollout = posttrain.rollout
    twice = sorted(set(model.add_tokens) & set(model.add_special_tokens))
    if twice:
        yield Problem(
            f"'{twice[0]}' is also listed in model.add_tokens",
            key="model.add_special_tokens",
            way_out="List it under one of the keys.",
        )
    if not (model.add_tokens or model.add_special_tokens):
        return
    added = "model.add_tokens" if model.add_tokens else "model.add_special_tokens"
    if posttrain.method and rollout.base_url:
        yield Problem(
            f"cannot be combined with {added}: the server's model has no rows for new tokens",
            key="posttrain.rollout.base_url",
            way_out="Train the tokens first, export the run, and start both from the exported folder.",
        )
    if model.mtp_num_layers:
        yield Problem(
            f"cannot be combined with {added}: the heads for further tokens have the folder's number of rows",
            key="model.mtp_num_layers",
            way_out="Set it to 0.",
        )


# --- heads for further tokens -----------------------------------------------------------------------------------------

_MTP = "model.mtp_num_layers"


def multi_token_problems(
    model: ModelArguments, parallel: ParallelArguments, training: TrainingArguments, features: FeatureArguments
) -> Iterator[Problem]:
    """What does not go with heads for further tokens; nothing where there are none."""
    depths = model.mtp_num_layers
    if not depths:
        return
    reasons = {
        "parallel.pipeline_parallel_size": (parallel.pipeline_parallel_size > 1, "the heads need both ends of a model"),
        "parallel.tensor_parallel_size": (parallel.tensor_parallel_size > 1, "the heads' layers have no plan for it"),
        "parallel.ring_attention_size": (parallel.ring_attention_size > 1, "the next token may be another rank's"),
        "parallel.ulysses_parallel_size": (parallel.ulysses_parallel_size > 1, "the next token may be another rank's"),
        "training.lora.enable": (training.lora.enable, "the heads are trained whole"),
        "features.loss_cfg.loss_type": (
            features.loss_cfg.loss_type == "raw", "the model's own loss does not include them"
        ),
    }  # fmt: skip
    for key, (is_set, reason) in reasons.items():
        if is_set:
            way_out = f"Leave it out, or set {_MTP} to 0."
            yield Problem(f"cannot be combined with {_MTP}, {depths}: {reason}", key=key, way_out=way_out)


# --- adapters ---------------------------------------------------------------------------------------------------------

_LORA = "training.lora"


def lora_problems(parallel: ParallelArguments, training: TrainingArguments) -> Iterator[Problem]:
    """What adapters cannot do as the configuration stands."""
    if training.lora.enable:
        yield from _of_the_base(training.lora)
        yield from _of_the_plan(parallel, training)


def _of_the_base(lora: LoraArguments) -> Iterator[Problem]:
    start = lora.init_lora_weights
    moves = isinstance(start, str) and start.startswith(("pissa", "olora", "corda"))
    if lora.quantize and moves:
        yield Problem(
            f"'{start}' takes its values from the base weights, which training.lora.quantize has rounded",
            key=f"{_LORA}.init_lora_weights",
            way_out="Use loftq, which compensates for the rounding, or leave training.lora.quantize out.",
        )
    if lora.quantize and lora.use_dora:
        yield Problem(
            "true, but DoRA needs the norms of the base weights in each step, and training.lora.quantize stores them "
            "in few bits",
            key=f"{_LORA}.use_dora",
            way_out="Keep one of them.",
        )
    if start == "loftq" and not lora.quantize:
        yield Problem(
            "'loftq' compensates for quantisation, but nothing is quantised",
            key=f"{_LORA}.init_lora_weights",
            way_out="Set training.lora.quantize: nf4.",
        )
    if lora.pretrained_lora_path and start not in (True, False):
        yield Problem(
            f"{start!r}, but training.lora.pretrained_lora_path already gives the adapters' first values",
            key=f"{_LORA}.init_lora_weights",
            way_out="Keep one of them.",
        )


def _of_the_plan(parallel: ParallelArguments, training: TrainingArguments) -> Iterator[Problem]:
    lora = training.lora
    size = parallel.tensor_parallel_size
    if size > 1 and lora.use_dora:
        yield Problem(
            f"true, but tensor_parallel_size is {size}: a rank that has a part of a row cannot measure it",
            key=f"{_LORA}.use_dora",
            way_out="Set parallel.tensor_parallel_size: 1; sharding alone does it.",
        )
    for key, count in (("tensor", size), ("pipeline", parallel.pipeline_parallel_size)):
        if count > 1 and lora.quantize:
            yield Problem(
                f"'{lora.quantize}', but {key}_parallel_size is {count}: quantised weights can only be sharded",
                key=f"{_LORA}.quantize",
                way_out=f"Set parallel.{key}_parallel_size: 1.",
            )
        if count > 1 and lora.init_lora_weights in ("eva", "corda"):
            yield Problem(
                f"'{lora.init_lora_weights}' reads the inputs of layers, but {key}_parallel_size is {count}",
                key=f"{_LORA}.init_lora_weights",
                way_out=f"Set parallel.{key}_parallel_size: 1, or choose another initialisation.",
            )
