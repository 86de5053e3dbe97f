"""The `tools` section: profilers, and what speed is measured by."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.fsdp.params.value_types import Flag, Level, Natural, Number, PathText, Positive, Section, Whole


class StaticProfile(Section):
    """A profile of steps chosen beforehand."""

    level: Level = 0
    """0: time of operators, kernels and collectives; 1: shapes of inputs too; 2: Python stacks, allocations and modules
    too. The three keys below add theirs to any level."""
    with_stack: Flag = False
    """Record Python stacks."""
    with_memory: Flag = False
    """Record allocations."""
    record_shapes: Flag = False
    """Record shapes of inputs."""
    with_cpu: Flag = True
    """Record the host as well as the accelerator."""
    save_path: PathText = "./profiling"
    """Where traces go; a relative path stands in the run folder, where there is one."""
    start_step: Natural = 10
    """First step recorded; the first of a run is 1."""
    end_step: Natural = 11
    """Step before which recording ends."""
    data_simplification: Flag = False
    """NPU: keep only the summary. Means nothing elsewhere."""
    aic_metrics_type: str | None = "PipeUtilization"
    """NPU: which counters of the cores; null: none. Means nothing elsewhere."""
    analyse_flag: Flag = True
    """Analyse the trace right away, and tell the result in the log."""


class DynamicProfile(Section):
    """A profile switched on from outside while training."""

    config_path: PathText | None = None
    """Folder that is watched: steps are recorded when `profile.json` in it is written or touched."""


class Profile(Section):
    """Time: traces of some steps."""

    enable: Flag = False
    """Profile this run."""
    profile_type: Literal["static", "dynamic"] = "static"
    """Steps chosen beforehand, or switched on from outside."""
    ranks: tuple[Whole, ...] = (0,)
    """Ranks that record; [-1]: all."""
    static_param: StaticProfile = Field(default_factory=StaticProfile)
    """Settings of `static`."""
    dynamic_param: DynamicProfile = Field(default_factory=DynamicProfile)
    """Settings of `dynamic`."""


class MemoryProfile(Section):
    """Memory: snapshots of the allocator."""

    enable: Flag = False
    """Record allocations of this run."""
    start_step: Natural = 1
    """First step recorded; the first of a run is 1."""
    end_step: Natural = 2
    """Step before which recording ends."""
    save_path: PathText = "./memory_snapshot"
    """Where reports and snapshots go; a relative path stands in the run folder, where there is one."""
    dump_ranks: tuple[Whole, ...] = (0,)
    """Ranks that record; [-1]: all."""
    stacks: Literal["python", "all"] = "all"
    """Which stacks an accelerator's snapshot holds. Means nothing on a CPU."""
    max_entries: Positive | None = None
    """Most events that an accelerator's snapshot holds; null: all. Means nothing on a CPU."""
    mem_info: Flag = False
    """Report the peak of each module (older name `record_peak_memory`)."""


class ToolsArguments(Section):
    """Profilers, and what speed is measured by."""

    profile: Profile = Field(default_factory=Profile)
    """Time (older name `profiler`)."""
    memory_profile: MemoryProfile = Field(default_factory=MemoryProfile)
    """Memory."""
    peak_tflops: Annotated[Number, Field(gt=0)] | None = None
    """TFLOP/s of one device that MFU in the log is a share of; null: the vendor's figure by the device's name, and no
    MFU on a CPU."""
