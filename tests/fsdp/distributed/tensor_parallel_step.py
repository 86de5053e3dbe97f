"""Training steps of tiny models under tensor parallelism and sharding, built on meta and loaded straight into their
parts, against the same steps of a plain model in one process. Everything in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState, destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import set_gradient_sync
from mindspeed_mm.fsdp.distributed.tensor.collectives import split_vocabulary
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.distributed.towers.idle import IdlePlan, IdleTowers
from mindspeed_mm.fsdp.features.memory.recompute import DistributedInputs, recompute_modules
from mindspeed_mm.fsdp.loss.head_loss import LabelledRowsHead, labelled_rows
from mindspeed_mm.fsdp.models.lora.apply import apply_lora, initialize_lora
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.structure.spec import ModelSpec, resolve_spec
from mindspeed_mm.fsdp.ops.collectives import AxisRanks
from mindspeed_mm.fsdp.optimizer.clip_grad import clip_grads_, grad_norm
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.fsdp.distributed.training_step import (
    ADAMW,
    IMAGES,
    MAX_NORM,
    SAMPLES,
    collate,
    label_tokens,
    load,
    make_samples,
    share,
    summed_loss,
)
from tests.helpers.parity import StepRecord, record_step, record_weights
from tests.helpers.tiny_models import make_tiny_qwen3

Batch = dict[str, torch.Tensor]
LossSum = Callable[[nn.Module, Batch], torch.Tensor]
NORMS = ["*.layers.{*}.input_layernorm", "*.layers.{*}.post_attention_layernorm"]
SEQUENCE: dict[str, Any] = {"tp_plan": {"sequence_parallel": NORMS}}


@dataclass(frozen=True)
class Case:
    """One model under one plan."""

    kind: str
    """text, packed (text in one row), moe, vlm, flux or wan."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """The `parallel` section; `tensor_parallel_size` is 2 where it says nothing."""
    accumulation: int = 1
    images: tuple[int, ...] = IMAGES
    gather_logits: bool = False
    recompute: bool = False
    distributed: bool = False
    """Inputs of what is recomputed divided among tensor ranks."""
    lora: bool = False
    scratch: bool = False
    """Weights from the seed instead of the folder."""


@dataclass
class Built:
    model: nn.Module
    spec: ModelSpec
    state: ParallelState
    head: LabelledRowsHead | None
    towers: IdleTowers | None


def build(case: Case, folder: str, after: Callable[[nn.Module], None] = lambda model: None) -> Built:
    """A model on this rank, as `assemble` orders the steps."""
    plan = {"param_dtype": "fp64", "cast_forward_inputs": case.kind not in GENERATORS}
    arguments = ParallelArguments.model_validate({"tensor_parallel_size": 2, **case.parallel, "fsdp_plan": plan})
    model_args = ModelArguments(model_name_or_path=folder, train_from_scratch=case.scratch)
    model = ModelHub.build(model_args, param_dtype=torch.float64)
    if case.kind == "moe":
        model.set_experts_implementation("eager")  # grouped matrix products have no fp64
    lora = LoraArguments(enable=case.lora, rank=4, alpha=8, target_modules=["*.q_proj", "*.down_proj"])
    if case.lora:
        apply_lora(model, lora, param_dtype=torch.float64)
    spec = resolve_spec(model)
    head = LabelledRowsHead(model.get_submodule(spec.head)) if spec.head else None
    towers = IdleTowers(model, IdlePlan(tuple(spec.towers))) if spec.towers else None
    state = init_parallel_state(resolve_parallel_sizes(arguments, dist.get_world_size()), "cpu")
    layout = {"shard_modules": spec.shard_modules, "tie_groups": spec.tie_groups}
    applier = ParallelApplier(arguments, gather_logits=case.gather_logits, **layout)  # type: ignore[arg-type]
    applier.pre_fully_shard_apply(model)
    if case.recompute:
        inputs = DistributedInputs(AxisRanks(state.axis_mesh("tp"))) if case.distributed else None
        recompute_modules(model, spec.blocks, inputs=inputs)
    applier.fully_shard_apply(model)
    ModelHub.load_weights(model, model_args, seed=5, device=torch.device("cpu"))
    if case.lora:
        initialize_lora(model, lora, seed=5)
        fill_adapters(model)
    after(model)
    return Built(model.train(), spec, state, head, towers)


def make_tiny_qwen3_moe(folder: Path) -> Path:
    """Four experts a layer, two a token, in the folder of the dense model."""
    make_tiny_qwen3(folder)
    config = AutoConfig.from_pretrained(folder).to_dict() | {"num_experts": 4, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**{k: v for k, v in config.items() if k != "model_type"}, num_experts_per_tok=2)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def fill_adapters(model: nn.Module) -> None:
    """B starts at zero, where a lost part of A's gradient would not be seen."""
    from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                full = torch.linspace(-0.1, 0.1, parameter.numel(), dtype=parameter.dtype).reshape(parameter.shape)
                for piece, region in local_pieces(parameter):
                    piece.copy_(full[tuple(slice(start, start + length) for start, length in region)])


def samples_of(
    kind: str, model: nn.Module, images: Sequence[int]
) -> tuple[list[Any], Callable[[Sequence[Any]], Batch]]:
    """Eight samples and what makes a batch of some."""
    if kind in GENERATORS:
        return GENERATORS[kind].samples(model.config), stack
    config = model.config if kind == "vlm" else MarkersOfText
    samples = make_samples(config, images if kind == "vlm" else (0,) * SAMPLES)
    if kind == "vlm":
        return samples, lambda some: collate(some, config)
    if kind == "packed":
        return samples, pack
    return samples, lambda some: {k: v for k, v in collate(some, config).items() if k != "mm_token_type_ids"}


class MarkersOfText:
    """Token ids that no text of a test holds."""

    vision_start_token_id = vision_end_token_id = image_token_id = -1


def pack(samples: Sequence[Any]) -> Batch:
    """All samples in one row, one document after the other."""
    lengths = torch.tensor([len(sample["ids"]) for sample in samples])
    borders = F.pad(lengths.cumsum(0), (1, 0))
    longest = int(lengths.max())
    return {
        "input_ids": torch.cat([sample["ids"] for sample in samples])[None],
        "shift_labels": torch.cat([sample["shift_labels"] for sample in samples])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,  # type: ignore[dict-item]
        "max_length_k": longest,  # type: ignore[dict-item]
    }


def flux_samples(config: Any) -> list[Batch]:
    """Latents of 3 × 2 patches and 5 tokens of text, with the velocity to learn."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        {
            "hidden_states": draw(6, config.in_channels),
            "encoder_hidden_states": draw(5, config.joint_attention_dim),
            "pooled_projections": draw(config.pooled_projection_dim),
            "timestep": torch.tensor(0.1 + 0.1 * number, dtype=torch.float64),
            "target": draw(6, config.in_channels),
        }
        for number in range(SAMPLES)
    ]


def stack(samples: Sequence[Batch]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def flux_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    places = torch.zeros(11, 3, dtype=torch.float64)
    places[5:, 1], places[5:, 2] = torch.arange(6) // 2, torch.arange(6) % 2
    inputs = {key: value for key, value in batch.items() if key != "target"}
    (velocity,) = model(**inputs, txt_ids=places[:5], img_ids=places[5:], return_dict=False)
    return (velocity - batch["target"]).square().sum()


def wan_samples(config: Any) -> list[Batch]:
    """Latents of 3 × 2 × 2 patches and 5 tokens of text."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        {
            "hidden_states": draw(config.in_channels, 3, 4, 4),
            "encoder_hidden_states": draw(5, config.text_dim),
            "timestep": torch.tensor(100.0 + 100 * number, dtype=torch.float64),
            "target": draw(config.out_channels, 3, 4, 4),
        }
        for number in range(SAMPLES)
    ]


def wan_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {key: value for key, value in batch.items() if key != "target"}
    with float_kept():
        (velocity,) = model(**inputs, return_dict=False)
    return (velocity - batch["target"]).square().sum()


def float_kept() -> Any:
    """Wan rounds to fp32 inside of its blocks, which would be all that could be seen in fp64."""
    own = torch.Tensor.float
    kept = lambda tensor: tensor if tensor.dtype == torch.float64 else own(tensor)  # noqa: E731
    return mock.patch.object(torch.Tensor, "float", kept)


@dataclass(frozen=True)
class Generator:
    """A family of generators in these tests."""

    samples: Callable[[Any], list[Batch]]
    loss: LossSum
    transformer: str


GENERATORS = {
    "flux": Generator(flux_samples, flux_loss, "FluxTransformer2DModel"),
    "wan": Generator(wan_samples, wan_loss, "WanTransformer3DModel"),
}


def label_loss(built: Built) -> LossSum:
    """Cross-entropy of labelled rows, of logits as the head returns them."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        labels = batch["shift_labels"]
        rows = labelled_rows(labels)
        inputs = {key: value for key, value in batch.items() if key != "shift_labels"}
        assert built.head is not None
        with built.head.select(rows):
            logits = model(**inputs, use_cache=False).logits
        logits, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)[rows]
        vocabulary = split_vocabulary(model)
        if vocabulary is None:
            return F.cross_entropy(logits, targets, reduction="sum")
        return vocabulary.token_losses(logits, targets)[0].sum()

    return loss


def count(kind: str, samples: Sequence[Any]) -> int:
    return len(samples) * 6 if kind in GENERATORS else label_tokens(samples)


def parallel_steps(
    case: Case,
    folder: str,
    steps: int = 1,
    *,
    after: Callable[[nn.Module], None] = lambda model: None,
    norm: Callable[[Iterable[nn.Parameter]], torch.Tensor] = grad_norm,
    fault: Any = None,
) -> list[StepRecord]:
    """Steps on this rank's share of the samples, recorded whole; `fault` is a context of a planted fault."""
    with fault or nullcontext():
        built = build(case, folder, after)
        records = run_steps(case, built, steps, norm)
    destroy_parallel_state()
    return records


def run_steps(
    case: Case,
    built: Built,
    steps: int,
    norm: Callable[[Iterable[nn.Parameter]], torch.Tensor] = grad_norm,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[StepRecord]:
    model, state = built.model, built.state
    samples, batched = samples_of(case.kind, model, case.images)
    mine = share(samples, state.data_rank, state.data_size)
    if built.towers is not None:
        built.towers.set_active(["image"] if any(case.images) else [])
    loss_sum = GENERATORS[case.kind].loss if case.kind in GENERATORS else label_loss(built)
    batches = [batched(share(mine, i, case.accumulation)) for i in range(case.accumulation)]
    optimizer = optimizer or adamw(model)
    records = []
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            set_gradient_sync(model, index == len(batches) - 1)
            part = loss_sum(model, batch) / count(case.kind, samples)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss, group=state.axis_group("dp"))
        total = norm(model.parameters())
        record = record_step(model, loss, total)
        clip_grads_(model.parameters(), total, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        records.append({**record, "weights": record_weights(model)})
    return records


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)


def plain_steps(kind: str, folder: str, steps: int = 1, images: Sequence[int] = IMAGES) -> list[StepRecord]:
    """The same with nothing of this package: one process, plain tensors, torch's own clipping."""
    model = plain_model(kind, folder)
    samples, batched = samples_of("text" if kind == "packed" else kind, model, images)
    loss_sum = GENERATORS[kind].loss if kind in GENERATORS else summed_loss
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    records = []
    for _ in range(steps):
        loss = loss_sum(model, batched(samples)) / count(kind, samples)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        record = record_step(model, loss, norm)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        records.append({**record, "weights": record_weights(model)})
    return records


def plain_model(kind: str, folder: str) -> nn.Module:
    if kind == "vlm":
        return load(folder)
    if kind == "moe":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").train()
        model.set_experts_implementation("eager")
        return model
    if kind in ("text", "packed"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").train()
    import diffusers

    transformer = getattr(diffusers, GENERATORS[kind].transformer)
    return transformer.from_pretrained(Path(folder) / "transformer").double().train()
