"""Rules between keys of the `tools` section that need only the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments


def tools_problems(arguments: Arguments) -> Iterator[Problem]:
    """Profilers that could record nothing."""
    profile, memory = arguments.tools.profile, arguments.tools.memory_profile
    if profile.enable:
        yield from _ranks(profile.ranks, "tools.profile.ranks")
        if profile.profile_type == "dynamic" and profile.dynamic_param.config_path is None:
            yield Problem(
                "is not given, but a dynamic profile is requested by a file in it",
                key="tools.profile.dynamic_param.config_path",
                way_out="Name a folder; it is created if it does not exist.",
            )
        static = profile.static_param
        if profile.profile_type == "static":
            yield from _steps(static.start_step, static.end_step, "tools.profile.static_param")
    if memory.enable:
        yield from _ranks(memory.dump_ranks, "tools.memory_profile.dump_ranks")
        yield from _steps(memory.start_step, memory.end_step, "tools.memory_profile")


def _ranks(ranks: tuple[int, ...], key: str) -> Iterator[Problem]:
    if not ranks or (ranks != (-1,) and min(ranks) < 0):
        yield Problem(f"{list(ranks)} names no ranks", key=key, way_out="List ranks, counted from 0, or [-1] for all.")


def _steps(start: int, end: int, section: str) -> Iterator[Problem]:
    """The first step of a run is 1."""
    if end <= max(1, start):
        yield Problem(f"is not after start_step, {max(1, start)}", key=f"{section}.end_step", way_out="Raise it.")
