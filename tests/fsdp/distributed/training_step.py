"""A plain training step on a tiny Qwen3-VL, cut in any way over ranks and micro-batches, for the parity tests.

Eight samples of different length with uneven label masks and zero to two images each; weights are fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState, destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import set_gradient_sync
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.distributed.towers.idle import IdlePlan, IdleTowers
from mindspeed_mm.fsdp.optimizer.clip_grad import clip_grads_, grad_norm
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.helpers.parity import StepRecord, record_step, record_weights
from tests.helpers.tiny_models import MERGE_SIZE, PATCH_SIZE

IGNORED_LABEL = -100
MAX_NORM = 0.5
SAMPLES = 8
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
IMAGES = (1, 0, 2, 0, 0, 1, 0, 0)
TIE_GROUPS = [["model.language_model.embed_tokens", "lm_head"]]

Sample = dict[str, torch.Tensor]


class ImageTower:
    """The image modality of Qwen3-VL, as a model's description states it."""

    name = "image"
    module = "model.visual"
    key = "pixel_values"
    decoder = "model.language_model"
    embedding = ""

    def run_idle(self, model: nn.Module) -> Sequence[torch.Tensor]:
        pixels = torch.zeros(MERGE_SIZE**2, 3 * 2 * PATCH_SIZE**2)
        output = model.model.get_image_features(pixels, torch.tensor([[1, MERGE_SIZE, MERGE_SIZE]]), return_dict=True)
        return [*output.pooler_output, *(tensor for level in output.deepstack_features for tensor in level)]


def load(folder: str | Path) -> Qwen3VLForConditionalGeneration:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    return model.train()


def shard_modules(model: nn.Module) -> list[str]:
    """Blocks, the tower around its blocks, and the decoder's layers."""
    vision = [f"model.visual.blocks.{i}" for i in range(len(model.model.visual.blocks))]
    layers = [f"model.language_model.layers.{i}" for i in range(len(model.model.language_model.layers))]
    return [*vision, "model.visual", *layers]


def make_samples(config: Any, images: Sequence[int] = IMAGES) -> list[Sample]:
    """Samples of 5 to 19 text tokens and some images of 4 × 4 and 4 × 8 patches."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number, count in enumerate(images):
        length = 5 + 2 * number
        text = torch.randint(10, 300, (length,), generator=generator)
        grids = torch.tensor([[1, 4, 4 + 4 * (i % 2)] for i in range(count)], dtype=torch.long).reshape(count, 3)
        tokens = [
            torch.tensor(
                [
                    config.vision_start_token_id,
                    *[config.image_token_id] * (int(grid.prod()) // MERGE_SIZE**2),
                    config.vision_end_token_id,
                ]
            )
            for grid in grids
        ]
        ids = torch.cat([*tokens, text])
        trained = torch.zeros(len(ids), dtype=torch.bool)
        # Between one and all of the text tokens, so that no two samples weigh the same.
        trained[-min(length, 1 + (5 * number) % 7) :] = True
        shifted = torch.cat([torch.where(trained, ids, IGNORED_LABEL)[1:], torch.tensor([IGNORED_LABEL])])
        patches = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * PATCH_SIZE**2, generator=generator)
        samples.append({"ids": ids, "shift_labels": shifted, "grids": grids, "patches": patches.double()})
    return samples


def collate(samples: Sequence[Sample], config: Any) -> dict[str, torch.Tensor]:
    """Right-padded rows; no image keys when no sample has an image."""
    length = max(len(sample["ids"]) for sample in samples)

    def padded(key: str, fill: int) -> torch.Tensor:
        return torch.stack([F.pad(s[key], (0, length - len(s[key])), value=fill) for s in samples])

    ids = padded("ids", 0)
    lengths = torch.tensor([len(sample["ids"]) for sample in samples])
    batch = {
        "input_ids": ids,
        "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
        "shift_labels": padded("shift_labels", IGNORED_LABEL),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    if any(len(sample["grids"]) for sample in samples):
        batch["pixel_values"] = torch.cat([sample["patches"] for sample in samples])
        batch["image_grid_thw"] = torch.cat([sample["grids"] for sample in samples])
    return batch


def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["shift_labels"].flatten()
    logits = model(**{key: value for key, value in batch.items() if key != "shift_labels"}).logits
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED_LABEL, reduction="sum")


def label_tokens(samples: Sequence[Sample]) -> int:
    return sum(int((sample["shift_labels"] != IGNORED_LABEL).sum()) for sample in samples)


def parallelize(
    model: nn.Module, parallel: dict[str, Any], tie_groups: Sequence[Sequence[str]] = TIE_GROUPS
) -> ParallelState:
    """Apply a `parallel` section to a model in this process group."""
    arguments = ParallelArguments.model_validate(parallel)
    state = init_parallel_state(resolve_parallel_sizes(arguments, dist.get_world_size()), "cpu")
    ParallelApplier(arguments, shard_modules=shard_modules(model), tie_groups=tie_groups)(model)
    return state


@dataclass(frozen=True)
class Variant:
    """How `train_steps` goes about a step; the planted faults replace one entry each."""

    prepare: Callable[[nn.Module], None] = lambda model: None
    """Before sharding: freezing."""
    after_sharding: Callable[[nn.Module], None] = lambda model: None
    set_sync: Callable[[nn.Module, int, int], None] = lambda model, index, last: set_gradient_sync(model, index == last)
    divisor: Callable[[int, int], float] = lambda everywhere, here: everywhere
    """Of the label tokens on all ranks and on this one."""
    norm: Callable[[Iterable[nn.Parameter]], torch.Tensor] = grad_norm
    idle_towers: bool = True


def train_steps(
    folder: str,
    parallel: dict[str, Any],
    accumulation: int = 1,
    *,
    images: Sequence[int] = IMAGES,
    steps: int = 1,
    variant: Variant = Variant(),
) -> list[StepRecord]:
    """AdamW steps on the same eight samples, spread over this process group and over micro-batches."""
    model = load(folder)
    variant.prepare(model)
    towers = IdleTowers(model, IdlePlan((ImageTower(),)))
    towers.set_active(["image"] if any(images) and variant.idle_towers else [])
    state = parallelize(model, parallel)
    variant.after_sharding(model)
    samples = make_samples(model.config, images)
    mine = share(samples, state.data_rank, state.data_size)
    divisor = variant.divisor(label_tokens(samples), label_tokens(mine))
    micro_batches = [collate(share(mine, i, accumulation), model.config) for i in range(accumulation)]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    records = []
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(micro_batches):
            variant.set_sync(model, index, accumulation - 1)
            part = summed_loss(model, batch) / divisor
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss, group=state.axis_group("dp"))
        norm = variant.norm(model.parameters())
        record = record_step(model, loss, norm)
        clip_grads_(model.parameters(), norm, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        records.append({**record, "weights": record_weights(model)})
    destroy_parallel_state()
    return records


def reference_steps(
    folder: str,
    micro_batches: int = SAMPLES,
    *,
    images: Sequence[int] = IMAGES,
    steps: int = 1,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> list[StepRecord]:
    """The same steps with nothing of this package: one process, plain tensors, torch's own clipping."""
    model = load(folder)
    prepare(model)
    samples = make_samples(model.config, images)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    records = []
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for index in range(micro_batches):
            batch = collate(share(samples, index, micro_batches), model.config)
            part = summed_loss(model, batch) / label_tokens(samples)
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        record = record_step(model, loss, norm)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        records.append({**record, "weights": record_weights(model)})
    return records


def share(samples: Sequence[Sample], part: int, parts: int) -> Sequence[Sample]:
    size = len(samples) // parts
    return samples[part * size : (part + 1) * size]
