"""`mm flops`: FLOPs of a training step by module, and what share of a device's peak a speed is. Needs no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.tools.flops_tool.peaks import known_peak
from mindspeed_mm.tasks.requests.measure import FlopsRequest
from mindspeed_mm.tasks.requests.shared import height_and_width

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_mm.fsdp.tools.flops_tool.count import ByConvention, FlopCount

_UNSAID = ("cut patches", "samples", "passes")
"""Sequences that say nothing which others do not say."""


@dataclass(frozen=True)
class Speed:
    """What a speed amounts to."""

    tokens_per_s: float
    """Tokens per second on one device."""
    peak_tflops: float
    device: str
    mfu: float = 0.0
    mfu_full: float = 0.0
    hfu: float = 0.0


@dataclass(frozen=True)
class FlopsReport:
    """FLOPs of one step on one device's samples."""

    model: str
    parameters: int
    trained: int
    samples: int
    tokens: int
    """Tokens of all samples: text and media of a language model, latents of a generator."""
    lengths: dict[str, float]
    """Sequence → rows of all samples."""
    rows: list[JsonObject]
    causal: dict[str, float]
    """forward, backward, recompute."""
    full: dict[str, float]
    uncounted: list[str] = field(default_factory=list)
    speed: Speed | None = None

    def to_dict(self) -> JsonObject:
        """Return all fields as a dictionary for JSON, the speed included."""
        return asdict(self)


def run(request: FlopsRequest) -> FlopsReport:
    """Count what a step of some equal samples takes on one device.

    Raises:
        ConfigError: The sample, the device or the model is not known.
        UsageError: The size of images is none.
    """
    from mindspeed_mm.fsdp.tools.flops_tool.imagined import SampleShape, imagined_batch, with_labels

    height = width = 0
    if request.image_size:
        height, width = height_and_width(request.image_size, "--image-size")
    sample = SampleShape(
        request.seq or 0, request.labels, request.images, height, width, request.frames, request.sound_s or 0.0
    )
    peak, samples = _peak(request), request.batch
    model, count = _counted(request)
    if count is None:
        raise ConfigError(
            f"it is not known what the modules of a {type(model).__name__} get as input",
            where=str(request.target),
            way_out="Derive the class from PreTrainedModel, with get_input_embeddings and, for media, get_towers: "
            "docs/plugins.md, step 3. To shard the blocks that are found, leave parallel.fsdp_plan.apply_modules out.",
        )
    batch = imagined_batch(model, sample, samples)
    lengths = count.lengths(with_labels(batch, count.lengths(batch), sample, samples))
    total = count.of(lengths)
    rows = []
    for (module, kind), part in count.by_module(lengths).items():
        if part.full.model:
            share = part.causal.model / total.causal.model
            rows.append({"module": module, "kind": kind, **part.causal._asdict(), "share": share})
    said = {name: sum(pieces) for name, pieces in lengths.items() if name not in _UNSAID}
    tokens = int(sum(lengths.get("latents", lengths.get("text", ()))))
    return FlopsReport(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        samples=samples,
        tokens=tokens,
        lengths={name: length for name, length in said.items() if length},
        rows=rows,
        causal=total.causal._asdict(),
        full=total.full._asdict(),
        uncounted=list(count.uncounted),
        speed=peak and _speed(total, tokens, *peak),
    )


def _counted(request: FlopsRequest) -> tuple[nn.Module, FlopCount | None]:
    from mindspeed_mm.fsdp.plan.outline import build_outline
    from mindspeed_mm.fsdp.plan.resolve import resolve_plan
    from mindspeed_mm.fsdp.train.run.utilisation import count_step

    arguments = _arguments(request.target, request.overrides)
    changes: JsonObject = {}
    if request.lora:
        training = arguments.training
        changes["training"] = training.model_copy(update={"lora": LoraArguments(enable=True)})
    if request.recompute is not None:
        plan = arguments.features.recompute_plan.model_copy(update={"mode": request.recompute})
        changes["features"] = arguments.features.model_copy(update={"recompute": True, "recompute_plan": plan})
    arguments = arguments.model_copy(update=changes)
    outline = build_outline(arguments)
    resolved = resolve_plan(outline, arguments, trains=not request.target.is_dir())
    return outline.model, count_step(outline.model, resolved.features, arguments)


def _arguments(target: Path, overrides: Sequence[str]) -> Arguments:
    """Those of a YAML; defaults around a model folder."""
    if not target.is_dir():
        from mindspeed_mm.fsdp.train.configuration import load_with_plugins

        return load_with_plugins(target, overrides).arguments
    if overrides:
        raise ConfigError("a model folder has no keys to override", key=overrides[0], way_out="Name a YAML.")
    return Arguments(model=ModelArguments(model_name_or_path=str(target)))


def _peak(request: FlopsRequest) -> tuple[float, float, str] | None:
    if request.tokens_per_s is None:
        return None
    if request.peak_tflops is not None:
        return request.tokens_per_s, request.peak_tflops, request.device or "a device"
    if request.device is None:
        raise ConfigError(
            "a throughput can only be compared with the peak of a device",
            key="--device",
            way_out="Give --device or --peak-tflops.",
        )
    peak = known_peak(request.device, request.precision)
    return request.tokens_per_s, peak, f"{request.device}, {request.precision}"


def _speed(total: ByConvention, tokens: int, tokens_per_s: float, peak: float, device: str) -> Speed:
    # steps a second, as a share of the peak: multiplied by the FLOPs of a step
    each = tokens_per_s / tokens / peak / 1e12
    return Speed(
        tokens_per_s,
        peak,
        device,
        mfu=total.causal.model * each,
        mfu_full=total.full.model * each,
        hfu=total.causal.hardware * each,
    )
