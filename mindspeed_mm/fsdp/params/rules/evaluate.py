"""Rules between the keys of `training.evaluate` and others."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.evaluate_args import METRIC_NAMES

SECTION = "training.evaluate"


def evaluation_fits(arguments: Arguments) -> Iterator[Problem]:
    """What contradicts itself in `training.evaluate`, or cannot be had under the plan."""
    asked = arguments.training.evaluate
    if asked.interval and asked.data is None:
        yield Problem(
            f"{asked.interval}, but there are no questions to answer",
            key=f"{SECTION}.interval",
            way_out=f"Name a file of rows with answers: {SECTION}.data.",
        )
    stages = arguments.parallel.pipeline_parallel_size
    if asked.interval and stages > 1:
        yield Problem(
            f"is not possible together with parallel.pipeline_parallel_size: {stages}: no rank can gather the model",
            key=f"{SECTION}.interval",
            way_out="Leave it out, and compare runs by training.val_interval; mm evaluate scores a checkpoint, "
            "also over ranks (--plan).",
        )
    yield from _best_can_be_measured(arguments)


def _best_can_be_measured(arguments: Arguments) -> Iterator[Problem]:
    training = arguments.training
    asked, key = training.evaluate, f"{SECTION}.best_metric"
    if asked.best_metric is None:
        for name in ("patience", "min_delta"):
            if getattr(asked, name):
                way_out = f"Name the metric, e.g. {key}=val_loss."
                yield Problem("is given, but no metric that it is about", key=f"{SECTION}.{name}", way_out=way_out)
        return
    if not training.save:
        yield Problem(
            "is given, but there is no run folder to keep the best checkpoint in", key=key, way_out="Set training.save."
        )
    name = asked.best_metric.partition("/")[0]
    if name.startswith("val_"):
        if not training.val_interval:
            way_out = "Set training.val_interval, and name rows for validation."
            what = f"'{asked.best_metric}' is measured by validation, and there is none"
            yield Problem(what, key=key, way_out=way_out)
    elif name != METRIC_NAMES[asked.metric]:
        yield Problem(
            f"'{asked.best_metric}' is not a number that this run measures",
            key=key,
            way_out=f"Choose val_loss, or with metric: {asked.metric} {METRIC_NAMES[asked.metric]}.",
        )
    elif not asked.interval:
        yield Problem(
            f"'{asked.best_metric}' is measured by evaluation, and there is none",
            key=key,
            way_out=f"Set {SECTION}.interval and {SECTION}.data.",
        )
