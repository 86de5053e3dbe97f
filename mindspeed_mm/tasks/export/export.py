"""`mm export`: a run's checkpoint as a folder that transformers, PEFT or diffusers loads, streamed tensor by tensor in
one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.choice import Which, choose_checkpoint
from mindspeed_mm.checkpoint.common.config import CommonModelConfig
from mindspeed_mm.checkpoint.conversion.run import Writing
from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, write_weights
from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.ptd.conversions import megatron_to_hf
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError
from mindspeed_mm.core.folder_writing import atomic_folder, check_target, copy_plain
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint, open_checkpoint
from mindspeed_mm.fsdp.checkpoint.loading import DcpTensors, Weights
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import plugin_module
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.export.contents import ContentKind, ExportContents, folders_read, open_contents
from mindspeed_mm.tasks.export.model_card import write_model_card
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
    plain = None if model_folder is not None or request.merge else _model_without_folder(source)
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


# --- plain models -----------------------------------------------------------------------------------------------------
# A run whose model has no folder, such as a plugin's plain `nn.Module`: its weights alone, with how to load them.

_CARD = """\
# {title}

Weights of `{model}` after {step:,} steps. The model is built by code of its own, so this folder has no configuration
that a library reads; `resolved.yaml` is the configuration of the run.

```python
from pathlib import Path

from safetensors.torch import load_file

weights = {{}}
for file in Path("{title}").glob("*.safetensors"):
    weights |= load_file(file)
model.load_state_dict(weights)  # a {model}
```
"""


def _model_without_folder(source: Path) -> str | None:
    """The class of a run's model that came from no folder; None: it came from one, or nothing tells.

    Args:
        source: A run folder, or one of its checkpoints.
    """
    for run in (source, source.absolute().parent):
        record = RunFolder(run).run_json
        if record.exists():
            facts = read_json_object(record, CheckpointError)
            name = facts.get("model_class")
            if facts.get("model_name_or_path") is None and isinstance(name, str):
                return name
            return None
    return None


def write_plain(
    source: Path,
    target: Path,
    model: str,
    *,
    step: Which,
    weights: Weights | None,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    overwrite: bool,
) -> tuple[CommittedCheckpoint, Weights, dict[str, int], str]:
    """Write the weights of a checkpoint under the model's own names.

    Args:
        source: As of `_model_without_folder`.
        target: The folder to write.
        model: The class.
        step: Which of the run's checkpoints.
        weights: The average, or as they were trained; None: the average when there is one.
        dtype: None: as they were trained.
        max_shard_bytes: Largest size of one file.
        overwrite: Replace what an earlier export has written there.

    Returns:
        The checkpoint, which weights were taken, the bytes of each tensor, and why this checkpoint.

    Raises:
        CheckpointError: It is damaged or absent.
        UsageError, MachineError: The target may not or cannot be written.
    """
    chosen = choose_checkpoint(source, step)
    checkpoint = open_checkpoint(chosen.path, Ranks(), "hash")
    reader = DcpTensors(checkpoint, weights)
    tensors = reader.lazy()
    with atomic_folder(target, overwrite=overwrite, sources=[source]) as draft:
        write_weights(
            tensors, draft, lambda _, held: dtype if dtype and held.is_floating_point else held, max_shard_bytes
        )
        resolved = RunFolder(checkpoint.path.parent).resolved
        if resolved.exists():
            copy_plain(resolved, draft / resolved.name)
        card = _CARD.format(title=target.name, model=model, step=checkpoint.iteration or 0)
        (draft / "README.md").write_text(card, encoding="utf-8")
    return checkpoint, reader.weights, {name: tensor.size_bytes for name, tensor in tensors.items()}, chosen.why
