"""Settings that belong to some values of another setting alone, and would do nothing with the one that is chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS, SCHEDULES, TrainingArguments
from mindspeed_mm.fsdp.params.value_types import Section, show

Reads = Mapping[str, Collection[str]]
"""Value of the setting that chooses → settings of the same section that act with it, and not with all values."""

_OF_TRAINING: Mapping[str, Reads] = {
    "optimizer": {name: facts.reads for name, facts in OPTIMIZERS.items()},
    "lr_decay_style": SCHEDULES,
}
"""Settings of `training` that choose."""


def unread(reads: Reads, chosen: Collection[str]) -> dict[str, list[str]]:
    """Settings that no chosen value reads → the values that do."""
    names = dict.fromkeys(name for settings in reads.values() for name in settings)
    readers = {name: sorted(value for value, settings in reads.items() if name in settings) for name in names}
    return {name: values for name, values in readers.items() if set(values).isdisjoint(chosen)}


def unread_of_training(value_of: Callable[[str], object]) -> Iterator[tuple[str, str]]:
    """Keys of `training` that its optimizer or its schedule does not read, each with the reason.

    Args:
        value_of: What a dotted key has so far; None: its default.
    """
    for choice, reads in _OF_TRAINING.items():
        chosen = str(value_of(f"training.{choice}") or TrainingArguments.model_fields[choice].default)
        for name in unread(reads, [chosen]):
            yield f"training.{name}", f"training.{choice}: {chosen} does not read it"


def idle_of_training(training: TrainingArguments) -> Iterator[Problem]:
    """Settings of another optimizer, or of another schedule."""
    for choice, reads in _OF_TRAINING.items():
        yield from idle_settings(training, "training", choice, reads, [training[choice]])


def idle_settings(section: Section, key: str, choice: str, reads: Reads, chosen: Collection[str]) -> Iterator[Problem]:
    """Settings that do nothing with what is chosen, and that nobody would notice.

    Args:
        section: Has the settings.
        key: Of the section.
        choice: Name of the setting that chooses, in the same section.
        reads: What each of its values reads.
        chosen: Its values now.
    """
    for name, readers in unread(reads, chosen).items():
        if section[name] != type(section).model_fields[name].default:
            yield Problem(
                f"{show(section[name])} has no effect with {key}.{choice}: {', '.join(chosen)}",
                key=f"{key}.{name}",
                way_out=f"Leave it out, or use {' or '.join(readers)}.",
            )
