"""Profiles of the memory (`tools.memory_profile`) and of the time (`tools.profile`) of some steps. Those of time are
chosen beforehand or asked for while the run goes on.

A profile begins when the step before the first one has ended, so that the wait for data is part of what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.tools_args import MemoryProfile, Profile, ToolsArguments
from mindspeed_mm.fsdp.tools.memory_profiler import MemoryProfiler, idle_settings
from mindspeed_mm.fsdp.tools.profile_request import REQUEST_FILE, ProfileRequest, read_request
from mindspeed_mm.fsdp.tools.recorder import Recorder, Window, check_settings
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.utils.device import get_device_type

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
    if run_folder is not None:
        return run_folder / path
    return Path(path)


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


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_profile_hook(parts: RunParts) -> Hook | None:
    """The hook, where `tools.memory_profile` asks for this rank."""
    return build_memory_profile_hook(parts.arguments, parts.job.rank, parts.job.world_size, parts.record.note)


def build_memory_profile_hook(arguments: Arguments, rank: int, world_size: int, note: Note) -> Hook | None:
    """The profiler of memory that the configuration asks for on this rank.

    Raises:
        ConfigError: A rank that is not there.
    """
    memory = arguments.tools.memory_profile
    if not memory.enable:
        return None
    ranks = existing_ranks(memory.dump_ranks, world_size, "tools.memory_profile.dump_ranks")
    for words in idle_settings(memory):
        note(f"warning: {words}")
    may_compile = arguments.features.compile is True or get_device_type() != "cpu"
    if arguments.features.compile and may_compile:
        note("memory: while it is recorded, compiled blocks run as if features.compile were off")
    if rank not in ranks:
        return None
    run_folder = Path(arguments.training.save) if arguments.training.save else None
    return MemoryProfileHook(memory, within(run_folder, memory.save_path), rank, note)


class MemoryProfileHook(Hook):
    """Records the memory of steps `start_step` to `end_step` - 1."""

    def __init__(self, settings: MemoryProfile, folder: Path, rank: int, note: Note) -> None:
        self._settings, self._folder, self._rank, self._note = settings, folder, rank, note
        self._first, self._end_step = max(1, settings.start_step), settings.end_step
        self._profiler: MemoryProfiler | None = None
        self._is_due = False

    def on_train_begin(self, engine: TrainEngine) -> None:
        """See that the steps are reached; they may begin at once."""
        self._is_due = check_reached(self._first, self._end_step, engine, "tools.memory_profile", self._note)
        self._begin(engine)

    def before_next_step(self, engine: TrainEngine) -> None:
        """Begin or end when it is time."""
        if self._profiler is not None and engine.iteration >= self._end_step - 1:
            self._end(engine.iteration)
        self._begin(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """The run ends within the steps: what was recorded counts."""
        self._end(engine.iteration)

    def on_failure(self, engine: TrainEngine) -> None:
        """End a recording that has begun, without a report."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.abandon()

    def _begin(self, engine: TrainEngine) -> None:
        upcoming = engine.iteration + 1
        if self._is_due and self._first <= upcoming <= engine.last_step:
            self._is_due = False
            self._profiler = MemoryProfiler(
                self._settings, self._folder, self._rank, engine.model, engine.optimizer, engine.device
            )
            self._profiler.start(upcoming)

    def _end(self, last_step: int) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        try:
            report = profiler.stop(last_step)
        except OSError as error:
            self._note(f"warning: {self._folder} could not be written ({error.strerror or error}); training goes on")
            return
        for line in report.lines():
            self._note(line)
        self._note(f"  written to {self._folder}")


# --- time -------------------------------------------------------------------------------------------------------------

ALIGNED_STEPS = 5
"""A profile of several ranks that is asked for while they run begins at a multiple of it: all of them see the request
before that, without telling each other."""


def time_profile_hook(parts: RunParts) -> Hook | None:
    """The hook, where `tools.profile` asks for this rank."""
    return build_time_profile_hook(parts.arguments, parts.job.rank, parts.job.world_size, parts.record.note)


def build_time_profile_hook(arguments: Arguments, rank: int, world_size: int, note: Note) -> Hook | None:
    """The profiler of time that the configuration asks for on this rank.

    Raises:
        ConfigError: A rank that is not there, or nothing that could be recorded on this device.
    """
    profile = arguments.tools.profile
    if not profile.enable:
        return None
    ranks = existing_ranks(profile.ranks, world_size, "tools.profile.ranks")
    for words in check_settings(profile.static_param, "tools.profile.static_param"):
        note(f"warning: {words}")
    if rank not in ranks:
        return None
    run_folder = Path(arguments.training.save) if arguments.training.save else None
    return _time_hook(profile, run_folder, rank, ranks, note)


def _time_hook(profile: Profile, run_folder: Path | None, rank: int, ranks: tuple[int, ...], note: Note) -> Hook:
    folder = within(run_folder, profile.static_param.save_path)
    if profile.profile_type == "static":
        settings = profile.static_param
        return StaticProfileHook(Window(max(1, settings.start_step), settings.end_step, settings), folder, rank, note)
    if profile.dynamic_param.config_path is None:
        raise ConfigError("is not given", key="tools.profile.dynamic_param.config_path", way_out="Name a folder.")
    watched = within(run_folder, profile.dynamic_param.config_path)
    aligned = ALIGNED_STEPS if len(ranks) > 1 else 1
    return DynamicProfileHook(watched / REQUEST_FILE, profile, folder, rank, aligned, note)


class _TimeHook(Hook):
    """Records one window at a time; subclasses say which."""

    def __init__(self, folder: Path, rank: int, note: Note) -> None:
        self._folder, self._rank, self._note = folder, rank, note
        self._window: Window | None = None
        self._recorder: Recorder | None = None

    def before_next_step(self, engine: TrainEngine) -> None:
        """Go on with what is recorded, or begin when it is time."""
        if self._recorder is not None and not self._recorder.step():
            self._end()
        self._begin(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """End what is still recorded."""
        if self._recorder is not None:
            self._end()

    def on_failure(self, engine: TrainEngine) -> None:
        """Let go of the profiler; what failed is what is told."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            with suppress(MMError, OSError, RuntimeError):
                recorder.stop()

    def _begin(self, engine: TrainEngine) -> None:
        """One step early: a profiler that has just been started distorts its first step."""
        window, upcoming = self._window, engine.iteration + 1
        if window is None or self._recorder is not None or upcoming < window.first - 1 or upcoming > engine.last_step:
            return
        self._recorder = Recorder(window, self._folder, self._rank, engine.model, self._note)
        self._recorder.start(upcoming)

    def _end(self) -> None:
        window, recorder = self._window, self._recorder
        self._window = self._recorder = None
        if window is None or recorder is None:
            return
        recorder.stop()
        if not recorder.traces:
            return
        self._note(f"profile: {', '.join(map(str, recorder.traces))}")
        if window.settings.analyse_flag:
            self._tell(recorder.traces)

    def _tell(self, traces: list[Path]) -> None:
        """What the analysis finds, in the log and beside the traces."""
        from mindspeed_mm.fsdp.tools.trace_analysis import analyse_files
        from mindspeed_mm.fsdp.tools.trace_report import summary_lines

        try:
            lines = summary_lines(analyse_files(traces), top=8)
            traces[0].with_name(f"{traces[0].name.partition('.')[0]}.summary.txt").write_text("\n".join(lines) + "\n")
        except (MMError, OSError) as error:
            lines = [f"warning: the trace could not be analysed: {error}"]
        for line in lines:
            self._note(line)


class StaticProfileHook(_TimeHook):
    """Records a window of steps that the configuration chose beforehand."""

    def __init__(self, window: Window, folder: Path, rank: int, note: Note) -> None:
        super().__init__(folder, rank, note)
        self._chosen = window

    def on_train_begin(self, engine: TrainEngine) -> None:
        """See that the steps are reached; they may begin at once."""
        chosen, key = self._chosen, "tools.profile.static_param"
        if check_reached(chosen.first, chosen.end, engine, key, self._note):
            first = max(chosen.first, engine.iteration + 1)
            self._window = Window(first, min(chosen.end, engine.last_step + 1), chosen.settings)
            self._begin(engine)


class DynamicProfileHook(_TimeHook):
    """Records when a file is written or touched while the run goes on: one look at its entry a step.

    Args:
        request: The file.
        profile: The `tools.profile` section; what a request leaves out is as there.
        aligned: Steps begin at a multiple of this.
    """

    def __init__(self, request: Path, profile: Profile, folder: Path, rank: int, aligned: int, note: Note) -> None:
        super().__init__(folder, rank, note)
        self._request, self._profile, self._aligned = request, profile, aligned
        self._seen: tuple[int, int, int] | None = None

    def on_train_begin(self, engine: TrainEngine) -> None:
        """A request file that is left from an earlier run is ignored."""
        with suppress(OSError):
            self._request.parent.mkdir(parents=True, exist_ok=True)
        self._seen = self._stamp()
        self._note(f"profile: write or touch {self._request} to record steps")

    def before_next_step(self, engine: TrainEngine) -> None:
        """Look for a request, then as always."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            if stamp is not None:
                self._take(engine)
        super().before_next_step(engine)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._request.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _take(self, engine: TrainEngine) -> None:
        try:
            request = read_request(self._request, self._profile.static_param)
            check_settings(request.settings, str(self._request))
        except MMError as error:
            self._note(f"warning: {error}")
            return
        if not request.start:
            return
        if self._recorder is not None:
            self._note("warning: a profile is being recorded; the new request is left out")
            return
        self._window = self._window_of(request, engine.iteration)

    def _window_of(self, request: ProfileRequest, done: int) -> Window | None:
        """The steps meant; without a number, from the next one on that all ranks know of."""
        if request.first is not None:
            first = request.first
            if first <= done:
                self._note(f"warning: {self._request}: step {first} is over; nothing is recorded")
                return None
        elif self._aligned == 1:
            first = done + 1
        else:
            first = -(-(done + 2) // self._aligned) * self._aligned
        self._note(f"profile: steps {first} to {first + request.steps - 1} will be recorded")
        return Window(first, first + request.steps, request.settings)
