"""What `mm quickstart` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.request import Request, argument, option


@dataclass(frozen=True)
class QuickstartRequest(Request):
    """A folder for the data, the model and the run of the quick start."""

    folder: Path = argument(default=Path("runs/digits"))
    as_json: bool = option("Print a summary as JSON; progress goes to stderr.", False, flag="--json")
