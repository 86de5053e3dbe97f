"""`mm convert`: from a folder that is recognised to a layout that is named."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_mm.checkpoint.common.config import CommonModelConfig, ParallelConfig
from mindspeed_mm.checkpoint.conversion.manifest import check_converted
from mindspeed_mm.checkpoint.conversion.run import Converted, Verify, Writing
from mindspeed_mm.checkpoint.cosyvoice3_release import is_cosyvoice3_release
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader
from mindspeed_mm.checkpoint.dcp_folder.reading import find_step as find_distributed_step
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.checkpoint.hf_folder import model_config
from mindspeed_mm.checkpoint.layout import RELEASE, list_iterations, read_tracker
from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.megatron.family import MegatronFamily
from mindspeed_mm.checkpoint.megatron.folder import find_step, step_files
from mindspeed_mm.checkpoint.megatron.layout import LAYOUT_FILE, even_stages
from mindspeed_mm.checkpoint.megatron.pt_reading import read_pt_files
from mindspeed_mm.checkpoint.original.converting import GeneratorTarget, convert_generator
from mindspeed_mm.checkpoint.original.families import recognise_generator
from mindspeed_mm.checkpoint.original.generator import Naming
from mindspeed_mm.checkpoint.original.mm_division import DIVISIONS, Places
from mindspeed_mm.checkpoint.ptd.conversions import divide_anew, hf_to_megatron, megatron_to_dcp, megatron_to_hf
from mindspeed_mm.checkpoint.ptd.trained import divide_trained
from mindspeed_mm.checkpoint.recognise import Layout, is_gguf, is_torch_dist, recognise, told_ways
from mindspeed_mm.checkpoint.safetensors_folder import find_entries, weight_files
from mindspeed_mm.core.errors import CheckpointError, Problem, UsageError, told_as
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.terminal import quoted
from mindspeed_mm.fsdp.models.loading.gguf import write_model_folder
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.convert.cosyvoice3 import hf_to_release, release_to_hf
from mindspeed_mm.tasks.convert.same_logits import same_logits
from mindspeed_mm.tasks.export.source import NAME_MODEL, noted_model, unnamed_model

_FLAGS = {"tp_size": "--tp", "pp_layers": "--pp", "llm_pp_layers": "--pp", "ep_size": "--ep"}
"""Last part of a configuration key → the option here that it comes from."""


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
    verify: Verify = True,
    allow_unused: bool = False,
) -> tuple[str, Converted]:
    """Convert a folder.

    Args:
        source: A Hugging Face folder, a distributed checkpoint, a run, a Megatron-style folder, a generator's weights
            in any layout, a text model in GGUF, or CosyVoice3's release.
        target: The folder to write.
        to: Its layout; None: `dcp` of a Hugging Face folder, `hf` of anything else. `hf` of a generator is `diffusers`.
        division: Of a Megatron-style target.
        model_folder: Configuration and tokenizer for a checkpoint that does not say what it was trained from; of a
            generator a diffusers folder of the same model; of CosyVoice3 to `original` its release.
        overwrite: Replace what an earlier conversion wrote there.
        verify: Read everything back and compare, also the logits; full: of models of any size.
        allow_unused: Leave out stored tensors that the model has no place for, and name them; else they are an error.

    Returns:
        What the source was recognised as, and what was written.

    Raises:
        UsageError: There is no way from that source to that layout, or an option is given that is not used on it.
    """
    if division is not None and to != "megatron":
        raise UsageError(
            "ranks divide a Megatron-style target", key="--tp --pp --vpp --ep", way_out="Add --to megatron."
        )
    if is_gguf(source) and to in (None, "hf"):
        _refuse_model(model_folder)
        return "gguf", _from_gguf(source, target, overwrite=overwrite)
    writing = Writing(overwrite, verify, same_logits, allow_unused)
    if is_cosyvoice3_release(source) and to in (None, "hf"):
        _refuse_model(model_folder)
        return "cosyvoice3", release_to_hf(source, target, writing)
    if to == "original" and _is_cosyvoice3(source):
        return "hf", hf_to_release(source, target, model_folder, writing)
    if to in ("diffusers", "original"):
        return "generator", _generator(source, target, Naming(to), model_folder, writing)
    kind = "generator" if source.is_file() else _kind_of(source)
    wanted: Layout = to or ("dcp" if kind == "hf" else "hf")
    if allow_unused and kind not in ("hf", "dcp", "run"):
        raise UsageError(
            f"does not apply to a source of kind '{kind}'",
            key="--allow-unused",
            way_out="Leave it out. A tensor without a place there is of another model than --model names.",
        )
    return _between_layouts(source, target, kind, wanted, division or Division(), model_folder, writing)


def _between_layouts(
    source: Path,
    target: Path,
    kind: str,
    wanted: Layout,
    division: Division,
    model_folder: Path | None,
    writing: Writing,
) -> tuple[str, Converted]:
    """Convert a folder of a model, a distributed checkpoint or a Megatron-style folder into another layout."""
    if wanted == "megatron":
        with told_as(_as_option):
            return _to_megatron(source, target, kind, division, model_folder, writing)
    if wanted == "hf" and kind != "hf" and _is_generator(source, kind):
        return "generator", _generator(source, target, Naming.DIFFUSERS, model_folder, writing)
    distributed = GenericDCPConverter()
    distributed.examine = same_logits
    if (kind, wanted) == ("hf", "dcp"):
        _refuse_model(model_folder)
        return kind, distributed.hf_to_dcp(
            source, target, overwrite=writing.overwrite, verify=writing.verify, allow_unused=writing.allow_unused
        )
    if kind in ("dcp", "run") and wanted == "hf":
        _refuse_adapters(source)
        assets = _model_of(source, model_folder)
        return kind, distributed.dcp_to_hf(
            source,
            target,
            assets,
            overwrite=writing.overwrite,
            verify=writing.verify,
            allow_unused=writing.allow_unused,
        )
    if kind == "megatron" and wanted in ("hf", "dcp"):
        assets = _model_of(source, model_folder)
        family, facts = _named_family(assets, kind), CommonModelConfig()
        if wanted == "dcp":
            return kind, megatron_to_dcp(family, source, assets, target, writing=writing)
        return kind, megatron_to_hf(family, source, assets, target, None, facts=facts, writing=writing)
    raise _no_way(source, kind, wanted)


def _kind_of(source: Path) -> str:
    """As `recognise`; a folder with the checkpoint of a conversion, and no step of a run, is of kind `dcp`."""
    kind = recognise(source)
    is_converted = kind == "run" and not list_iterations(source) and read_tracker(source) == RELEASE
    if is_converted:
        return "dcp"
    return kind


def _is_cosyvoice3(source: Path) -> bool:
    return (source / "config.json").is_file() and model_config(source).get("model_type") == "cosyvoice3"


def _from_gguf(source: Path, target: Path, *, overwrite: bool) -> Converted:
    """A text model in GGUF as a model folder, by transformers' reader."""
    start = time.perf_counter()
    not_finite = write_model_folder(source, target, overwrite=overwrite)
    entries = find_entries(target)
    size_bytes = sum(file.stat().st_size for file in weight_files(target))
    seconds = time.perf_counter() - start
    return Converted(target, len(entries), size_bytes, seconds, 0.0, not_finite=not_finite)


def compare(folder: Path) -> tuple[int, int]:
    """Compare a folder that a conversion wrote with the checksums that it left there: numbers of tensors and bytes, all
    as they were written.

    Raises:
        CheckpointError: No conversion wrote it; or a tensor is missing or another one, with its file and key.
    """
    return check_converted(folder, WorkProgress("MB"))


def _to_megatron(
    source: Path, target: Path, kind: str, division: Division, model_folder: Path | None, writing: Writing
) -> tuple[str, Converted]:
    if _is_generator(source, kind):
        if division.ep > 1:
            raise UsageError("a generator has no experts", key="ep_size", way_out="Leave it out.")
        return "generator", _generator(source, target, Naming.MM, model_folder, writing, division)
    if kind not in ("hf", "dcp", "run", "megatron"):
        raise _no_way(source, kind, "megatron")
    return kind, _divided(source, target, kind, division, model_folder, writing)


def _no_way(source: Path, kind: str, wanted: str) -> UsageError:
    way_out = f"Possible are {told_ways()}. Other layouts have a converter of their own: mm-convert --help."
    return UsageError(
        f"there is nothing to convert from a folder of kind '{kind}' to '{wanted}'",
        where=str(source),
        key="--to",
        way_out="Merge adapters with mm merge; mm-convert converts them too." if kind == "adapters" else way_out,
    )


def _refuse_adapters(source: Path) -> None:
    """A run with LoRA saves what it trained, without the model under it."""
    adapters = [name for name in DcpReader(find_distributed_step(source)).model_tensors() if is_adapter_weight(name)]
    if adapters:
        raise UsageError(
            f"holds adapters ({len(adapters)} tensors, as {adapters[0]}) without the model under them",
            where=str(source),
            way_out=f"mm export {quoted(source)} FOLDER writes them as PEFT's files; mm merge adds those to the model.",
        )


def _as_option(problem: Problem) -> Problem:
    """What is wrong with a division that was asked for, under the name that it was asked by."""
    option = _FLAGS.get(problem.key.rpartition(".")[2])
    if option and not problem.where:
        return replace(problem, key=option)
    return problem


def _refuse_model(model_folder: Path | None) -> None:
    if model_folder is not None:
        raise UsageError("is not used: the source has its own config.json", key="--model", way_out="Leave it out.")


def _divided(
    source: Path, target: Path, kind: str, division: Division, model_folder: Path | None, writing: Writing
) -> Converted:
    if kind == "hf":
        _refuse_model(model_folder)
        assets = source
    else:
        assets = _model_of(source, model_folder)
    family = _named_family(assets, kind)
    layers = even_stages(family.model(model_config(assets)).depths["text"], division.pp, division.vpp)
    said = ParallelConfig(llm_pp_layers=list(map(list, layers)), tp_size=division.tp, ep_size=division.ep)
    if kind == "hf":
        return hf_to_megatron(family, source, target, said, facts=CommonModelConfig(), writing=writing)
    if kind in ("dcp", "run"):
        return divide_trained(family, source, target, assets, said, writing=writing)
    return divide_anew(family, source, target, assets, None, said, writing=writing)


def _is_generator(source: Path, kind: str) -> bool:
    """Whether the weights are those of a generator: a file of its authors, a folder of diffusers or of its authors,
    MindSpeed-MM's ranks, or a run."""
    if kind == "generator" or (source / "model_index.json").is_file():
        return True
    if kind == "megatron":
        said = find_step(source) / LAYOUT_FILE
        if said.is_file():
            return read_json_object(said, CheckpointError).get("family") in DIVISIONS
        if is_torch_dist(find_step(source)):
            return False  # generators are not saved so
        contents = read_pt_files(step_files(source))
        names: set[str] = set()
        for content in contents:
            names.update(*content.tensors.values())
        return recognise_generator(names) is not None
    if kind in ("dcp", "run"):
        return recognise_generator(DcpReader(find_distributed_step(source)).model_tensors()) is not None
    return kind == "hf" and (source / "config.json").is_file() and "_class_name" in model_config(source)


def _generator(
    source: Path,
    target: Path,
    naming: Naming,
    model_folder: Path | None,
    writing: Writing,
    division: Division | None = None,
) -> Converted:
    division = division or Division()
    places = Places(division.pp, division.vpp) if division.pp * division.vpp > 1 else None
    wanted = GeneratorTarget(naming, division.tp, places, hf_dir=model_folder)
    return convert_generator(
        source, target, wanted, overwrite=writing.overwrite, verify=bool(writing.verify), stream=sys.stderr
    )


def _model_of(source: Path, told: Path | None) -> Path:
    """The folder with the configuration and tokenizer of a checkpoint's model."""
    found = told or noted_model(source) or noted_model(source.parent)
    if found is None and (source / "config.json").is_file():
        found = source
    if found is None:
        raise unnamed_model(source, NAME_MODEL)
    model_config(found, NAME_MODEL)
    return found


def _named_family(folder: Path, kind: str) -> MegatronFamily:
    """The family of the model whose folder was named."""
    way_out = "Any other trains from a distributed checkpoint: --to dcp."
    if kind in ("dcp", "run"):
        way_out = "Write any other as a Hugging Face folder: --to hf."
    elif kind == "megatron":
        way_out = "Name the folder of the model that was divided: --model FOLDER."
    return family_of(model_config(folder, NAME_MODEL), str(folder / "config.json"), way_out)
