"""What an export writes: a whole model, adapters, a generator, or its transformer alone. Nothing is read before it is
written: memory holds one file at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from mindspeed_mm.checkpoint.hf_folder import DtypeRule, copy_assets, write_weights
from mindspeed_mm.checkpoint.lazy_tensor import Computed, LazyTensor
from mindspeed_mm.checkpoint.original.lora_names import UNREAD_BY_DIFFUSERS, LoraFormat
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.checkpoint.stored_weights import step_of_weights
from mindspeed_mm.core.artifacts import free_bytes
from mindspeed_mm.core.errors import (
    CheckpointError,
    MachineError,
    ModelFolderError,
    UsageError,
)
from mindspeed_mm.core.folder_writing import atomic_folder
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED
from mindspeed_mm.core.terminal import quoted
from mindspeed_mm.fsdp.checkpoint.adapters import of_untouched_base, write_adapters
from mindspeed_mm.fsdp.checkpoint.base_weights import (
    base_weights_mark,
    dtypes_of_base,
    has_weights,
    open_base,
    weights_folder_of_load,
)
from mindspeed_mm.fsdp.checkpoint.diffusers_folder import components_bytes, copy_components, write_transformer
from mindspeed_mm.fsdp.checkpoint.hf import (
    check_complete,
    folder_tensors,
    hub_tensors,
    remember_layout,
    with_beside,
)
from mindspeed_mm.fsdp.checkpoint.loading import DcpTensors
from mindspeed_mm.fsdp.data.data_utils.training_view import WriteView, view_writer
from mindspeed_mm.fsdp.models.added_tokens import with_new_rows
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import QuantizedLayout, packings_of, rounded
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.transformer import transformer_weights, weights_folder
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import note_on_settings, write_own_settings
from mindspeed_mm.fsdp.models.loading.folder import kept_beside
from mindspeed_mm.fsdp.models.lora.apply import apply_lora
from mindspeed_mm.fsdp.models.lora.files import stored_adapters
from mindspeed_mm.fsdp.models.lora.merge import deltas_of_files, deltas_of_run, merge_into
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.export.single_file import authors_files
from mindspeed_mm.tasks.export.source import ExportSource

ContentKind = Literal["model", "adapters", "generator", "transformer", "single_file"]


@dataclass(frozen=True)
class ExportContents:
    """Describes what an export will write: its kind, sizes in bytes, and the function that writes it."""

    kind: ContentKind
    tensors: int
    size_bytes: int
    """Size of the weights."""
    other_bytes: int
    """Size of components that are copied; small files do not count."""
    write: Callable[[Path], object]
    """Writes everything into a folder that exists."""
    notes: tuple[str, ...] = ()
    """What a person should know of it."""

    def write_to(
        self,
        target: Path,
        sources: Sequence[Path],
        *,
        overwrite: bool,
        finish: Callable[[Path], object] = lambda _draft: None,
    ) -> None:
        """Write everything; the folder appears when it is complete.

        Args:
            target: The folder to write.
            sources: What is read, which `target` must not be.
            overwrite: Replace what an earlier export or merge has written there.
            finish: Writes more into the folder before it appears.

        Raises:
            MachineError: There is not enough space.
        """
        with atomic_folder(target, overwrite=overwrite, sources=sources) as draft:
            needed = self.size_bytes + self.other_bytes
            if (free := free_bytes(draft)) < needed:
                raise MachineError(f"{needed:,} bytes are needed, but only {free:,} are free", where=str(target))
            self.write(draft)
            finish(draft)


@contextmanager
def open_contents(
    source: ExportSource,
    reader: DcpTensors,
    *,
    dtype: torch.dtype | None,
    merge: bool,
    transformer_only: bool,
    max_shard_bytes: int,
    single_file: bool = False,
    lora_format: LoraFormat = "diffusers",
) -> Iterator[ExportContents]:
    """Find out what is to be written; inside, it can be.

    Args:
        source: Where the checkpoint and the rest come from.
        reader: Of the checkpoint.
        dtype: None: as the model that the run started from has each tensor; adapters as they were trained.
        merge: Of a run that trained adapters, write the whole model.
        transformer_only: Of a generator, leave the other components out.
        max_shard_bytes: Largest size of one file.
        single_file: Of a generator, write the transformer as one file under its authors' names.
        lora_format: Whose names a generator's adapters bear.

    Raises:
        CheckpointError: The checkpoint is of another model.
        ModelFolderError: The model folder does not fit.
        UsageError: An option for generators where there is none, or for what is not written.
    """
    _check_for_generators(
        source, {"--transformer-only": transformer_only, "--single-file": single_file, "--lora-format": lora_format}
    )
    has_adapters = any(map(is_adapter_weight, reader.lazy()))
    if has_adapters and not merge:
        if single_file:
            raise UsageError("the run trained adapters", key="--single-file", way_out="Add --merge, or leave it out.")
        yield _adapter_contents(source, reader, dtype, lora_format)
        return
    if lora_format != "diffusers":
        raise UsageError("no adapters are written", key="--lora-format", way_out="Leave it out.")
    outline = ModelHub.build(outline_arguments(source))
    if (adapter := facts_of(outline).adapter) is not None and source.arguments is not None:
        # a distilled generator: the scheduler of the folder has to draw in as few steps
        adapter.note_few_steps(FewSteps.of_run(source.arguments.training, source.arguments.posttrain))
    if has_adapters:
        weights = weights_folder(outline, base_weights_folder(source))
        opened = _merged(source, reader, outline, dtype)
    else:
        weights = weights_folder(outline, source.model_folder)
        opened = _as_trained(source, reader, outline)
    with opened as tensors:
        rule, view = dtypes_of_base(outline, weights, dtype), _view_of_run(source)
        whole = WholeModel(source.model_folder, outline, tensors, rule, max_shard_bytes, dtype, view, transformer_only)
        if single_file:
            yield _single_file_contents(whole)
        else:
            yield whole.contents()


def _check_for_generators(source: ExportSource, options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value not in (False, "diffusers")]
    if given and not source.kind.trained_part:
        raise UsageError(
            "the model is not a generator", where=str(source.model_folder), key=given[0], way_out="Leave it out."
        )


@dataclass(frozen=True)
class WholeModel:
    """A model with all of its weights, that will be written."""

    model_folder: Path
    """Configuration, tokenizer and processor, or a generator's other components."""
    outline: nn.Module
    """What was trained, without weights."""
    tensors: Mapping[str, LazyTensor]
    """Its weights, by the keys of the folder."""
    rule: DtypeRule
    """The dtype of each."""
    max_shard_bytes: int
    """Largest size of one file."""
    dtype: torch.dtype | None
    """The dtype of all, for the configuration; None: as it is there."""
    write_view: WriteView | None
    """Adds how training looked at its rows."""
    transformer_only: bool = False
    """Leave a generator's other components out."""

    def contents(self) -> ExportContents:
        """What a folder of the model's kind holds."""
        return WHOLE_CONTENTS[facts_of(self.outline).kind](self)


def _model_contents(whole: WholeModel) -> ExportContents:
    def write(draft: Path) -> None:
        copy_assets(whole.model_folder, draft, whole.dtype)
        write_own_settings(whole.outline, draft)
        if whole.write_view is not None:
            whole.write_view(draft)
        write_weights(whole.tensors, draft, whole.rule, whole.max_shard_bytes)

    return ExportContents("model", len(whole.tensors), _size_bytes(whole.tensors, whole.rule), 0, write)


def _generator_contents(whole: WholeModel) -> ExportContents:
    def write(draft: Path) -> None:
        adapter = facts_of(whole.outline).adapter
        assert adapter is not None
        if not whole.transformer_only:
            copy_components(whole.model_folder, draft)
        write_transformer(adapter, whole.tensors, draft, whole.rule, whole.max_shard_bytes)

    kind: ContentKind = "transformer"
    others = 0
    if not whole.transformer_only:
        kind, others = "generator", components_bytes(whole.model_folder)
    return ExportContents(kind, len(whole.tensors), _size_bytes(whole.tensors, whole.rule), others, write)


def _single_file_contents(whole: WholeModel) -> ExportContents:
    adapter = facts_of(whole.outline).adapter
    assert adapter is not None
    files = authors_files(whole.tensors, whole.rule, adapter)

    def write(draft: Path) -> None:
        for file in files:
            write_weights(file.tensors, draft, file.rule, inf, stem=file.name.removesuffix(".safetensors"))

    size_bytes = sum(_size_bytes(file.tensors, file.rule) for file in files)
    return ExportContents("single_file", sum(len(file.tensors) for file in files), size_bytes, 0, write)


WHOLE_CONTENTS = {LANGUAGE: _model_contents, GENERATOR: _generator_contents, UNIFIED: _model_contents}
"""Kind of model → what its whole folder holds."""


def _adapter_contents(
    source: ExportSource, reader: DcpTensors, dtype: torch.dtype | None, lora_format: LoraFormat
) -> ExportContents:
    outline = _adapted_outline(source)
    tensors = reader.matched_to(outline)
    size_bytes = _size_bytes(tensors, DtypeRule({}, dtype))
    base, write_view = base_weights_folder(source), _view_of_run(source, only_template=True)
    notes = _note_on_base(source) + note_on_settings(outline)
    adapter = facts_of(outline).adapter
    if lora_format != "diffusers" and adapter is not None and adapter.transformer_class in UNREAD_BY_DIFFUSERS:
        notes += (
            f"diffusers does not load adapters of {adapter.transformer_class} by {lora_format}'s names; ComfyUI does",
        )

    if (
        source.arguments is not None
        and FewSteps.of_run(source.arguments.training, source.arguments.posttrain) is not None
    ):
        notes += ("adapters do not say that they draw in few steps; mm export --merge writes a folder that does",)

    def write(draft: Path) -> None:
        write_adapters(outline, tensors, draft, base, dtype=dtype, lora_format=lora_format)
        if write_view is not None:
            write_view(draft)

    return ExportContents("adapters", len(tensors), size_bytes, 0, write, notes)


def _note_on_base(source: ExportSource) -> tuple[str, ...]:
    base = base_weights_folder(source)
    if step_of_weights(base) is not None:
        return (f"the adapters stand on {base}; for PEFT, name the model folder that this was written from",)
    if not is_megatron_folder(base):
        return ()
    return (
        f"the adapters stand on {base}, whose weights are in Megatron's layout; for PEFT, write it as a model folder: "
        f"mm convert {quoted(base)} OUT --to hf --model {quoted(source.model_folder)}",
    )


def _view_of_run(source: ExportSource, *, only_template: bool = False) -> WriteView | None:
    """What adds the run's view of its rows; None where its configuration was not kept, and for generators.

    Raises:
        ModelFolderError: The processor lay in a folder of its own, which is gone.
    """
    if source.arguments is None or not source.kind.has_tokens:
        return None
    named = source.arguments.data.dataset_param.preprocess_parameters.model_name_or_path
    is_apart = named not in (None, source.arguments.model.model_name_or_path)
    if named is not None and is_apart and not source.is_told and not Path(named).is_dir():
        raise ModelFolderError(
            "the folder whose processor the run read its rows with no longer exists",
            where=named,
            way_out="Put it back, or name a model folder that has this processor: --model FOLDER.",
        )
    return view_writer(source.arguments.data.dataset_param, source.model_folder, only_template=only_template)


def _size_bytes(tensors: Mapping[str, LazyTensor], rule: DtypeRule) -> int:
    return sum(torch.Size(t.shape).numel() * rule(key, t.dtype).itemsize for key, t in tensors.items())


# --- tensors of a whole model -----------------------------------------------------------------------------------------


@contextmanager
def _as_trained(source: ExportSource, reader: DcpTensors, outline: nn.Module) -> Iterator[dict[str, LazyTensor]]:
    """The checkpoint's tensors under the keys of the folder that the run started from, compared with the model."""
    weights = transformer_weights(source.model_folder)
    trained = reader.matched_to(outline)
    with ExitStack() as opened:
        stored: Mapping[str, LazyTensor] = {}
        if has_weights(weights):  # a folder of sizes alone has none: trained from scratch
            stored = opened.enter_context(open_base(outline, weights))
        yield complete(outline, dict(trained), remember_layout(outline, weights), weights, stored)


@contextmanager
def _merged(
    source: ExportSource, reader: DcpTensors, outline: nn.Module, dtype: torch.dtype | None
) -> Iterator[dict[str, LazyTensor]]:
    """The base model's tensors with the adapters added, those that lay frozen under the trained one too. A base that
    was kept in few bits is written as the numbers that it stood for: the adapters were trained on these."""
    adapted = _adapted_outline(source)
    trained = of_untouched_base(reader.matched_to(adapted))
    base = base_weights_folder(source)
    recorded = source.checkpoint.context.get("base_weights")
    if recorded is not None and recorded != base_weights_mark(base):
        raise ModelFolderError(
            "does not hold the weights that the adapters were trained on",
            where=str(base),
            way_out="Name the folder that the run started from: --model FOLDER.",
        )
    lora = facts_of(adapted).lora
    assert lora is not None
    whole = {name: tensor for name, tensor in trained.items() if not is_adapter_weight(name)}
    frozen = stored_adapters(lora.frozen)
    weights = weights_folder(outline, base)
    with open_base(outline, weights) as stored, deltas_of_files(frozen, outline) as under:
        # the base lacks the rows of tokens that the run added
        tensors = with_new_rows(outline, folder_tensors(outline, stored, whole), weights)
        expected = remember_layout(outline, weights)
        for name, packing in packings_of(adapted).items():
            kept = tensors[name]
            tensors[name] = Computed([kept], partial(_rounded, packing), kept.shape, kept.dtype)
        own = deltas_of_run(lora, trained, outline)
        added = [(each.deltas, 1.0) for each in under]
        merge_into(tensors, [*added, (own, 1.0)], dtype)
        tensors |= whole  # last: they take the base's place
        yield complete(outline, tensors, expected, weights, stored)


def _rounded(packing: QuantizedLayout, read: list[torch.Tensor]) -> torch.Tensor:
    return rounded(read[0], packing)


def complete(
    outline: nn.Module,
    tensors: Mapping[str, LazyTensor],
    expected: set[str],
    weights: Path,
    stored: Mapping[str, LazyTensor],
) -> dict[str, LazyTensor]:
    """A model's tensors under the keys of the folder that they came from; `expected` are all of these. What else is
    `stored` there, of models beside it, is handed on.

    Raises:
        ModelFolderError: Some would be missing.
    """
    made = hub_tensors(outline, tensors)
    check_complete(expected, made, weights)
    return with_beside(made, kept_beside(outline, stored))


# --- the model's outline ----------------------------------------------------------------------------------------------


def outline_arguments(source: ExportSource, *, freeze: bool = False) -> ModelArguments:
    """The `model` section of the run, changed so that only the outline of the model is built, on any machine."""
    changes: JsonObject = {
        "model_name_or_path": str(source.model_folder),
        "attn_implementation": source.kind.outline_attention,
        "train_from_scratch": True,
    }
    if not freeze:
        changes["freeze"] = []
    if source.arguments is None:
        return ModelArguments.model_validate(changes)
    return source.arguments.model.model_copy(update=changes)


def _adapted_outline(source: ExportSource) -> nn.Module:
    model = ModelHub.build(outline_arguments(source, freeze=True))
    apply_lora(model, _lora_arguments(source))
    return model


def _lora_arguments(source: ExportSource) -> LoraArguments:
    if source.arguments is not None:
        return source.arguments.training.lora
    section = source.checkpoint.context.get("config", {}).get("training", {}).get("lora")
    if not section:
        raise CheckpointError(
            "holds adapters and does not say of which kind", where=str(source.checkpoint.path), way_out="Name its run."
        )
    return LoraArguments.model_validate(section)


def base_weights_folder(source: ExportSource) -> Path:
    """Where the weights are that the adapters stand on: where `training.load` says, or in the model folder."""
    load = None
    if source.arguments is not None and not source.is_told:
        load = source.arguments.training.load
    return weights_folder_of_load(load) or source.model_folder


def folders_read(source: ExportSource) -> list[Path]:
    """What an export must not write over: the checkpoint, the model folder, and what adapters stand on."""
    folders = [source.checkpoint.path, source.model_folder, base_weights_folder(source)]
    if source.arguments is not None:
        folders += [Path(folder) for folder in source.arguments.training.lora.frozen_adapters]
    return folders
