"""Files of a generator's LoRA: opened to be merged, written in MindSpeed-MM's layout or as a checkpoint that trains.

Layers may bear the names of any layout of the family, and those of kohya's scripts, with underscores for dots. A layer
that holds several of another layout is taken apart by the rule that takes its weight apart: B has the same rows as the
weight, and every part has the whole A.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mindspeed_mm.checkpoint.conversion.files import OutputFile, PtFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, step_in
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.keymap import KeyMap
from mindspeed_mm.checkpoint.layout import RELEASE, TRACKER
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.megatron.folder import CHECKPOINT_VERSION, find_step
from mindspeed_mm.checkpoint.megatron.layout import WEIGHTS_FILE
from mindspeed_mm.checkpoint.megatron.pt_reading import read_pt_files
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Naming
from mindspeed_mm.checkpoint.original.lora import ADAPTER_CONFIG, LoraScaling, alphas_of, lora_modules
from mindspeed_mm.checkpoint.original.reading import open_file
from mindspeed_mm.checkpoint.recognise import check_folder_exists
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, Problem, UsageError, first_problems

_KOHYA = re.compile(r"(?:lora_unet|\w+?_lora)_(?P<layer>\w+)")
"""A module as kohya's scripts name it: a prefix of each program's own, and the layer with underscores for dots."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA to merge into the weights, and how it is scaled."""

    path: Path
    """A safetensors file, a folder with one, MindSpeed-MM's folder of one rank, or a run that trained it."""
    scaling: LoraScaling = field(default_factory=LoraScaling)


@dataclass(frozen=True)
class OpenedAdapter:
    """A LoRA whose tensors can be read."""

    ledger: SourceLedger
    """Its A and B by the names in the files."""
    alphas: Mapping[str, float]
    """Module, as `lora_modules` names it → alpha; none of modules whose alpha nobody says, if that was allowed."""


@contextmanager
def open_adapter(adapter: Adapter, *, needs_alphas: bool = True) -> Iterator[OpenedAdapter]:
    """Open a LoRA for the length of the `with` block.

    Args:
        adapter: Where it is.
        needs_alphas: It is an error that nobody says how it is scaled.

    Raises:
        UsageError: There is no such file, or more than one; or its scale is not known, or said otherwise.
        ModelFolderError: It holds more than A and B of linear layers.
        CheckpointError: The checkpoint is damaged or divided.
    """
    path, scaling = adapter.path, adapter.scaling
    if not path.is_file():
        check_folder_exists(path)
    found = tensors_of_checkpoint(path) if path.is_dir() else None
    if found is not None:
        tensors = {name: tensor for name, tensor in found.items() if ".lora_" in name}
        alphas = alphas_of(tensors, {}, path, scaling, needed=needs_alphas)
        yield OpenedAdapter(SourceLedger(tensors, path), alphas)
        return
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise UsageError(f"holds {len(files)} safetensors files", where=str(path), way_out="Name the LoRA's file.")
        path = files[0]
    if path.suffix != ".safetensors":
        raise UsageError("is not a safetensors file", where=str(path), way_out="Get the LoRA as safetensors.")
    with open_file(path) as (stored, metadata):
        tensors = dict(stored)
        alphas = alphas_of(tensors, metadata, path, scaling, needed=needs_alphas)
        yield OpenedAdapter(SourceLedger(tensors, path), alphas)


def tensors_of_checkpoint(path: Path) -> dict[str, LazyTensor] | None:
    """The model's tensors of MindSpeed-MM's folder of one rank, or of a run; None where the folder is neither. A
    checkpoint of adapters may hold the base's tensors too.

    Raises:
        CheckpointError: It is damaged, or divided among ranks.
    """
    if not (any(path.glob("mp_rank_*/")) or any(path.glob("*/mp_rank_*/"))):
        step = step_in(path)
        if step is None:
            return None
        return dict(DcpReader(step).model_tensors())
    folders = sorted(find_step(path).glob("mp_rank_*/"))
    if len(folders) != 1:
        raise CheckpointError(
            f"is divided among {len(folders)} ranks, and adapters are read from one",
            where=str(path),
            way_out="Give the LoRA as one safetensors file.",
        )
    (content,) = read_pt_files([folders[0] / WEIGHTS_FILE])
    found: dict[str, LazyTensor] = {}
    for section, tensors in content.tensors.items():
        if section.startswith("model"):
            found |= tensors
    return found


def convert_adapter(
    source: Path,
    target: Path,
    family: GeneratorLayouts,
    naming: Naming,
    *,
    in_place: bool = False,
    keep_backup: bool = True,
    stream: TextIO | None = None,
) -> Converted:
    """Write a LoRA under the names of another layout.

    Args:
        source: As `Adapter.path`.
        target: The folder to write: MindSpeed-MM's folder of one rank for its names, a distributed checkpoint for
            those of diffusers, which training has.
        family: Of the model.
        naming: Whose names are written.
        in_place: The target is the source.
        keep_backup: Of a conversion in place.
        stream: Where progress is shown.

    Raises:
        MMError: As `open_adapter` and `renamed`; or the modules have alphas of their own.
    """
    with open_adapter(Adapter(source), needs_alphas=False) as opened:
        flat = _flat_names(family)
        modules = {_with_dots(name, flat): pair for name, pair in lora_modules(opened.ledger.tensors).items()}
        tensors: dict[str, LazyTensor] = {}
        for name, (down, up) in renamed(modules, family, naming).items():
            tensors |= {f"{name}.lora_A.default.weight": down, f"{name}.lora_B.default.weight": up}
        texts = {TRACKER: f"{RELEASE}\n" if naming is Naming.DIFFUSERS else RELEASE}
        if opened.alphas:
            texts[ADAPTER_CONFIG] = json.dumps(_settings(opened, source), indent=2) + "\n"
        files: dict[str, OutputFile] = {RELEASE: DcpFolder(tensors)}
        if naming is Naming.MM:
            rank = PtFile({"model": tensors}, {"checkpoint_version": CHECKPOINT_VERSION})
            files = {f"{RELEASE}/mp_rank_00/{WEIGHTS_FILE}": rank}
        conversion = Conversion(
            [opened.ledger.where],
            [opened.ledger],
            files,
            {"kind": "dcp" if naming is Naming.DIFFUSERS else str(naming), "family": family.name, "names": "adapters"},
            dict.fromkeys(opened.ledger.tensors),  # the A of a layer that is taken apart is that of each part
            texts=texts,
        )
        return convert(conversion, target, Writing(), in_place=in_place, keep_backup=keep_backup, stream=stream)


def _settings(opened: OpenedAdapter, source: Path) -> dict[str, object]:
    """What `adapter_config.json` says. The layouts have one scale for all modules.

    Raises:
        UsageError: The modules have several.
    """
    found = set()
    for module, (down, _) in lora_modules(opened.ledger.tensors).items():
        found.add((down.shape[0], opened.alphas[module]))
    if len({alpha / rank for rank, alpha in found}) > 1:
        raise UsageError(
            f"has layers of {len(found)} ranks and alphas, and this layout has room for one",
            where=str(source),
            way_out="Merge it into the model's weights with merge_lora_to_base.",
        )
    rank, alpha = max(found)
    return {"r": rank, "lora_alpha": alpha}


def renamed(
    modules: Mapping[str, tuple[LazyTensor, LazyTensor]], family: GeneratorLayouts, wanted: Naming
) -> dict[str, tuple[LazyTensor, LazyTensor]]:
    """Adapters under the names of another layout.

    Args:
        modules: Module → A and B, by the names of any layout of the family.
        family: Of the model.
        wanted: The layout.

    Raises:
        ModelFolderError: The modules are not layers of the family.
        UsageError: A layer of the wanted layout is made of several that have adapters of their own.
    """
    best: list[str] | None = None
    for naming in Naming:
        if naming is Naming.MM and not family.mm:
            continue
        hub, unknown = _through(modules, family.rules(naming))
        if naming is Naming.DIFFUSERS:  # whose rules take any name
            unknown = [module for module in modules if not _is_of_diffusers(module, family)]
        if not unknown:
            made, _ = _through(hub, family.rules(wanted).inverse)
            return made
        best = unknown if best is None or len(unknown) < len(best) else best
    raise ModelFolderError(
        f"the adapter is for layers that {family.name} does not have",
        problems=first_problems([Problem("is not a layer of it", key=module) for module in best or []]),
    )


def _is_of_diffusers(module: str, family: GeneratorLayouts) -> bool:
    rules = family.rules(Naming.ORIGINAL).inverse.rules
    return any(regex.fullmatch(f"{module}.weight") for rule in rules for regex in rule.regexes)


def _through(
    modules: Mapping[str, tuple[LazyTensor, LazyTensor]], rules: KeyMap
) -> tuple[dict[str, tuple[LazyTensor, LazyTensor]], list[str]]:
    """Adapters behind a key map, and the modules that it does not know."""
    made: dict[str, tuple[LazyTensor, LazyTensor]] = {}
    unknown = {f"{module}.weight": module for module in modules}
    try:
        steps = rules.steps({key: modules[module][1] for key, module in unknown.items()})
    except ModelFolderError as error:  # a part of a layer that is made of several has none
        raise UsageError(
            "a layer of the wanted layout is made of several, and not all of them have an adapter",
            problems=error.problems,
            way_out="Merge it into the model's weights with merge_lora_to_base.",
        ) from error
    for step in steps:
        downs = {id(down): down for down in (modules[unknown[source]][0] for source in step.sources)}
        if len(downs) > 1:
            raise UsageError(
                f"{' and '.join(step.sources)} are one layer in the wanted layout, and have adapters of their own",
                way_out="Merge it into the model's weights with merge_lora_to_base.",
            )
        (down,) = downs.values()
        for key, up in step.targets.items():
            made[key.removesuffix(".weight")] = (down, up)
    used = {source for step in steps for source in step.sources}
    return made, [module for key, module in unknown.items() if key not in used]


def _flat_names(family: GeneratorLayouts) -> Mapping[re.Pattern[str], str]:
    """Names of layers with underscores → the authors' own, as a template that `re` expands."""
    found: dict[re.Pattern[str], str] = {}
    for rule in family.original:
        for source in rule.sources:
            layer = source.removesuffix(".{part}").removesuffix(".weight")
            if "*" in layer:
                continue
            flat = re.escape(layer.replace(".", "_")).replace(re.escape("{n}"), r"(?P<n>\d+)")
            found[re.compile(flat)] = layer.replace("{n}", r"\g<n>")
    return found


def _with_dots(module: str, flat_names: Mapping[re.Pattern[str], str]) -> str:
    """A module of kohya's scripts under the authors' name; any other as it is."""
    match = _KOHYA.fullmatch(module)
    if match is None:
        return module
    for flat, dotted in flat_names.items():
        if found := flat.fullmatch(match["layer"]):
            return found.expand(dotted)
    return module
