"""What is written of adapters beside their numbers: keys, and settings as PEFT and diffusers read them."""

from __future__ import annotations

import json
from typing import Any

from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_PREFIX, METADATA
from mindspeed_mm.fsdp.models.lora.names import MAGNITUDE, LoraReport, base_name, split_adapter_weight


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
    return f"{prefix}{layer}.lora_{side}" + ("" if side == MAGNITUDE else ".weight")


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
        # Those of the base as it is, whatever they started with: PEFT would compute it anew and move the base.
        "init_lora_weights": lora.initialisation if isinstance(lora.initialisation, bool) else True,
        "modules_to_save": list(lora.modules_to_save) or None,
    }


def diffusers_metadata(lora: LoraReport) -> dict[str, str]:
    """Metadata of `pytorch_lora_weights.safetensors`. Without it a pipeline would take alpha for equal to the rank."""
    settings = {f"{DIFFUSERS_PREFIX}{key}": value for key, value in _settings(lora).items()}
    return {METADATA: json.dumps(settings, indent=2, sort_keys=True)}


def _settings(lora: LoraReport) -> dict[str, Any]:
    targets, times = lora.peft_targets, 2 if lora.moves_base else 1
    settings: dict[str, Any] = {
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
        settings["rank_pattern"] = {name: strength.rank for name, strength in lora.strengths.items()}
        settings["alpha_pattern"] = {name: _plain(strength.alpha) for name, strength in lora.strengths.items()}
    return settings


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else number
