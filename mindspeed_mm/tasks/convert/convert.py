"""`mm convert`: from a folder that is recognised to a layout that is named."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.checkpoint.common.config import CommonModelConfig, ParallelConfig
from mindspeed_mm.checkpoint.conversion.run import Converted
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.megatron.folder import find_step, pt_files
from mindspeed_mm.checkpoint.megatron.layout import LAYOUT_FILE, even_layers
from mindspeed_mm.checkpoint.megatron.pt_reading import read_pt_files
from mindspeed_mm.checkpoint.original.converting import GeneratorTarget, convert_generator
from mindspeed_mm.checkpoint.original.families import recognise_generator
from mindspeed_mm.checkpoint.original.generator import Naming
from mindspeed_mm.checkpoint.original.mm_division import DIVISIONS
from mindspeed_mm.checkpoint.ptd.conversions import Writing, divide_anew, hf_to_megatron, megatron_to_hf
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.tasks.export.source import noted_model

Layout = Literal["hf", "dcp", "megatron", "diffusers", "original"]


@dataclass(frozen=True)
class Division:
    """How a Megatron-style checkpoint is divided; layers evenly."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1


def run(
    source: Path,
    target: Path,
    to: Layout | None = None,
    *,
    division: Division | None = None,
    model_folder: Path | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> tuple[str, Converted]:
    """Convert a folder.

    Args:
        source: A Hugging Face folder, a distributed checkpoint, a run, a Megatron-style folder, or a generator's
            weights in any layout.
        target: The folder to write.
        to: Its layout; None: `dcp` of a Hugging Face folder, `hf` of anything else. `hf` of a generator is `diffusers`.
        division: Of a Megatron-style target.
        model_folder: Configuration and tokenizer for a checkpoint that does not say what it was trained from; of a
            generator a diffusers folder of the same model.
        overwrite: Replace what an earlier conversion wrote there.
        verify: Read everything back and compare.

    Returns:
        What the source was recognised as, and what was written.

    Raises:
        UsageError: There is no way from that source to that layout, or ranks were given for another layout.
    """
    if division is not None and to != "megatron":
        raise UsageError(
            "ranks divide a Megatron-style target", key="--tp --pp --vpp --ep", way_out="Add --to megatron."
        )
    writing = Writing(overwrite, verify)
    if to in ("diffusers", "original"):
        return "generator", _generator(source, target, Naming(to), 1, model_folder, writing)
    kind = "generator" if source.is_file() else recognise(source)
    wanted = to or ("dcp" if kind == "hf" else "hf")
    if wanted == "megatron" and _is_generator(source, kind):
        return "generator", _divided_generator(source, target, division or Division(), model_folder, writing)
    if wanted == "hf" and kind != "hf" and _is_generator(source, kind):
        return "generator", _generator(source, target, Naming.DIFFUSERS, 1, model_folder, writing)
    if (kind, wanted) == ("hf", "dcp"):
        return kind, GenericDCPConverter().hf_to_dcp(source, target, overwrite=overwrite, verify=verify)
    if kind in ("dcp", "run") and wanted == "hf":
        assets = _model_of(source, model_folder)
        return kind, GenericDCPConverter().dcp_to_hf(source, target, assets, overwrite=overwrite, verify=verify)
    if kind == "megatron" and wanted == "hf":
        assets = _model_of(source, model_folder)
        family = family_of(_config(assets))
        facts = CommonModelConfig()
        return kind, megatron_to_hf(family, source, assets, target, None, facts=facts, writing=writing)
    if kind in ("hf", "megatron") and wanted == "megatron":
        return kind, _divided(source, target, kind, division or Division(), model_folder, writing)
    raise UsageError(
        f"there is nothing to convert from a folder of kind '{kind}' to '{wanted}'", where=str(source), key="--to"
    )


def _divided(
    source: Path, target: Path, kind: str, division: Division, model_folder: Path | None, writing: Writing
) -> Converted:
    assets = source if kind == "hf" else _model_of(source, model_folder)
    config = _config(assets)
    family = family_of(config)
    depths = family.model(config).depths
    if division.pp * division.vpp > depths["text"]:
        raise UsageError(
            f"{division.pp} stages × {division.vpp} chunks are more than the language model's {depths['text']} layers",
            key="--pp",
            way_out="Take fewer; mm-convert takes the layers of each place, and some may have none.",
        )
    layers = even_layers(depths, division.pp, division.vpp)["text"]
    said = ParallelConfig(llm_pp_layers=[list(chunk) for chunk in layers], tp_size=division.tp, ep_size=division.ep)
    if kind == "hf":
        return hf_to_megatron(family, source, target, said, facts=CommonModelConfig(), writing=writing)
    return divide_anew(family, source, target, assets, None, said, writing=writing)


def _is_generator(source: Path, kind: str) -> bool:
    """Whether the weights are those of a generator: a file of its authors, a folder of diffusers or of its authors, or
    MindSpeed-MM's ranks."""
    if kind == "generator" or (source / "model_index.json").is_file():
        return True
    if kind == "megatron":
        said = find_step(source) / LAYOUT_FILE
        if said.is_file():
            return read_json_object(said, CheckpointError).get("family") in DIVISIONS
        contents = read_pt_files(pt_files(source))
        names = {name for content in contents for of in content.tensors.values() for name in of}
        return recognise_generator(names) is not None
    return kind == "hf" and (source / "config.json").is_file() and "_class_name" in _config(source)


def _divided_generator(
    source: Path, target: Path, division: Division, model_folder: Path | None, writing: Writing
) -> Converted:
    if (division.pp, division.vpp, division.ep) != (1, 1, 1):
        raise UsageError("of a generator, --tp alone is taken here", key="--pp", way_out="See mm-convert --help.")
    return _generator(source, target, Naming.MM, division.tp, model_folder, writing)


def _generator(
    source: Path, target: Path, naming: Naming, tp: int, model_folder: Path | None, writing: Writing
) -> Converted:
    wanted = GeneratorTarget(naming, tp_size=tp, hf_dir=model_folder)
    return convert_generator(
        source, target, wanted, overwrite=writing.overwrite, verify=writing.verify, stream=sys.stderr
    )


def _model_of(source: Path, told: Path | None) -> Path:
    """The folder with the configuration and tokenizer of a checkpoint's model."""
    found = told or noted_model(source) or noted_model(source.parent)
    if found is None and (source / "config.json").is_file():
        found = source
    if found is None:
        raise UsageError(
            "does not say which model it was trained from",
            where=str(source),
            way_out="Name the folder with its config.json and tokenizer: --model FOLDER.",
        )
    return found


def _config(folder: Path) -> dict[str, object]:
    return read_json_object(folder / "config.json", ModelFolderError)
