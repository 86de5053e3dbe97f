"""Models with adapters that do something, and what they compute."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.apply import apply_lora, initialize_lora
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments

FEW = ("q_proj", "k_proj", "v_proj")
"""Layers of a language model that get adapters in tests of what adapters do."""


def adapted_model(folder: Path, *, dtype: torch.dtype | None = None, random: bool = True, **lora: Any) -> Any:
    """A model with adapters of rank 4 and alpha 12 over the folder's weights; trained at random, or fresh."""
    arguments = ModelArguments(model_name_or_path=str(folder))
    model: Any = ModelHub.build(arguments, param_dtype=dtype)
    few: dict[str, Any] = {} if facts_of(model).adapter else {"target_modules": FEW}
    section = LoraArguments.model_validate({"enable": True, "rank": 4, "alpha": 12, **few, **lora})
    apply_lora(model, section, param_dtype=dtype)
    loaded = ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    initialize_lora(model, section, 7, folder=loaded.folder)
    if random:
        move_trained(model)
    return model.eval()


@torch.no_grad()
def move_trained(model: torch.nn.Module, seed: int = 0) -> None:
    """Add noise to all that is trained."""
    report = facts_of(model).lora
    assert report is not None
    for name, parameter in sorted(model.named_parameters()):
        if name in report.trained:
            generator = torch.Generator().manual_seed(len(name) + seed)
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of a language model, for twelve tokens."""
    return model(torch.arange(12).reshape(1, -1)).logits


@torch.no_grad()
def denoised(transformer: Any, adapter: Any, seed: int = 0) -> torch.Tensor:
    """A transformer's prediction for noise and a text of noise, (1, C, [T,] 4, 4)."""
    generator = torch.Generator().manual_seed(seed)
    config = transformer.config
    dtype = next(transformer.parameters()).dtype
    channels = adapter.geometry.latent_channels
    shape = (1, channels, 2, 4, 4) if adapter.geometry.is_video else (1, channels, 4, 4)
    width = config.get("joint_attention_dim") or config.get("text_dim")
    batch = {
        "prompt_embeds": torch.randn(1, 6, width, generator=generator, dtype=torch.float64).to(dtype),
        "pooled_prompt_embeds": torch.randn(
            1, config.get("pooled_projection_dim") or 1, generator=generator, dtype=torch.float64
        ).to(dtype),
    }
    noisy = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    inputs = adapter.inputs(noisy, torch.tensor([0.5]), batch, 3.5)
    return adapter.prediction(transformer(**inputs, return_dict=False), shape)


def float_keeps_double() -> AbstractContextManager[Any]:
    """`keeping_double` for `float()` alone: PEFT's decompositions ask for fp32 by `to` and take nothing else."""
    real = torch.Tensor.float
    return mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype is torch.float64 else real(x))
