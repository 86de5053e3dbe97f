"""The options that say where a run starts, which `mm train` and `mm check` share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from mindspeed_mm.fsdp.train.run.resume_options import ResumeOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--resume",
        type=click.Choice(["auto", "never"]),
        default="auto",
        show_default=True,
        help="auto: continue from the newest checkpoint in training.save; never: refuse a folder that has one.",
    ),
    click.option("--weights-only", is_flag=True, help="Load only a checkpoint's weights and start at step 0."),
    click.option(
        "--allow-fresh",
        is_flag=True,
        help="Start from the beginning even though no checkpoint in the run folder is valid.",
    ),
    click.option(
        "--accept-data-change",
        is_flag=True,
        help="Continue although the data set or its order has changed; train on features although their rows have "
        "changed.",
    ),
)


def resume_options(command: Command) -> Command:
    """Add them to a command, which takes them as `ResumeOptions` by the name `start`."""

    @wraps(command)
    def with_start(
        *args: Any, resume: str, weights_only: bool, allow_fresh: bool, accept_data_change: bool, **kwargs: Any
    ) -> Any:
        start = ResumeOptions(resume == "auto", weights_only, allow_fresh, accept_data_change)
        return command(*args, start=start, **kwargs)

    for option in reversed(_OPTIONS):
        option(with_start)
    return cast(Command, with_start)


def resume_words(start: ResumeOptions) -> list[str]:
    """The same options as words of a command line."""
    words = ["--resume", "auto" if start.resume else "never"]
    for name in ("weights_only", "allow_fresh", "accept_data_change"):
        if getattr(start, name):
            words.append(f"--{name.replace('_', '-')}")
    return words
