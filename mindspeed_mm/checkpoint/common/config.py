"""The configuration of subcommands that take `--cfg.…`; each field's docstring is its help. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, PositiveInt


def _nested(value: object) -> object:
    """`[14, 14]` is one virtual chunk a stage: `[[14, 14]]`."""
    flat = isinstance(value, list) and value and not any(isinstance(item, list) for item in value)
    if flat:
        return [value]
    return value


PipelineLayers = Annotated[list[list[NonNegativeInt]], BeforeValidator(_nested)]
"""Layers on each stage, one list for each virtual chunk; a flat list is one chunk."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class ParallelConfig(_Config):
    """How a Megatron-style checkpoint is divided."""

    llm_pp_layers: PipelineLayers | None = None
    """Layers of the language model on each pipeline stage: [14,14], or with virtual chunks [[10,10,10,2],[0,0,0,0]]."""
    vit_pp_layers: PipelineLayers | None = None
    """Layers of the vision tower on each pipeline stage."""
    audio_pp_layers: PipelineLayers | None = None
    """Layers of the audio tower on each pipeline stage."""
    tp_size: PositiveInt = 1
    """Ranks that divide each layer."""
    vit_tp_size: NonNegativeInt = 0
    """Ranks that divide a layer of the vision tower; 0: as tp_size."""
    audio_tp_size: NonNegativeInt = 0
    """Ranks that divide a layer of the audio tower; 0: as tp_size."""
    ep_size: PositiveInt = 1
    """Ranks that divide the experts."""
    encoders_on_every_stage: bool = False
    """Every pipeline stage holds the whole vision and audio towers, as heterogeneous parallelism trains them."""


class HfConfig(_Config):
    """Names the Hugging Face folder that a conversion reads."""

    hf_dir: Path
    """The folder with config.json and the safetensors."""


class CommonModelConfig(_Config):
    """Facts about the model. They are read from config.json; given here, they are compared with it."""

    num_experts: NonNegativeInt | None = None
    """Routed experts in a layer."""
    num_key_value_heads: NonNegativeInt | None = None
    """Key and value heads of a layer."""
    enable_canonical_hf_struct: bool = False
    """Qwen2-VL and Qwen2.5-VL: queries, keys and values, and gates and ups, stay apart. Adapters need it."""
    tie_word_embeddings: bool | None = None
    """Whether the head is the embedding."""
    llm_hf_dir: Path | None = None
    """Folder of another language model, which takes the place of the model's own."""
    llm_num_layers: NonNegativeInt | None = None
    """Layers of the language model."""
    vit_num_layers: NonNegativeInt | None = None
    """Layers of the vision tower."""
    audio_num_layers: NonNegativeInt | None = None
    """Layers of the audio tower."""


class ConvertMMConfig(_Config):
    """From a Hugging Face folder to a Megatron-style checkpoint."""

    mm_dir: Path
    """The Megatron-style checkpoint."""
    hf_config: HfConfig
    """The Hugging Face folder."""
    parallel_config: ParallelConfig = ParallelConfig()
    """How the checkpoint is divided."""
    llm_hf_config: HfConfig | None = None
    """As common_model_config.llm_hf_dir."""
    common_model_config: CommonModelConfig = CommonModelConfig()
    """Facts about the model."""
    save_vit_only: bool = False
    """Write the vision tower and its projector alone."""
    trust_remote_code: bool = False
    """Let code in the folder run."""


class ConvertHFConfig(ConvertMMConfig):
    """From a Megatron-style checkpoint to a Hugging Face folder."""

    save_hf_dir: Path
    """The folder to write."""
    parallel_config: ParallelConfig | None = None  # type: ignore[assignment]
    """How the checkpoint is divided; without it, as its layout.json says."""


class ConvertResplitConfig(_Config):
    """From one division of a Megatron-style checkpoint to another."""

    source_dir: Path
    """The checkpoint as it is."""
    target_dir: Path
    """The folder to write."""
    source_parallel_config: ParallelConfig | None = None
    """How it is divided; without it, as its layout.json says."""
    target_parallel_config: ParallelConfig
    """How it is to be divided."""


class GeneratorParallelConfig(_Config):
    """How a generator's checkpoint is divided."""

    tp_size: PositiveInt = 1
    """Ranks that divide each layer."""
    pp_layers: PipelineLayers | None = None
    """Layers on each pipeline stage."""
    ep_size: PositiveInt = 1
    """Ranks that divide the experts."""


class ConvertGeneratorConfig(_Config):
    """From one layout of a generator's transformer to another."""

    source_path: Path
    """The weights as they are."""
    target_path: Path
    """The folder to write. It may be the source: the original is then kept as <name>.bak."""
    lora_path: Path | None = None
    """Adapters to add."""
    hf_dir: Path | None = None
    """The original folder, for configuration and components."""
    target_parallel_config: GeneratorParallelConfig = GeneratorParallelConfig()
    """How the result is divided."""
    keep_backup: bool = True
    """Keep the original as <name>.bak when it is converted in place."""
