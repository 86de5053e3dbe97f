"""Builds the model that a configuration names, without weights, and fills it once it is sharded.

Between the two stands whatever changes the model: `build` → adapters, plans, `fully_shard` → `load_weights`. No rank
ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mindspeed_mm.checkpoint.transformers_map import conversion_rules
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.models.added_tokens import check_trainable, note_added_tokens, refuse_tokens, tokens_of_section
from mindspeed_mm.fsdp.models.behaviour import multi_token
from mindspeed_mm.fsdp.models.diffusion.transformer import build_transformer, kind_of_section, weights_folder
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import (
    OwnSettings,
    as_written,
    changed,
    construct,
    is_transformers,
    override_config,
    resolve_class,
    set_dtypes,
)
from mindspeed_mm.fsdp.models.loading.folder import folder_warnings, require_folder
from mindspeed_mm.fsdp.models.loading.initialization import initialize
from mindspeed_mm.fsdp.models.loading.meta_device import materialize
from mindspeed_mm.fsdp.models.loading.stream import LoadReport, stream_weights
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, undo_forwards
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
    from mindspeed_mm.fsdp.params.model_args import ModelArguments

__all__ = ["LoadReport", "ModelHub"]


class ModelHub:
    """Models by id or by folder."""

    @staticmethod
    def build(
        model_args: ModelArguments,
        *,
        param_dtype: torch.dtype | None = None,
        overrides: Mapping[str, object] | None = None,
        feature_args: FeatureArguments | None = None,
    ) -> nn.Module:
        """The model with parameters on the meta device and real buffers; ties are live.

        Args:
            model_args: The `model` section.
            param_dtype: What the plan computes in. Trainable parameters are fp32 masters all the same (fp64 under
                fp64); frozen ones are kept in it.
            overrides: Settings of the model's configuration to change, dotted (`text_config.num_hidden_layers`); of a
                generator's transformer, beside those of `model.transformer`.
            feature_args: The `features` section, for a model's `overwrite_transformer_config`.

        Raises:
            ConfigError: The id is not registered, the folder is not named, a pattern matches nothing, or nothing is
                left to train.
            ModelFolderError: The folder cannot be understood.
        """
        prepare_for_transformers()
        build = BUILDERS[kind_of_section(model_args)]
        return _prepared(build(model_args, overrides or {}, feature_args, param_dtype), model_args, param_dtype)

    @staticmethod
    def adopt(
        model: nn.Module,
        model_args: ModelArguments,
        *,
        param_dtype: torch.dtype | None = None,
        may_be_empty: bool = False,
    ) -> nn.Module:
        """A model that the caller has built, prepared as `build` does. It is changed in place and keeps its values.

        Args:
            model: With values.
            model_args: The `model` section; what it says of building a model goes unused.
            param_dtype: As in `build`.
            may_be_empty: Parameters may be on the meta device: `load_weights` gives them values.

        Raises:
            ConfigError: A pattern of `freeze` matches nothing, or nothing is left to train.
            ModelFolderError: Parameters have no values.
            ConfigError: Tokens are to be added to it.
        """
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if empty and not may_be_empty:
            raise ModelFolderError(
                f"'{empty[0]}' has no values: it is on the meta device",
                where=type(model).__name__,
                key="model",
                way_out="Give a model with weights, or name its folder.",
            )
        refuse_tokens(model_args, "the model is given, so its embedding and its tokenizer are too")
        undo_forwards(model, ForwardKind.HEAD_LOSS)  # loss and features of an earlier training of this model
        return _prepared(model, model_args, param_dtype)

    @staticmethod
    def load_weights(
        model: nn.Module,
        model_args: ModelArguments,
        *,
        seed: int,
        device: torch.device,
        folder: Path | None = None,
        buffer_device: torch.device | None = None,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        from_first_rank: bool = False,
    ) -> LoadReport:
        """Give the model memory and values: a folder's weights straight into the shards, or new ones.

        Args:
            model: From `build`, sharded or not.
            model_args: The `model` section.
            seed: For weights from scratch, which are the same under every plan.
            device: Of the parameters.
            folder: Other weights than those of `model.model_name_or_path`; they are loaded even with
                `train_from_scratch`. For a generator a whole folder in diffusers' layout, or one of a transformer.
            buffer_device: Of the buffers, when parameters are offloaded to the host.
            allow_missing: Patterns of names that the folder may lack; those are initialised.
            allow_unexpected: Patterns of stored names that the model may lack.
            from_first_rank: Rank 0 reads the weights and sends them.

        Raises:
            ModelFolderError: The weights are damaged or do not fit, with a diff.
        """
        base = [parameter for name, parameter in model.named_parameters() if not is_adapter_weight(name)]
        # Asked before `materialize`, which gives memory to what has none.
        has_values = not any(parameter.is_meta for parameter in base)
        materialize(model, device, buffer_device)
        if has_values and folder is None:  # by the model's own `from_pretrained`
            return LoadReport(folder=str(model_args.model_name_or_path))
        units = find_blocks(model)
        if model_args.train_from_scratch and folder is None:
            return LoadReport(initialized=tuple(initialize(model, seed=seed, units=units)))
        source = weights_folder(model, folder or require_folder(model_args.model_name_or_path))
        report = stream_weights(
            model,
            source,
            seed=seed,
            units=units,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            from_first_rank=from_first_rank,
        )
        notes = folder_warnings(source, trust_remote_code=model_args.trust_remote_code)
        return replace(report, warnings=(*notes, *report.warnings))


def _prepared(model: nn.Module, model_args: ModelArguments, param_dtype: torch.dtype | None) -> nn.Module:
    """With frozen modules, the masters' types and the rules by which weights are stored."""
    facts_of(model).denoises_pictures = bool(attribute_at(model, "denoises_pictures", False))
    _freeze(model, model_args.freeze)
    if (added := facts_of(model).added_tokens) is not None:
        check_trainable(model, added)
    set_dtypes(model, param_dtype)
    if is_transformers(type(model)):
        own_rules = conversion_rules(model)  # type: ignore[arg-type]
        facts_of(model).conversion_rules = [*multi_token.renamings(model), *own_rules]
    return model


def _build_generator(
    model_args: ModelArguments,
    overrides: Mapping[str, object],
    feature_args: FeatureArguments | None,
    param_dtype: torch.dtype | None,
) -> nn.Module:
    if model_args.mtp_num_layers:
        raise ConfigError(
            f"{model_args.mtp_num_layers}, but a generator predicts no tokens",
            key=multi_token.KEY,
            way_out="Set it to 0.",
        )
    refuse_tokens(model_args, "a generator is trained on the embeddings of its frozen text encoders")
    return build_transformer(model_args, overrides, param_dtype)


def _build_by_class(
    model_args: ModelArguments,
    overrides: Mapping[str, object],
    feature_args: FeatureArguments | None,
    param_dtype: torch.dtype | None,
) -> nn.Module:
    if model_args.transformer:
        raise ConfigError(
            "changes the transformer of a generator, but the model is not one",
            where=str(model_args.model_name_or_path or ""),
            key="model.transformer",
            way_out="Leave it out, or name a folder in diffusers' layout.",
        )
    model_class, config = resolve_class(model_args)
    override_config(config, overrides)
    overwrite = attribute_at(model_class, "overwrite_transformer_config")
    own: dict[str, object] = {}
    if overwrite is not None:
        before = as_written(config)
        config = overwrite(config, model_args, feature_args) or config
        if config is not model_args:  # a model without a folder has no configuration to write
            own = changed(before, as_written(config))
    added = tokens_of_section(model_args, config)
    model = construct(model_class, config, model_args, param_dtype)
    if own:
        facts_of(model).note(OwnSettings(own))
    if added is not None:
        note_added_tokens(model, added, model_args)
    if model_args.mtp_num_layers:
        multi_token.attach_multi_token(model, model_args.mtp_num_layers)
    return model


BUILDERS = {LANGUAGE: _build_by_class, GENERATOR: _build_generator, UNIFIED: _build_by_class}
"""Kind of model → what builds one without weights."""


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    if not patterns:
        return
    parameters = dict(model.named_parameters())
    named: dict[str, nn.Module | nn.Parameter] = {**dict(model.named_modules()), **parameters}
    for name in resolve_patterns(patterns, list(named), key="model.freeze"):
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{', '.join(patterns)} freezes every parameter: nothing is left to train",
            key="model.freeze",
            way_out="Leave a module out of the list.",
        )
