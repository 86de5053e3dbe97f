"""What `infer` and `evaluate` work with: a model folder, or a run, whose checkpoint is exported."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.choice import choose_checkpoint
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.checkpoint.safetensors_folder import holds_safetensors
from mindspeed_mm.checkpoint.stored_weights import holds_weights, stored_files
from mindspeed_mm.core.artifacts import RunFolder, one_at_a_time, sha256_file
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.folder_writing import remove_written
from mindspeed_mm.core.model_kinds import EXPERT_PARTS, GENERATOR, expert_folders, kind_of_folder
from mindspeed_mm.core.terminal import quoted
from mindspeed_mm.fsdp.checkpoint.committed import open_checkpoint
from mindspeed_mm.fsdp.checkpoint.loading import Weights
from mindspeed_mm.fsdp.models.loading.gguf import model_folder_of
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_WEIGHTS, AdapterFile
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.export.source import noted_model, unnamed_model
from mindspeed_mm.tasks.requests.export import ExportRequest

FOLDER_FILES = ("*.safetensors", "*.json", "*.jinja")
EXPORTED = "exported"
AS_MODEL = "model-"
"""Before the name of an export that runs are trained on: it is not replaced by that of a newer checkpoint."""


@dataclass(frozen=True)
class ModelSource:
    """A model folder, and the run that it came from, if any."""

    folder: Path
    """A Hugging Face folder; of a generator the folder in diffusers' layout that has its encoders and scheduler."""
    run: Path | None = None
    transformer: Path | None = None
    """Folder of a generator's trained transformer, to be used instead of `folder / "transformer"`."""
    lora: Path | None = None
    """A folder of adapters to be put beside the weights, or a file of them."""

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when the files do (names, sizes, times of change)."""
        files: list[Path] = []
        for folder in (self.folder, self.transformer, self.lora):
            if folder is None:
                continue
            for name in FOLDER_FILES:
                files += sorted(folder.glob(name))
                files += sorted(folder.glob(f"*/{name}"))
        if self.lora is not None and self.lora.is_file():
            files.append(self.lora)
        if kind_of_folder(self.folder) is GENERATOR:
            from mindspeed_mm.fsdp.models.diffusion.transformer import transformer_weights  # no other model needs it

            weights = self.transformer or transformer_weights(self.folder)
            if not holds_safetensors(weights) and holds_weights(weights):
                files += stored_files(weights)
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def resolve_model(path: Path, weights: Weights | None = None) -> ModelSource:
    """The model folder that `path` names.

    Args:
        path: A Hugging Face folder, one in diffusers' or Megatron's layout, a run folder, or one `iter_*` folder of a
            run. A checkpoint is exported once, into `exported/` inside the run, and taken from there afterwards; of a
            run it is the best that it keeps, else the newest good one. Of a generator that is the transformer alone,
            or the adapters: encoders are taken from where the run took them. Adapters of a language model are merged. A
            file in GGUF is made a folder first.
        weights: Of a run, the average of the weights or the weights as they were trained; None: the average when there
            is one.

    Raises:
        CheckpointError: None of these, or the run has no valid checkpoint.
        ModelFolderError: A checkpoint of another framework, or adapters without a model.
        UsageError: A checkpoint that does not say which model it holds.
    """
    path = model_folder_of(path)
    kind = recognise(path)
    if kind == "hf":
        return ModelSource(path)
    if kind == "megatron":
        return ModelSource(_with_configuration(path))
    if kind == "adapters":
        raise ModelFolderError(
            "holds adapters and no model",
            where=str(path),
            way_out="Name the run that they come from; or their base model, with --lora; or write the merged model "
            "with mm export --merge or mm merge.",
        )
    run = path if kind == "run" else path.absolute().parent
    base = noted_model(run)
    if base is None:
        raise unnamed_model(path, f"Write it as a model folder: mm export {quoted(path)} OUT --model MODEL.")
    part = kind_of_folder(base).trained_part
    exported = _exported(path, run, weights, whole=not part)
    if not part:
        return ModelSource(exported, run)
    if any((exported / part / DIFFUSERS_WEIGHTS).is_file() for part in ("", *EXPERT_PARTS)):
        return ModelSource(base, run, lora=exported)
    return ModelSource(base, run, transformer=exported if expert_folders(exported) else exported / part)


def _with_configuration(folder: Path) -> Path:
    """A folder in Megatron's layout, if configuration and tokenizer lie in it, as `mm convert` puts them there."""
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            "holds weights in Megatron's layout, and no config.json",
            where=str(folder),
            way_out=f"Write it as a model folder: mm convert {quoted(folder)} OUT --to hf --model MODEL.",
        )
    return folder


def model_of_run(path: Path) -> tuple[Path, str] | None:
    """A run, or one of its checkpoints, as a model folder that can be trained: adapters are merged, and a generator
    has all of its components. It is written once, into `exported/` inside the run, and stays there.

    Returns:
        The folder, and which checkpoint it holds; None where `path` is something else.

    Raises:
        CheckpointError: The checkpoint is damaged or absent.
        ModelFolderError: The model that the run started from is gone.
    """
    is_checkpoint = (path / layout.MANIFEST).exists()
    run = path.absolute().parent if is_checkpoint else path
    if not is_checkpoint and not (layout.list_iterations(path) and (path / "run.json").exists()):
        return None
    chosen = choose_checkpoint(path)
    checkpoint = open_checkpoint(chosen.path, Ranks(), "size")
    with one_at_a_time(run):  # the ranks of a job come here together
        name = f"{AS_MODEL}{checkpoint.path.name}-{sha256_file(checkpoint.path / layout.MANIFEST)[:12]}"
        target = run / EXPORTED / name
        if not target.is_dir():
            from mindspeed_mm.tasks.export import export  # formats of all models, for once in a run

            merge = bool(checkpoint.context.get("base_weights")) or _trained_adapters(run)
            export.run(ExportRequest(checkpoint.path, target, merge=merge))
    return target, f"step {checkpoint.iteration} ({chosen.why})" if chosen.why else f"step {checkpoint.iteration}"


def _trained_adapters(run: Path) -> bool:
    arguments = run_arguments(run)
    return arguments is not None and arguments.training.lora.enable


def with_adapters(source: ModelSource, lora: Path | None) -> ModelSource:
    """The source with adapters beside its weights: those that are named, else those of the run's `inference.adapter`.

    Raises:
        UsageError: The run, a generator's, has adapters of its own.
        ModelFolderError: There are none in the folder.
    """
    key = "--lora" if lora is not None else "inference.adapter"
    chosen = lora or _noted_adapter(source.run)
    if chosen is None:
        return source
    if source.lora is not None:
        raise UsageError("the run already has adapters", where=str(source.run), key=key, way_out="Leave it out.")
    AdapterFile.find_all(chosen, key)
    return replace(source, lora=chosen)


def run_arguments(run: Path | None) -> Arguments | None:
    """A run's configuration; None where there is no run, or it was not kept."""
    if run is None or not (resolved := RunFolder(run).resolved).exists():
        return None
    return load_with_plugins(resolved).arguments


def _noted_adapter(run: Path | None) -> Path | None:
    arguments = run_arguments(run)
    adapter = arguments.inference.adapter if arguments is not None else None
    if adapter is not None:
        return Path(adapter)
    return None


def _exported(source: Path, run: Path, weights: Weights | None, *, whole: bool) -> Path:
    """What was trained, as a folder named after the checkpoint's step and content; written when it is not there yet."""
    checkpoint = open_checkpoint(choose_checkpoint(source).path, Ranks(), "size").path
    marks = [checkpoint / layout.MANIFEST, checkpoint / layout.METADATA]
    marks = [path for path in marks if path.exists()]
    if not marks:
        raise CheckpointError(
            f"has no {layout.METADATA}", where=str(checkpoint), way_out="Name a model folder, or a run that has saved."
        )
    mark = marks[0]
    which = f"-{weights}" if weights else ""
    target = run / EXPORTED / f"{checkpoint.name}-{sha256_file(mark)[:12]}{which}"
    if not target.is_dir():
        from mindspeed_mm.tasks.export import export  # formats of all models, for once in a run

        export.run(ExportRequest(checkpoint, target, weights=weights, merge=whole, transformer_only=not whole))
        # Only one export of a run is kept: each is as large as the model.
        for folder in target.parent.glob("iter_*"):
            if folder != target:
                remove_written(folder)
    return target
