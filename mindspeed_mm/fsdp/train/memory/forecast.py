"""What a configuration would hold on one rank: the model is put together as for training and its step is simulated.

Nothing is loaded, nothing runs on a device, and no process group is needed: any number of ranks can be asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.features.apply_features import OFFLOAD_MODULES, FeaturesApplier
from mindspeed_mm.fsdp.features.memory.selection import select_modules
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.flow_matching import FlowMatching
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.modelhub import LoadReport
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.tools.memory_model.prediction import MemoryPrediction, predict_memory
from mindspeed_mm.fsdp.train.assemble import Assembled, build_model, is_generator, packs_rows
from mindspeed_mm.fsdp.train.step.objective import build_language_objective
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype

_TEXT_WIDTH = 4096
"""Width of the text features of both families, where the folder does not say."""
_IMAGE_TOKENS = 257
"""Tokens of CLIP's vision encoder, through which i2v models see their first frame."""


def forecast(
    arguments: Arguments, batch: Batch, world_size: int = 1, device_type: str | None = None
) -> MemoryPrediction:
    """The memory of a training step, from the second one on.

    Args:
        arguments: The configuration.
        batch: One micro-batch, as collated or as prepared by the objective.
        world_size: Ranks.
        device_type: Of the ranks; None: of this machine.

    Raises:
        ConfigError: The model cannot be built, or the sizes do not fit.
    """
    sizes = resolve_parallel_sizes(arguments.parallel, world_size)
    assembled = _assembled(_as_simulated(arguments))
    model = assembled.model
    objective = _objective(assembled, arguments)
    is_prepared = any(key.startswith("_") for key in batch)
    notes = []
    if "pixels" in batch and not is_prepared:
        batch = features_of(batch, assembled.adapter)
        notes = ["the encoders of raw media, which stay loaded beside the model"]
    prediction = predict_memory(
        arguments,
        model,
        assembled.spec,
        batch if is_prepared else objective.prepare(batch),
        partial(_loss, objective),
        sizes,
        device_type=device_type or get_device_type(),
        casts_inputs=not is_generator(model),
        offloaded=_offloaded(assembled, arguments),
    )
    return replace(prediction, approximations=(*prediction.approximations, *notes))


def features_of(batch: Batch, adapter: Any) -> Batch:
    """What encoders would make of raw media, in shape: latents, features of the caption and of the condition."""
    rows, _, *sides = batch["pixels"].shape
    latents = torch.zeros(rows, *adapter.geometry.latent_shape(MediaSize(*sides)))
    config = adapter.transformer_config
    width = config.get("joint_attention_dim") or config.get("text_dim") or _TEXT_WIDTH
    made: Batch = {"latents": latents, "prompt_embeds": torch.zeros(rows, adapter.text_tokens, width)}
    if "joint_attention_dim" in config:
        made["pooled_prompt_embeds"] = torch.zeros(rows, config.get("pooled_projection_dim", 768))
    if adapter.task == "i2v":
        made["condition_latents"] = torch.zeros_like(latents)
        if config.get("image_dim"):
            made["image_embeds"] = torch.zeros(rows, _IMAGE_TOKENS, config["image_dim"])
    kept = {key: value for key, value in batch.items() if key not in ("pixels", "captions")}
    return kept | made


def _as_simulated(arguments: Arguments) -> Arguments:
    """Graphs are left out: they hold about what single operations hold, and compiling takes longer than anything.
    Offloading is simulated: it copies what is there."""
    update = {"compile": False, "enable_activation_offload": False}
    return arguments.model_copy(update={"features": arguments.features.model_copy(update=update)})


def _offloaded(assembled: Assembled, arguments: Arguments) -> list[str]:
    features = arguments.features
    if not features.enable_activation_offload:
        return []
    patterns = features.activation_offload_plan.apply_modules
    return select_modules(assembled.model, patterns, assembled.spec.blocks, OFFLOAD_MODULES)


def _assembled(arguments: Arguments) -> Assembled:
    """The steps of `assemble` that stand before sharding, on one rank."""
    model = build_model(arguments)
    if packs_rows(arguments):
        apply_packed_rows(model, attention=arguments.model.attn_implementation)
    spec = resolve_spec(model)
    head = build_head_loss(model, spec.head, arguments.features)
    towers = {tower.module for tower in spec.towers}
    features = FeaturesApplier(arguments.features, spec.blocks, model_args=arguments.model, towers=towers)
    features.pre_fully_shard_apply(model)
    model.train()
    return Assembled(model, spec, head, None, LoadReport())


def _objective(assembled: Assembled, arguments: Arguments) -> Objective:
    if is_generator(assembled.model):
        dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype) or torch.float32
        diffusion = arguments.training.diffusion.model_copy(update={"caption_dropout": 0.0})
        adapter: Any = assembled.adapter
        return FlowMatching(adapter, diffusion, seed=arguments.training.seed, compute_dtype=dtype)
    alone: Any = SimpleNamespace(token_groups=_no_groups)
    return build_language_objective(arguments, assembled, alone)


def _no_groups() -> Sequence[Any]:
    """Statistics of routers are summed over no ranks."""
    return ()


def _loss(objective: Objective, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return torch.stack(list(objective.terms(model, batch).values())).sum()
