"""What `mm export`, `mm merge`, `mm extract` and `mm convert` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.checkpoint.recognise import Layout
from mindspeed_mm.core.request import Request, argument, option, required
from mindspeed_mm.tasks.requests.shared import plugin_option

Dtype = Literal["bf16", "fp16", "fp32", "fp64"]


@dataclass(frozen=True)
class ExportRequest(Request):
    """A run, and the folder that its weights are written to."""

    run: Path = argument("RUN_OR_CHECKPOINT")
    out: Path = argument()
    step: int | str | None = option(
        "Checkpoint of the run to export; default: the best one if the run keeps one, else the newest.",
        flag="--checkpoint",
        also="--step",
        metavar="best|newest|STEP",
    )
    weights: Literal["ema", "model"] | None = option(
        "Export the moving average or the trained weights; default: the average if the run kept one."
    )
    dtype: Dtype | None = option("Type of the exported weights; default: that of the model the run started from.")
    model_folder: Path | None = option(
        "Folder with everything but the trained weights; default: the one the run started from.", flag="--model"
    )
    merge: bool = option("For a run that trained adapters: write the whole model with the adapters merged.", False)
    transformer_only: bool = option("For a generator: leave out encoders and other components.", False)
    single_file: bool = option(
        "For a generator: write the transformer as one file under its authors' names, as ComfyUI reads it.", False
    )
    lora_format: Literal["diffusers", "comfyui", "kohya"] = option(
        "For a generator's adapters: whose names the file uses.", "diffusers"
    )
    overwrite: bool = option("Replace what an earlier export or merge wrote to OUT.", False)
    as_json: bool = option("Print what was written as JSON.", False, flag="--json")
    max_shard_bytes: int | None = None
    """Largest size of one weights file, unless a single tensor is larger; None: as transformers has it."""


@dataclass(frozen=True)
class MergeRequest(Request):
    """A model, the adapters that are added to its weights, and the folder for the sum."""

    base: Path = argument("BASE_OR_RUN")
    adapters: tuple[Path, ...] = argument("[ADAPTER]...", default=())
    out: Path = required("Folder to write the merged model to.")
    scales: tuple[float, ...] = option(
        "Factor on an adapter; give one for all, or one each. -1 removes an adapter that was merged before.",
        (),
        flag="--scale",
    )
    dtype: Dtype | None = option("Type of the merged weights; default: that of the base.")
    plugins: tuple[str, ...] = plugin_option()
    overwrite: bool = option("Replace what an earlier export or merge wrote to --out.", False)
    as_json: bool = option("Print what was written as JSON.", False, flag="--json")
    max_shard_bytes: int | None = None
    """Largest size of one weights file, unless a single tensor is larger; None: as transformers has it."""


@dataclass(frozen=True)
class ExtractRequest(Request):
    """A configuration whose media and captions are encoded, and the folder for the features."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    out: Path | None = option("Folder to write; default: basic_parameters.features_dir.")
    batch_size: int | None = option(
        "Number of samples encoded at a time; default: chosen by the number of pixels.", least=1
    )
    nproc: int = option("Number of ranks on this host; more than 1 starts torchrun.", 1, least=1)
    dtype: Literal["bf16", "fp32"] | None = option("Type that the encoders compute in; default: the stored one.")
    overwrite: bool = option("Delete the existing features and start again.", False)
    verify: Literal["hash", "size"] = option(
        "How existing features are verified: every byte, or headers and sizes only.", "hash"
    )
    as_json: bool = option("Print the outcome as JSON.", False, flag="--json")


# --- mm convert -------------------------------------------------------------------------------------------------------


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
