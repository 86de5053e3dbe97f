"""A generator ready to sample: the folder's pipeline around the transformer that a run trained, or adapters."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

from mindspeed_mm.checkpoint.original.lora_names import layers_of
from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.checkpoint.safetensors_folder import holds_safetensors
from mindspeed_mm.checkpoint.stored_weights import holds_weights, open_stored
from mindspeed_mm.core.errors import MMError, ModelFolderError
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import family_class, load_encoders, stored_dtype
from mindspeed_mm.fsdp.models.diffusion.transformer import ExpertPair
from mindspeed_mm.fsdp.models.loading.folder import check_all_loaded, read_config
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_PREFIX, DIFFUSERS_WEIGHTS
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.tasks.model_source import ModelSource

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def load_sampler(adapter: DiffusionAdapter, source: ModelSource, device: torch.device) -> DiffusionSampler:
    """Load everything that sampling needs, each part in the type that it is stored in.

    Args:
        adapter: Of `source.folder`.
        source: The folder, and what was trained of it.
        device: Of all parts.

    Raises:
        ModelFolderError: Weights are missing, left over or of another model.
    """
    transformer = load_transformers(adapter, source.transformer or adapter.weights_folder)
    sampler = DiffusionSampler(adapter, transformer.to(device), load_encoders(adapter, device))
    if source.lora is not None:
        load_lora(sampler.pipeline, source.lora)
    return sampler


def load_transformers(adapter: DiffusionAdapter, folder: Path) -> nn.Module:
    """What is trained of a generator: its transformer, or its two as one module.

    Args:
        adapter: Of the model.
        folder: Of the one transformer, or with the folders of the two.

    Raises:
        ModelFolderError: As `load_transformer`.
    """
    if len(adapter.transformers) == 1:
        return load_transformer(adapter, folder)
    parts = [load_transformer(adapter, folder / name) for name in adapter.transformers]
    return ExpertPair(parts[0], parts[1], adapter.boundary_time)


def load_transformer(adapter: DiffusionAdapter, folder: Path) -> nn.Module:
    """The transformer of a folder, frozen, in evaluation mode, on the CPU.

    Raises:
        ModelFolderError: Weights are missing, left over, damaged or of another shape.
    """
    if holds_weights(folder) and not holds_safetensors(folder):
        return _joined_transformer(adapter, folder).requires_grad_(False).eval()
    dtype = stored_dtype(folder)  # says what is wrong with weight files in words
    try:
        with quiet("diffusers"):
            model, report = family_class(adapter, adapter.transformer_class).from_pretrained(
                str(folder),
                torch_dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelFolderError(f"the transformer cannot be loaded: {_first_line(error)}", where=str(folder)) from error
    check_all_loaded(report, folder)
    return model.requires_grad_(False).eval()


def _joined_transformer(adapter: DiffusionAdapter, folder: Path) -> nn.Module:
    """The transformer of a folder in MindSpeed-MM's layout, or of a distributed checkpoint."""
    model_class: Any = family_class(adapter, adapter.transformer_class)
    model = model_class.from_config(read_config(folder))
    with open_stored(folder, None) as stored:
        weights = {key: tensor.read() for key, tensor in stored.items()}
    report = model.load_state_dict(weights, strict=False, assign=True)
    check_all_loaded({"missing_keys": report.missing_keys, "unexpected_keys": report.unexpected_keys}, folder)
    # As `from_pretrained` has it: beside halves, these are computed in single precision.
    wide = model_class._keep_in_fp32_modules or ()
    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize == 2 and not set(wide).isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()
    return model  # type: ignore[no-any-return]


def load_lora(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Put adapters beside the weights of a pipeline's transformer.

    Args:
        pipeline: Of the model that they were trained on.
        folder: With `pytorch_lora_weights.safetensors`; or a safetensors file, by the names of diffusers, ComfyUI or
            kohya's scripts, which diffusers translates.

    Raises:
        ModelFolderError: There are none, or they do not belong to this model.
    """
    if isinstance(pipeline.transformer, ExpertPair):
        experts = dict(pipeline.transformer.named_children())
        there = [part for part in experts if (folder / part / DIFFUSERS_WEIGHTS).is_file()]
        for part in there or experts:
            _load_lora(pipeline, experts[part], folder / part)
    else:
        _load_lora(pipeline, pipeline.transformer, folder)


def _load_lora(pipeline: DiffusionPipeline, transformer: Any, folder: Path) -> None:
    path = folder if folder.is_file() else folder / DIFFUSERS_WEIGHTS
    if not path.is_file():
        raise ModelFolderError(
            f"holds no {DIFFUSERS_WEIGHTS}",
            where=str(folder),
            key="--lora",
            way_out="Export a run that trained adapters.",
        )
    names = read_header(path).keys()
    _check_layers(transformer, names, path)
    translated = _translated(transformer, path)
    try:
        with quiet("diffusers"):
            files = {"weight_name": path.name, "local_files_only": True}
            if translated is not None:
                state, alphas = translated
                transformer.load_lora_adapter(state, prefix="transformer", network_alphas=alphas)
            elif transformer is pipeline.transformer and hasattr(pipeline, "load_lora_weights"):
                pipeline.load_lora_weights(str(path.parent), **files)
            else:  # some pipelines have no such door, and none for one of two; their transformers do
                transformer.load_lora_adapter(str(path.parent), prefix="transformer", **files)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AssertionError, RuntimeError) as error:
        if translated is None and not any(name.startswith(DIFFUSERS_PREFIX) for name in names):
            raise _untranslated(transformer, min(names, default="no tensor"), path) from error
        raise _foreign(_first_line(error), path) from error
    if not any(hasattr(module, "lora_A") for module in transformer.modules()):
        raise ModelFolderError(
            f"holds no adapter of a layer of {type(transformer).__name__}",
            where=str(path),
            key="--lora",
            way_out="Name a file for this model, by the names of diffusers, ComfyUI or kohya's scripts.",
        )


def _translated(transformer: nn.Module, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]] | None:
    """A file by ComfyUI's or kohya's names, by diffusers' own, with alphas; None where its names are others. diffusers
    itself takes such files of Wan apart only where every linear layer has an adapter, and those of VACE not at all."""
    if any(name.startswith(DIFFUSERS_PREFIX) for name in read_header(path)):
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}
    try:
        layers = layers_of(load_file(path), shapes, type(transformer).__name__)
    except MMError as error:  # a rule that cannot take a matrix of this shape apart
        raise _foreign(_first_line(error), path) from error
    if layers is None:
        return None
    state: dict[str, torch.Tensor] = {}
    alphas: dict[str, float] = {}
    for layer, (a, b, scale) in layers.items():
        name = DIFFUSERS_PREFIX + layer
        state |= {f"{name}.lora_A.weight": a.clone(), f"{name}.lora_B.weight": b.contiguous()}
        alphas[f"{name}.alpha"] = scale * len(a)
    return state, alphas


def _foreign(why: str, path: Path) -> ModelFolderError:
    return ModelFolderError(f"the adapters do not belong to this model: {why}", where=str(path), key="--lora")


def _untranslated(transformer: nn.Module, name: str, path: Path) -> ModelFolderError:
    return ModelFolderError(
        f"diffusers does not read adapters by these names ('{name}') for this {type(transformer).__name__}",
        where=str(path),
        key="--lora",
        way_out="Name a file for this model, by diffusers' own names: `mm export RUN OUT` writes them, "
        "`--lora-format diffusers`.",
    )


def _check_layers(transformer: nn.Module, names: Collection[str], path: Path) -> None:
    """diffusers leaves out what it does not know, and says so in a log line."""
    adapted = set()
    for key in names:
        # What other tools write has other names, which diffusers translates itself.
        if key.startswith(DIFFUSERS_PREFIX) and ".lora_" in key:
            adapted.add(key.removeprefix(DIFFUSERS_PREFIX).partition(".lora_")[0])
    foreign = sorted(adapted - dict(transformer.named_modules()).keys())
    if foreign:
        what = f"the adapters do not belong to this model: it has no layer {foreign[0]}"
        if len(foreign) > 1:
            what += f", nor {len(foreign) - 1} others"
        way_out = "Name the folder that they were trained on."
        raise ModelFolderError(what, where=str(path), key="--lora", way_out=way_out)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
