"""Checking with what a caller in Python gives."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.python_words import problem_for_python
from mindspeed_mm.fsdp.train.run.train_options import ResumeOptions
from mindspeed_mm.tasks.check import check as check_task
from mindspeed_mm.tasks.given.arguments import named_by
from mindspeed_mm.tasks.given.configuration import GivenConfig


def check_given(
    config: GivenConfig, rows: object, val_rows: object, nproc: int | None, start: ResumeOptions
) -> check_task.CheckResult:
    """What is wrong with a configuration; arguments as of `mm.check`, `start` as for `mm check`.

    Raises:
        UsageError: A model object or a data set of one's own is given, which cannot be checked.
    """
    if config.model is not None:
        raise UsageError(
            "a model object is not checked", key="model", way_out="Give its folder, or train it for a step: steps=1."
        )
    words = list(config.overrides)
    with ExitStack() as stack:
        if rows is not None or val_rows is not None:
            from mindspeed_mm.tasks.given.objects import is_data_set, with_objects  # torch

            for key, each in (("rows", rows), ("val_rows", val_rows)):
                if is_data_set(each):
                    raise UsageError(
                        "a data set of your own is not checked", key=key, way_out="Train it for a step: steps=1."
                    )
            words, _ = with_objects(config.source, words, None, (rows, val_rows), None, stack, keeps=False)
        result = check_task.run(config.source, words, nproc=nproc, options=start)
    named_as = named_by(rows=rows, val_rows=val_rows)
    result.findings = [replace(each, problem=problem_for_python(named_as(each.problem))) for each in result.findings]
    return result
