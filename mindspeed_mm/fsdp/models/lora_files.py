"""Files of adapters: as PEFT has them beside transformers' models, and as diffusers' pipelines take them.

PEFT        adapter_config.json, adapter_model.safetensors        base_model.model.<layer>.lora_A.weight
diffusers   pytorch_lora_weights.safetensors, settings in it      transformer.<layer>.lora_A.weight
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from mindspeed_mm.checkpoint.lazy_tensor import Stored
from mindspeed_mm.checkpoint.safetensors_header import read_header
from mindspeed_mm.core.errors import ModelFolderError, Problem
from mindspeed_mm.fsdp.models.local_shard import local_pieces
from mindspeed_mm.fsdp.models.lora_names import (
    LoraReport,
    adapter_weight,
    base_name,
    lora_of,
    split_adapter_weight,
)
from mindspeed_mm.fsdp.models.ties import shared_parameters

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_PREFIX = "base_model.model."
DIFFUSERS_PREFIX = "transformer."
_METADATA = "lora_adapter_metadata"
_KEY = "training.lora.pretrained_lora_path"
_MOST = 5
_VARIANTS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication")
"""Settings of PEFT that give an adapter another meaning."""


# --- writing ----------------------------------------------------------------------------------------------------------


def file_key(name: str, prefix: str) -> str:
    """The key in a file of a trained parameter.

    Args:
        name: In the model with adapters.
        prefix: `PEFT_PREFIX` or `DIFFUSERS_PREFIX`.
    """
    found = split_adapter_weight(name)
    return f"{prefix}{found[0]}.lora_{found[1]}.weight" if found else prefix + base_name(name)


def peft_settings(lora: LoraReport, base: str, task_type: str | None) -> dict[str, Any]:
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
        "init_lora_weights": lora.initialisation,
        "modules_to_save": list(lora.modules_to_save) or None,
    }


def diffusers_metadata(lora: LoraReport) -> dict[str, str]:
    """Metadata of `pytorch_lora_weights.safetensors`. Without it a pipeline would take alpha for equal to the rank."""
    settings = {f"{DIFFUSERS_PREFIX}{key}": value for key, value in _settings(lora).items()}
    return {_METADATA: json.dumps(settings, indent=2, sort_keys=True)}


def _settings(lora: LoraReport) -> dict[str, Any]:
    targets = lora.peft_targets
    return {
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets),
    }


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterFile:
    """A file of adapters: what it says of itself."""

    weights: Path
    settings: Mapping[str, Any]
    """PEFT's settings; empty when the file has none."""

    @classmethod
    def find(cls, path: Path) -> AdapterFile:
        """The adapters in a folder, or a safetensors file of them.

        Raises:
            ModelFolderError: There are none, or they are pickled or damaged.
        """
        weights = _weights_file(path)
        read_header(weights)
        config = weights.parent / PEFT_CONFIG
        return cls(weights, _peft_settings_of(config) if config.is_file() else _metadata_of(weights))

    def names(self) -> dict[str, str]:
        """Name of the parameter in a model with adapters → key in the file."""
        keys = list(read_header(self.weights))
        prefix = next((p for p in (PEFT_PREFIX, DIFFUSERS_PREFIX) if all(key.startswith(p) for key in keys)), "")
        return {_parameter_name(key.removeprefix(prefix)): key for key in keys}

    def check_fits(self, lora: LoraReport) -> None:
        """Raise `ModelFolderError` when the adapters are of another kind or strength than the model's."""
        where = str(self.weights)
        for name in _VARIANTS:
            if self.settings.get(name):
                raise ModelFolderError(f"'{name}' is set, which this version does not have", where=where, key=_KEY)
        rank = self.settings.get("r", lora.rank)
        # A file that says nothing means alpha = rank, for PEFT and diffusers alike.
        alpha = self.settings.get("lora_alpha", rank)
        for name, held, wanted in (("rank", rank, lora.rank), ("alpha", alpha, lora.alpha)):
            if held != wanted:
                raise ModelFolderError(
                    f"has {name} {held}, this run {wanted:g}",
                    where=where,
                    key=_KEY,
                    way_out=f"Set training.lora.{name}={held}.",
                )


def load_adapters(model: nn.Module, path: str | Path) -> None:
    """Fill a model's adapters, and what is trained whole beside them, from files. Each rank reads its part.

    Raises:
        ModelFolderError: There are no such files, or they are of other adapters.
    """
    lora = lora_of(model)
    assert lora is not None, "the model has no adapters"
    file = AdapterFile.find(Path(path))
    file.check_fits(lora)
    targets = {name: tensor for name, tensor in _tensors(model).items() if name in lora.trained}
    names = file.names()
    for name, others in _aliases(model).items():
        if name in targets:
            for other in others:
                names.pop(other, None)
    entries = read_header(file.weights)
    _check_same(targets, {name: entries[key].shape for name, key in names.items()}, file.weights)
    with safe_open(file.weights, framework="pt") as reader, torch.no_grad():
        for name, target in targets.items():
            entry = entries[names[name]]
            stored = Stored(names[name], entry.shape, entry.dtype, lambda: reader)
            for piece, region in local_pieces(target):
                stored.copy_to(piece, region)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """First name of a shared parameter → its other names: PEFT's files hold it under each."""
    return {names[0]: names[1:] for names in shared_parameters(model)}


def _check_same(targets: Mapping[str, torch.Tensor], held: Mapping[str, tuple[int, ...]], weights: Path) -> None:
    missing = [Problem("missing in the file", key=name) for name in targets if name not in held]
    unknown = [Problem("in the file, but not trained here", key=name) for name in held if name not in targets]
    differing = [
        Problem(f"{list(held[name])} in the file, {list(tensor.shape)} here", key=name)
        for name, tensor in targets.items()
        if name in held and tuple(held[name]) != tuple(tensor.shape)
    ]
    if missing or unknown or differing:
        raise ModelFolderError(
            f"{weights}: the adapters do not fit: {len(missing)} missing, {len(unknown)} unexpected, {len(differing)} "
            "of another shape. Give training.lora the target_modules and modules_to_save that they were made with.",
            problems=[*missing[:_MOST], *unknown[:_MOST], *differing[:_MOST]],
        )


def _parameter_name(key: str) -> str:
    layer, found, _ = key.rpartition(".lora_")
    return adapter_weight(layer, key.removesuffix(".weight")[-1]) if found else key


def _weights_file(path: Path) -> Path:
    if path.is_file() and path.suffix == ".safetensors":
        return path
    for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS):
        if (path / name).is_file():
            return path / name
    held = sorted(entry.name for entry in path.iterdir())[:5] if path.is_dir() else []
    what = f"holds {', '.join(held) or 'nothing'}" if path.is_dir() else "is not there, or no safetensors file"
    raise ModelFolderError(
        f"{what}: no adapters",
        where=str(path),
        key=_KEY,
        way_out=f"Name a folder with {PEFT_WEIGHTS} or {DIFFUSERS_WEIGHTS}, or the file itself.",
    )


def _peft_settings_of(config: Path) -> dict[str, Any]:
    settings = _parsed(config.read_text(encoding="utf-8"), config)
    if settings.get("peft_type") != "LORA":
        raise ModelFolderError(
            f"'{settings.get('peft_type')}' adapters, only LORA can be loaded", where=str(config), key="peft_type"
        )
    return settings


def _metadata_of(weights: Path) -> dict[str, Any]:
    try:
        with safe_open(weights, framework="pt") as reader:
            text = (reader.metadata() or {}).get(_METADATA)
    except SafetensorError as error:
        raise ModelFolderError(f"is damaged: {error}", where=str(weights), key=_KEY) from error
    settings = _parsed(text, weights) if text else {}
    return {key.removeprefix(DIFFUSERS_PREFIX): value for key, value in settings.items()}


def _parsed(text: str, place: Path) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"is not valid JSON: {error}", where=str(place), key=_KEY) from error
    if not isinstance(settings, dict):
        raise ModelFolderError("is not a table of settings", where=str(place), key=_KEY)
    return settings
