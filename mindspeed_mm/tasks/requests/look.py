"""What `mm models`, `mm route`, `mm config`, `mm schema`, `mm report` and `mm completion` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.request import Request, argument, option


@dataclass(frozen=True)
class ModelsRequest(Request):
    """A family of models that is looked up; an empty name lists all of them."""

    name: str = argument(default="")
    proof: bool = option("With NAME: print what is proven of the family, and by which test.", False)
    as_json: bool = option("Print the cards as JSON.", False, flag="--json")
    as_markdown: bool = option("Print the table of the README.", False, flag="--markdown")


@dataclass(frozen=True)
class RouteRequest(Request):
    """What somebody wants to do, in their words."""

    wish: tuple[str, ...] = argument()
    as_json: bool = option("Print the families, commands and page as JSON.", False, flag="--json")


@dataclass(frozen=True)
class ConfigRequest(Request):
    """A configuration that is shown, or that a launch of another kind is translated to."""

    config: Path | None = argument(default=None)
    overrides: tuple[str, ...] = argument(default=())
    given: bool = option("Leave out the defaults.", False)
    as_json: bool = option("Print configuration, origins and warnings as JSON.", False, flag="--json")
    from_flags: bool = option(
        "Print the YAML that means the same as the Megatron-style flags that follow, without the defaults. A launch "
        "script, a command with its entry, or a YAML with gpt_args can be given instead.",
        False,
    )
    from_other: bool = option(
        "Print the YAML that means the same as the file or command of another trainer that follows: LLaMA-Factory, "
        "ms-swift, axolotl, TRL, diffusers' scripts, kohya's sd-scripts, musubi-tuner, ai-toolkit or DiffSynth-Studio. "
        "What has no effect here and what is not supported is listed at its end.",
        False,
        flag="--from",
    )


@dataclass(frozen=True)
class SchemaRequest(Request):
    """A configuration key or section; an empty one means all keys."""

    key: str = argument(default="")
    as_json: bool = option("Print JSON: without KEY, a JSON schema for editors.", False, flag="--json")


@dataclass(frozen=True)
class ReportRequest(Request):
    """Runs that one page shows."""

    runs: tuple[Path, ...] = argument()
    out: Path | None = option("HTML file to write; default: report.html in the first run.")
    as_json: bool = option("Print the report's path as JSON.", False, flag="--json")


@dataclass(frozen=True)
class CompletionRequest(Request):
    """A shell that is to complete verbs and options."""

    shell: Literal["bash", "zsh", "fish"] = argument()
    as_json: bool = option("Print it as JSON.", False, flag="--json")
