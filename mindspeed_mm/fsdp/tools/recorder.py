"""Records steps with the profiler of this device: torch's own on CPUs and GPUs, the vendor's on an NPU.

What the levels record, each all that the one below it does:

- 0: time of every operator, kernel, copy and collective, and of the parts of a step;
- 1: shapes of inputs, those of collectives included;
- 2: Python stacks, allocations, and the modules by name.

`record_shapes`, `with_stack` and `with_memory` add theirs to any level. On an NPU the level is also that of its own
profiler, which adds counters of the cores.
"""

from __future__ import annotations

import gzip
import importlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.artifacts import make_writable_folder
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.tools_args import StaticProfile
from mindspeed_mm.fsdp.tools.module_walk import ROOT
from mindspeed_mm.fsdp.utils import ranges
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import setting_of

STEPS_A_FILE = 5
"""A window of more steps is written in several files, so that no trace grows without limit in memory."""
LIMIT_BYTES = 1 << 30
"""Once a rank's traces, compressed, have reached this, it records no more."""


def profiler_module() -> ModuleType:
    """What records a profile on this device: `torch.profiler`, on an NPU that of its vendor's package."""
    if get_device_type() != "npu":
        return torch.profiler
    return importlib.import_module("torch_npu.profiler")


def recorded_activities(module: ModuleType, *, with_cpu: bool) -> list[object]:
    """What of this machine a profiler records: the host where it is asked for, and the device if it has a name for it.
    Backends from outside of torch share one name."""
    device = get_device_type()
    names = ["CPU"] if with_cpu else []
    if device != "cpu":
        names.append(device.upper())
    if device == torch._C._get_privateuse1_backend_name():
        names.append("PrivateUse1")
    known = (setting_of(module.ProfilerActivity, object, name) for name in names)
    return [activity for activity in known if activity is not None][: 1 + with_cpu]


@dataclass(frozen=True)
class Window:
    """Steps `first` to `end` - 1 of the run, and what is recorded of them."""

    first: int
    end: int
    settings: StaticProfile

    @property
    def has_shapes(self) -> bool:
        """Whether shapes of inputs are recorded."""
        return self.settings.record_shapes or self.settings.level >= 1

    @property
    def has_stacks(self) -> bool:
        """Whether Python stacks are recorded."""
        return self.settings.with_stack or self.settings.level >= 2

    @property
    def has_memory(self) -> bool:
        """Whether allocations are recorded: `with_memory`, or a level of 2 or more."""
        return self.settings.with_memory or self.settings.level >= 2

    @property
    def has_modules(self) -> bool:
        """Whether modules are recorded by name."""
        return self.settings.level >= 2


def check_settings(settings: StaticProfile, key: str) -> list[str]:
    """What of the settings means nothing on this device, in words.

    Raises:
        ConfigError: Nothing would be recorded.
    """
    device_type = get_device_type()
    if not recorded_activities(profiler_module(), with_cpu=settings.with_cpu):
        only = f"torch's profiler records no '{device_type}'"
        if device_type == "cpu":
            only = "there is only a CPU to record"
        raise ConfigError(f"false, but {only}", key=f"{key}.with_cpu", way_out="Set it to true.")
    if device_type == "npu":
        _metrics(profiler_module(), settings)
        return []
    defaults = StaticProfile()
    notes = []
    for name in ("data_simplification", "aic_metrics_type"):
        if settings[name] != defaults[name]:
            notes.append(f"{key}.{name} is for NPUs and has no effect on {device_type}")
    return notes


class Recorder:
    """Records one window of steps.

    Args:
        window: Which steps, and what of them.
        folder: Where traces go.
        rank: Global rank; part of the files' names.
        model: Whose modules are named, at level 2.
        note: Tells people.
    """

    def __init__(self, window: Window, folder: Path, rank: int, model: nn.Module, note: Callable[[str], None]) -> None:
        self._window, self._folder, self._rank, self._model, self._note = window, folder, rank, model, note
        self._around = ExitStack()
        self._files = 0
        self.traces: list[Path] = []

    def start(self, next_step: int) -> None:
        """Begin before `next_step`: with a step to warm up where there is one, otherwise at once."""
        make_writable_folder(self._folder)
        self._step, self._done = next_step, next_step - 1
        self._profile = self._build(profiler_module(), next_step)
        self._around.enter_context(ranges.recording())
        if self._window.has_modules:
            self._around.enter_context(named_modules(self._model))
        self._profile.start()

    def step(self) -> bool:
        """A step has ended; returns whether there is more to record."""
        self._done = self._step
        with warnings.catch_warnings():
            # That a file's events are let go of once it is written is what several files are for.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle.*")
            self._profile.step()
        self._step += 1
        if self._step < self._window.end and self._written_bytes() >= LIMIT_BYTES:
            self._note(f"profile: stopped after step {self._step - 1}, its traces have reached {LIMIT_BYTES >> 30} GiB")
            return False
        return self._step < self._window.end

    def stop(self) -> None:
        """End, and write what is still to be written."""
        with self._around:
            self._profile.stop()

    def _build(self, module: ModuleType, next_step: int) -> Any:
        settings, window = self._window.settings, self._window
        options: dict[str, object] = {
            "activities": recorded_activities(module, with_cpu=settings.with_cpu),
            "record_shapes": window.has_shapes,
            "profile_memory": window.has_memory,
            "with_stack": window.has_stacks,
        }
        if get_device_type() != "npu":
            return module.profile(**options, schedule=self._action_at(next_step), on_trace_ready=self._write)
        handler = module.tensorboard_trace_handler(
            str(self._folder), worker_name=f"rank{self._rank}", analyse_flag=settings.analyse_flag
        )
        wait = max(0, window.first - next_step)
        active = window.end - max(window.first, next_step)
        schedule = module.schedule(wait=0, warmup=wait, active=active, repeat=1, skip_first=0)
        config = _npu_config(module, settings)
        return module.profile(**options, schedule=schedule, on_trace_ready=handler, experimental_config=config)

    def _action_at(self, next_step: int) -> Callable[[int], torch.profiler.ProfilerAction]:
        action, window = torch.profiler.ProfilerAction, self._window

        def at(count: int) -> torch.profiler.ProfilerAction:
            step = next_step + count
            if step < window.first:
                return action.WARMUP
            if step >= window.end:
                return action.NONE
            ends_a_file = step == window.end - 1 or (step - window.first) % STEPS_A_FILE == STEPS_A_FILE - 1
            if ends_a_file:
                return action.RECORD_AND_SAVE
            return action.RECORD

        return at

    def _write(self, profile: Any) -> None:
        """Called by the profiler in the middle of `step`, when a file is complete, and of `stop`."""
        first = self._window.first + STEPS_A_FILE * self._files
        if self._done < first:
            return  # stopped before a step of another file had ended
        self._files += 1
        path = self._folder / f"rank{self._rank}_step{first}-{self._done}.trace.json.gz"
        plain, draft = path.with_name(f".{path.name}.json"), path.with_name(f".{path.name}")
        try:
            profile.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(draft, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)  # torch's own gzip goes line by line, at the slowest level
            draft.replace(path)
        except OSError as error:
            self._note(f"warning: {path} could not be written ({error.strerror or error}); training goes on")
            return
        finally:
            with suppress(OSError):
                plain.unlink(missing_ok=True)
                draft.unlink(missing_ok=True)
        self.traces.append(path)

    def _written_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.traces if path.exists())


def _npu_config(module: ModuleType, settings: StaticProfile) -> object:
    return module._ExperimentalConfig(
        export_type=module.ExportType.Text,
        profiler_level=getattr(module.ProfilerLevel, f"Level{settings.level}"),
        aic_metrics=_metrics(module, settings),
        data_simplification=settings.data_simplification,
    )


def _metrics(module: ModuleType, settings: StaticProfile) -> object:
    """The vendor's constant for `aic_metrics_type`; null: no counters."""
    name = settings.aic_metrics_type or "AiCoreNone"
    found = setting_of(module.AiCMetrics, object, name)
    if found is None:
        known = ", ".join(sorted(word for word in vars(module.AiCMetrics) if not word.startswith("_")))
        key = "tools.profile.static_param.aic_metrics_type"
        raise ConfigError(f"'{name}' is not known to this NPU's profiler", key=key, way_out=f"It knows {known}.")
    return found


@contextmanager
def named_modules(model: nn.Module) -> Iterator[None]:
    """While inside, each module's forward pass bears its name in the trace."""
    open_ranges: list[Any] = []
    handles = []

    def begin(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object) -> None:
            current = torch.profiler.record_function(f"{ranges.MODULE}{name}")
            current.__enter__()
            open_ranges.append(current)

        return hook

    def end(_module: nn.Module, _args: object, _output: object) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin(name or ROOT), prepend=True))
        handles.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
