"""The parts of a generator's folder around its transformer: VAE, text and image encoders, tokenizers, scheduler.

A folder is data: classes come from diffusers and transformers only, weights from safetensors only, and a weight that is
missing is an error.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.safetensors_folder import find_entries, weight_files
from mindspeed_mm.core.errors import ConfigError, MachineError, ModelFolderError
from mindspeed_mm.core.folder_links import check_links
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import pack_linears
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.generator_folder import absent_component
from mindspeed_mm.fsdp.models.loading.folder import read_config
from mindspeed_mm.fsdp.utils.processor import check_words
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

_MODULES = ("diffusers", "transformers", "mindspeed_mm.fsdp.models.diffusion.identity_vae")
"""What `model_index.json` may name as the home of a class."""
_OF_PIPELINES = ("ltx2",)
"""Folders of diffusers' pipelines that it may name, too: parts that no other pipeline has stand there."""
_QUANTIZED = ("text_encoder", "image_encoder")
"""What names of components begin with that `model.quantize_encoders` is about."""
_SETTINGS = (".json", ".txt", ".model", ".jinja")
"""Files that decide what a component does, beside its weights."""


class TransformerSettings:
    """Stands for the transformer in a pipeline that only encodes: some pipelines ask it for sizes, as Stable
    Diffusion 3 does for captions when it has no T5.

    Args:
        adapter: Of the folder.
    """

    def __init__(self, adapter: DiffusionAdapter) -> None:
        settings = {}
        parameters = inspect.signature(family_class(adapter, adapter.transformer_class).__init__).parameters
        for name, parameter in parameters.items():
            if parameter.default is not parameter.empty:
                settings[name] = parameter.default
        # config.json may leave out what has the constructor's default.
        self.config = SimpleNamespace(**settings | adapter.transformer_config)
        """As the transformer itself would have it."""


def load_encoders(
    adapter: DiffusionAdapter, device: torch.device, dtype: torch.dtype | None = None
) -> DiffusionPipeline:
    """The folder's diffusers pipeline with nothing but the settings of its transformer: frozen, in evaluation mode, on
    a device.

    Args:
        adapter: Of the folder.
        device: Of the encoders.
        dtype: What they compute in; as each is stored when None.

    Raises:
        MachineError: diffusers is not installed.
        ModelFolderError: A component is missing, damaged, incomplete, pickled, or of a class from elsewhere.
    """
    _check_listed(adapter)
    parts = {name: load_component(adapter, name, dtype) for name in component_names(adapter)}
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        part.requires_grad_(False).eval()
        if adapter.quantize_encoders and name.startswith(_QUANTIZED):
            pack_linears(part, adapter.quantize_encoders)  # on the host: the device never holds the whole
        part.to(device)
    for option in adapter.vae_options:
        _enable(parts["vae"], option)
    return _pipeline(adapter, parts | {"transformer": TransformerSettings(adapter)})


def _enable(vae: ModelMixin, option: str) -> None:
    """Let a VAE take less memory by `tiling` or `slicing`.

    Raises:
        ConfigError: It cannot.
    """
    try:
        getattr(vae, f"enable_{option}")()
    except (AttributeError, NotImplementedError):
        raise ConfigError(
            f"{type(vae).__name__} has no {option}", key=f"model.vae_{option}", way_out="Leave it out."
        ) from None


def load_pipeline(adapter: DiffusionAdapter, transformer: nn.Module, encoders: DiffusionPipeline) -> DiffusionPipeline:
    """The whole pipeline: a live transformer with the components that `load_encoders` loaded, which are shared."""
    scheduler = type(encoders.scheduler).from_config(encoders.scheduler.config)  # it counts steps: not to be shared
    trained = dict.fromkeys(adapter.transformers, transformer)  # two are one module, which knows whose turn it is
    return _pipeline(adapter, encoders.components | trained | {"scheduler": scheduler})


def encoder_files(adapter: DiffusionAdapter, absent: Collection[str] = ()) -> dict[str, list[Path]]:
    """Component → the files that decide what it encodes: all components but transformer and scheduler.

    Args:
        adapter: Of the folder.
        absent: Components to pass over; where there are any, nothing will be encoded.

    Raises:
        ModelFolderError: A component that the family cannot do without is not listed; its folder or its weights are
            missing, or they are pickled.
    """
    if not absent:
        _check_listed(adapter)
    return {name: _component_files(adapter.folder / name) for name in _encoder_names(adapter) if name not in absent}


def absent_encoders(adapter: DiffusionAdapter) -> set[str]:
    """Encoders that the folder lists and that have no folder, or none with weights: a run on features uses none."""
    absent = set()
    for name in _encoder_names(adapter):
        folder = adapter.folder / name
        if not folder.is_dir() or _is_stripped(folder):
            absent.add(name)
    return absent


def _is_stripped(folder: Path) -> bool:
    """Whether a component has its configuration alone."""
    weights = any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir())
    return (folder / "config.json").is_file() and not weights


def _encoder_names(adapter: DiffusionAdapter) -> list[str]:
    return [name for name in component_names(adapter) if name != "scheduler"]


def _check_listed(adapter: DiffusionAdapter) -> None:
    lacking = [name for name in adapter.encoders if not adapter.has_component(name)]
    if lacking:
        raise ModelFolderError(
            f"lists no {', no '.join(lacking)}, and nothing can be encoded without",
            where=str(adapter.folder / "model_index.json"),
            key=lacking[0],
            way_out=adapter.unlisted_way_out,
        )


def component_names(adapter: DiffusionAdapter) -> list[str]:
    """The components that the folder has, but for its transformer."""
    return [name for name in adapter.index if adapter.has_component(name) and not name.startswith("transformer")]


def load_component(adapter: DiffusionAdapter, name: str, dtype: torch.dtype | None = None) -> Any:
    """One component of the folder, on the CPU.

    Raises:
        ModelFolderError: As `load_encoders`.
    """
    return load_class(_component_class(adapter, name), adapter.folder / name, dtype)


def load_class(component: Any, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A component of a class of transformers or diffusers, on the CPU.

    Args:
        component: The class.
        folder: As its `save_pretrained` writes it.
        dtype: Of its weights; None: as they are stored.

    Raises:
        ModelFolderError: The folder is not there, or holds something else.
    """
    if not folder.is_dir():
        raise absent_component(folder)
    check_links(folder)
    try:
        with quiet("transformers", "diffusers"):
            if issubclass(component, nn.Module):
                return _load_module(component, folder, dtype)
            loaded = component.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFolderError(
            f"{component.__name__} cannot be loaded: {first_line}",
            where=str(folder),
            way_out="Compare the folder with the original model's.",
        ) from error
    check_words(loaded, folder)
    return loaded


def _load_module(component: Any, folder: Path, dtype: torch.dtype | None) -> Any:
    from transformers import PreTrainedModel  # seconds to import

    read_config(folder)
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    # diffusers still calls it `torch_dtype`.
    name = "dtype" if issubclass(component, PreTrainedModel) else "torch_dtype"
    module, report = component.from_pretrained(str(folder), **options, **{name: dtype or stored_dtype(folder)})
    missing = list(map(str, report.get("missing_keys") or ()))
    missing += map(str, report.get("mismatched_keys") or ())
    missing.sort()
    # `from_pretrained` only warns of these and draws them at random: it would encode nonsense.
    if missing:
        raise ModelFolderError(
            f"{len(missing)} weights are missing or of another shape: {', '.join(missing[:3])} …",
            where=str(folder),
            way_out="Copy the weights that belong to this config.json.",
        )
    return module


def stored_dtype(folder: Path) -> torch.dtype:
    """The type of a folder's first weight that is of a floating type.

    Raises:
        ModelFolderError: Weights are missing or pickled.
    """
    for entry in find_entries(folder).values():
        if entry.dtype.is_floating_point:
            return entry.dtype
    return torch.float32


def diffusers_class(name: str) -> Any:
    """A class of diffusers by name.

    Raises:
        MachineError: diffusers is not installed.
        ModelFolderError: It has no such class.
    """
    prepare_for_transformers()
    try:
        import diffusers  # an extra, and seconds to import
    except ImportError as error:
        raise MachineError(
            f"diffusers cannot be imported: {error}", way_out="Install it: pip install 'mindspeed-mm[diffusion]'."
        ) from error
    found = getattr(diffusers, name, None)
    if not isinstance(found, type):
        raise ModelFolderError(
            f"diffusers {diffusers.__version__} has no class {name}", way_out="Install a newer diffusers."
        )
    return found


def family_class(adapter: DiffusionAdapter, name: str) -> Any:
    """A class of the family's own, or of diffusers, by name; errors as of `diffusers_class`."""
    module = adapter.own_classes.get(name)
    if module is None:
        return diffusers_class(name)
    diffusers_class("ModelMixin")  # says it in words where diffusers is not installed
    return getattr(importlib.import_module(module), name)


def _component_class(adapter: DiffusionAdapter, name: str) -> Any:
    library, class_name = adapter.index[name]
    if class_name in adapter.own_classes:
        return family_class(adapter, class_name)
    where = str(adapter.folder / "model_index.json")
    if library in _OF_PIPELINES:
        library = f"diffusers.pipelines.{library}"
    elif library not in _MODULES:
        raise ModelFolderError(
            f"the class {class_name} comes from '{library}', whose code is not run",
            where=where,
            key=name,
            way_out=f"Components are classes of {' and '.join(_MODULES[:2])}.",
        )
    if library == "diffusers":
        return diffusers_class(class_name)
    prepare_for_transformers()
    found = getattr(importlib.import_module(library), class_name, None)
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise ModelFolderError(f"{library} has no class {class_name}", where=where, key=name)
    return found


def _pipeline(adapter: DiffusionAdapter, parts: dict[str, Any]) -> DiffusionPipeline:
    """The pipeline of these parts; those that the folder lists as absent, or does not list, are None."""
    pipeline_class = family_class(adapter, adapter.pipelines[adapter.task])
    known = inspect.signature(pipeline_class.__init__).parameters
    arguments: dict[str, Any] = {}
    for name, parameter in known.items():
        listed = adapter.index.get(name)
        is_component = isinstance(listed, list) and len(listed) == 2
        if name in adapter.index and not is_component:
            arguments[name] = listed  # a setting of the pipeline
        elif name != "self" and (is_component or parameter.default is parameter.empty):
            arguments[name] = None  # a part that the folder does not have
    with quiet("diffusers"):
        pipeline = pipeline_class(**arguments | parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _component_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise absent_component(folder)
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _SETTINGS and ".index." not in path.name]
    if (folder / "config.json").is_file():  # tokenizers and image processors have no weights
        files += weight_files(folder)
    return files
