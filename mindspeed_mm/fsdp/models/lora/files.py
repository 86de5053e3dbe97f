"""Files of adapters: as PEFT has them beside transformers' models, and as diffusers' pipelines take them.

PEFT        adapter_config.json, adapter_model.safetensors        base_model.model.<layer>.lora_A.weight
diffusers   pytorch_lora_weights.safetensors, settings in it      transformer.<layer>.lora_A.weight
FLUX.1      the same without settings, alpha by layer             transformer.<layer>.alpha
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from mindspeed_mm.checkpoint.lazy_tensor import Region, Stored, TensorReader
from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.core.errors import ModelFolderError, Problem
from mindspeed_mm.core.json_file import parse_json, read_json_object
from mindspeed_mm.core.model_kinds import EXPERT_PARTS
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces
from mindspeed_mm.fsdp.models.lora.names import (
    INITIAL,
    MAGNITUDE,
    LoraReport,
    adapter_weight,
    base_name,
    split_adapter_weight,
)
from mindspeed_mm.fsdp.models.structure.stages import first_names, whole_of
from mindspeed_mm.fsdp.utils.model_parts import shared_parameters

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_PREFIX = "base_model.model."
DIFFUSERS_PREFIX = "transformer."
METADATA = "lora_adapter_metadata"
ALPHA_END = ".alpha"
_KEY = "training.lora.pretrained_lora_path"
FROZEN_KEY = "training.lora.frozen_adapters"
_MOST = 5
_UNKNOWN = (
    "lora_bias",
    "layer_replication",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "arrow_config",
    "use_qalora",
    "velora_config",
    "kasa_config",
    "monteclora_config",
)
"""Settings of PEFT that give an adapter a meaning that nothing here computes."""
Json = Any
"""A value of PEFT's settings, which `AdapterFile.check_fits` reads with suspicion."""
Number = TypeVar("Number", int, float)
TOKENS = ".token_adapter.trainable_tokens_delta"
"""End of a key with the rows of some tokens, by the name of the embedding or head (`trainable_token_indices`)."""
_SIDES = re.compile(rf"(?P<layer>.+)\.lora_(?:(?P<side>[AB])\.weight|(?P<length>{MAGNITUDE})(?:\.weight)?)")


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterFile:
    """A file of adapters: what it says of itself."""

    weights: Path
    settings: Mapping[str, Json]
    """PEFT's settings; empty when the file has none."""
    key: str = _KEY
    """What named it, for messages."""
    part: str = ""
    """Of a generator with two transformers, the one that the adapters are of; layers are named below it."""

    @classmethod
    def find_all(cls, path: Path, key: str = _KEY) -> list[AdapterFile]:
        """The adapters in a folder: one file or, of a generator with two transformers, one in a folder of each one's
        name; or a safetensors file of them.

        Raises:
            ModelFolderError: As `find`.
        """
        parts = [part for part in EXPERT_PARTS if _holds_adapters(path / part)]
        if not parts or _holds_adapters(path):
            return [cls.find(path, key)]
        return [replace(cls.find(path / part, key), part=part) for part in parts]

    @classmethod
    def find(cls, path: Path, key: str = _KEY) -> AdapterFile:
        """The adapters in a folder, or a safetensors file of them.

        Raises:
            ModelFolderError: There are none, or they are pickled or damaged.
        """
        weights = _weights_file(path, key)
        read_header(weights)
        config = weights.parent / PEFT_CONFIG
        if config.is_file():
            return cls(weights, _peft_settings_of(config), key)
        return cls(weights, _metadata_of(weights) or _alphas_of(weights), key)

    def plain_keys(self) -> dict[str, str]:
        """Key without the prefix that all keys have, below `part` → key in the file."""
        held = read_header(self.weights)
        keys = [key for key in held if not _is_alpha(key, held)]
        shared = (prefix for prefix in (PEFT_PREFIX, DIFFUSERS_PREFIX) if all(key.startswith(prefix) for key in keys))
        prefix, start = next(shared, ""), f"{self.part}." if self.part else ""
        return {start + key.removeprefix(prefix): key for key in keys}

    def names(self) -> dict[str, str]:
        """Name of the parameter in a model with adapters → key in the file."""
        return {_parameter_name(plain): key for plain, key in self.plain_keys().items()}

    def adapter(self) -> StoredAdapter:
        """What the file holds, layer by layer.

        Raises:
            ModelFolderError: Its settings give it a meaning that nothing here computes.
        """
        self.check_known()
        layers: dict[str, dict[str, str]] = {}
        fused: dict[str, dict[str, str]] = {}
        whole: dict[str, str] = {}
        tokens: dict[str, TokenRows] = {}
        for plain, key in self.plain_keys().items():
            if plain.endswith(TOKENS):
                tokens[_parameter_name(plain)] = TokenRows(key, self.rows_of(_parameter_name(plain)))
                continue
            match = _SIDES.fullmatch(plain)
            if match is None:
                whole[base_name(plain)] = key  # a bias of a layer with an adapter, under PEFT's `bias: all`
                continue
            kind = fused if self._is_fused(match["layer"]) else layers
            kind.setdefault(match["layer"], {})[match["side"] or match["length"]] = key
        for layer, sides in {**layers, **fused}.items():
            if not {"A", "B"} <= sides.keys():
                raise ModelFolderError("has only one half of the adapter", where=str(self.weights), key=layer)
        for name in whole:
            if ".lora_" in name:
                raise ModelFolderError("is not an adapter of a linear layer", where=str(self.weights), key=name)
        keys = {**self.plain_keys(), **whole}
        return StoredAdapter(self.weights, self.settings, layers, fused, list(whole), keys, tokens)

    def rows_of(self, name: str) -> tuple[int, ...]:
        """The rows of tokens that the file has for a weight, in the order of the file.

        Raises:
            ModelFolderError: Its settings do not name them.
        """
        named = self.settings.get("trainable_token_indices")
        module = name.removesuffix(".weight")
        rows = named
        if isinstance(named, dict):  # by ends of names
            rows = next((own for end, own in named.items() if module == end or module.endswith(f".{end}")), None)
        if not isinstance(rows, list) or not all(isinstance(row, int) and row >= 0 for row in rows):
            raise ModelFolderError(
                f"has rows of tokens for '{module}', and its settings do not name them",
                where=str(self.weights),
                key="trainable_token_indices",
                way_out=f"Copy {PEFT_CONFIG} of the same adapters beside it.",
            )
        return tuple(rows)

    def check_known(self) -> None:
        """Raise `ModelFolderError` for settings that nothing here computes."""
        for name in _UNKNOWN:
            if self.settings.get(name):
                raise ModelFolderError(
                    f"'{name}' is set, which this version does not have", where=str(self.weights), key=self.key
                )

    def check_fits(self, lora: LoraReport) -> None:
        """Raise `ModelFolderError` when the adapters are of another kind or strength than the model's."""
        where = str(self.weights)
        self.check_known()
        for name in ("rank_pattern", "alpha_pattern"):
            if self.settings.get(name) and not lora.strengths:
                raise ModelFolderError(f"'{name}' is set, and a run has one rank and alpha", where=where, key=self.key)
        if self.settings and bool(self.settings.get("use_dora")) != lora.use_dora:
            held = "true" if self.settings.get("use_dora") else "false"
            raise ModelFolderError(
                f"'use_dora' is {held} in it", where=where, key=self.key, way_out=f"Set training.lora.use_dora: {held}."
            )
        rank = self.settings.get("r", lora.rank)
        # A file that says nothing means alpha = rank, for PEFT and diffusers alike.
        alpha = self.settings.get("lora_alpha", rank)
        if self.settings.get("use_rslora") and isinstance(rank, int):
            alpha = alpha * math.sqrt(rank)  # scale = alpha / √rank
        for name, held, wanted in (("rank", rank, lora.rank), ("alpha", alpha, lora.alpha)):
            if held != wanted:
                raise ModelFolderError(
                    f"has {name} {held}, this run {wanted:g}",
                    where=where,
                    key=self.key,
                    way_out=f"Set training.lora.{name}={held}.",
                )

    def _is_fused(self, layer: str) -> bool:
        """Whether a layer is a module of experts: `target_parameters` names parameters of it."""
        plain = layer.replace(".base_layer", "")
        for name in self.settings.get("target_parameters") or ():
            module = name.rpartition(".")[0]
            if plain == module or plain.endswith(f".{module}"):
                return True
        return False


class TokenRows(NamedTuple):
    """Rows of a weight that were trained in full."""

    key: str
    """Key in the file."""
    rows: tuple[int, ...]


@dataclass(frozen=True)
class StoredAdapter:
    """What a file of adapters holds, nothing read yet. Layers are named as in the model without adapters."""

    weights: Path
    settings: Mapping[str, Json]
    layers: dict[str, dict[str, str]]
    """Linear layer → `A`, `B`, with DoRA `magnitude_vector` → key in the file."""
    fused: dict[str, dict[str, str]]
    """Module of experts, with one `.base_layer` for each further parameter inside → the same."""
    whole: list[str]
    """Parameters that were trained whole."""
    keys: dict[str, str]
    """Key without prefix, and name of a parameter that was trained whole → key in the file."""
    tokens: dict[str, TokenRows] = field(default_factory=dict)
    """Weight of an embedding or head → the rows of tokens that were trained in full."""

    @property
    def rank(self) -> int:
        """Of most layers; a file without settings says it by its shapes."""
        if "r" in self.settings:
            return int(self.settings["r"])
        for sides in (*self.layers.values(), *self.fused.values()):
            return read_header(self.weights)[sides["A"]].shape[0]
        return 1

    @property
    def alpha(self) -> float:
        """Of most layers; a file that does not say means one that equals the rank."""
        return self.settings.get("lora_alpha", self.rank)

    @property
    def use_rslora(self) -> bool:
        """Scale alpha / √rank instead of alpha / rank (Kalajdzievski 2023)."""
        return bool(self.settings.get("use_rslora"))

    @property
    def rank_pattern(self) -> Mapping[str, int]:
        """Ends of names, or expressions → another rank."""
        return self.settings.get("rank_pattern") or {}

    @property
    def alpha_pattern(self) -> Mapping[str, float]:
        """Ends of names, or expressions → another alpha."""
        return self.settings.get("alpha_pattern") or {}

    def scale(self, name: str) -> float:
        """What B·A is multiplied by for a layer or a fused parameter."""
        rank = _by_pattern(self.rank_pattern, name, self.rank)
        alpha = _by_pattern(self.alpha_pattern, name, self.alpha)
        if self.use_rslora:
            return alpha / math.sqrt(rank)
        return alpha / rank

    def stored(self, key: str, reader: TensorReader) -> Stored:
        """One tensor of the file."""
        entry = read_header(self.weights)[key]
        return Stored(key, entry.shape, entry.dtype, lambda: reader)


def _by_pattern(patterns: Mapping[str, Number], name: str, default: Number) -> Number:
    """As PEFT reads them: the first whose expression matches the end of the name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def stored_adapters(folders: Sequence[str]) -> list[StoredAdapter]:
    """What the folders of frozen adapters hold, file by file. Raises `ModelFolderError` as `AdapterFile.adapter`."""
    return [file.adapter() for folder in folders for file in AdapterFile.find_all(Path(folder), FROZEN_KEY)]


def load_adapters(model: nn.Module, path: str | Path) -> None:
    """Fill a model's adapters, and what is trained whole beside them, from files. Each rank reads its part.

    Raises:
        ModelFolderError: There are no such files, or they are of other adapters.
    """
    files, trained = _fitting(model, path)
    copies = first_names(model)
    rows_of = _rows_trained(model)
    for file, names in files:
        entries = read_header(file.weights)
        with safe_open(file.weights, framework="pt") as reader, torch.no_grad():
            for own_name, target in _tensors(model).items():
                name = copies.get(own_name, own_name)
                if name not in trained or name not in names:
                    continue
                entry = entries[names[name]]
                stored = Stored(names[name], entry.shape, entry.dtype, partial(_unchanged_reader, reader))
                for piece, region in local_pieces(target):
                    if name in rows_of:
                        _copy_rows(stored, rows_of[name], piece, region)
                    else:
                        stored.copy_to(piece, region)


def _unchanged_reader(reader: TensorReader) -> TensorReader:
    return reader


def _copy_rows(stored: Stored, rows: Sequence[int], piece: torch.Tensor, region: Region) -> None:
    (start, length), *others = region
    for number, row in enumerate(rows):
        if start <= row < start + length:
            stored.copy_to(piece.narrow(0, row - start, 1), ((number, 1), *others))  # row `number` of the file


def _rows_trained(model: nn.Module) -> Mapping[str, Sequence[int]]:
    lora = facts_of(whole_of(model)).lora
    return lora.token_rows if lora is not None else {}


def check_adapters(model: nn.Module, path: str | Path) -> None:
    """Raise `ModelFolderError` when `load_adapters` could not fill the model from these files. Reads headers only."""
    _fitting(model, path)


def _fitting(
    model: nn.Module, path: str | Path
) -> tuple[list[tuple[AdapterFile, dict[str, str]]], dict[str, torch.Tensor]]:
    """The files, each with name of the parameter → key in it; what is trained. Raises `ModelFolderError`."""
    lora = facts_of(model).lora
    assert lora is not None, "the model has no adapters"
    files = [(file, file.names()) for file in AdapterFile.find_all(Path(path))]
    for file, _ in files:
        file.check_fits(lora)
    whole = whole_of(model)  # of a pipeline's rank: a file holds the adapters of all stages
    trained = {}
    for name, tensor in _tensors(whole).items():
        if name in lora.trained and not name.endswith(INITIAL):  # a file's adapters are of an untouched base
            trained[name] = tensor
    held: dict[str, tuple[int, ...]] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    for name, rows in lora.token_rows.items():
        shapes[name] = (len(rows), *shapes[name][1:])
    for file, names in files:
        for first, *others in shared_parameters(whole):
            if first in trained:  # PEFT's files hold a shared parameter under each of its names
                for other in others:
                    names.pop(other, None)
        entries = read_header(file.weights)
        held |= {name: entries[key].shape for name, key in names.items()}
        for name, rows in lora.token_rows.items():
            if name in names and names[name].endswith(TOKENS) and file.rows_of(name) != rows:
                what = f"has rows of other tokens for '{name}' than model.add_tokens adds"
                raise ModelFolderError(what, where=str(file.weights), key=_KEY)
    _check_same(shapes, held, Path(path))
    return files, trained


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _check_same(targets: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]], weights: Path) -> None:
    missing, differing = [], []
    for name, shape in targets.items():
        if name not in held:
            missing.append(Problem("missing in the file", key=name))
        elif tuple(held[name]) != shape:
            what = f"{list(held[name])} in the file, {list(shape)} here"
            differing.append(Problem(what, key=name))
    unknown = [Problem("in the file, but not trained here", key=name) for name in held if name not in targets]
    if missing or unknown or differing:
        raise ModelFolderError(
            f"{weights}: the adapters do not fit: {len(missing)} missing, {len(unknown)} unexpected, {len(differing)} "
            "of another shape. Give training.lora the target_modules and modules_to_save that they were made with.",
            problems=[*missing[:_MOST], *unknown[:_MOST], *differing[:_MOST]],
        )


def _parameter_name(key: str) -> str:
    if key.endswith(TOKENS):
        return f"{key.removesuffix(TOKENS)}.weight"
    match = _SIDES.fullmatch(key)
    if match is None:
        return key
    return adapter_weight(match["layer"], match["side"] or match["length"])


def _holds_adapters(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS))


def _weights_file(path: Path, key: str) -> Path:
    if path.is_file() and path.suffix == ".safetensors":
        return path
    for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS):
        if (path / name).is_file():
            return path / name
    what = "is not there, or is not a safetensors file"
    if path.is_dir():
        held = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
        what = f"holds {', '.join(held[:_MOST]) or 'nothing'}"
    raise ModelFolderError(
        f"{what}: no adapters",
        where=str(path),
        key=key,
        way_out=f"Name a folder with {PEFT_WEIGHTS} or {DIFFUSERS_WEIGHTS}, or the file itself.",
    )


def _peft_settings_of(config: Path) -> dict[str, Json]:
    settings = read_json_object(config, ModelFolderError, key=_KEY)
    if settings.get("peft_type") != "LORA":
        raise ModelFolderError(
            f"'{settings.get('peft_type')}' adapters, only LORA can be loaded", where=str(config), key="peft_type"
        )
    return settings


def _metadata_of(weights: Path) -> dict[str, Json]:
    try:
        with safe_open(weights, framework="pt") as reader:
            text = (reader.metadata() or {}).get(METADATA)
    except SafetensorError as error:
        raise ModelFolderError(f"is damaged: {error}", where=str(weights), key=_KEY) from error
    if not text:
        return {}
    return {key.removeprefix(DIFFUSERS_PREFIX): value for key, value in _parsed(text, weights).items()}


def _is_alpha(key: str, keys: Collection[str]) -> bool:
    return key.endswith(ALPHA_END) and f"{key.removesuffix(ALPHA_END)}.lora_A.weight" in keys


def _alphas_of(weights: Path) -> dict[str, Json]:
    """PEFT's settings from alphas beside the layers, as diffusers' loader of FLUX.1 makes them; none without alphas."""
    entries = read_header(weights)
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    with safe_open(weights, framework="pt") as reader:
        for key, entry in entries.items():
            layer = key.removesuffix(".lora_A.weight")
            if layer == key:
                continue
            name = layer.removeprefix(DIFFUSERS_PREFIX)
            ranks[name] = entry.shape[0]
            alphas[name] = ranks[name]
            if layer + ALPHA_END in entries:
                alphas[name] = _alpha(reader.get_tensor(layer + ALPHA_END), layer + ALPHA_END, weights)
    if not any(_is_alpha(key, entries) for key in entries):
        return {}
    rank, alpha = (Counter(each.values()).most_common(1)[0][0] for each in (ranks, alphas))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "use_dora": any(f".lora_{MAGNITUDE}" in key for key in entries),
    }


def _alpha(stored: torch.Tensor, key: str, weights: Path) -> float:
    """The shortest number that the file's precision takes for it: of 0.1 in fp32 0.1."""
    if stored.numel() != 1 or not stored.isfinite().all():
        raise ModelFolderError("is not one finite number", where=str(weights), key=key)
    return _plain(float(str(np.float32(stored.item()))))


def _parsed(text: str, place: Path) -> dict[str, Json]:
    try:
        settings = parse_json(text)
    except ValueError as error:
        raise ModelFolderError(f"is not valid JSON: {error}", where=str(place), key=_KEY) from error
    if not isinstance(settings, dict):
        raise ModelFolderError("is not a table of settings", where=str(place), key=_KEY)
    return settings


# --- what is written --------------------------------------------------------------------------------------------------


def file_key(name: str, prefix: str) -> str:
    """The key in a file of a trained parameter.

    Args:
        name: In the model with adapters.
        prefix: `PEFT_PREFIX` or `DIFFUSERS_PREFIX`.
    """
    found = split_adapter_weight(name)
    if found is None:
        return prefix + base_name(name)
    layer, side = found
    ending = "" if side == MAGNITUDE else ".weight"
    return f"{prefix}{layer}.lora_{side}{ending}"


def peft_settings(lora: LoraReport, base: str, task_type: str | None) -> dict[str, Json]:
    """Content of `adapter_config.json`.

    Args:
        lora: The model's adapters.
        base: Name or folder of the base model.
        task_type: PEFT's, `CAUSAL_LM` for models that write text.
    """
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "inference_mode": True,
        **_settings(lora),
        "bias": "none",
        # Those of the base as it is, whatever they started with: PEFT would compute it anew and move the base.
        "init_lora_weights": lora.initialisation if isinstance(lora.initialisation, bool) else True,
        "modules_to_save": list(lora.modules_to_save) or None,
        "trainable_token_indices": _token_indices(lora),
    }


def _token_indices(lora: LoraReport) -> dict[str, list[int]] | None:
    """By whole names: PEFT takes an end of a name for every module that ends so."""
    return {name.removesuffix(".weight"): list(rows) for name, rows in lora.token_rows.items()} or None


def diffusers_metadata(lora: LoraReport) -> dict[str, str]:
    """Metadata of `pytorch_lora_weights.safetensors`. Without it a pipeline would take alpha for equal to the rank,
    unless it reads alphas beside the layers (`lora_names.ALPHA_BESIDE_LAYERS`)."""
    settings = {f"{DIFFUSERS_PREFIX}{name}": value for name, value in _settings(lora).items()}
    return {METADATA: json.dumps(settings, indent=2, sort_keys=True)}


def _settings(lora: LoraReport) -> dict[str, Json]:
    # An adapter that started with a part of the base is written as what was learnt since: it and its start, subtracted,
    # side by side, with twice the rank.
    times = 2 if lora.moves_base else 1
    targets = lora.peft_targets
    settings: dict[str, Json] = {
        "r": lora.rank * times,
        "lora_alpha": _plain(lora.alpha * times),
        "lora_dropout": lora.dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets),
    }
    if lora.use_dora:
        settings["use_dora"] = True
    if lora.parameters_targeted:
        settings["target_parameters"] = list(lora.peft_parameters)
    if lora.strengths:
        settings["rank_pattern"], settings["alpha_pattern"] = {}, {}
    for name, strength in lora.strengths.items():
        settings["rank_pattern"][name] = strength.rank
        settings["alpha_pattern"][name] = _plain(strength.alpha)
    return settings


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else number
