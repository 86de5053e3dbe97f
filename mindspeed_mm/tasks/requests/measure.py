"""What `mm verify`, `mm flops`, `mm profile`, `mm doctor` and `mm download` are asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.request import Request, argument, option

Precision = Literal["bf16", "fp16", "tf32", "fp32", "fp8"]


@dataclass(frozen=True)
class VerifyRequest(Request):
    """A configuration whose plan is compared with one process."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    full: bool = option("Use the real model with its weights instead of a small one.", False)
    fault: str | None = option(
        "Plant a fault, to see that it is detected (exit code 5).", flag="--inject", metavar="FAULT"
    )
    nproc: int | None = option("Number of processes; default: as few as the plan needs.", least=1)
    as_json: bool = option("Print the comparisons as JSON.", False, flag="--json")


@dataclass(frozen=True)
class FlopsRequest(Request):
    """A model, the samples of a step, and a speed that is to be judged."""

    target: Path = argument("MODEL_FOLDER|CONFIG")
    overrides: tuple[str, ...] = argument(default=())
    seq: int | None = option("Tokens in a sample, media included; for a generator, in its caption.", least=1)
    batch: int = option("Number of samples in a step.", 1, least=1)
    labels: int | None = option("Number of tokens with a label; default: all that are not media.", least=0)
    images: int = option("Number of images or videos in a sample.", 0, least=0)
    image_size: str | None = option(
        "Size of each image or video in pixels; for a generator, the size it denoises.", metavar="HxW"
    )
    frames: int = option("Number of frames of each image or video; with more than one it is a video.", 1, least=1)
    sound_s: float | None = option("Seconds of audio in a sample.", flag="--audio", above=0)
    lora: bool = option("Train adapters on the default layers and nothing else.", False)
    recompute: Literal["full", "selective"] | None = option("Recompute blocks in the backward pass.")
    tokens_per_s: float | None = option(
        "Compare this throughput of one device with its peak, in tokens per second.", above=0
    )
    device: str | None = option("Device whose peak the throughput is compared with: H100, H200, A100, 910B …")
    precision: Precision = option("Precision of the peak.", "bf16")
    peak_tflops: float | None = option("Peak TFLOP/s of a device that is not in the table.", above=0)
    as_json: bool = option("Print the count as JSON.", False, flag="--json")


@dataclass(frozen=True)
class ProfilingRequest(Request):
    """A configuration whose steps are recorded, or a trace that is there."""

    target: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    steps: str | None = option(
        "With a YAML: record steps A to B - 1, then end training.  [default: 3:6]", metavar="A:B"
    )
    nproc: int | None = option("With a YAML: number of ranks on this host.  [default: 1]", least=1)
    out: Path | None = option("With a YAML: folder for traces; default: under profiling/.")
    top: int = option("Number of rows in each table.", 10, least=1)
    as_json: bool = option("Print the figures as JSON.", False, flag="--json")

    @property
    def recorded(self) -> tuple[int, int]:
        """The first step that is recorded, and the one that is not any more.

        Raises:
            UsageError: They are no two steps in their order.
        """
        if self.steps is None:
            return 3, 6
        found = re.fullmatch(r"(\d+):(\d+)", self.steps)
        if found is None or not 1 <= int(found[1]) < int(found[2]):
            what = f"'{self.steps}' is not A:B with 1 <= A < B"
            raise UsageError(what, key="--steps", way_out="Steps A to B - 1 are recorded: --steps 3:6.")
        return int(found[1]), int(found[2])


@dataclass(frozen=True)
class DoctorRequest(Request):
    """What of this machine is looked at."""

    nproc: int | None = option("Also try a group of this many ranks on this host.", least=1)
    as_json: bool = option("Print the findings as JSON.", False, flag="--json")


@dataclass(frozen=True)
class DownloadRequest(Request):
    """A model of a hub, and the folder for it."""

    name: str = argument()
    out: Path | None = option("Folder to write; default: models/MODEL.")
    hub: Literal["hf", "modelscope"] = option("Hub whose client is run; it must be installed.", "hf")
    as_json: bool = option("Print the folder as JSON.", False, flag="--json")
