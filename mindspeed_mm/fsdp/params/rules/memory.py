"""What must hold between the keys of recomputation and of slices of a micro-batch, and all others."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments

REENTRANT = "features.recompute_plan.use_reentrant"
SLICES = "features.enable_chunk_mbs"
WEIGHTS = "features.enable_weight_offload"
SKIPS = ("skip_flash_attn_recompute", "skip_gdn_recompute", "skip_kda_recompute")


def memory_problems(arguments: Arguments) -> Iterator[Problem]:
    """What breaks a configuration that trades time for memory; nothing where it does not."""
    if arguments.features.recompute:
        yield from _results_can_be_kept(arguments)
    if arguments.features.enable_chunk_mbs:
        yield from _rows_can_be_sliced(arguments)
    if arguments.features.enable_weight_offload:
        yield from _weights_can_wait(arguments)


def memory_notes(arguments: Arguments) -> Iterator[Problem]:
    """What is accepted and changes nothing."""
    features, rows = arguments.features, arguments.training.micro_batch_size
    if features.enable_chunk_mbs and features.chunkmbs_plan.chunk_mbs >= rows and not _is_filled_up(arguments):
        yield Problem(
            f"{features.chunkmbs_plan.chunk_mbs} rows are a whole micro-batch (training.micro_batch_size is {rows}): "
            "nothing is sliced",
            key="features.chunkmbs_plan.chunk_mbs",
            way_out="Lower it to save memory, or set features.enable_chunk_mbs to false.",
        )


def _is_filled_up(arguments: Arguments) -> bool:
    """Whether a micro-batch has as many rows as fit."""
    loader = arguments.data.dataloader_param
    return loader.dataloader_mode == "variable" or loader.sampler_type == "TokenBudgetSampler"


def _results_can_be_kept(arguments: Arguments) -> Iterator[Problem]:
    """Torch's re-entrant checkpoint runs its first pass without autograd: nothing that it computes can be kept."""
    plan, model = arguments.features.recompute_plan, arguments.model
    skipped = [f"model.{name}" for name in SKIPS if getattr(model, name)]
    asked = ["features.recompute_plan.mode: selective", *skipped] if plan.mode == "selective" else skipped
    if plan.use_reentrant and asked:
        yield Problem(
            f"true, but {asked[0]} keeps results of the forward pass, which a re-entrant one does not have",
            key=REENTRANT,
            way_out="Set it to false.",
        )
    if model.skip_flash_attn_recompute and model.attn_implementation == "eager":
        yield Problem(
            "true, but 'eager' attention has no kernel whose result could be kept",
            key="model.skip_flash_attn_recompute",
            way_out="Leave model.attn_implementation out, or this key.",
        )
    delta_nets = [f"model.{name}" for name in SKIPS[1:] if getattr(model, name)]
    if delta_nets and arguments.features.compile is True:
        yield Problem(
            "true, but features.compile compiles a block into one graph, from which no layer can be left out",
            key=delta_nets[0],
            way_out="Set one of them to false.",
        )


def _rows_can_be_sliced(arguments: Arguments) -> Iterator[Problem]:
    if getattr(arguments.data.dataset_param.basic_parameters, "packs", False):
        yield Problem(
            "true, but packing makes one row of a micro-batch: there is nothing to slice",
            key=SLICES,
            way_out="Set it to false, or data.dataset_param.basic_parameters.packing.",
        )
    if arguments.parallel.expert_parallel_size > 1 and _is_filled_up(arguments):
        yield Problem(
            "true, but micro-batches that are filled up give ranks different numbers of rows, and so of slices, in "
            "each of which they exchange tokens of experts",
            key=SLICES,
            way_out="Set it to false, or choose another data.dataloader_param.sampler_type.",
        )
    if arguments.features.skip_moe_pad_tokens:
        yield Problem(
            "true, but features.skip_moe_pad_tokens finds padding by the mask of the whole micro-batch",
            key=SLICES,
            way_out="Set one of them to false.",
        )


def _weights_can_wait(arguments: Arguments) -> Iterator[Problem]:
    """Weights travel whole, from this process's host memory."""
    parallel = arguments.parallel
    others = {
        "parallel.tensor_parallel_size": (parallel.tensor_parallel_size > 1, "splits the weights", "1"),
        "parallel.expert_parallel_size": (parallel.expert_parallel_size > 1, "spreads the weights of experts", "1"),
        "parallel.pipeline_parallel_size": (parallel.pipeline_parallel_size > 1, "runs blocks in another order", "1"),
        "parallel.fsdp_plan.cpu_offload": (parallel.fsdp_plan.cpu_offload, "keeps all weights on the host", "false"),
    }
    for key, (is_set, what, value) in others.items():
        if is_set:
            yield Problem(f"true, but {key} {what}", key=WEIGHTS, way_out=f"Set it to false, or {key} to {value}.")
    if arguments.features.compile is True and arguments.features.recompute_plan.mode == "selective":
        yield Problem(
            "true, but what brings the weights would be compiled with blocks that keep results of single operations",
            key=WEIGHTS,
            way_out="Set features.recompute_plan.mode: full, or features.compile: false.",
        )
