"""Hugging Face folder ↔ distributed checkpoint, for every model that transformers or a plain rename knows.

The checkpoint holds the names of transformers' module, so that `training.load` reads it. Where prefixes or fused
linears are given, they say what the names are, and the folder's own keys are taken as they stand.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Verify, Writing, convert
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, find_step, wrapper_prefix
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.dequantized import refuse_quantized
from mindspeed_mm.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    DtypeRule,
    asset_files,
    config_text,
    model_config,
    safetensors_files,
)
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Reshaped, Stored
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, check_same_tensors, find_entries, open_weights
from mindspeed_mm.checkpoint.stored_weights import UNDER_ADAPTERS
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, Problem, UsageError, first_names
from mindspeed_mm.core.terminal import say

_RENAMED = "the checkpoint's names are none of transformers' model"
_NO_CLASS = "transformers has no class that config.json names, so the checkpoint has the folder's own keys"


class GenericDCPConverter(Converter):
    """Any model that transformers knows: Hugging Face folder ↔ distributed checkpoint."""

    def hf_to_dcp(
        self,
        hf_dir: Path,
        dcp_dir: Path,
        dcp_prefix: str = "",
        hf_prefix: str = "",
        tie_weight_mapping: dict[str, str] | None = None,
        fused_linear_names: list[str] | None = None,
        is_lora_base: bool = False,
        num_workers: int = 0,
        overwrite: bool = False,
        verify: Verify = True,
        allow_unused: bool = False,
    ) -> Converted:
        """Write a Hugging Face folder as a distributed checkpoint that trains.

        Args:
            hf_dir: The folder with config.json and the safetensors.
            dcp_dir: The folder to write: release/ and latest_checkpointed_iteration.txt.
            dcp_prefix: What the checkpoint's names begin with, in place of hf_prefix.
            hf_prefix: What of the folder's keys dcp_prefix replaces.
            tie_weight_mapping: Further name of a tensor → the key that it is stored under, as
                {"lm_head.weight": "model.embed_tokens.weight"}: one copy, read back under both.
            fused_linear_names: Parts of names of stacked experts [E, a, b], which are written as [E·a, b].
            is_lora_base: Write the names of a model under adapters: training.load of a run with LoRA takes it.
            num_workers: Accepted for older scripts; one process reads and writes.
            overwrite: Replace what an earlier conversion wrote to dcp_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
            allow_unused: Leave out stored tensors that the model has no place for, and name them; else they are an
                error.
        """
        self._check_family(hf_dir)
        _tell_workers(num_workers)
        if is_lora_base:
            dcp_prefix = _prefix_under_adapters(hf_dir, dcp_prefix, hf_prefix)
        with open_weights(hf_dir, MAPPED_BYTES) as stored:
            ledger = SourceLedger(stored, hf_dir)
            fused = fused_linear_names or []
            renames = bool(dcp_prefix or hf_prefix or fused)
            outline = _outline(hf_dir, renames)
            left_out: dict[str, str] = {}
            tensors: dict[str, LazyTensor] = dict(ledger.tensors)
            if outline is not None:
                tensors, surplus = outline.own_tensors(ledger.tensors)
                left_out = outline.unused(surplus, where=hf_dir, allowed=allow_unused)
            ties = tie_weight_mapping or {}
            _check_stored_ties(ties, tensors)
            check_prefix("--hf_prefix", hf_prefix, tensors, hf_dir)
            _check_fused(fused, tensors, hf_dir, dims=3)
            for key, tensor in tensors.items():
                tensors[key] = _flattened(key, tensor, fused)
            tensors = renamed(tensors, hf_prefix, dcp_prefix)
            aliases = {}
            for alias, key in ties.items():
                aliases[_with_prefix(alias, hf_prefix, dcp_prefix)] = _with_prefix(key, hf_prefix, dcp_prefix)
            conversion = Conversion(
                sources=[hf_dir],
                ledgers=[ledger],
                files={layout.RELEASE: DcpFolder(tensors, aliases)},
                layout={
                    "kind": "dcp",
                    "names": "transformers" if outline is not None else "folder",
                    "dcp_prefix": dcp_prefix,
                    "hf_prefix": hf_prefix,
                    "fused_linear_names": fused,
                },
                left_out=left_out,
                incomparable=_why_incomparable(outline, renames),
                texts={layout.TRACKER: f"{layout.RELEASE}\n"},
            )
            return convert(conversion, dcp_dir, Writing(overwrite, verify, self.examine), stream=sys.stderr)

    def dcp_to_hf(
        self,
        load_dir: Path,
        save_dir: Path,
        model_assets_dir: Path,
        dcp_prefix: str = "",
        hf_prefix: str = "",
        fused_linear_names: list[str] | None = None,
        trust_remote_code: bool = False,
        to_bf16: bool = False,
        num_workers: int = 0,
        overwrite: bool = False,
        verify: Verify = True,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        allow_unused: bool = False,
    ) -> Converted:
        """Write a distributed checkpoint as a Hugging Face folder.

        Each tensor is written in the dtype that the model's own folder has it in. Keys of that folder that the model
        has no place for (further heads, say) are taken over from there.

        Args:
            load_dir: The folder with the tracker, its release/ or an iter_*/.
            save_dir: The folder to write.
            model_assets_dir: The model's own folder: configuration, tokenizer, processor; its keys are written.
            dcp_prefix: What the checkpoint's names begin with.
            hf_prefix: What the folder's keys begin with in its place.
            fused_linear_names: Parts of names of stacked experts, stored as [E·a, b] and written as [E, a, b].
            trust_remote_code: Accepted for older scripts; no code in the folder is run here.
            to_bf16: Write every tensor in bfloat16, instead of the dtype that the model's own folder has it in.
            num_workers: Accepted for older scripts; one process reads and writes.
            overwrite: Replace what an earlier conversion wrote to save_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
            max_shard_bytes: Largest size of one file, unless a single tensor is larger.
            allow_unused: Leave out stored tensors that the model has no place for, and name them; else they are an
                error.
        """
        del trust_remote_code
        self._check_family(model_assets_dir)
        _tell_workers(num_workers)
        step = find_step(load_dir)
        dtype = torch.bfloat16 if to_bf16 else None
        fused = fused_linear_names or []
        renames = bool(dcp_prefix or hf_prefix or fused)
        outline = _outline(model_assets_dir, renames)
        ledger = SourceLedger(DcpReader(step).model_tensors(), step)
        with _own_weights(model_assets_dir) as stored:
            if outline is not None:
                on_hub = hub_folder(outline, ledger.tensors, stored, step, allow_unused=allow_unused)
            else:
                check_prefix("--dcp_prefix", dcp_prefix, ledger.tensors, step)
                _check_fused(fused, ledger.tensors, step, dims=2)
                on_hub = HubFolder(_by_flags(ledger.tensors, model_assets_dir, dcp_prefix, hf_prefix, fused))
            if stored is not None:
                check_same_tensors(on_hub.tensors, step, model_assets_dir)
            on_hub.copies |= asset_files(model_assets_dir)
            if dtype is not None:
                on_hub.texts["config.json"] = config_text(model_assets_dir, dtype)
            self._finish(on_hub, model_assets_dir)
            rule = DtypeRule.of_source(model_assets_dir, dtype)
            tensors = {key: rule.cast(key, tensor) for key, tensor in on_hub.tensors.items()}
            files, texts = safetensors_files(tensors, max_shard_bytes)
            conversion = Conversion(
                sources=[step, model_assets_dir],
                ledgers=[ledger],
                files=files,
                layout={"kind": "hf"},
                times=on_hub.times,
                left_out=on_hub.left_out,
                incomparable=_why_incomparable(outline, renames),
                copies=on_hub.copies,
                texts=texts | on_hub.texts,
            )
            return convert(conversion, save_dir, Writing(overwrite, verify, self.examine), stream=sys.stderr)

    def _finish(self, made: HubFolder, model_assets_dir: Path) -> None:
        """Change what `dcp_to_hf` is about to write. Here: nothing."""

    def _check_family(self, folder: Path) -> None:
        """Raise `UsageError` when the converter is not for this folder's model."""


def _tell_workers(number: int) -> None:
    if number > 0:
        say(f"note: --num_workers {number} has no effect: one process reads and writes, tensor by tensor", err=True)


def _prefix_under_adapters(folder: Path, dcp_prefix: str, hf_prefix: str) -> str:
    """What names begin with in the base of adapters, whose values are the folder's own: `open_stored` reads it back."""
    if dcp_prefix or hf_prefix:
        raise UsageError(
            "names the prefix itself", key="--is_lora_base", way_out="Leave out --dcp_prefix and --hf_prefix."
        )
    refuse_quantized(model_config(folder), str(folder / "config.json"))
    return UNDER_ADAPTERS


def _outline(folder: Path, renames: bool) -> TransformersOutline | None:
    """The model of a folder, by whose names tensors go; None where flags rename them, or there is no such class."""
    if renames:
        return None
    return TransformersOutline.of(folder)


def _why_incomparable(outline: TransformersOutline | None, renames: bool) -> str:
    """Why the logits of what is written cannot be compared; empty where they can."""
    if outline is not None:
        return ""
    if renames:
        return _RENAMED
    return _NO_CLASS


def _with_prefix(key: str, old: str, new: str) -> str:
    if key.startswith(old):
        return new + key.removeprefix(old)
    return key


def renamed(tensors: Mapping[str, LazyTensor], old: str, new: str) -> dict[str, LazyTensor]:
    """With another prefix; keys that do not begin with the old one stay as they are."""
    homes: dict[str, str] = {}
    for key in tensors:
        name = _with_prefix(key, old, new)
        if (first := homes.setdefault(name, key)) != key:
            raise UsageError(f"{first} and {key} would both become this", key=name, way_out="Choose another prefix.")
    return {name: tensors[key] for name, key in homes.items()}


def check_prefix(flag: str, prefix: str, keys: Collection[str], where: Path) -> None:
    """Raise `UsageError` for a prefix that no key begins with."""
    if prefix and not any(key.startswith(prefix) for key in keys):
        raise UsageError(f"no key begins with '{prefix}'", where=str(where), key=flag, way_out=_some_keys(keys))


def _check_fused(names: Sequence[str], tensors: Mapping[str, LazyTensor], where: Path, *, dims: int) -> None:
    """Each is part of the name of a tensor that has the dims of stacked experts."""
    for name in names:
        keys = [key for key in tensors if name in key]
        if any(len(tensors[key].shape) >= dims for key in keys):
            continue
        if keys:
            what = f"none of the keys with '{name}' has {dims} dims"
        else:
            what = f"no key holds '{name}'"
        raise UsageError(what, where=str(where), key="--fused_linear_names", way_out=_some_keys(keys or tensors))


def _some_keys(keys: Collection[str]) -> str:
    return f"Keys there are {first_names(sorted(keys), most=3)}."


def _flattened(key: str, tensor: LazyTensor, fused: Sequence[str]) -> LazyTensor:
    if len(tensor.shape) < 3 or not any(name in key for name in fused):
        return tensor
    return Reshaped(tensor, (-1, tensor.shape[-1]))


def _check_stored_ties(ties: Mapping[str, str], tensors: Collection[str]) -> None:
    """Each further name is of a tensor that is stored, and is not stored itself."""
    problems = []
    for alias, key in ties.items():
        if key not in tensors:
            problems.append(Problem("is not stored", key=key))
        if alias in tensors:
            problems.append(Problem("is stored beside the tensor that it is to be tied to", key=alias))
    if problems:
        raise UsageError("--tie_weight_mapping does not fit what is stored", problems=problems)


@contextmanager
def _own_weights(folder: Path) -> Iterator[Mapping[str, Stored] | None]:
    """A model's own tensors; None of a folder that has none."""
    if not _has_weights(folder):
        yield None
        return
    with open_weights(folder, MAPPED_BYTES) as stored:
        yield stored


@dataclass
class HubFolder:
    """What is written of a checkpoint: its tensors by the hub's keys, and the files beside them."""

    tensors: dict[str, LazyTensor]
    times: dict[str, int | None] = field(default_factory=dict)
    """Keys of the checkpoint that are written several times."""
    left_out: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    """Name → file or folder to copy."""
    texts: dict[str, str] = field(default_factory=dict)
    """Name → text; of a name in `copies`, in place of that file."""


def hub_folder(
    outline: TransformersOutline,
    tensors: Mapping[str, Stored],
    stored: Mapping[str, Stored] | None,
    step: Path,
    *,
    allow_unused: bool,
) -> HubFolder:
    """What the model's class says; what it has no place for is taken over from the model's own folder.

    Args:
        outline: The model.
        tensors: Of a checkpoint, by its names.
        stored: What the model's own folder holds; None: it has no weights, or they are not asked.
        step: Where the checkpoint is, for errors.
        allow_unused: Leave out tensors that the model has no place for.

    Raises:
        ModelFolderError: Weights are missing or surplus, or have another shape.
    """
    taken_over: list[str] = []
    if stored is not None:  # read first: it finds out which keys of the folder are tied
        _, taken_over = outline.own_tensors(stored)
    held = _unwrapped(tensors, outline)
    surplus = [tensor.key for name, tensor in held.items() if name not in outline.shapes and name not in outline.ties]
    left_out = _copies(held, outline)
    if allow_unused:  # else `hub_tensors` names them, with what is missing
        left_out |= outline.unused(surplus, where=step, allowed=True)
    held = {name: tensor for name, tensor in held.items() if tensor.key not in left_out}
    made = outline.hub_tensors(held, step)
    times: dict[str, int | None] = {}
    for key, name in outline.tied_keys.items():
        made[key] = held[name]
        times[held[name].key] = 2
    if stored is not None:
        made |= {key: stored[key] for key in taken_over}
    return HubFolder(made, times, left_out)


def _unwrapped(tensors: Mapping[str, Stored], outline: TransformersOutline) -> dict[str, Stored]:
    """Under the model's names, for a checkpoint whose names all have `model.` in front too."""
    wrapper = wrapper_prefix(tensors, outline.shapes)
    return {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}


def _copies(held: Mapping[str, Stored], outline: TransformersOutline) -> dict[str, str]:
    """Keys of tied tensors that are stored under two names."""
    copies = {}
    for alias, name in outline.ties.items():
        if alias in held and name in held:
            copies[held[alias].key] = f"is tied to {name}"
    return copies


def _by_flags(
    tensors: Mapping[str, LazyTensor], assets: Path, dcp_prefix: str, hf_prefix: str, fused: Sequence[str]
) -> dict[str, LazyTensor]:
    """What prefixes and fused linears say."""
    entries = find_entries(assets) if _has_weights(assets) else {}
    made: dict[str, LazyTensor] = dict(tensors)
    for name, tensor in tensors.items():
        key = _with_prefix(name, dcp_prefix, hf_prefix)
        is_fused = len(tensor.shape) == 2 and any(part in name for part in fused)
        if not is_fused:
            continue
        if key in entries:
            made[name] = _unfolded(name, tensor, entries[key].shape)
        elif not entries and not key.endswith("weight"):
            made[name] = _unfolded(name, tensor, (_number_of_experts(assets), -1, tensor.shape[-1]))
    return renamed(made, dcp_prefix, hf_prefix)


def _unfolded(key: str, tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    try:
        return Reshaped(tensor, shape)
    except RuntimeError as error:
        what = f"is {list(tensor.shape)}, and {list(shape)} is wanted of it"
        raise CheckpointError(what, key=key, way_out="Is it another model's?") from error


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _number_of_experts(assets: Path) -> int:
    parts = [model_config(assets)]
    for part in parts:  # grows as it is read: sections of sections too
        parts += [value for value in part.values() if isinstance(value, dict)]
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        for part in parts:
            if isinstance(found := part.get(name), int) and found:
                return found
    raise ModelFolderError(
        "says no number of experts, which --fused_linear_names needs", where=str(assets / "config.json")
    )
