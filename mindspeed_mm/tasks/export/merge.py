"""`mm merge`: a model's folder with adapters added to its weights, streamed tensor by tensor in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.folder_writing import check_target
from mindspeed_mm.core.model_kinds import kind_of_folder
from mindspeed_mm.fsdp.checkpoint.base_weights import dtypes_of_base, open_base
from mindspeed_mm.fsdp.checkpoint.hf import folder_tensors, remember_layout
from mindspeed_mm.fsdp.data.data_utils.training_view import TOKEN_KEYS, view_of_adapters, view_writer
from mindspeed_mm.fsdp.models.added_tokens import with_new_rows
from mindspeed_mm.fsdp.models.diffusion.transformer import transformer_weights
from mindspeed_mm.fsdp.models.lora.files import AdapterFile, StoredAdapter
from mindspeed_mm.fsdp.models.lora.merge import deltas_of_files, merge_into
from mindspeed_mm.fsdp.models.lora.names import MAGNITUDE
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.export.contents import WholeModel, complete
from mindspeed_mm.tasks.requests.export import ExportRequest, MergeRequest

_KEY = "ADAPTER"


@dataclass(frozen=True)
class Merged:
    """Reports what `mm merge` wrote: the folder, the adapters that it merged, and the size of its weights."""

    folder: Path
    merged: tuple[str, ...]
    """Adapters, or the checkpoint that holds them."""
    tensors: int
    size_bytes: int
    """Size of the weights."""

    def lines(self) -> list[str]:
        """For a person: the folder, what is in it, and what was merged."""
        size = f"{self.tensors:,} tensors, {self.size_bytes / 2**20:,.1f} MiB"
        return [f"{self.folder}: {size}, with {', '.join(self.merged)}"]


def run(request: MergeRequest) -> Merged:
    """Write a folder like `base` with adapters merged. It appears when it is complete; memory holds one file of it.

    The base is a folder of transformers', in diffusers' layout, or in Megatron's with a config.json; or, without
    adapters, a run that trained some: its checkpoint is merged with what the run started from. Each adapter is added as
    many times as its scale says: once without; −1 takes one out of a folder that it was merged into.

    Raises:
        ModelFolderError: The adapters are of another model, or of a kind that is not known.
        UsageError: Numbers of scales and adapters differ, or `out` may not be written.
        MachineError: The target cannot be written.
    """
    base, adapters, out, overwrite = request.base, request.adapters, request.out, request.overwrite
    check_target(out, overwrite=overwrite, sources=(base, *adapters))
    if not adapters:
        return _merge_run(request)
    if not _is_model(base):
        raise ModelFolderError(
            "is not a model folder",
            where=str(base),
            way_out="Name the model that the adapters were trained on; for a run: mm merge RUN --out FOLDER.",
        )
    files = [[file.adapter() for file in AdapterFile.find_all(adapter, _KEY)] for adapter in adapters]
    times = _times(files, request.scales)
    found = [file for of_adapter in files for file in of_adapter]
    own_view = None
    if kind_of_folder(base).has_tokens:
        own_view = view_of_adapters(adapters[-1])  # of several, the last one's
    outline = ModelHub.build(_outline_arguments(base, own_view))
    weights, torch_type = transformer_weights(base), torch_dtype(request.dtype)
    with open_base(outline, weights) as stored, deltas_of_files(found, outline) as read:
        whole = {name for each in read for name in each.whole}
        tensors = with_new_rows(outline, folder_tensors(outline, stored, whole), weights)
        expected = remember_layout(outline, weights)
        # modules that files hold whole, before deltas are added to them
        for each in read:
            each.replace_in(tensors)
        added = [(each.deltas, scale) for each, scale in zip(read, times, strict=True)]
        merge_into(tensors, added, torch_type)
        made = complete(outline, tensors, expected, weights, stored)
        rule = dtypes_of_base(outline, weights, torch_type)
        view = None
        if own_view is not None:
            view = view_writer(own_view, base)
        shard_bytes = request.max_shard_bytes or MAX_SHARD_BYTES
        contents = WholeModel(base, outline, made, rule, shard_bytes, torch_type, view).contents()
        contents.write_to(out, (base, *adapters), overwrite=overwrite)
    return Merged(out, tuple(map(str, adapters)), contents.tensors, contents.size_bytes)


def _is_model(base: Path) -> bool:
    kind = recognise(base)
    return kind == "hf" or (kind == "megatron" and (base / "config.json").is_file())


def _merge_run(request: MergeRequest) -> Merged:
    if recognise(request.base) not in ("run", "dcp"):
        raise UsageError(
            "there is nothing to merge", where=str(request.base), key=_KEY, way_out="Name adapters after the base."
        )
    if request.scales:
        raise UsageError("applies only to adapters that are named", key="--scale", way_out="Leave it out.")
    exported = export.run(
        ExportRequest(
            request.base,
            request.out,
            dtype=request.dtype,
            merge=True,
            overwrite=request.overwrite,
            max_shard_bytes=request.max_shard_bytes,
        )
    )
    return Merged(request.out, (str(exported.checkpoint),), exported.tensors, exported.size_bytes)


def _times(adapters: Sequence[Sequence[StoredAdapter]], scales: Sequence[float]) -> list[float]:
    """How many times each file is added, of all adapters in turn."""
    if len(scales) not in (0, 1, len(adapters)):
        raise UsageError(
            f"{len(scales)} numbers for {len(adapters)} adapters",
            key="--scale",
            way_out="Give one for all, or one for each.",
        )
    times = list(scales) or [1.0]
    if len(times) == 1:
        times *= len(adapters)
    of_files = [(file, each) for files, each in zip(adapters, times, strict=True) for file in files]
    for adapter, each in of_files:
        is_dora = any(MAGNITUDE in sides for sides in adapter.layers.values())
        if is_dora and each != 1:
            raise UsageError(
                f"{each:g}, but {adapter.weights} is DoRA, whose magnitudes hold for the whole adapter",
                key="--scale",
                way_out="Merge it once.",
            )
        full = [*adapter.whole, *adapter.tokens]
        if full and each != 1:
            raise UsageError(
                f"{each:g}, but {adapter.weights} holds '{full[0]}', which was fully trained",
                key="--scale",
                way_out="Merge it once.",
            )
    return [each for _, each in of_files]


def _outline_arguments(base: Path, view: DatasetParam | None) -> ModelArguments:
    tokens = {}
    if view is not None:  # the adapters may have rows of tokens that the base does not have
        tokens = {key: view.preprocess_parameters[key] for key in TOKEN_KEYS}
    return ModelArguments.model_validate(
        tokens
        | {
            "model_name_or_path": str(base),
            "attn_implementation": kind_of_folder(base).outline_attention,
            "train_from_scratch": True,
        }
    )
