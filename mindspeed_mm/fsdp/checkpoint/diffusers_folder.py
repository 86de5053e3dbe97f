"""A generator's folder in diffusers' layout: the trained transformer, and the rest as the run found it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, DtypeRule, drafted_folder, write_weights
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.folder_links import check_links
from mindspeed_mm.core.folder_writing import copy_plain
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import EXPERT_PARTS, GENERATOR_INDEX
from mindspeed_mm.fsdp.checkpoint.hf import hub_tensors, live_tensors
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.utils.ranks import Ranks

STEM = "diffusion_pytorch_model"
"""Stem of the file names that diffusers looks for."""


def save_transformer(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    ranks: Ranks | None = None,
) -> None:
    """Write the transformer of a live model, sharded or not, as `<folder>/transformer`. Called by all ranks.

    Args:
        model: From `ModelHub.build`, of a generator.
        folder: Appears when complete.
        dtype: None writes each tensor in the dtype that the folder of the run's model has for it.
        overwrite: Replace an existing folder.
        ranks: All of them; made here when not given, which is itself a collective.
    """
    adapter = facts_of(model).adapter
    assert adapter is not None, "the model is not a generator"
    ranks = ranks or Ranks()
    made = hub_tensors(model, live_tensors(model))
    rule = ranks.first("reading the source", lambda: DtypeRule.of_source(adapter.weights_folder, dtype))
    with drafted_folder(folder, ranks, overwrite=overwrite) as draft:
        write_transformer(adapter, made, draft, rule, ranks=ranks)


def write_transformer(
    adapter: DiffusionAdapter,
    tensors: Mapping[str, LazyTensor],
    draft: Path,
    rule: DtypeRule,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    ranks: Ranks | None = None,
) -> None:
    """Write `transformer/`, or both transformers, into a folder that exists: the configuration with the run's changes,
    and the weights.

    Args:
        adapter: Of the run.
        tensors: By the transformer's own keys.
        draft: Where to.
        rule: In which dtype.
        max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        ranks: Given when reading is a collective.
    """
    ranks = ranks or Ranks()
    for name in adapter.transformers:
        config, folder = adapter.config_of(name), draft / name
        ranks.first("writing the configuration", partial(_write_config, config, folder))
        own, own_rule = tensors, rule
        if len(adapter.transformers) > 1:
            own, own_rule = of_part(tensors, rule, f"{name}.")
        write_weights(own, folder, own_rule, max_shard_bytes, ranks, stem=STEM)


def of_part(tensors: Mapping[str, LazyTensor], rule: DtypeRule, prefix: str) -> tuple[dict[str, LazyTensor], DtypeRule]:
    """What belongs to one of two transformers, under its own keys."""
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    dtypes = {key.removeprefix(prefix): dtype for key, dtype in rule.of_key.items() if key.startswith(prefix)}
    return own, DtypeRule(dtypes, rule.default)


def copy_components(source: Path, draft: Path) -> list[str]:
    """Copy `model_index.json` and every component but the transformer, as they are.

    Args:
        source: A folder in diffusers' layout.
        draft: Where to; exists.

    Returns:
        Names of the components.

    Raises:
        ModelFolderError: A link leads out of the folder or nowhere, or something is not a regular file.
    """
    components = list(component_folders(source))
    check_links(source)
    for folder in components:
        # Before it is copied: a link out of the folder would bring in files of somebody else.
        check_links(folder, deep=True)
        copy_plain(folder, draft / folder.name)
    for file in (source / GENERATOR_INDEX, *sorted(source.glob("LICENSE*"))):
        shutil.copyfile(file, draft / file.name)
    return [folder.name for folder in components]


def component_folders(source: Path) -> Iterator[Path]:
    """The components that `model_index.json` lists and a pipeline needs beside its transformers.

    Raises:
        ModelFolderError: One of them is not there.
    """
    index = read_json_object(source / GENERATOR_INDEX, ModelFolderError)
    for name, entry in index.items():
        is_present = isinstance(entry, list) and len(entry) == 2 and entry[0] is not None
        if not is_present or name in EXPERT_PARTS:
            continue
        if not (source / name).is_dir():
            raise ModelFolderError(
                f"'{name}' is listed in {GENERATOR_INDEX}, but its folder does not exist",
                where=str(source / name),
                way_out="Copy the model folder again, or export with --transformer-only.",
            )
        yield source / name


def components_bytes(source: Path) -> int:
    """Return the size in bytes of the component folders that `copy_components` copies."""
    size = 0
    for folder in component_folders(source):
        size += sum(path.stat().st_size for path in folder.rglob("*"))
    return size


def _write_config(config: Mapping[str, object], folder: Path) -> None:
    folder.mkdir()
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
