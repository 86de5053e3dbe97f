"""What `mm train` and `mm check` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.request import Request, argument, group, option
from mindspeed_mm.fsdp.train.run.train_options import ResumeOptions, TrainOptions


@dataclass(frozen=True)
class TrainRequest(Request):
    """A configuration to train by, and how this start goes about it."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    nproc: int = option("Number of ranks on this host; more than 1 starts torchrun.", 1, least=1)
    options: TrainOptions = group(TrainOptions)
    as_json: bool = option("Print the outcome as JSON.", False, flag="--json")


@dataclass(frozen=True)
class CheckRequest(Request):
    """A configuration to check before a run is started by it."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    config_only: bool = option("Check only the text, keys and values; import no plugin and build nothing.", False)
    nproc: int | None = option("Check the parallel sizes for this many ranks.", least=1)
    start: ResumeOptions = group(ResumeOptions)
    as_json: bool = option("Print the findings as JSON.", False, flag="--json")
