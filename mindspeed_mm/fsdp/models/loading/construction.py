"""Finds the class and the configuration of a model, and constructs it without weights.

Settings that a plugin puts from the YAML into a folder's configuration (`overwrite_transformer_config`) are noted: a
folder that is written keeps them, because who loads it has no YAML.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.models.base_model import BaseModel
from mindspeed_mm.fsdp.models.behaviour.attention import choose_attention
from mindspeed_mm.fsdp.models.behaviour.experts import fit_experts
from mindspeed_mm.fsdp.models.behaviour.host_grids import attend_to_pictures_at_once, read_grids_on_host
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.folder import (
    check_parts,
    load_model_config,
    native_class,
    pass_over_others,
    require_folder,
    trained_config,
)
from mindspeed_mm.fsdp.models.loading.meta_device import parameters_on_meta
from mindspeed_mm.fsdp.ops.attention import register_attention
from mindspeed_mm.fsdp.ops.host_values import tell_facts
from mindspeed_mm.fsdp.params.cards import id_in_folder
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all
from mindspeed_mm.fsdp.utils.plugins import call_plugin
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from mindspeed_mm.fsdp.params.model_args import ModelArguments


def resolve_class(model_args: ModelArguments) -> tuple[object, object]:
    """The class to build and the configuration to build it from."""
    trusted = model_args.trust_remote_code
    if model_args.model_id is None:
        folder = require_folder(model_args.model_name_or_path)
        whole = load_model_config(folder, trust_remote_code=trusted)
        check_parts(whole, folder)
        config = trained_config(whole)
        model_class = native_class(config, folder, trust_remote_code=trusted)
        _check_trains(model_class, config, folder)
        return model_class, config
    model_class = _registered(model_args.model_id)
    if not is_transformers(model_class) and not _has_config(model_args):
        return model_class, model_args
    folder = require_folder(model_args.model_name_or_path)
    config = load_model_config(folder, trust_remote_code=trusted, plugin_class=model_class)
    model_id = id_in_folder(model_args.model_id, attribute_at(config, "model_type"))
    if model_id != model_args.model_id:
        model_class = _registered(model_id)
    _check_fits(model_class, config, model_args)
    return model_class, config


def _registered(model_id: str) -> Any:
    entry = model_register.get(model_id)
    return entry if isinstance(entry, type) else entry()  # a function puts off a heavy import


def _check_trains(model_class: type, config: object, folder: Path) -> None:
    """Raise `ModelFolderError` for a class that generates by its parts and has no forward pass of its own."""
    if model_class.forward is not nn.Module.forward:  # type: ignore[attr-defined]
        return
    parts = [name.removesuffix("_config") for name in attribute_at(config, "sub_configs", {})]
    raise ModelFolderError(
        f"a {model_class.__name__} ({', '.join(parts)}) has no forward pass: as a whole it cannot be trained",
        where=str(folder / "config.json"),
        key="architectures",
        way_out="Name the folder of the part that is trained.",
    )


def _has_config(model_args: ModelArguments) -> bool:
    return bool(model_args.model_name_or_path) and (Path(str(model_args.model_name_or_path)) / "config.json").exists()


def _check_fits(model_class: type, config: PreTrainedConfig, model_args: ModelArguments) -> None:
    if is_transformers(model_class) and attribute_at(model_class, "key_map") is not None:
        raise ConfigError(
            f"{model_class.__name__} derives from a model of transformers, whose loading reads no key_map",
            key="model.model_id",
            way_out="Register its renamings with transformers (`register_checkpoint_conversion_mapping` of "
            "transformers.conversion_mapping, by the name of the class), or derive from BaseModel.",
        )
    expected = attribute_at(model_class, "config_class")
    if expected is not None and not isinstance(config, expected):
        raise ConfigError(
            f"'{model_args.model_id}' builds {expected.model_type} models, this is a {config.model_type} model",
            where=str(model_args.model_name_or_path),
            key="model.model_id",
            way_out="Name the model_id of this folder's model, or leave model_id out.",
        )


def override_config(config: object, overrides: Mapping[str, object]) -> None:
    """Set dotted settings of a configuration. Raises `ConfigError` for one that it does not have."""
    for name, value in overrides.items():
        section, _, last = name.rpartition(".")
        target = attribute_at(config, section) if section else config
        if not has_all(target, last):
            raise ConfigError("the model's configuration has no such setting", key=name)
        setattr(target, last, value)


def construct(
    model_class: Any, config: object, model_args: ModelArguments, param_dtype: torch.dtype | None
) -> nn.Module:
    """The model, parameters on the meta device unless its class loads its weights by code of its own.

    A class of a plugin is called with what its signature takes: `_from_config(config)` as well as
    `_from_config(model_args)`, `from_pretrained(folder, config=…)` as well as `from_pretrained(model_args)`.
    """
    choice = choose_attention(model_args.attn_implementation, model_class, config=config, param_dtype=param_dtype)
    options = {"dtype": master_dtype(param_dtype), "attn_implementation": choice.name}
    if _loads_itself(model_class) and not model_args.train_from_scratch:
        require_folder(model_args.model_name_or_path)
        return _call(model_class.from_pretrained, config, options, model_args, first="folder")
    if not is_transformers(model_class):
        with parameters_on_meta():
            return _call(attribute_at(model_class, "_from_config", model_class), config, options, model_args)
    model = _construct_transformers(model_class, config, options, model_args)
    facts_of(model).attention = choice
    pass_over_others(model)
    return model


def _call(
    function: Callable[..., nn.Module],
    config: object,
    options: Mapping[str, object],
    model_args: ModelArguments,
    first: str = "config",
) -> nn.Module:
    """Call a way to make a model; `first` is what a parameter of any other name gets."""
    folder = None
    if model_args.model_name_or_path:
        folder = Path(model_args.model_name_or_path)
    offered: dict[str, object] = {"config": config, "model_args": model_args, "args": model_args, **options}
    offered |= dict.fromkeys(("folder", "model_name_or_path", "pretrained_model_name_or_path"), folder)
    spread = ("config", *options) if first == "folder" else tuple(options)
    name = model_args.model_id or type(config).__name__
    return call_plugin(function, offered, order=(first,), spread=spread, key="model.model_id", name=name)


def _construct_transformers(
    model_class: Any, config: object, options: dict[str, Any], model_args: ModelArguments
) -> nn.Module:
    from transformers.initialization import no_init_weights

    registered_here = options["attn_implementation"] == "mm_varlen"
    if registered_here:
        # A name of ours is known to a built model only.
        by_library = "eager" if attribute_at(model_class, "needs_own_attention", False) else "sdpa"
        options = options | {"attn_implementation": by_library}
    with parameters_on_meta(), no_init_weights():
        if model_args.model_id is None:
            with _explained_construction(model_args):
                model = model_class._from_config(config, **options)
        else:
            model = _call(model_class._from_config, config, options, model_args)
    model.tie_weights()  # part of the initialisation that was left out
    if registered_here:
        register_attention()
        model.set_attn_implementation("mm_varlen")
        tell_facts(model)
    read_grids_on_host(model)
    attend_to_pictures_at_once(model)
    fit_experts(model, options["dtype"])
    if model.can_generate():
        _set_generation_config(model, require_folder(model_args.model_name_or_path))
    return model


@contextmanager
def _explained_construction(model_args: ModelArguments) -> Iterator[None]:
    """What a class of transformers raises while it is built comes from the sizes in config.json."""
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ModelFolderError(
            f"no model can be built from it: {type(error).__name__}: {reason}",
            where=str(require_folder(model_args.model_name_or_path) / "config.json"),
            way_out="Compare it with the original model's config.json.",
        ) from error


def _set_generation_config(model: PreTrainedModel, folder: Path) -> None:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").exists():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, TypeError, OSError) as error:
        raise ModelFolderError(
            f"is not readable: {error}", where=str(folder / "generation_config.json"), way_out="Repair or remove it."
        ) from error


def is_transformers(model_class: object) -> bool:
    """Whether a class is one of transformers, or derives from one."""
    from transformers import PreTrainedModel

    return isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)


def _loads_itself(model_class: object) -> bool:
    """Whether a plugin brings a `from_pretrained` of its own."""
    from transformers import PreTrainedModel

    method = attribute_at(model_class, "from_pretrained")
    inherited = (BaseModel.from_pretrained.__func__, PreTrainedModel.from_pretrained.__func__)  # type: ignore[attr-defined]
    return method is not None and attribute_at(method, "__func__", method) not in inherited


def master_dtype(param_dtype: torch.dtype | None) -> torch.dtype:
    """fp32, or fp64 where the plan computes in it."""
    if param_dtype == torch.float64:
        return torch.float64
    return torch.float32


def set_dtypes(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Keep trainable parameters in the masters' dtype and frozen ones in what the plan computes in."""
    master = master_dtype(param_dtype)
    for parameter in model.parameters():
        dtype = master
        if param_dtype is not None and not parameter.requires_grad:
            dtype = param_dtype
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


_PLAIN = (bool, int, float, str, list, type(None))


@dataclass(frozen=True)
class OwnSettings:
    """What a plugin has changed of its folder's configuration, as config.json nests it."""

    values: JsonObject


def as_written(config: object) -> JsonObject:
    """The settings of a configuration as they are now, sections as mappings."""
    told = attribute_at(config, "to_dict")
    return copy.deepcopy(told() if callable(told) else vars(config))


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> JsonObject:
    """The settings that differ, sections included; those that JSON cannot hold are left out."""
    found: JsonObject = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping):
            section = changed(old if isinstance(old, Mapping) else {}, value)
            if section:
                found[key] = section
        elif isinstance(value, _PLAIN) and (key not in before or value != old):
            found[key] = value
    return found


def write_own_settings(model: nn.Module, folder: Path) -> None:
    """Put them into the config.json of a folder that is being written.

    Args:
        model: Whole, from `ModelHub.build`.
        folder: Has a config.json.
    """
    own = facts_of(model).noted(OwnSettings)
    if own is None:
        return
    path = folder / "config.json"
    config = _merged(read_json_object(path, ModelFolderError), own.values)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def note_on_settings(model: nn.Module) -> tuple[str, ...]:
    """What whoever loads adapters alone should know: no configuration lies beside them."""
    own = facts_of(model).noted(OwnSettings)
    if own is None:
        return ()
    told = json.dumps(own.values, ensure_ascii=False)
    return (f"trained with {told}: set that in config.json of the base, or write the whole model with --merge",)


def _merged(config: Mapping[str, object], values: Mapping[str, object]) -> JsonObject:
    whole = dict(config)
    for key, value in values.items():
        old = whole.get(key)
        whole[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return whole
