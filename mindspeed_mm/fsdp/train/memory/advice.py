"""Changes of a configuration that save memory, with their predicted effects: what an out-of-memory error ends with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_mm.core.batch import Batch, first_of
from mindspeed_mm.core.config_path import with_value
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.tools.memory_model.prediction import MemoryPrediction
from mindspeed_mm.fsdp.tools.memory_model.report import in_units, table
from mindspeed_mm.fsdp.train.memory.forecast import forecast

PATIENCE_S = 20.0
"""Longest that changes are tried; a prediction takes a second or two."""
_WORTH_NAMING = 0.02
"""Least saving, as a share of the peak."""
_MOST_ADVICE = 3


@dataclass(frozen=True)
class Change:
    """Something that a person may change."""

    settings: JsonMapping
    """Dotted key → value."""
    rows_share: float = 1.0
    """What is left of a micro-batch's rows."""
    tokens_share: float = 1.0
    """What is left of its longest row."""
    ranks: int = 1
    """Factor on the ranks."""

    def __str__(self) -> str:
        words = [f"{key}={_yaml_word(value)}" for key, value in self.settings.items()]
        if self.ranks > 1:
            words.append(f"{self.ranks} times the ranks")
        return " ".join(words)


@dataclass(frozen=True)
class Advice:
    """A change and the peak with it."""

    change: Change
    peak: int


def candidates(arguments: Arguments, batch: Batch, device_type: str) -> Iterator[Change]:
    """Changes that a configuration does not have yet, those that cost least first. Whether they apply shows when they
    are tried."""
    features, training, plan = arguments.features, arguments.training, arguments.parallel.fsdp_plan
    is_text = "input_ids" in batch
    if is_text and not (features.enable_chunk_loss is True or features.enable_dynamic_chunk_loss):
        yield Change({"features.enable_chunk_loss": True})
    if plan.param_dtype is None:
        yield Change({"parallel.fsdp_plan.param_dtype": "bf16"})
    if training.micro_batch_size > 1 and _rows(batch) > 1:
        rows, more = -(-training.micro_batch_size // 2), training.gradient_accumulation_steps * 2
        settings = {"training.micro_batch_size": rows, "training.gradient_accumulation_steps": more}
        yield Change(settings, rows_share=0.5)
    if not features.recompute:
        yield Change({"features.recompute": True})
    elif features.recompute_plan.mode == "selective":
        yield Change({"features.recompute_plan.mode": "full"})
    if training.optimizer == "adamw" and training.optimizer_state_dtype is None:
        yield Change({"training.optimizer_state_dtype": "int8"})
    if device_type != "cpu":
        if not features.enable_activation_offload:
            yield Change({"features.enable_activation_offload": True})
        if not plan.cpu_offload:
            yield Change({"parallel.fsdp_plan.cpu_offload": True})
        elif training.optimizer == "adamw":
            yield Change({"training.optimizer": "adamw_swap"})
    cutoff = arguments.data.dataset_param.basic_parameters.cutoff_len
    if is_text and cutoff and batch["input_ids"].shape[-1] * 2 > cutoff:
        yield Change({"data.dataset_param.basic_parameters.cutoff_len": cutoff // 2}, tokens_share=0.5)
    yield Change({}, ranks=2)
    if not training.lora.enable and not arguments.model.train_from_scratch:
        yield Change({"training.lora.enable": True})


def advise(
    arguments: Arguments, batch: Batch, now: MemoryPrediction, world_size: int, device_type: str
) -> list[Advice]:
    """The changes with the greatest predicted saving.

    Args:
        arguments: The configuration that does not fit.
        batch: A prepared micro-batch.
        now: The prediction for it.
        world_size: Ranks.
        device_type: Of the ranks.
    """
    found, started = [], time.perf_counter()
    for change in candidates(arguments, batch, device_type):
        if time.perf_counter() - started > PATIENCE_S:
            break
        peak = _peak_with(change, arguments, batch, now, world_size, device_type)
        if peak is not None and now.peak - peak > _WORTH_NAMING * now.peak:
            found.append(Advice(change, peak))
    return sorted(found, key=lambda advice: advice.peak)[:_MOST_ADVICE]


def _peak_with(
    change: Change, arguments: Arguments, batch: Batch, now: MemoryPrediction, world_size: int, device_type: str
) -> int | None:
    """None: the change does not apply to this configuration."""
    share = change.rows_share * change.tokens_share
    if share < 1:  # what depends on rows and tokens shrinks with them; whole gradients may stay one micro-batch longer
        peak = now.peak - round((1 - share) * now.of_batch)
        if arguments.training.gradient_accumulation_steps == 1 and change.rows_share < 1:
            peak += now.gradients
        return peak
    try:
        changed = with_settings(arguments, change.settings)
        if check_cross_section(changed):
            return None
        return forecast(changed, batch, world_size * change.ranks, device_type).peak
    except (MMError, RuntimeError, NotImplementedError):  # no such ranks, no head, frozen all over …
        return None


def with_settings(arguments: Arguments, settings: Mapping[str, object]) -> Arguments:
    """The configuration with dotted keys changed."""
    for key, value in settings.items():
        arguments = with_value(arguments, key, value)
    return arguments


def memory_report(arguments: Arguments, world_size: int, device_type: str, batch: Batch) -> tuple[list[str], list[str]]:
    """What used the memory, and what would use less: two lists of lines."""
    now = forecast(arguments, batch, world_size, device_type)
    advice = advise(arguments, batch, now, world_size, device_type)
    peak = in_units(now.peak)
    return table(now), [f"{each.change}: predicted {peak} → {in_units(each.peak)}" for each in advice]


def _rows(batch: Batch) -> int:
    first = first_of(batch, ("input_ids", "latents"))
    if first is not None:
        return len(first)
    return 1


def _yaml_word(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
