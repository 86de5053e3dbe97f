"""Converts the weights of a generator from any of their layouts into another: diffusers' folder, the authors' files,
MindSpeed-MM's `mp_rank_*` folders in any division, with or without a LoRA merged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mindspeed_mm.checkpoint.conversion.files import OutputFile, PtFile, SafetensorsFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, DtypeRule, safetensors_files
from mindspeed_mm.checkpoint.layout import RELEASE, TRACKER
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.megatron.folder import CHECKPOINT_VERSION, divided_files
from mindspeed_mm.checkpoint.megatron.layout import LAYOUT_FILE
from mindspeed_mm.checkpoint.megatron.sharding import times_written
from mindspeed_mm.checkpoint.original.adapter_files import Adapter, OpenedAdapter, open_adapter
from mindspeed_mm.checkpoint.original.diffusers_model import fitting_config, told_version
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, count, from_diffusers
from mindspeed_mm.checkpoint.original.lora import merge_lora
from mindspeed_mm.checkpoint.original.mm_division import DIVISIONS, layout_of, megatron_family
from mindspeed_mm.checkpoint.original.reading import CONFIG_FILE, GeneratorWeights, open_generator
from mindspeed_mm.core.errors import ModelFolderError

DIFFUSERS_STEM = "diffusion_pytorch_model"
Files = Mapping[str, OutputFile]


@dataclass(frozen=True)
class GeneratorTarget:
    """What is to be written."""

    naming: Naming
    tp_size: int = 1
    pp_layers: Any = None
    """As `layout_of` of `mm_division` takes it, for MindSpeed-MM's layout."""
    hf_dir: Path | None = None
    """A diffusers folder of the same model, whose config.json is taken; None: the source's, or what shapes tell."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    task: str | None = None
    """`t2v` or `i2v`, where keys and shapes do not tell it."""
    is_distributed: bool = False
    """A distributed checkpoint that trains, instead of a diffusers folder."""


def convert_generator(
    source: Path,
    target: Path,
    wanted: GeneratorTarget,
    *,
    adapter: Adapter | None = None,
    check: Callable[[GeneratorWeights], None] | None = None,
    open_source: Callable[[Path], AbstractContextManager[GeneratorWeights]] = open_generator,
    overwrite: bool = False,
    keep_backup: bool = True,
    verify: bool = True,
    stream: TextIO | None = None,
) -> Converted:
    """Convert. A target that is the source is replaced: the new folder is built beside it and verified, and the
    original is kept as `<name>.bak`.

    Args:
        source: As `open_source` takes it.
        target: The folder to write.
        wanted: Layout and division.
        adapter: A LoRA to merge meanwhile.
        check: Raises for a source that is not wanted.
        open_source: Opens it.
        overwrite: Replace what a command of ours has written at the target.
        keep_backup: Of a conversion in place.
        verify: Read back and compare before the folder gets its name.
        stream: Where progress is shown.

    Raises:
        ModelFolderError: The weights are of no family here, or names and shapes are not those of the model.
        CheckpointError: A file is damaged, or what was written does not read back.
        UsageError: The division is none of this model's, or the target is none that may be written.
        MachineError: There is not enough room.
    """
    with ExitStack() as stack:
        weights = stack.enter_context(open_source(source))
        if check is not None:
            check(weights)
        opened = None
        if adapter:
            opened = stack.enter_context(open_adapter(adapter))
        return convert(
            plan_conversion(weights, wanted, opened),
            target,
            Writing(overwrite, verify),
            in_place=target.resolve() in {source.resolve(), weights.path.resolve()},
            keep_backup=keep_backup,
            stream=stream,
        )


def plan_conversion(
    weights: GeneratorWeights, wanted: GeneratorTarget, adapter: OpenedAdapter | None = None
) -> Conversion:
    """What is written from what. Nothing is read.

    Raises:
        ModelFolderError: Names are missing or surplus, or shapes are not those of the model.
        UsageError: The division is none of this model's.
    """
    family = weights.family
    ledgers = [SourceLedger(weights.stored, weights.path, weights.beside)]
    hub = weights.under_diffusers_names(ledgers[0].tensors)
    # Before a LoRA is merged: merging changes neither names nor shapes.
    config = fitting_config(hub, weights, wanted.hf_dir, wanted.task)
    if weights.is_of_run:
        hub = _as_before_training(hub, wanted.hf_dir or weights.home)
    times: dict[str, int | None] = {}
    if adapter is not None:
        ledgers.append(adapter.ledger)
        hub = merge_lora(hub, family, adapter.ledger.tensors, adapter.alphas)
    layout = {"kind": str(wanted.naming), "family": family.name, "version": told_version(hub, family)}
    texts: dict[str, str] = {}
    if wanted.naming is Naming.MM:
        files, times = _mm_files(hub, family, wanted, texts)
        texts[CONFIG_FILE] = _json(config)
    elif wanted.naming is Naming.ORIGINAL:
        files = _original_files(hub, family, config, wanted, texts)
    elif wanted.is_distributed:
        files = {RELEASE: DcpFolder(hub)}
        layout["kind"] = "dcp"
        texts |= {TRACKER: f"{RELEASE}\n", CONFIG_FILE: _json(config)}
    else:
        files = _weight_files(hub, wanted.max_shard_bytes, texts)
        texts[CONFIG_FILE] = _json(config)
    if adapter is not None:  # a fused layer's A is read for each of its parts
        times |= dict.fromkeys(adapter.ledger.tensors)
    sources = [weights.path]
    if adapter is not None:
        sources.append(adapter.ledger.where)
    return Conversion(sources, ledgers, files, layout, times, weights.left_out, texts=texts)


def _as_before_training(hub: Mapping[str, LazyTensor], folder: Path | None) -> dict[str, LazyTensor]:
    """Each tensor in the type that the model folder has it in: training may hold it in a wider one."""
    if folder is None:
        return dict(hub)
    try:
        with open_generator(folder) as weights:
            found = {key: tensor.dtype for key, tensor in weights.under_diffusers_names().items()}
    except ModelFolderError:  # it has a configuration alone
        found = {}
    rule = DtypeRule(found, None)
    return {key: rule.cast(key, tensor) for key, tensor in hub.items()}


def _mm_files(
    hub: Mapping[str, LazyTensor], family: GeneratorLayouts, wanted: GeneratorTarget, texts: dict[str, str]
) -> tuple[Files, dict[str, int | None]]:
    """The ranks' files, and how often stored keys are written that several ranks hold."""
    whole = from_diffusers(hub, family, Naming.MM)
    depth = count(whole, DIVISIONS[family.name].layers)
    layout = layout_of(family, depth, wanted.tp_size, wanted.pp_layers)
    model = megatron_family(family).model({"model_type": family.name, "num_layers": depth})
    contents = divided_files(whole, model, layout)
    files: dict[str, OutputFile] = {}
    for name, sections in contents.items():
        files[f"{RELEASE}/{name}"] = PtFile(sections, {"checkpoint_version": CHECKPOINT_VERSION})
    # Without a line's end, as MindSpeed-MM writes it.
    texts[TRACKER] = RELEASE
    texts[f"{RELEASE}/{LAYOUT_FILE}"] = _json({"family": family.name, **layout.to_json()})
    return files, times_written(whole, model, layout)


def _original_files(
    hub: Mapping[str, LazyTensor],
    family: GeneratorLayouts,
    config: Json,
    wanted: GeneratorTarget,
    texts: dict[str, str],
) -> Files:
    tensors = from_diffusers(hub, family, Naming.ORIGINAL)
    if family.original_config is not None:
        texts[CONFIG_FILE] = _json(family.original_config(hub, config))
    texts.update(family.original_texts)
    if family.original_file is None:
        return _weight_files(tensors, wanted.max_shard_bytes, texts)
    if family.original_file.endswith(".pt"):
        return {family.original_file: PtFile({"module": tensors})}
    return {family.original_file: SafetensorsFile(tensors)}


def _weight_files(
    tensors: Mapping[str, LazyTensor], max_shard_bytes: int, texts: dict[str, str]
) -> Mapping[str, OutputFile]:
    files, index = safetensors_files(tensors, max_shard_bytes, DIFFUSERS_STEM)
    texts.update(index)
    return files


def _json(value: Json) -> str:
    return json.dumps(value, indent=2) + "\n"
