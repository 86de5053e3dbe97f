"""Hugging Face folder ↔ distributed checkpoint, for every model that transformers or a plain rename knows.

The checkpoint holds the names of transformers' module, so that `training.load` reads it. Where prefixes or fused
linears are given, they say what the names are, and the folder's own keys are taken as they stand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, convert
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, find_step, wrapper_prefix
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, DtypeRule, asset_files, safetensors_files
from mindspeed_mm.checkpoint.lazy_tensor import Cast, LazyTensor, Reshaped, Stored
from mindspeed_mm.checkpoint.safetensors_folder import find_entries, open_weights
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, Problem, UsageError
from mindspeed_mm.core.json_file import read_json_object

NO_PLACE = "the model has no place for it"


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
        overwrite: bool = False,
        verify: bool = True,
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
            overwrite: Replace what an earlier conversion wrote to dcp_dir.
            verify: Read everything back and compare.
        """
        self._check_family(hf_dir)
        with open_weights(hf_dir, most_open=1) as stored:
            ledger = SourceLedger(stored, hf_dir)
            renames = bool(dcp_prefix or hf_prefix or fused_linear_names)
            outline = None if renames else TransformersOutline.of(hf_dir)
            surplus: list[str] = []
            tensors: dict[str, LazyTensor] = dict(ledger.tensors)
            if outline is not None:
                tensors, surplus = outline.own_tensors(ledger.tensors)
            aliases = _aliases(tie_weight_mapping or {}, tensors)
            tensors = {
                _renamed(key, hf_prefix, dcp_prefix): _flattened(key, tensor, fused_linear_names or ())
                for key, tensor in tensors.items()
            }
            aliases = {
                _renamed(alias, hf_prefix, dcp_prefix): _renamed(key, hf_prefix, dcp_prefix)
                for alias, key in aliases.items()
            }
            conversion = Conversion(
                sources=[hf_dir],
                ledgers=[ledger],
                files={layout.RELEASE: DcpFolder(tensors, aliases)},
                layout={
                    "kind": "dcp",
                    "names": "transformers" if outline is not None else "folder",
                    "dcp_prefix": dcp_prefix,
                    "hf_prefix": hf_prefix,
                    "fused_linear_names": fused_linear_names or [],
                },
                left_out=dict.fromkeys(surplus, NO_PLACE),
                texts={layout.TRACKER: f"{layout.RELEASE}\n"},
            )
            return convert(conversion, dcp_dir, overwrite=overwrite, verify=verify, stream=sys.stderr)

    def dcp_to_hf(
        self,
        load_dir: Path,
        save_dir: Path,
        model_assets_dir: Path,
        dcp_prefix: str = "",
        hf_prefix: str = "",
        fused_linear_names: list[str] | None = None,
        trust_remote_code: bool = False,
        overwrite: bool = False,
        verify: bool = True,
        max_shard_bytes: int = MAX_SHARD_BYTES,
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
            overwrite: Replace what an earlier conversion wrote to save_dir.
            verify: Read everything back and compare.
            max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        """
        del trust_remote_code
        self._check_family(model_assets_dir)
        step = find_step(load_dir)
        assets = asset_files(model_assets_dir)
        has_weights = _has_weights(model_assets_dir)
        renames = bool(dcp_prefix or hf_prefix or fused_linear_names)
        outline = None if renames else TransformersOutline.of(model_assets_dir)
        ledger = SourceLedger(DcpReader(step).model_tensors(), step)
        left_out: dict[str, str] = {}
        taken_over: dict[str, LazyTensor] = {}
        with open_weights(model_assets_dir, most_open=1) if has_weights else _nothing() as stored:
            if outline is not None:
                if has_weights:
                    _, surplus = outline.own_tensors(stored)
                    taken_over = {key: stored[key] for key in surplus}
                held = _unwrapped(ledger.tensors, outline)
                left_out = _copies(held, outline)
                held = {name: tensor for name, tensor in held.items() if tensor.key not in left_out}
                made = outline.hub_tensors(held)
                made |= {key: held[name] for key, name in outline.tied_keys.items()}
            else:
                made = _by_flags(ledger.tensors, model_assets_dir, dcp_prefix, hf_prefix, fused_linear_names or ())
            _check_wanted(made.keys() | taken_over.keys(), model_assets_dir, step, has_weights)
            rule = DtypeRule.of_source(model_assets_dir)
            tensors = {key: _cast(tensor, rule(key, tensor.dtype)) for key, tensor in {**made, **taken_over}.items()}
            files, texts = safetensors_files(tensors, max_shard_bytes)
            conversion = Conversion(
                sources=[step, model_assets_dir],
                ledgers=[ledger],
                files=files,
                layout={"kind": "hf"},
                repeated={held[name].key for name in outline.tied_keys.values()} if outline is not None else (),
                left_out=left_out,
                copies={path.name: path for path in assets},
                texts=texts,
            )
            return convert(conversion, save_dir, overwrite=overwrite, verify=verify, stream=sys.stderr)

    def _check_family(self, folder: Path) -> None:
        """Raise `UsageError` when the converter is not for this folder's model."""


def _renamed(key: str, old: str, new: str) -> str:
    return key.replace(old, new, 1) if old else f"{new}{key}"


def _flattened(key: str, tensor: LazyTensor, fused: Sequence[str]) -> LazyTensor:
    if len(tensor.shape) < 3 or not any(name in key for name in fused):
        return tensor
    return Reshaped(tensor, (-1, tensor.shape[-1]))


def _aliases(mapping: Mapping[str, str], tensors: dict[str, LazyTensor]) -> dict[str, str]:
    """Names that are read back beside those that are stored; where both are stored, they must be equal."""
    problems = [Problem("is not stored", key=key) for key in mapping.values() if key not in tensors]
    problems += [
        Problem("is stored beside the tensor that it is to be tied to", key=alias)
        for alias in mapping
        if alias in tensors
    ]
    if problems:
        raise UsageError("--tie_weight_mapping does not fit what is stored", problems=problems)
    return dict(mapping)


@contextmanager
def _nothing() -> Iterator[dict[str, Stored]]:
    yield {}


def _unwrapped(tensors: Mapping[str, Stored], outline: TransformersOutline) -> dict[str, Stored]:
    """Under the model's names, for a checkpoint whose names all have `model.` in front too."""
    wrapper = wrapper_prefix(tensors, outline.shapes)
    return {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}


def _copies(held: Mapping[str, Stored], outline: TransformersOutline) -> dict[str, str]:
    """Keys of tied tensors that are stored under two names."""
    return {
        held[alias].key: f"is tied to {name}" for alias, name in outline.ties.items() if alias in held and name in held
    }


def _by_flags(
    tensors: Mapping[str, LazyTensor], assets: Path, dcp_prefix: str, hf_prefix: str, fused: Sequence[str]
) -> dict[str, LazyTensor]:
    """What prefixes and fused linears say."""
    shapes = {key: entry.shape for key, entry in find_entries(assets).items()} if _has_weights(assets) else {}
    made: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        key = hf_prefix + name.removeprefix(dcp_prefix) if name.startswith(dcp_prefix) else name
        if key in made:
            raise CheckpointError("two stored names become this one", key=key)
        made[key] = tensor
        if len(tensor.shape) == 2 and any(part in name for part in fused):
            if shapes:
                made[key] = Reshaped(tensor, shapes.get(key, tensor.shape))
            elif not name.endswith("weight"):
                made[key] = Reshaped(tensor, (_number_of_experts(assets), -1, tensor.shape[-1]))
    return made


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _number_of_experts(assets: Path) -> int:
    config = read_json_object(assets / "config.json", ModelFolderError)
    parts: list[Any] = [config]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        for part in parts:
            if isinstance(found := part.get(name), int) and found:
                return found
    raise ModelFolderError(
        "says no number of experts, which --fused_linear_names needs", where=str(assets / "config.json")
    )


def _check_wanted(made: set[str], assets: Path, step: Path, has_weights: bool) -> None:
    """The keys of the model's own folder, all of them and no others."""
    if not has_weights:
        return
    wanted = set(find_entries(assets))
    problems = [Problem("is in the model's folder and not in the checkpoint", key=key) for key in sorted(wanted - made)]
    problems += [
        Problem("is in the checkpoint and not in the model's folder", key=key) for key in sorted(made - wanted)
    ]
    if problems:
        raise CheckpointError(
            f"{step} does not give the keys of {assets}: {len(wanted - made)} missing, {len(made - wanted)} surplus",
            problems=problems,
        )


def _cast(tensor: LazyTensor, dtype: Any) -> LazyTensor:
    return tensor if tensor.dtype == dtype else Cast(tensor, dtype)
