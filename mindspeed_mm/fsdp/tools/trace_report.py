"""What the analysis of a trace found, in a person's words: where the time goes, what holds it up, what to try."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mindspeed_mm.core.patterns import pattern_of
from mindspeed_mm.fsdp.tools.trace_analysis import (
    COMMUNICATION,
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    DATA,
    IDLE,
    Analysis,
    Seconds,
    Times,
)

WORTH_NAMING = 0.1
"""A share of the step from which on it is a bottleneck."""
UNEVEN = 0.1
"""An imbalance from which on the ranks wait for each other."""
MANY_SHORT = 0.5
"""A share of short kernels from which on their launches are the cost."""


@dataclass(frozen=True)
class Bottleneck:
    """What holds the steps up most."""

    name: str
    what: str
    advice: str


_MEANING = {
    COMPUTE: "operators running",
    COMMUNICATION: "between ranks, not hidden by compute",
    COPY_IN: "copies of batches to the device",
    COPY_OUT: "copies back to the host",
    DATA: "waiting for the next batch",
    IDLE: "none of the above: Python, launches, waits",
}


def bottleneck(analysis: Analysis) -> Bottleneck:
    """Name what holds the steps up most, with advice; `compute-bound` where no wait is worth naming."""
    total = analysis.total
    share = total.shares_of_window
    worst = max((DATA, COPY_IN, COPY_OUT, COMMUNICATION, IDLE), key=lambda name: share[name])
    if share[worst] < WORTH_NAMING:
        return Bottleneck(
            "compute-bound",
            f"{share[COMPUTE]:.0%} of the time is computation",
            "The rest is small. Faster: bf16 (parallel.fsdp_plan.param_dtype), features.compile, packing "
            "(basic_parameters.packing), less recompute (features.recompute), more devices.",
        )
    what = f"{share[worst]:.0%} of the time: {_MEANING[worst]}"
    if worst == COMMUNICATION and len(analysis.ranks) > 1 and analysis.imbalance >= UNEVEN:
        return Bottleneck(
            "uneven ranks",
            f"{what}; rank {analysis.slowest} has {analysis.imbalance:.0%} more work than the mean, and the others "
            "wait for it",
            "Batches of equal size on all ranks: sampler_type LengthGroupedSampler or TokenBudgetSampler, packing; "
            "for experts features.enable_ep_balance. If it is always the same rank, look at its host.",
        )
    return Bottleneck(*_REMEDIES[worst](total, what))


def _waits_for_data(_: Times, what: str) -> tuple[str, str, str]:
    return (
        "data-bound",
        what,
        "More data.dataloader_param.num_workers and prefetch_factor; encode samples once "
        "(basic_parameters.preprocess_on_fly=false, or mm extract for generators); smaller images or fewer frames "
        "(image_max_pixels, video_maxlen).",
    )


def _copy_in(_: Times, what: str) -> tuple[str, str, str]:
    return (
        "bound by copies to the device",
        what,
        "data.dataloader_param.pin_memory=true and enable_preload=true copy the next batch while this one is used.",
    )


def _copy_out(_: Times, what: str) -> tuple[str, str, str]:
    return (
        "bound by copies to the host",
        what,
        "Less is moved to the host without features.enable_activation_offload, training.optimizer=adamw_swap and "
        "parallel.fsdp_plan.cpu_offload.",
    )


def _communication(total: Times, what: str) -> tuple[str, str, str]:
    hidden = total.hidden / total.communication if total.communication else 0.0
    return (
        "communication-bound",
        f"{what}; {hidden:.0%} of all communication is hidden",
        "Gather earlier (fsdp_plan.num_to_forward_prefetch and num_to_backward_prefetch); shard within a host only "
        "(parallel.fully_shard_parallel_size, HSDP); keep weights gathered (fsdp_plan.reshard_after_forward=false); "
        "more tokens a step (micro_batch_size, gradient_accumulation_steps).",
    )


def _idle(total: Times, what: str) -> tuple[str, str, str]:
    kernels = sum(total.kernel_calls.values())
    if kernels and total.short_kernels / kernels >= MANY_SHORT:
        return (
            "host-bound: many small kernels",
            f"{what}; {total.short_kernels:,} of {kernels:,} kernels last less than 10 microseconds",
            "features.compile joins kernels; packing and a larger micro_batch_size make them longer; "
            "features.fused_kernels needs fewer.",
        )
    return (
        "host-bound",
        what,
        f"{'The device waits for Python' if total.has_device else 'Python works between operators'}: look for "
        "hooks, logging and reads of device numbers in your own code "
        "(level 2 records stacks), collect garbage at fixed steps (training.manual_gc_interval), give the process "
        "more cores (OMP_NUM_THREADS), use a larger micro_batch_size or packing.",
    )


_REMEDIES = {DATA: _waits_for_data, COPY_IN: _copy_in, COPY_OUT: _copy_out, COMMUNICATION: _communication, IDLE: _idle}


def summary_lines(analysis: Analysis, top: int) -> list[str]:
    """The report as text; `top`: rows of each table."""
    total = analysis.total
    found = bottleneck(analysis)
    ranks = f"{len(analysis.ranks)} ranks" if len(analysis.ranks) > 1 else "one rank"
    step_ms = 1000 * total.window / max(total.steps, 1)
    lines = [f"profile of {total.steps // len(analysis.ranks)} steps on {ranks}: {step_ms:,.1f} ms a step"]
    lines += [
        f"  {name:<16}{share:>7.1%}  {_MEANING[name]}"
        for name, share in total.shares_of_window.items()
        if total.shares[name] or name in (COMPUTE, COMMUNICATION, DATA, IDLE)
    ]
    if total.communication:
        lines.append(f"  {total.hidden / total.communication:.0%} of all communication is hidden behind compute")
    lines += [f"bottleneck: {found.name}: {found.what}", f"  {found.advice}"]
    lines += _rank_lines(analysis) + _phase_lines(total)
    if total.has_device:
        lines += _table("kernels on the device", total.kernels, total.kernel_calls, total, top)
    lines += _table("operators on the host, without what they call", total.operators, total.calls, total, top)
    if total.modules:
        lines += _table("modules, forward and backward", _grouped(total.modules), None, total, top)
    return lines


def _rank_lines(analysis: Analysis) -> list[str]:
    if len(analysis.ranks) == 1:
        return []
    lines = [
        f"slowest: rank {analysis.slowest}, {analysis.imbalance:.1%} more work than the mean",
        "    rank   ms/step   compute  communication  data loading     idle",
    ]
    for rank, times in sorted(analysis.ranks.items()):
        share = times.shares_of_window
        step_ms = 1000 * times.window / max(times.steps, 1)
        lines.append(
            f"  {rank:>6}{step_ms:>10.1f}{share[COMPUTE]:>10.1%}{share[COMMUNICATION]:>15.1%}{share[DATA]:>14.1%}"
            f"{share[IDLE]:>9.1%}"
        )
    return lines


def _phase_lines(total: Times) -> list[str]:
    if not total.phases:
        return []
    steps = max(total.steps, 1)
    lines = ["parts of a step                  lasted       work given (ms a step)"]
    for name, times in total.phases.items():
        lines.append(f"  {name:<24}{1000 * times['host'] / steps:>12.2f}{1000 * times['work'] / steps:>12.2f}")
    return lines


def _table(title: str, seconds: Seconds, calls: Counter[str] | None, total: Times, top: int) -> list[str]:
    steps = max(total.steps, 1)
    lines = [f"{title} (ms a step)" if calls is None else f"{title} (ms a step, calls a step)"]
    for name, value in seconds.top(top):
        cells = f"{1000 * value / steps:>10.2f}"
        if calls is not None:
            cells += f"{calls[name] / steps:>9,.0f}×"
        short = name if len(name) <= 90 else f"{name[:87]}..."
        lines.append(f"  {cells}  {short}")
    return lines


def _grouped(modules: Seconds) -> Seconds:
    """Modules whose names differ in numbers only, added up."""
    groups = Seconds()
    for name, seconds in modules.items():
        groups[pattern_of(name)] += seconds
    return groups
