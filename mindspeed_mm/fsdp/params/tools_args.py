"""The `tools` section: profilers, and what speed is measured by."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.fsdp.params.value_types import Flag, Level, Natural, Number, PathText, Positive, Section, Whole


class StaticProfile(Section):
    """A profile of steps chosen beforehand."""

    level: Level = 0
    """Level of detail. 0: time of operators, kernels and collectives; 1: also the shapes of inputs; 2: also Python
    stacks, allocations and modules. `with_stack`, `with_memory` and `record_shapes` add to any level."""
    with_stack: Flag = False
    """Record the Python stack of each operator."""
    with_memory: Flag = False
    """Record allocations and releases of memory."""
    record_shapes: Flag = False
    """Record the shapes of each operator's inputs."""
    with_cpu: Flag = True
    """Record the host as well as the accelerator."""
    save_path: PathText = "./profiling"
    """Folder that traces are written to; a relative path is taken from the run folder, if there is one."""
    start_step: Natural = 10
    """First step recorded; the first of a run is 1."""
    end_step: Natural = 11
    """Step at which recording ends; this step is not recorded."""
    data_simplification: Flag = False
    """Keep only the summary of an NPU's profile. Has no effect on other devices."""
    aic_metrics_type: str | None = "PipeUtilization"
    """Set of an NPU's core counters that is recorded; null: none. Has no effect on other devices."""
    analyse_flag: Flag = True
    """Analyse the trace as soon as it is written, and report the result in the log."""


class DynamicProfile(Section):
    """A profile switched on from outside while training."""

    config_path: PathText | None = None
    """Folder that is watched: steps are recorded when `profile.json` in it is written or touched."""


class Profile(Section):
    """Time: traces of some steps."""

    enable: Flag = False
    """Profile the time of this run."""
    profile_type: Literal["static", "dynamic"] = "static"
    """How steps are chosen: `static` records steps fixed beforehand, `dynamic` those requested while the run goes
    on."""
    ranks: tuple[Whole, ...] = (0,)
    """Ranks that record a profile; [-1]: all."""
    static_param: StaticProfile = Field(default_factory=StaticProfile)
    """Settings used when `profile_type` is `static`."""
    dynamic_param: DynamicProfile = Field(default_factory=DynamicProfile)
    """Settings used when `profile_type` is `dynamic`."""


class MemoryProfile(Section):
    """Memory: snapshots of the allocator."""

    enable: Flag = False
    """Record allocations of this run."""
    start_step: Natural = 1
    """First step recorded; the first of a run is 1."""
    end_step: Natural = 2
    """Step at which recording ends; this step is not recorded."""
    save_path: PathText = "./memory_snapshot"
    """Folder that reports and snapshots are written to; a relative path is taken from the run folder, if there is
    one."""
    dump_ranks: tuple[Whole, ...] = (0,)
    """Ranks that record allocations; [-1]: all."""
    stacks: Literal["python", "all"] = "all"
    """Which stacks an accelerator's snapshot holds. Has no effect on a CPU."""
    max_entries: Positive | None = None
    """Maximum number of events in an accelerator's snapshot; null: all. Has no effect on a CPU."""
    mem_info: Flag = False
    """Report the peak of each module (older name `record_peak_memory`)."""


class ToolsArguments(Section):
    """Profilers, and what speed is measured by."""

    profile: Profile = Field(default_factory=Profile)
    """Settings of the time profiler (older name `profiler`)."""
    memory_profile: MemoryProfile = Field(default_factory=MemoryProfile)
    """Settings of the memory profiler."""
    peak_tflops: Annotated[Number, Field(gt=0)] | None = None
    """Peak TFLOP/s of one device, which MFU in the log is relative to; null: the vendor's figure, looked up by the
    device's name; on a CPU no MFU is logged."""
