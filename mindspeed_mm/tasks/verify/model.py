"""The model that is verified: the user's own made small, in a folder of its own; or the real one, without dropout."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from mindspeed_mm.checkpoint.safetensors_folder import VAE_FILE
from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.config_path import value_at, with_value
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.model_kinds import UNIFIED, ModelKind, kind_of_folder
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.models.diffusion.generator_folder import read_json
from mindspeed_mm.fsdp.models.diffusion.picture_vae import DIFFUSERS_FOLDER, FLUX_LATENTS, write_small_vae
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.folder import load_model_config
from mindspeed_mm.fsdp.models.lora.apply import apply_lora
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.argument import Arguments, ModelArguments, ParallelArguments
from mindspeed_mm.fsdp.params.schema_walk import pattern_keys
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.tasks.verify.setup import change_line
from mindspeed_mm.tasks.verify.shrink import NARROW_HEADS, Room, Shrunk, is_rate, shrink, without_dropout

_SMALL_FILES = ("*.json", "*.py", "*.txt", "*.jinja", "*.model")
_NUMBERED = re.compile(r"\{[^{}]*\d[^{}]*\}|\.\d+(\.|$)")
"""In a pattern: certain layers, which a model with fewer may lack."""
_LORA = "training.lora."
_SCRATCH = "model.train_from_scratch"
REFUSALS = (ConfigError, ModelFolderError, ValueError, TypeError, ArithmeticError, RuntimeError, LookupError)
"""How a model's class says that it cannot be had in these sizes."""

Candidate = tuple[Arguments, tuple[str, ...]]
"""Arguments whose model is small, and what was changed."""


def check_real_model(parallel: ParallelArguments, comparable: Arguments) -> None:
    """Raise `ConfigError` where the plan does not fit the model as it is: made small, it might.

    Args:
        arguments: As configured.
        comparable: With an attention kernel that is here.
    """
    judged = comparable.model_copy(update={"parallel": parallel})
    resolve_plan(build_outline(judged), judged)


def small_models(arguments: Arguments, sizes: ParallelSizes, folder: Path) -> Iterator[Candidate]:
    """The model made as small as possible, and less and less so, for classes that cannot be had like this.

    Args:
        arguments: Comparable.
        sizes: Of the plan.
        folder: Where to write configurations.
    """
    pipeline = arguments.parallel.pp_plan
    chunks = 2 if pipeline.schedule == "zbv" else pipeline.virtual_stages
    room = Room(sizes.pp * chunks, sizes.tp, sizes.ep)
    config = _config_of(arguments.model)
    if config is None:
        yield with_value(arguments, _SCRATCH, True), ("weights: random, from the seed; the model is not made small",)
        return
    for number, small in enumerate(smaller_ones(config, room)):
        still = without_dropout(small.config)
        changes = small.changes | still.changes
        made = _with_config(arguments, still.config, changes, folder / f"model{number}", shrinks=True)
        lines = (*_lines(changes), "weights: random, from the seed")
        if not small.changes:
            lines += ("the model is not made small: its class takes no smaller sizes",)
        if _kind(arguments.model) is UNIFIED:
            lines += ("VAE: few features, random weights",)
        yield fitting(with_value(made, _SCRATCH, True), lines)


def smaller_ones(config: JsonMapping, room: Room) -> list[Shrunk]:
    """A configuration made small in several ways, from the smallest model to the real one."""
    ways = [
        shrink(config, room),
        # Some classes derive numbers of heads from a width, 64 features each.
        shrink(config, room, heads=NARROW_HEADS[-1]),
        shrink(config, room, layers=False),
        shrink(config, room, layers=False, heads=NARROW_HEADS[-1]),
        shrink(config, room, heads=None),
        Shrunk(dict(config), {}),
    ]
    return [way for number, way in enumerate(ways) if way not in ways[:number]]


def real_model(arguments: Arguments, folder: Path) -> Candidate:
    """The model as it is, with its weights, but for dropout."""
    config = _config_of(arguments.model)
    still = without_dropout(config or {})
    if not still.changes:
        return arguments, ()
    made = _with_config(arguments, still.config, still.changes, folder / "model", shrinks=False)
    moved = made.model.model_name_or_path != arguments.model.model_name_or_path
    if moved and not (arguments.training.load or arguments.model.train_from_scratch):
        load = {"load": arguments.model.model_name_or_path, "load_format": "hf"}
        made = made.model_copy(update={"training": made.training.model_copy(update=load)})
    return made, _lines(still.changes)


def can_be_built(arguments: Arguments) -> bool:
    """Whether the model's class takes its configuration, and the plan the model; if not, another candidate is tried."""
    try:
        resolve_plan(build_outline(arguments), arguments)
    except REFUSALS:
        return False
    return True


def write_weights(arguments: Arguments, folder: Path) -> Arguments:
    """For adapters, whose base is never made from scratch: the small model with random weights in a folder."""
    if not arguments.training.lora.enable:
        return arguments
    import torch

    model: Any = ModelHub.build(arguments.model, param_dtype=torch.float32, feature_args=arguments.features)
    ModelHub.load_weights(model, arguments.model, seed=arguments.training.seed, device=torch.device("cpu"))
    adapter = facts_of(model).adapter
    if adapter is None:
        model.save_pretrained(folder)
        if _kind(arguments.model) is UNIFIED:
            _copy_vae(Path(str(arguments.model.model_name_or_path)), folder)
    else:
        _link_others(Path(str(arguments.model.model_name_or_path)), folder, adapter.transformers)
        for part in adapter.transformers:
            transformer = model if len(adapter.transformers) == 1 else model.get_submodule(part)
            transformer.save_pretrained(folder / part)
    changed = {"model_name_or_path": str(folder), "train_from_scratch": False}
    return arguments.model_copy(update={"model": arguments.model.model_copy(update=changed)})


# --- configurations ---------------------------------------------------------------------------------------------------


def _kind(model: ModelArguments) -> ModelKind:
    return kind_of_folder(model.model_name_or_path)


def _config_of(model: ModelArguments) -> JsonObject | None:
    """`config.json` of the model, or of a generator's transformer with the changes of the YAML."""
    named = model.model_name_or_path
    path = Path(named or "") / _kind(model).trained_part / "config.json"
    if not named or not path.is_file():
        return None
    config = read_json(path) | (model.transformer or {})
    if _kind(model).trained_part:
        return config
    try:
        whole = load_model_config(Path(named), trust_remote_code=model.trust_remote_code)
    except ModelFolderError:
        return config  # only a plugin knows its class
    return with_rates(config, whole.to_dict())


def with_rates(config: JsonMapping, whole: JsonMapping) -> JsonObject:
    """A configuration with the probabilities of dropping something that it leaves to its class: transformers stores no
    setting that has the value of its class.

    Args:
        config: As stored.
        whole: With every setting.
    """
    told = dict(config)
    for key, value in whole.items():
        if isinstance(value, dict) and isinstance(told.get(key), dict):
            told[key] = with_rates(told[key], value)
        elif key in told:
            continue
        elif is_rate(key, value) or (isinstance(value, dict) and with_rates({}, value)):
            told[key] = value
    return told


def _with_config(
    arguments: Arguments, config: JsonMapping, changes: JsonMapping, folder: Path, *, shrinks: bool
) -> Arguments:
    """Arguments whose model has this configuration: the YAML can change a part of a model, a whole one has a folder.

    Args:
        arguments: As configured.
        config: Of the model.
        changes: What differs in it.
        folder: Where it is written.
        shrinks: Whether the frozen VAE of a model that draws is made small, too.
    """
    if _kind(arguments.model).trained_part:
        own = {key: config[key] for key in changes}
        update: JsonObject = {"transformer": (arguments.model.transformer or {}) | own}
        return arguments.model_copy(update={"model": arguments.model.model_copy(update=update)})
    folder.mkdir(parents=True)
    source = Path(str(arguments.model.model_name_or_path))
    if _kind(arguments.model) is UNIFIED and shrinks:
        latents = FLUX_LATENTS | (config.get("vae_config") or {})
        write_small_vae(folder, latents["z_channels"], latents["downsample"])
    elif _kind(arguments.model) is UNIFIED:
        _copy_vae(source, folder)
    for pattern in _SMALL_FILES:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    atomic_write_text(folder / "config.json", json.dumps(config))
    update = {"model_name_or_path": str(folder)}
    return arguments.model_copy(update={"model": arguments.model.model_copy(update=update)})


def _link_others(source: Path, folder: Path, parts: Sequence[str]) -> None:
    """A folder with everything of `source` but some parts."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name in parts:
            continue
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
        else:
            (folder / path.name).symlink_to(path.resolve())


def _copy_vae(source: Path, folder: Path) -> None:
    """Give another folder of a model that answers and draws the frozen autoencoder that `source` has."""
    if (source / VAE_FILE).is_file():
        shutil.copyfile(source / VAE_FILE, folder / VAE_FILE)
    if (source / DIFFUSERS_FOLDER).is_dir():
        shutil.copytree(source / DIFFUSERS_FOLDER, folder / DIFFUSERS_FOLDER)


def _lines(changes: Mapping[str, tuple[object, object]]) -> tuple[str, ...]:
    return tuple(change_line(f"model: {key}", *values) for key, values in changes.items())


# --- patterns that name certain layers --------------------------------------------------------------------------------


def fitting(arguments: Arguments, lines: tuple[str, ...]) -> Candidate:
    """Without the patterns that name only layers which the small model does not have."""
    numbered: dict[str, list[str]] = {}
    for key in pattern_keys():
        numbered[key] = [pattern for pattern in value_at(arguments, key) or () if _NUMBERED.search(pattern)]
    if arguments.parallel.pp_plan.split_points:
        arguments = with_value(arguments, "parallel.pp_plan.split_points", ())
        lines += ("parallel.pp_plan.split_points: left out, stages of equal cost",)
    if not any(numbered.values()):
        return arguments, lines
    unfrozen = arguments.model.model_copy(update={"freeze": ()})
    of_adapters = {key: numbered.pop(key) for key in list(numbered) if key.startswith(_LORA)}
    try:
        model = ModelHub.build(unfrozen, param_dtype=torch_dtype("fp32"), feature_args=arguments.features)
        arguments, lines = _without_absent((arguments, lines), of_adapters, _names(model))
        if arguments.training.lora.enable:
            apply_lora(model, arguments.training.lora)
    except REFUSALS:
        return arguments, lines  # `can_be_built` will say no
    return _without_absent((arguments, lines), numbered, _names(model))


def _without_absent(candidate: Candidate, numbered: Mapping[str, Sequence[str]], names: Sequence[str]) -> Candidate:
    """Without the patterns that match none of the names."""
    arguments, lines = candidate
    for key, patterns in numbered.items():
        gone = [pattern for pattern in patterns if not _matches(pattern, names)]
        if gone:
            kept = tuple(pattern for pattern in value_at(arguments, key) if pattern not in gone)
            arguments = with_value(arguments, key, kept)
            lines += (f"{key}: without {', '.join(gone)}, layers that the small model does not have",)
    return arguments, lines


def _names(model: nn.Module) -> list[str]:
    """The names of modules and of parameters."""
    return [name for name, _ in chain(model.named_modules(), model.named_parameters())]


def _matches(pattern: str, names: Iterable[str]) -> bool:
    try:
        return bool(resolve_patterns([pattern], names, key="", allow_suffix=True))
    except ConfigError:
        return False
