"""What `mm train`, `mm check` and `mm posttrain` are asked; methods that train are asked as `mm train` is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.request import Request, argument, group, option, required
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


# --- mm posttrain -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutsRequest(Request):
    """A run, and what is shown of its samples."""

    run: Path = argument()
    number: int | None = option("Number of the rollout to show; default: the newest.", least=0)
    prompts: int = option("Number of prompts to show.", 8, least=1)
    as_json: bool = option("Print the samples as JSON.", False, flag="--json")


@dataclass(frozen=True)
class ScoreRequest(Request):
    """A configuration whose rewards judge, and the samples that are judged."""

    config: Path = argument()
    rows: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    out: Path = required("JSONL file to write.")
    histogram: Path | None = option("JSON file to write the histogram of scores to, for posttrain.dpo.histogram_path.")
    as_json: bool = option("Print the outcome as JSON.", False, flag="--json")


@dataclass(frozen=True)
class ReferenceRequest(Request):
    """A configuration whose reference is computed once."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    nproc: int = option("Number of ranks on this host; more than 1 starts torchrun.", 1, least=1)
    as_json: bool = option("Print the outcome as JSON.", False, flag="--json")
