"""Builds the denoising transformer of a generator's folder without weights, and says where its weights lie. Two that
share the noise levels between them are one module (Wan2.2).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.folder_links import check_links
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, ModelKind, expert_folders, kind_of_folder
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.models.behaviour.attention import set_attention_backend
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import family_class
from mindspeed_mm.fsdp.models.diffusion.find import adapter_of_section
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.folder import read_config, require_folder
from mindspeed_mm.fsdp.models.loading.meta_device import parameters_on_meta
from mindspeed_mm.fsdp.params.cards import model_modules
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.params.model_args import ModelArguments


def kind_of_section(model_args: ModelArguments) -> ModelKind:
    """The kind of model that the configuration names: by its id, or else by its folder. (A plugin may read a folder in
    diffusers' layout by a class of its own; a built-in language model cannot.)"""
    of_folder = kind_of_folder(model_args.model_name_or_path)
    if model_args.model_id is None or (of_folder is GENERATOR and model_args.model_id in model_modules()):
        return of_folder
    entry = model_register.get(model_args.model_id)
    if isinstance(entry, type) and issubclass(entry, DiffusionAdapter):
        return GENERATOR
    return LANGUAGE


def build_transformer(
    model_args: ModelArguments, overrides: Mapping[str, object], param_dtype: torch.dtype | None
) -> nn.Module:
    """The transformer with parameters on the meta device and real buffers; its adapter is in `facts_of(model)`.

    All parameters have one dtype, as FSDP asks: what diffusers would keep in fp32 beside bf16 is fp32 anyway, since
    masters are.

    Args:
        model_args: The `model` section.
        overrides: Settings of the transformer's configuration to change, beside `model.transformer`.
        param_dtype: What the plan computes in.

    Raises:
        ConfigError: The transformer has no such setting, or diffusers no such attention kernel.
        ModelFolderError: The folder cannot be understood, or its parts do not fit together.
        MachineError: diffusers, or the attention kernel asked for, is not installed.
    """
    changes = {**(model_args.transformer or {}), **overrides}
    require_folder(model_args.model_name_or_path)
    adapter = adapter_of_section(model_args, transformer=changes)
    model_class = family_class(adapter, adapter.transformer_class)
    _check_config(adapter, model_class, changes)
    try:
        with parameters_on_meta(), quiet("diffusers"):
            parts = [model_class.from_config(adapter.config_of(name)) for name in adapter.transformers]
            for part in parts:
                adapter.settle_transformer(part)
            model = parts[0] if len(parts) == 1 else ExpertPair(parts[0], parts[1], adapter.boundary_time)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, IndexError) as error:
        raise ModelFolderError(
            f"diffusers cannot build the transformer: {' '.join(str(error).split())}",
            where=str(adapter.transformer_folder / "config.json"),
            key="model.transformer" if changes else "",
            way_out="Compare the settings with the original model's config.json.",
        ) from error
    set_attention_backend(model, model_args.attn_implementation, param_dtype=param_dtype)
    facts_of(model).adapter = adapter
    return model


def weights_folder(model: nn.Module, folder: Path) -> Path:
    """Where, in a folder of this model, the weights of what is trained lie."""
    if facts_of(model).kind.trained_part:
        return transformer_weights(folder)
    return folder


def transformer_weights(folder: Path) -> Path:
    """Where a transformer's weights lie: `transformer/` of a folder in diffusers' layout, else the folder itself, also
    where it holds two transformers."""
    if parts := expert_folders(folder):
        for part in parts:
            check_links(part)
        return folder
    weights = folder / kind_of_folder(folder).trained_part
    if weights.is_dir():
        check_links(weights)
    return weights


def _check_config(adapter: DiffusionAdapter, model_class: type, changes: Mapping[str, object]) -> None:
    where = adapter.transformer_folder / "config.json"
    config = read_config(adapter.transformer_folder)
    if config.get("_class_name", adapter.transformer_class) != adapter.transformer_class:
        raise ModelFolderError(
            f"describes a {config['_class_name']}, not a {adapter.transformer_class}",
            where=str(where),
            key="_class_name",
            way_out="Name the model_id of this folder's model, or leave model_id out.",
        )
    known = set(inspect.signature(model_class).parameters)
    for name in changes:
        if name not in known:
            raise ConfigError(
                f"{adapter.transformer_class} has no such setting",
                key=f"model.transformer.{name}",
                way_out=f"{did_you_mean(name, known)}It has {', '.join(sorted(known))}.",
            )
    if unknown := [name for name in config if name not in known and not name.startswith("_")]:
        raise ModelFolderError(
            f"{', '.join(unknown)}: the installed diffusers knows no such setting of {adapter.transformer_class}",
            where=str(where),
            key=unknown[0],
            way_out="Install the diffusers that the folder was made for, or remove the setting.",
        )


class ExpertPair(nn.Module):
    """Sends each sample to the transformer of its noise level. The two bear the names of their folders, `EXPERT_PARTS`.

    Both are called wherever gradients or other ranks may wait for them, with a sample that counts for nothing where
    none is theirs: every rank then gathers the same weights, and every step has the gradients of both.

    Args:
        transformer: For times from the boundary on.
        transformer_2: For times below.
        boundary: In the transformers' own time, 0..1000.
    """

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary

    @property
    def config(self) -> Any:
        """Of the first: the two have the same sizes."""
        return self.transformer.config

    @property
    def dtype(self) -> torch.dtype:
        """What pipelines ask a transformer for."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """What pipelines ask a transformer for."""
        return next(self.parameters()).device

    def cache_context(self, *_: object, **__: object) -> AbstractContextManager[None]:
        """What pipelines wrap calls in; nothing is cached here."""
        return nullcontext()

    def forward(self, timestep: torch.Tensor, return_dict: bool = False, **inputs: Any) -> tuple[torch.Tensor]:
        """The samples' outputs in their order, (B, …), as the transformers give them with `return_dict=False`.

        Args:
            timestep: (B,) times.
            return_dict: Of no effect: tuples are returned.
            inputs: Other arguments of the transformers. Tensors are of B samples; anything else is for all of them.
        """
        is_noisy = timestep >= self.boundary
        shares = [is_noisy.nonzero().flatten(), (~is_noisy).nonzero().flatten()]
        calls_both = torch.is_grad_enabled() or (dist.is_initialized() and dist.get_world_size() > 1)
        output: torch.Tensor | None = None
        for expert, rows in zip((self.transformer, self.transformer_2), shares, strict=True):
            is_spare = len(rows) == 0
            if is_spare and not calls_both:
                continue
            rows = rows.new_zeros(1) if is_spare else rows
            given = dict(inputs)
            for key, value in inputs.items():
                if isinstance(value, torch.Tensor):
                    given[key] = value[rows]
            (made,) = expert(timestep=timestep[rows], return_dict=False, **given)
            if output is None:
                output = made.new_zeros(len(timestep), *made.shape[1:])
            # Added, not assigned: an expert without samples of its own adds nothing, and still has gradients.
            output = output.index_add(0, rows, made * 0 if is_spare else made)
        assert output is not None
        return (output,)
