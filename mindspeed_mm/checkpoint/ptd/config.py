"""Further configuration of the subcommands of converters that know divisions and adapters. No torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mindspeed_mm.checkpoint.common.config import (
    CommonModelConfig,
    ConvertResplitConfig,
    HfConfig,
    ParallelConfig,
)


class AdapterModelConfig(CommonModelConfig):
    """Facts about a model that has adapters."""

    new_transformers_weight_key: bool = False
    """The adapters' names have model.language_model. and model.visual., as transformers since 4.52 names modules."""
    model_prefix: str = ""
    """What the adapters' names begin with: base_model.model. as PEFT writes them."""


class ResplitConfig(ConvertResplitConfig):
    """From one division of a Megatron-style checkpoint to another."""

    hf_config: HfConfig | None = None
    """The model's folder, for its config.json, where none lies in the checkpoint."""


class _AdapterConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    mm_dir: Path
    """The adapters in Megatron's layout."""
    common_model_config: AdapterModelConfig = AdapterModelConfig()
    """How they are named."""


class ConvertLoraMMConfig(_AdapterConfig):
    """From PEFT's adapters to one piece for each rank."""

    hf_config: HfConfig
    """The folder with adapter_model.safetensors."""
    parallel_config: ParallelConfig
    """How the model is divided: all layers of both towers are told here."""


class ConvertLoraHFConfig(_AdapterConfig):
    """From one piece for each rank to PEFT's adapters."""

    save_hf_dir: Path
    """The folder to write."""
    parallel_config: ParallelConfig | None = None
    """How the model is divided; without it, as its layout.json says."""
