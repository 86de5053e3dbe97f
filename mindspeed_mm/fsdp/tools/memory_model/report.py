"""A prediction in words: the table that errors and `mm check` print."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_mm.fsdp.tools.memory_model.prediction import MemoryPrediction

_MOST_MODULES = 4


def in_units(size: int) -> str:
    """Bytes as GiB, MiB or KiB."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**20:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB"


def table(prediction: MemoryPrediction) -> list[str]:
    """Lines: the peak, its categories, the modules that hold most of it."""
    lines = [f"predicted peak {in_units(prediction.peak)} on a rank, in the {prediction.phase or 'step'}"]
    lines.append(f"  {in_words(prediction.categories())}")
    modules = dict(list(prediction.modules().items())[:_MOST_MODULES])
    if modules:
        lines.append(f"  by module: {in_words(modules)}")
    if prediction.on_host:
        lines.append(f"  on the host instead: {in_units(prediction.on_host)}")
    return lines + [f"  not included: {what}" for what in prediction.approximations]


def in_words(sizes: Mapping[str, int]) -> str:
    """`optimizer 2.10 GiB, parameters 1.05 GiB`; what is less than a hundredth of all is left out."""
    total = sum(sizes.values())
    return ", ".join(f"{name} {in_units(size)}" for name, size in sizes.items() if size * 100 >= total)


def as_record(prediction: MemoryPrediction) -> dict[str, object]:
    """What machines read, in bytes."""
    return {
        "peak_bytes": prediction.peak,
        "resident_bytes": prediction.resident,
        "phase": prediction.phase,
        "parameters_bytes": prediction.parameters,
        "gradients_bytes": prediction.gradients,
        "optimizer_bytes": prediction.optimizer,
        "activations_bytes": prediction.activations,
        "on_host_bytes": prediction.on_host,
        "peak_by_category": prediction.categories(),
        "peak_by_module": prediction.modules(),
        "approximations": list(prediction.approximations),
    }
