"""Further configuration of the subcommands of converters that know canonical models and adapters. No torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mindspeed_mm.checkpoint.common.config import (
    CommonModelConfig,
    ConvertHFConfig,
    ConvertMMConfig,
    ConvertResplitConfig,
    HfConfig,
    ParallelConfig,
)


class CanonicalModelConfig(CommonModelConfig):
    """Facts about a model that may be canonical."""

    enable_canonical_hf_struct: bool = False
    """Keep queries, keys and values, and gates and ups, apart, as the hub has them. Adapters need it."""
    new_transformers_weight_key: bool = False
    """The adapters' names have model.language_model. and model.visual., as transformers since 4.52 names modules."""
    model_prefix: str = ""
    """What the adapters' names begin with: base_model.model. as PEFT writes them."""


class ConvertCanonicalMMConfig(ConvertMMConfig):
    """From a Hugging Face folder to a Megatron-style checkpoint."""

    common_model_config: CanonicalModelConfig = CanonicalModelConfig()
    """Facts about the model."""


class ConvertCanonicalHFConfig(ConvertHFConfig):
    """From a Megatron-style checkpoint to a Hugging Face folder."""

    common_model_config: CanonicalModelConfig = CanonicalModelConfig()
    """Facts about the model."""


class ResplitConfig(ConvertResplitConfig):
    """From one division of a Megatron-style checkpoint to another."""

    hf_config: HfConfig | None = None
    """The model's folder, for its config.json, where none lies in the checkpoint."""


class _AdapterConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    mm_dir: Path
    """The adapters in Megatron's layout."""
    common_model_config: CanonicalModelConfig = CanonicalModelConfig()
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
