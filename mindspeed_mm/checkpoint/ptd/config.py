"""Further configuration of the subcommands of converters that know divisions and adapters. No torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from mindspeed_mm.checkpoint.common.config import (
    CommonModelConfig,
    ConvertMMConfig,
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


class RewardModelConfig(AdapterModelConfig):
    """Facts about VideoAlign's reward model."""

    resize_vocab_size: PositiveInt | None = None
    """Rows of the embedding, if it is to have others than Qwen2-VL's: 151660 with the three tokens of rewards."""


class ConvertRewardMMConfig(ConvertMMConfig):
    """From Qwen2-VL, or VideoAlign's released files, to a Megatron-style checkpoint."""

    pt_path: Path | None = None
    """model.pth of the release, or the checkpoint-* folder that it or the adapters lie in; without it the weights are
    Qwen2-VL's, with a new head."""
    common_model_config: RewardModelConfig = RewardModelConfig()
    """Facts about the model."""
    save_lora_only: bool = False
    """Not built: adapters are added to the weights."""


class ConvertReleasedConfig(BaseModel):
    """From VideoAlign's released files to a Hugging Face folder."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    hf_config: HfConfig
    """The folder of Qwen2-VL-2B-Instruct: configuration, processor and tokenizer."""
    pt_path: Path | None = None
    """model.pth of the release, or the checkpoint-* folder that it or the adapters lie in; without it the weights are
    Qwen2-VL's, with a new head."""
    save_hf_dir: Path
    """The folder to write."""
    common_model_config: RewardModelConfig = RewardModelConfig()
    """Facts about the model."""


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
