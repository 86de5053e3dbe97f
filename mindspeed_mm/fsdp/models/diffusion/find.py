"""Finds the adapter of the family that a folder in diffusers' layout belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.model_kinds import GENERATOR_INDEX, PIPELINES_OF_UNIFIED
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.generator_folder import read_json
from mindspeed_mm.fsdp.params.cards import transformer_ids
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.params.model_args import ModelArguments


def find_adapter(
    folder: str | Path,
    model_id: str | None = None,
    transformer: Mapping[str, object] | None = None,
    task: str | None = None,
) -> DiffusionAdapter:
    """The adapter for a folder: of the registered id, or of the family whose transformer the folder holds.

    Args:
        folder: In diffusers' layout.
        model_id: `model.model_id`; None: found by the class that `model_index.json` names.
        transformer: `model.transformer`: settings of the transformer's configuration to change.
        task: `model.task`; None: the first that the folder's pipeline does.

    Raises:
        ModelFolderError: The folder is in another layout, no family here has its transformer, or its parts do not fit
            together.
        ConfigError: The id is not a generator's; the folder is for another task.
    """
    path = Path(folder)
    if not (path / GENERATOR_INDEX).is_file():
        raise _no_generator(path, model_id)
    index = read_json(path / GENERATOR_INDEX)
    if (converter := PIPELINES_OF_UNIFIED.get(str(index.get("_class_name")))) is not None:
        raise ModelFolderError(
            f"holds the parts of a {index['_class_name']}, which answers and draws, in folders of their own",
            where=str(path),
            key="model.model_name_or_path",
            way_out=f"Write them as one folder: mm-convert {converter} hf_to_mm --cfg.source_path {path} "
            "--cfg.target_path FOLDER.",
        )
    if model_id is None:
        model_id = _id_of(path, index)
    entry = model_register.get(model_id)
    if not _is_adapter(entry):
        raise ConfigError(
            f"'{model_id}' is not a generator, but the folder is one",
            where=str(path),
            key="model.model_id",
            way_out=f"Leave model_id out, or name one of {', '.join(sorted(set(transformer_ids().values())))}.",
        )
    entry = entry.of_release(index)
    adapter = entry(path, transformer) if task is None else entry(path, transformer, task)
    adapter.check()
    return adapter


def adapter_of_section(
    section: ModelArguments, task: str | None = None, transformer: Mapping[str, object] | None = None
) -> DiffusionAdapter:
    """The adapter that the `model` section describes; errors as of `find_adapter`.

    Args:
        section: Names a folder.
        task: In place of the section's.
        transformer: In place of the section's.
    """
    changes = section.transformer if transformer is None else transformer
    adapter = find_adapter(str(section.model_name_or_path), section.model_id, changes, task or section.task)
    adapter.vae_options = ("tiling",) * section.vae_tiling + ("slicing",) * section.vae_slicing
    adapter.quantize_encoders = section.quantize_encoders
    return adapter


def _no_generator(path: Path, model_id: str | None) -> ModelFolderError:
    what = f"holds no {GENERATOR_INDEX}"
    if not path.exists():
        what = "does not exist"
    elif not path.is_dir():
        what = "is a file, not a folder"
    family: Any = DiffusionAdapter
    if model_id is not None and _is_adapter(named := model_register.get(model_id)):
        family = named  # its releases may come in a layout of their own
    return ModelFolderError(what, where=str(path), key="model.model_name_or_path", way_out=family.layout_way_out)


def _id_of(path: Path, index: Mapping[str, object]) -> str:
    entry = index.get("transformer")
    name = str(entry[1]) if isinstance(entry, list) and len(entry) == 2 else "no transformer"
    built_in = transformer_ids()
    loaded = {key: entry for key, entry in model_register.loaded().items() if key not in built_in.values()}
    # A plugin that somebody has imported goes before the family that is built in.
    ids = {**built_in, **{entry.transformer_class: key for key, entry in loaded.items() if _is_adapter(entry)}}
    if name not in ids:
        raise ModelFolderError(
            f"the transformer is {name}, which no family here has",
            where=str(path / GENERATOR_INDEX),
            key="transformer",
            way_out=f"{did_you_mean(name, ids)}Known: {', '.join(sorted(ids))}. "
            "Others are added by a plugin: name it in training.plugin, or to mm infer and mm merge by --plugin.",
        )
    return ids[name]


def _is_adapter(entry: object) -> bool:
    return isinstance(entry, type) and issubclass(entry, DiffusionAdapter)
