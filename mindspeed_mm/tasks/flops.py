"""`mm flops`: FLOPs of a training step by module, and what share of a device's peak a speed is. Needs no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.tools.flops_tool.peaks import known_peak

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_mm.fsdp.tools.flops_tool.count import ByConvention, FlopCount
    from mindspeed_mm.fsdp.tools.flops_tool.imagined import SampleShape


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
    rows: list[dict[str, Any]]
    causal: dict[str, float]
    """forward, backward, recompute."""
    full: dict[str, float]
    uncounted: list[str] = field(default_factory=list)
    speed: Speed | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dictionary for JSON, the speed included."""
        return asdict(self)


def run(
    target: Path,
    overrides: Sequence[str],
    sample: SampleShape,
    *,
    samples: int = 1,
    lora: bool = False,
    recompute: str | None = None,
    tokens_per_s: float | None = None,
    device: str | None = None,
    precision: str = "bf16",
    peak_tflops: float | None = None,
) -> FlopsReport:
    """Count.

    Args:
        target: A model folder, or a YAML whose model, adapters, frozen parts and recomputation are counted.
        overrides: `section.key=value`, of a YAML.
        sample: What each sample is.
        samples: In a step of one device.
        lora: Train adapters on the default layers, whatever the target says.
        recompute: `full` or `selective`, of all blocks; None: as the YAML says.
        tokens_per_s: A speed of one device to be judged.
        device: Whose peak that is a share of.
        precision: Of the peak.
        peak_tflops: The peak itself, instead of a device.

    Raises:
        ConfigError: The sample, the device or the model is not known.
    """
    from mindspeed_mm.fsdp.tools.flops_tool.imagined import imagined_batch, with_labels

    peak = _peak(tokens_per_s, device, precision, peak_tflops)
    model, count = _counted(target, overrides, lora=lora, recompute=recompute)
    if count is None:
        raise ConfigError(
            f"it is not known what the modules of a {type(model).__name__} get as input", where=str(target)
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
        speed=_speed(total, tokens, *peak) if peak is not None else None,
    )


def _counted(
    target: Path, overrides: Sequence[str], *, lora: bool, recompute: str | None
) -> tuple[nn.Module, FlopCount | None]:
    from mindspeed_mm.fsdp.plan.outline import build_outline
    from mindspeed_mm.fsdp.plan.resolve import resolve_plan
    from mindspeed_mm.fsdp.train.run.utilisation import count_step

    arguments = _arguments(target, overrides)
    changes: dict[str, Any] = {}
    if lora:
        training = arguments.training
        changes["training"] = training.model_copy(update={"lora": LoraArguments(enable=True)})
    if recompute is not None:
        plan = arguments.features.recompute_plan.model_copy(update={"mode": recompute})
        changes["features"] = arguments.features.model_copy(update={"recompute": True, "recompute_plan": plan})
    arguments = arguments.model_copy(update=changes)
    outline = build_outline(arguments)
    resolved = resolve_plan(outline, arguments, trains=not target.is_dir())
    return outline.model, count_step(outline.model, resolved.features, arguments)


def _arguments(target: Path, overrides: Sequence[str]) -> Arguments:
    """Those of a YAML; defaults around a model folder."""
    if not target.is_dir():
        from mindspeed_mm.fsdp.train.configuration import load_with_plugins

        return load_with_plugins(target, overrides).arguments
    if overrides:
        raise ConfigError("a model folder has no keys to override", key=overrides[0], way_out="Name a YAML.")
    return Arguments(model=ModelArguments(model_name_or_path=str(target)))


def _peak(
    tokens_per_s: float | None, device: str | None, precision: str, peak_tflops: float | None
) -> tuple[float, float, str] | None:
    if tokens_per_s is None:
        return None
    if peak_tflops is not None:
        return tokens_per_s, peak_tflops, device or "a device"
    if device is None:
        raise ConfigError(
            "a throughput can only be compared with the peak of a device",
            key="--device",
            way_out="Give --device or --peak-tflops.",
        )
    return tokens_per_s, known_peak(device, precision), f"{device}, {precision}"


def _speed(total: ByConvention, tokens: int, tokens_per_s: float, peak: float, device: str) -> Speed:
    each = tokens_per_s / tokens / peak / 1e12
    return Speed(
        tokens_per_s,
        peak,
        device,
        mfu=total.causal.model * each,
        mfu_full=total.full.model * each,
        hfu=total.causal.hardware * each,
    )
