"""What `mm convert` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.checkpoint.recognise import Layout
from mindspeed_mm.core.request import Request, argument, option


@dataclass(frozen=True)
class ConvertRequest(Request):
    """A checkpoint, and the layout that it is to have."""

    source: Path = argument()
    target: Path | None = argument(default=None)
    to: Layout | None = option("Layout of TARGET; default: dcp of a Hugging Face folder, hf of a checkpoint.")
    tp: int | None = option("To megatron: ranks that divide each layer.", least=1)
    pp: int | None = option("To megatron: pipeline stages, layers divided evenly.", least=1)
    vpp: int | None = option("To megatron: virtual chunks on each stage.", least=1)
    ep: int | None = option("To megatron: ranks that divide the experts.", least=1)
    model_folder: Path | None = option("Folder with config.json and tokenizer, for a checkpoint.", flag="--model")
    overwrite: bool = option("Replace what an earlier conversion wrote to TARGET.", False)
    verify: Literal["true", "false", "full"] = option(
        "Read everything back and compare, also the logits of a language model; full: of models of any size.",
        "true",
        bare="true",
        short_forms={"--no-verify": ("false", "The same as --verify false.")},
    )
    allow_unused: bool = option(
        "Leave out stored tensors that the model has no place for, and name them; else they are an error.", False
    )
    verify_only: bool = option("Compare SOURCE with the checksums of its conversion; write nothing.", False)
    as_json: bool = option("Print what was written as JSON.", False, flag="--json")
