"""A training step of a tiny language model whose rows are spread over ranks, for the parity tests of context
parallelism. Loss and head are the engine's own; weights are fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from mindspeed_mm.fsdp.distributed.context.apply import ContextParallel
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.tensor.collectives import split_vocabulary
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.features.memory.recompute import recompute_modules
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.ops.attention import register_attention
from mindspeed_mm.fsdp.optimizer.clip_grad import grad_norm
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.fsdp.distributed.training_step import Sample, collate, make_samples
from tests.helpers.parity import StepRecord, record_step

IMAGES = (1, 0, 2, 1)
"""Of the four samples; the first half is the first data rank's."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
VISION_SIZES = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size",
                "spatial_merge_size", "temporal_patch_size")  # fmt: skip
LENGTHS = (3, 19, 11, 16)
"""Of the four texts."""
MARKERS = ("image", "video", "vision_start", "vision_end")


def no_fault(_: ContextParallel) -> AbstractContextManager[Any]:
    return nullcontext()


CLASSES: dict[str, Any] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "gemma2": Gemma2ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
}
TEXT_SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "sliding_window": 4, "pad_token_id": 0,
}  # fmt: skip


def load(folder: str, attention: str | None = None) -> nn.Module:
    """The model; `attention` is the name of an implementation, by default this package's."""
    config = AutoConfig.from_pretrained(folder)
    name = attention or register_attention()
    if config.model_type == "gemma2":
        name = "eager"  # nothing else has a softcap
    model = CLASSES[config.model_type].from_pretrained(folder, dtype=torch.float64, attn_implementation=name).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no fp64
    if name == register_attention():
        apply_packed_rows(model)  # as training does: towers are not told the text's borders
    return model


def make_tiny_softcap(folder: Path) -> Path:
    """A Gemma 2 with a softcap that bends, a window of four tokens in its first layer, none in its second."""
    config = Gemma2Config(**TEXT_SIZES, attn_logit_softcapping=0.5, query_pre_attn_scalar=16)
    return save(Gemma2ForCausalLM(config), folder)


def make_tiny_sinks(folder: Path) -> Path:
    """A gpt-oss with sinks, a window of four tokens in its first layer, none in its second, and four experts."""
    config = GptOssConfig(**TEXT_SIZES, num_local_experts=4, num_experts_per_tok=2, eos_token_id=1)
    return save(GptOssForCausalLM(config), folder)


def save(model: Any, folder: Path) -> Path:
    """In fp64, with weights large enough for scores to matter."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.double().save_pretrained(folder)
    return folder


def make_tiny_windows(folder: Path, other: Path) -> Path:
    """A Qwen2.5-VL whose tower attends in windows of 4 × 4 patches and, in its second block, to whole images.

    Args:
        folder: Where to write.
        other: A tiny Qwen3-VL, whose sizes and token ids it takes.
    """
    like = AutoConfig.from_pretrained(other)
    text = {key: getattr(like.text_config, key) for key in SIZES}
    vision = {key: getattr(like.vision_config, key) for key in VISION_SIZES}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config={**vision, "window_size": 4 * like.vision_config.patch_size, "fullatt_block_indexes": [1]},
        tie_word_embeddings=True,
        **{f"{name}_token_id": getattr(like, f"{name}_token_id") for name in MARKERS},
    )
    torch.manual_seed(2)
    Qwen2_5_VLForConditionalGeneration(config).double().save_pretrained(folder)
    return folder


def make_batches(config: Any, packed: bool, data_size: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """One batch a data rank: two padded rows, or one packed one; always the same four samples."""
    samples = make_samples(config, IMAGES) if hasattr(config, "vision_config") else make_texts(lengths)
    each = len(samples) // data_size
    parts = [samples[rank * each : (rank + 1) * each] for rank in range(data_size)]
    return [pack(part, config) if packed else collate_any(part, config) for part in parts]


def make_texts(lengths: Sequence[int]) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for length in lengths:
        ids = torch.randint(10, 300, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) > 0.4, ids, -100)
        shifted = torch.cat([labels[1:], torch.tensor([-100])])
        empty = torch.zeros(0, 3, dtype=torch.long)
        samples.append({"ids": ids, "shift_labels": shifted, "grids": empty})
    return samples


def collate_any(samples: Sequence[Sample], config: Any) -> dict[str, Any]:
    if hasattr(config, "vision_config"):
        return collate(samples, config)
    length = max(len(sample["ids"]) for sample in samples)
    rows = {key: torch.full((len(samples), length), fill) for key, fill in (("ids", 0), ("shift_labels", -100))}
    weights = torch.zeros(len(samples), length)
    mask = torch.zeros(len(samples), length, dtype=torch.long)
    for row, sample in enumerate(samples):
        for key, whole in rows.items():
            whole[row, : len(sample["ids"])] = sample[key]
        mask[row, : len(sample["ids"])] = 1
        weights[row, : len(sample["ids"])] = weights_of(len(sample["ids"]))
    batch = {"input_ids": rows["ids"], "shift_labels": rows["shift_labels"], "attention_mask": mask}
    return batch | {"loss_weights": weights}


def weights_of(length: int) -> torch.Tensor:
    """(length,): tokens count differently."""
    return (torch.arange(length) % 4 + 1) / 4


def pack(samples: Sequence[Sample], config: Any) -> dict[str, Any]:
    """One row of documents, whose tokens count differently."""
    lengths = [len(sample["ids"]) for sample in samples]
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    row: dict[str, Any] = {
        "input_ids": torch.cat([sample["ids"] for sample in samples])[None],
        "shift_labels": torch.cat([sample["shift_labels"] for sample in samples])[None],
        "loss_weights": torch.cat([weights_of(length) for length in lengths])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    if hasattr(config, "vision_config"):
        # Any positions do, as long as all plans use the same: text, time, height and width are told apart.
        axes = torch.tensor([1, 1, 2, 3])[:, None, None]
        row["position_ids"] = row["position_ids"][None] * axes
        row["pixel_values"] = torch.cat([sample["patches"] for sample in samples])
        row["image_grid_thw"] = torch.cat([sample["grids"] for sample in samples])
    return row


def plain_step(
    folder: str,
    packed: bool,
    *,
    per_sample: bool = False,
    lengths: Sequence[int] = LENGTHS,
    attention: str | None = None,
) -> StepRecord:
    """One process, nothing spread."""
    model = load(folder, attention)
    objective = TokenCrossEntropy(model, HeadLoss(model.lm_head), share="sample" if per_sample else "token")
    batches = [objective.prepare(batch) for batch in make_batches(model.config, packed, 2, lengths)]
    divisor = objective.count(batches)["loss"]
    with keeping_double():
        loss = torch.stack([objective.terms(model, batch)["loss"] for batch in batches]).sum() / divisor
        loss.backward()
    return record_step(model, loss.detach(), grad_norm(model.parameters()))


def spread_step(
    folder: str,
    packed: bool,
    parallel: dict[str, Any],
    *,
    per_sample: bool = False,
    recompute: bool = False,
    split_towers: bool = False,
    lengths: Sequence[int] = LENGTHS,
    fault: Callable[[ContextParallel], AbstractContextManager[Any]] = no_fault,
) -> StepRecord:
    """The same over this process group, sharded over data and context ranks."""
    model = load(folder)
    arguments = ParallelArguments.model_validate(parallel)
    state = init_parallel_state(resolve_parallel_sizes(arguments, dist.get_world_size()), "cpu")
    spec = resolve_spec(model)
    head = HeadLoss(model.get_submodule(spec.head))
    towers = {tower.module for tower in spec.towers} if split_towers else set()
    applier = ParallelApplier(arguments, shard_modules=spec.shard_modules, tie_groups=spec.tie_groups, towers=towers)
    applier.pre_fully_shard_apply(model)
    head.vocabulary = split_vocabulary(model)
    objective = TokenCrossEntropy(model, head, share="sample" if per_sample else "token")
    context = applier.context
    assert context is not None
    if recompute:
        recompute_modules(model, spec.blocks)
    applier.fully_shard_apply(model)
    prepared = [objective.prepare(batch) for batch in make_batches(model.config, packed, 2, lengths)]
    divisor = objective.count(prepared)["loss"]
    losses = torch.zeros((), dtype=torch.float64)
    with fault(context), keeping_double():
        for batch in prepared[state.data_rank :: state.data_size]:
            loss = objective.terms(model, context.split(batch))["loss"] / divisor
            loss.backward()
            losses += loss.detach()
    dist.all_reduce(losses, group=state.axis_group("dp"))
    record = record_step(model, context.sum_losses(losses), grad_norm(model.parameters()))
    destroy_parallel_state()
    return record
