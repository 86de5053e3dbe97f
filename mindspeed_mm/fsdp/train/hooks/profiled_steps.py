"""What profiles of time and of memory share: the ranks and the steps that are recorded, and where files go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.tools_args import ToolsArguments
from mindspeed_mm.fsdp.train.train_engine import TrainEngine

Note = Callable[[str], None]


def existing_ranks(ranks: tuple[int, ...], world_size: int, key: str) -> tuple[int, ...]:
    """The ranks meant: [-1] is all of them.

    Raises:
        ConfigError: One is not there.
    """
    if ranks == (-1,):
        return tuple(range(world_size))
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is not among the {world_size} of this run",
                key=key,
                way_out=f"Name ranks from 0 to {world_size - 1}, or [-1] for all.",
            )
    return ranks


def within(run_folder: Path | None, path: str) -> Path:
    """A relative path stands in the run folder, where there is one."""
    return run_folder / path if run_folder is not None else Path(path)


def check_steps_of_profiles(tools: ToolsArguments, total_steps: int) -> None:
    """Raise `ConfigError` for steps to be recorded that a run of so many steps does not have."""
    if tools.profile.enable and tools.profile.profile_type == "static":
        _check_within_run(tools.profile.static_param.start_step, total_steps, "tools.profile.static_param")
    if tools.memory_profile.enable:
        _check_within_run(tools.memory_profile.start_step, total_steps, "tools.memory_profile")


def _check_within_run(first: int, total: int, section: str) -> None:
    if first > total:
        raise ConfigError(
            f"{first}, but the run ends after step {total}: nothing would be recorded",
            key=f"{section}.start_step",
            way_out=f"Lower it to {total} or less.",
        )


def check_reached(first: int, end: int, engine: TrainEngine, section: str, note: Note) -> bool:
    """Whether steps `first` to `end` - 1 are among those that this start of the run does.

    Raises:
        ConfigError: The whole run is shorter.
    """
    _check_within_run(first, engine.schedule.total_steps, section)
    if end <= engine.iteration + 1:
        note(f"{section}: steps {first} to {end - 1} are over: nothing is recorded")
    elif first > engine.last_step:
        note(f"{section}: this start ends before step {first}: nothing is recorded")
    return end > engine.iteration + 1 and first <= engine.last_step
