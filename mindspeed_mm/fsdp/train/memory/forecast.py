"""What a configuration would hold on one rank: the model is put together as for training and its step is simulated; the
frozen reference of post-training is added to it.

Nothing is loaded, nothing runs on a device, and no process group is needed: any number of ranks can be asked about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.garbage import passed_over_by_collection
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.model_kinds import UNIFIED
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.loss.build_head_loss import apply_head_loss
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED, REJECTED_LATENTS, SOUND
from mindspeed_mm.fsdp.models.diffusion.picture_vae import outline_vae, posterior_of
from mindspeed_mm.fsdp.models.forward_arguments import refusals_explained
from mindspeed_mm.fsdp.models.loading.construction import set_dtypes
from mindspeed_mm.fsdp.params.argument import (
    Arguments,
    DataArguments,
    ModelArguments,
    ParallelArguments,
    PosttrainArguments,
)
from mindspeed_mm.fsdp.params.rules.distillation import trains_critic
from mindspeed_mm.fsdp.params.rules.posttrain import has_moving_reference, reference_kind
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes, resolve_parallel_sizes
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import Outline, build_outline
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.tools.memory_model.ledger import MemoryLedger
from mindspeed_mm.fsdp.tools.memory_model.prediction import MemoryPrediction, predict_memory
from mindspeed_mm.fsdp.tools.memory_model.simulation import Simulation, watch_modules
from mindspeed_mm.fsdp.tools.memory_model.static_part import HeldUnit, held_units, state_bytes, static_part
from mindspeed_mm.fsdp.train.distillation.critic_start import critic_start, told_of_critic
from mindspeed_mm.fsdp.train.family import family_of
from mindspeed_mm.fsdp.train.reference_start import reference_outline, reference_start
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

_TEXT_WIDTH = 4096
"""Width of the text features of both families, where the folder does not say."""


def forecast(
    arguments: Arguments, batch: Batch, world_size: int = 1, device_type: str | None = None, *, whole: bool = False
) -> MemoryPrediction:
    """The memory of a training step, from the second one on.

    Args:
        arguments: The configuration.
        batch: One micro-batch, as collated or as prepared by the objective.
        world_size: Ranks.
        device_type: Of the ranks; None: of this machine.
        whole: Simulate every block of the model, where otherwise a few of each kind stand for all. The result is the
            same.

    Raises:
        ConfigError: The model cannot be built, or the sizes do not fit.
    """
    outline = build_outline(arguments)
    plan = resolve_plan(outline, arguments, resolve_parallel_sizes(arguments.parallel, world_size))
    return forecast_plan(outline, plan, arguments, batch, device_type, whole=whole)


def forecast_plan(
    outline: Outline,
    plan: ModelPlan,
    arguments: Arguments,
    batch: Batch,
    device_type: str | None = None,
    *,
    whole: bool = False,
) -> MemoryPrediction:
    """As `forecast`, of a model and a plan that are there. The model is of no use afterwards."""
    with passed_over_by_collection():  # a model and what was imported are millions of objects
        return _forecast_by_kinds(outline, plan, arguments, batch, device_type, whole=whole)


def _forecast_by_kinds(
    outline: Outline, plan: ModelPlan, arguments: Arguments, batch: Batch, device_type: str | None, *, whole: bool
) -> MemoryPrediction:
    if not whole:
        try:
            return _forecast(outline, plan, arguments, batch, device_type, whole=False)
        except MMError:
            raise
        except Exception:  # noqa: BLE001 (blocks differ after all; or what else it is shows once more)
            outline = build_outline(arguments)
            plan = resolve_plan(outline, arguments, plan.parallel.sizes)
    return _forecast(outline, plan, arguments, batch, device_type, whole=True)


def _forecast(
    outline: Outline, plan: ModelPlan, arguments: Arguments, batch: Batch, device_type: str | None, *, whole: bool
) -> MemoryPrediction:
    model, device_type = outline.model, device_type or get_device_type()
    head = apply_head_loss(model, plan.head) if plan.head is not None else None
    # Graphs hold about what single operations hold, and compiling takes longer than anything; offloading is simulated.
    applied = replace(plan.features, compiled=(), offloaded=(), waiting=())
    ranks = SimulatedRanks(plan.parallel.sizes.tp)
    FeaturesApplier(
        arguments.features, model_args=arguments.model, plan=applied, tensor_ranks=ranks
    ).pre_fully_shard_apply(model)
    model.train()
    family = family_of(model, arguments, torch.device("meta"))
    objective = family.build_simulated_objective(outline, head, plan)
    # Objectives begin the names of what they prepare with an underscore.
    is_prepared = any(key.startswith("_") for key in batch)
    notes = []
    if outline.adapter is not None and "pixels" in batch and not is_prepared:
        batch = features_of(batch, outline.adapter)
        kind = arguments.model.quantize_encoders
        held = f" in {kind}" if kind else ""
        notes = [f"the encoders of raw media, which stay loaded{held} beside the model"]
    if not is_prepared:
        batch = objective.prepare(batch)
    prediction = predict_memory(
        model,
        plan,
        arguments,
        batch,
        partial(_loss, objective),
        device_type=device_type,
        media=[tower.key for tower in outline.spec.towers],
        whole=whole,
    )
    reference = frozen_reference_bytes(arguments, plan.parallel.sizes)
    critic = critic_bytes(arguments, plan.parallel.sizes, prediction.gradients)
    prediction = with_vae(prediction, arguments.model, arguments.data, arguments.parallel, outline, batch)
    on_host = prediction.on_host
    if is_on_host := arguments.parallel.fsdp_plan.cpu_offload and device_type != "cpu":
        on_host += reference + critic
    return replace(
        prediction,
        reference=0 if is_on_host else reference,
        critic=0 if is_on_host else critic,
        blocks=blocks_bytes(arguments.parallel, arguments.posttrain, outline.adapter, batch),
        resident=prediction.resident + reference + critic,
        on_host=on_host,
        approximations=(*prediction.approximations, *notes),
    )


class SimulatedRanks:
    """Ranks that hold the same tensors, seen from the first one: what is gathered takes memory, and is sent by nobody.

    Args:
        size: How many.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """(n,) → (ranks · n,)."""
        return own.new_empty(self.size * own.numel())


def features_of(batch: Batch, adapter: Any) -> Batch:
    """What encoders would make of raw media, in shape: latents, features of the caption and of the condition."""
    rows, _, *sides = batch["pixels"].shape
    latents = torch.zeros(rows, *adapter.geometry.latent_shape(MediaSize(*sides)))
    config = adapter.transformer_config
    width = _TEXT_WIDTH
    for name in ("joint_attention_dim", "text_dim", "caption_channels", "text_embed_dim", "cap_feat_dim"):
        if isinstance(config.get(name), int):  # of several encoders a list: the family says their shapes
            width = config[name]
            break
    of_sample, given = tuple(latents.shape[1:]), [role.name for role in adapter.media_roles if role.batch_key in batch]
    text_tokens = adapter.text_tokens + adapter.seen_tokens(of_sample, given)
    made: Batch = {"latents": latents, "prompt_embeds": torch.zeros(rows, text_tokens, width)}
    made["prompt_mask"] = torch.ones(rows, text_tokens, dtype=torch.int64)
    shapes = adapter.text_shapes() | adapter.condition_shapes(of_sample, given)
    made |= {key: torch.zeros(rows, *shape) for key, shape in shapes.items()}
    if adapter.sound is not None:
        positions = batch[SOUND.batch_key].shape[-1] // adapter.sound.samples_per_position
        made["audio_latents"] = torch.zeros(rows, *adapter.sound.latent_shape(positions))
    if config.get("joint_attention_dim") or config.get("pooled_projection_dim"):
        made["pooled_prompt_embeds"] = torch.zeros(rows, config.get("pooled_projection_dim", 768))

    if REJECTED.batch_key in batch:
        made[REJECTED_LATENTS] = latents
    encoded = {"captions", SOUND.batch_key, *(key for key in batch if key.startswith("pixels"))}
    kept = {key: value for key, value in batch.items() if key not in encoded}
    return kept | made


def _loss(objective: Objective, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    with refusals_explained(model, batch):
        return torch.stack(list(objective.terms(model, batch).values())).sum()


# --- the frozen VAE ---------------------------------------------------------------------------------------------------


def with_vae(
    prediction: MemoryPrediction,
    model: ModelArguments,
    data: DataArguments,
    parallel: ParallelArguments,
    outline: Outline,
    batch: Batch,
) -> MemoryPrediction:
    """A prediction with the frozen VAE that encodes pictures of rows in front of each step, of models that name one
    (`vae_config`): its weights, and where that is more than the step takes, what encoding the largest picture takes. As
    before, where features are read instead.

    Raises:
        ModelFolderError: The model's folder has no VAE.
    """
    basic = data.dataset_param.basic_parameters
    reads_features = basic.get("features_dir") is not None or "picture_posteriors" in batch
    has_vae = outline.kind is UNIFIED and attribute_at(outline.model, "config.vae_config") is not None
    if not has_vae or reads_features:
        return prediction
    dtype = torch.promote_types(torch_dtype(parallel.fsdp_plan.computed_in), torch.float32)
    vae = outline_vae(Path(str(model.model_name_or_path)))
    held = sum(tensor.numel() * dtype.itemsize for tensor in vae.state_dict().values())
    if "picture_sizes" not in batch:
        notes = (*prediction.approximations, "the encoding of pictures, of which the first batch has none")
        return replace(prediction, vae=held, resident=prediction.resident + held, approximations=notes)
    ledger = encoding(vae, max(batch["picture_sizes"].tolist(), key=math.prod), dtype)
    alive, phase = ledger.alive_at(ledger.peak()), ledger.phase_at(ledger.peak())
    if alive.total() > sum(prediction.at_peak.values()):
        prediction = replace(prediction, at_peak=alive, phase=phase)
    # Pictures are encoded in front of the step: of the two, the larger one counts.
    in_step = prediction.resident - prediction.device_static
    resident = prediction.device_static + held + max(in_step, ledger.resident())
    return replace(prediction, vae=held, resident=resident)


def encoding(vae: object, size: Sequence[int], dtype: torch.dtype) -> MemoryLedger:
    """The books of one picture's way through a VAE, without gradients.

    Args:
        vae: On meta; of no use afterwards.
        size: Height and width in pixels.
        dtype: What it computes in.
    """
    ledger = MemoryLedger()
    simulation = Simulation(ledger)
    simulation.fake_parameters(vae, lambda _, parameter: (parameter.shape, dtype))
    watch_modules(vae, simulation)
    with torch.no_grad(), simulation, simulation.phase("encoding of pictures"):
        posterior_of(vae, simulation.empty((3, *size), dtype))
    return ledger


# --- the frozen reference ---------------------------------------------------------------------------------------------


def frozen_reference_bytes(arguments: Arguments, sizes: ParallelSizes) -> int:
    """Bytes of its shards, and of the units that stay gathered behind its forward pass: there is no backward pass, in
    front of which they would be cut again. 0 where there is no such reference.

    Raises:
        ConfigError: It cannot be built.
    """
    if reference_kind(arguments) != "frozen" or has_moving_reference(arguments.posttrain):
        return 0
    outline = reference_outline(arguments)
    outline.model.requires_grad_(False)
    # What is never trained is kept in the type that it computes in.
    set_dtypes(outline.model, torch_dtype(arguments.parallel.fsdp_plan.param_dtype))
    plan = resolve_plan(outline, reference_start(arguments), sizes, trains=False)
    return _held_bytes(outline, plan, arguments.parallel)


def critic_bytes(arguments: Arguments, sizes: ParallelSizes, gradients: int) -> int:
    """Bytes of a distillation's critic: its shards and the state of its optimizer, the units that stay gathered behind
    its forward pass, and by how much its gradients are more than the student's, which are not there at the same time. 0
    where there is none.

    Args:
        arguments: The configuration.
        sizes: Of the ranks.
        gradients: Bytes of the student's.

    Raises:
        MMError: It cannot be built.
    """
    if not trains_critic(arguments.posttrain):
        return 0
    start = critic_start(arguments)
    with told_of_critic(arguments.posttrain):
        outline = build_outline(start)
        plan = resolve_plan(outline, start, sizes)
    units = held_units(outline.model, plan.parallel)
    static = static_part(units, partial(state_bytes, training=start.training, matrices=()), averages=False)
    return _held_bytes(outline, plan, arguments.parallel) + static.optimizer + max(0, static.gradients - gradients)


def blocks_bytes(parallel: ParallelArguments, posttrain: PosttrainArguments, adapter: Any, batch: Batch) -> int:
    """Bytes of the keys and values of finished blocks of frames while samples are drawn; 0 where they are drawn at
    once."""
    size = posttrain.dmd.num_frame_per_block
    if not trains_critic(posttrain) or size is None:
        return 0
    rows, *shape = batch["latents"].shape
    # (channels, frames, height, width), without the block that is being drawn.
    finished = (shape[0], max(0, shape[1] - size), *shape[2:])
    compute = torch_dtype(parallel.fsdp_plan.param_dtype) or torch.float32
    return int(rows * adapter.kept_of_blocks(adapter.geometry.tokens(finished)) * compute.itemsize)


def _held_bytes(outline: Outline, plan: ModelPlan, parallel: ParallelArguments) -> int:
    """Of a model's shards, its buffers, and the units that stay gathered when no backward pass follows."""
    compute = torch_dtype(parallel.fsdp_plan.param_dtype)
    units = held_units(outline.model, plan.parallel)
    reshards = plan.parallel.sharding.section.reshard_after_forward is not False
    held = sum(buffer.numel() * buffer.element_size() for buffer in outline.model.buffers())
    for unit in units:
        held += sum(parameter.bytes for parameter in unit.parameters)
        if unit.shards > 1 and not (reshards and _is_cut_again(unit)):
            held += _whole_bytes(unit, compute)
    return held


def _is_cut_again(unit: HeldUnit) -> bool:
    """The root, and modules that are gathered together, stay whole until the backward pass."""
    return len(unit.names) == 1 and unit.names[0] != ""


def _whole_bytes(unit: HeldUnit, compute: torch.dtype | None) -> int:
    return sum(parameter.padded_numel * (compute or parameter.dtype).itemsize for parameter in unit.parameters)
