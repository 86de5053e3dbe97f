"""`mm export`: a run's checkpoint as a folder that transformers, PEFT or diffusers loads, streamed tensor by tensor in
one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mindspeed_mm.checkpoint.common.config import CommonModelConfig
from mindspeed_mm.checkpoint.conversion.run import Writing
from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES
from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.ptd.conversions import megatron_to_hf
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.folder_writing import check_target
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.checkpoint.loading import DcpTensors, Weights
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import plugin_module
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.tasks.export.contents import ContentKind, ExportContents, folders_read, open_contents
from mindspeed_mm.tasks.export.model_card import write_model_card
from mindspeed_mm.tasks.export.plain import model_without_folder, write_plain
from mindspeed_mm.tasks.export.source import NAME_MODEL, ExportSource, resolve_source
from mindspeed_mm.tasks.requests.export import ExportRequest


@dataclass(frozen=True)
class Exported:
    """Reports what `mm export` wrote: the folder, the checkpoint that it came from, and the size of its weights."""

    folder: Path
    checkpoint: Path
    step: int | None
    tensors: int
    size_bytes: int
    """Size of the weights."""
    notes: tuple[str, ...]
    weights: Weights = "model"
    """Whether they are the average (`ema`) or as they were trained."""
    kind: ContentKind = "model"
    why: str = ""
    """Why this checkpoint of the run was taken: `best by val_loss 3.16`, `newest`, `named`."""


def run(request: ExportRequest) -> Exported:
    """Export a checkpoint. The folder appears when it is complete; memory holds one file of it at a time.

    A run that trained adapters gives a folder of adapters; a generator's run a whole folder in diffusers' layout; a run
    whose model came from no folder its weights alone. A folder in Megatron's layout is joined.

    Raises:
        CheckpointError: The checkpoint is damaged, absent or of another model.
        ModelFolderError: The model folder is gone or does not fit.
        UsageError: The target may not be written (`check_target`), or an option for generators
            where there is none.
        MachineError: The target cannot be written.
    """
    source, target, model_folder, overwrite = request.run, request.out, request.model_folder, request.overwrite
    check_target(target, overwrite=overwrite)  # before the checkpoint is read, which may take long
    shard_bytes = request.max_shard_bytes or MAX_SHARD_BYTES
    if source.is_dir() and is_megatron_folder(source):
        return _export_megatron(source, target, model_folder or source, overwrite=overwrite)
    plain = None if model_folder is not None or request.merge else model_without_folder(source)
    if plain is not None:
        checkpoint, taken, sizes, why = write_plain(
            source,
            target,
            plain,
            step=request.step,
            weights=request.weights,
            dtype=torch_dtype(request.dtype),
            max_shard_bytes=shard_bytes,
            overwrite=overwrite,
        )
        size_bytes = sum(sizes.values())
        notes = (*checkpoint.notes, f"{plain} came from no folder: these are its weights alone, under its own names")
        return Exported(target, checkpoint.path, checkpoint.iteration, len(sizes), size_bytes, notes, taken, why=why)
    found = resolve_source(source, request.step, model_folder)
    reader = DcpTensors(found.checkpoint, request.weights)
    opened = open_contents(
        found,
        reader,
        dtype=torch_dtype(request.dtype),
        merge=request.merge,
        transformer_only=request.transformer_only,
        max_shard_bytes=shard_bytes,
        single_file=request.single_file,
        lora_format=request.lora_format,
    )
    with opened as contents:
        return _write(contents, found, reader.weights, target, overwrite=overwrite)


def notes_on_media(arguments: Arguments | None) -> tuple[str, ...]:
    """What a person has to do so that an exported model sees media as the plugins of its run prepared them."""
    notes = []
    for plugin in arguments.training.plugin if arguments is not None else ():
        name = plugin_module(plugin)
        for entry in MM_PLUGINS.loaded().values():
            if entry.__module__ == name or entry.__module__.startswith(f"{name}."):
                notes.append(
                    f"its media are prepared by {entry.__name__} of the plugin {plugin}, which the folder does not "
                    f"hold: name it with --plugin {plugin} of mm infer, chat, serve and evaluate, or give them the "
                    "run's YAML (--config)"
                )
    return tuple(notes)


def _write(
    contents: ExportContents, found: ExportSource, weights: Weights, target: Path, *, overwrite: bool
) -> Exported:
    checkpoint = found.checkpoint
    card = partial(
        write_model_card,
        run=found.run,
        step=checkpoint.iteration,
        model_folder=found.model_folder,
        title=target.name,
        kind=contents.kind,
    )
    contents.write_to(target, folders_read(found), overwrite=overwrite, finish=card)
    return Exported(
        target,
        checkpoint.path,
        checkpoint.iteration,
        contents.tensors,
        contents.size_bytes,
        checkpoint.notes + contents.notes + notes_on_media(found.arguments),
        weights,
        contents.kind,
        found.why,
    )


def _export_megatron(source: Path, target: Path, model_folder: Path, *, overwrite: bool) -> Exported:
    """Join a checkpoint in Megatron's layout; configuration and tokenizer come from the model folder."""
    config = read_json_object(model_folder / "config.json", ModelFolderError, way_out=NAME_MODEL)
    written = megatron_to_hf(
        family_of(config),
        source,
        model_folder,
        target,
        None,
        facts=CommonModelConfig(),
        writing=Writing(overwrite=overwrite),
    )
    return Exported(target, source, None, written.tensors, written.size_bytes, ())
