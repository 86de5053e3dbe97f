"""What a run that trains on its own samples has drawn: `mm posttrain rollouts RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.train.rollouts.files import FOLDER, read_rollout, rollout_file

_LONGEST = 60
"""Characters of a cell."""


@dataclass(frozen=True)
class RolloutSample:
    """One sample of a rollout."""

    prompt: str
    text: str | None
    """None where a picture or clip was drawn."""
    key: str
    """Its name."""
    reward: float | None
    advantage: float
    scores: tuple[float | None, ...]
    truncated: bool


@dataclass(frozen=True)
class RolloutView:
    """A rollout of a run."""

    number: int
    groups: list[list[RolloutSample]]
    """By prompt, in the order of training; within a group from the best on."""

    def lines(self) -> list[str]:
        """For a terminal: a prompt, then its samples."""
        shown = []
        for group in self.groups:
            shown.append(_short(group[0].prompt))
            for sample in group:
                reward = "null" if sample.reward is None else f"{sample.reward:.3g}"
                cut = " (cut)" if sample.truncated else ""
                told = sample.key if sample.text is None else _short(sample.text)
                shown.append(f"  {reward:>8} {sample.advantage:>+7.2f}  {told}{cut}")
        return shown


def run(folder: Path, number: int | None = None, prompts: int | None = None) -> RolloutView:
    """A rollout of a run folder.

    Args:
        folder: The run folder.
        number: Which; None: the newest.
        prompts: At most so many of its prompts.

    Raises:
        UsageError: The run has no such rollout, or its file is not as it was written.
    """
    if not folder.is_dir():
        raise UsageError("there is no such folder", where=str(folder), way_out="Name the folder of a run.")
    there = numbers(folder)
    if number is None and there:
        number = there[-1]
    if number is not None:
        stored = read_rollout(folder, number)
        if stored is not None:
            return RolloutView(number, _groups(stored.samples)[:prompts])
        if number in there:
            raise UsageError(
                "was cut short or changed after it was written: its checksum does not fit",
                where=str(rollout_file(folder, number)),
                way_out="Show another one: --number.",
            )
    what = "there is no rollout" if number is None else f"there is no rollout {number}"
    told = f"it has {there[0]} to {there[-1]}" if there else "it has none"
    raise UsageError(
        f"{what}: {told}",
        where=str(folder),
        way_out="Name the folder of a run with posttrain.method: grpo or nft and posttrain.rollout.keep: true.",
    )


def numbers(folder: Path) -> list[int]:
    """The rollouts that a run has kept, ascending."""
    return sorted(int(path.stem.removeprefix("rollout_")) for path in (folder / FOLDER).glob("rollout_*.jsonl"))


def _groups(samples: Sequence[Any]) -> list[list[RolloutSample]]:
    """Samples whose names differ in nothing but their number."""
    groups: dict[str, list[RolloutSample]] = {}
    for each in samples:
        name = f"{each['step']}/{each['key'].rpartition('/')[0]}"
        groups.setdefault(name, []).append(
            RolloutSample(
                each["prompt"],
                each.get("text"),
                each["key"],
                each["reward"],
                each["advantage"],
                tuple(each["scores"]),
                each.get("truncated", False),
            )
        )
    return [sorted(group, key=lambda sample: -sample.advantage) for group in groups.values()]


def _short(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _LONGEST:
        return line
    return line[: _LONGEST - 1] + "…"
