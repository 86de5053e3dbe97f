"""What `mm init` and `mm quickstart` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.request import Request, argument, option, required

Method = Literal["full", "lora", "qlora"]


@dataclass(frozen=True)
class InitRequest(Request):
    """A model and rows, the devices to train on, and further keys of the YAML."""

    overrides: tuple[str, ...] = argument(default=())
    model: Path = required("Folder of the model, as transformers or diffusers has it.")
    data: Path = required("File or folder of rows.")
    gpu: float | None = option(
        "Memory of a device in GiB, such as 24, 48 or 80; default: that of this machine.", above=0, metavar="GIB"
    )
    devices: int | None = option("Number of devices on a host; default: those of this machine.", least=1)
    method: Literal["auto", "full", "lora", "qlora"] = option(
        "What is trained. auto: all weights where they fit, else LoRA, else LoRA over four bits; of generators LoRA.",
        "auto",
    )
    out: Path = option("YAML to write; a script with the same name is written beside it.", Path("run.yaml"))
    overwrite: bool = option("Replace the files that are there.", False)
    as_json: bool = option("Print what was chosen as JSON.", False, flag="--json")


@dataclass(frozen=True)
class QuickstartRequest(Request):
    """A folder for the data, the model and the run of the quick start."""

    folder: Path = argument(default=Path("runs/digits"))
    as_json: bool = option("Print a summary as JSON; progress goes to stderr.", False, flag="--json")
