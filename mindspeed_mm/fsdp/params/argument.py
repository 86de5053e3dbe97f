"""The whole configuration: one frozen tree, one class a section, attribute names equal to the YAML's keys."""

from __future__ import annotations

from pydantic import Field

from mindspeed_mm.fsdp.params.data_args import DataArguments
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.inference_args import InferenceArguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.tools_args import ToolsArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.params.value_types import Section

__all__ = [
    "Arguments",
    "DataArguments",
    "FeatureArguments",
    "InferenceArguments",
    "LoraArguments",
    "ModelArguments",
    "ParallelArguments",
    "ToolsArguments",
    "TrainingArguments",
]


class Arguments(Section):
    """A run: model, data, parallel plan, training, features, tools and inference."""

    model: ModelArguments = Field(default_factory=ModelArguments)
    """Which model, from where, what of it is trained."""
    data: DataArguments = Field(default_factory=DataArguments)
    """Which rows, and how they become batches."""
    parallel: ParallelArguments = Field(default_factory=ParallelArguments)
    """How model and batch are spread over devices."""
    training: TrainingArguments = Field(default_factory=TrainingArguments)
    """Optimizer, schedule, steps, saving and loading."""
    features: FeatureArguments = Field(default_factory=FeatureArguments)
    """Losses, and what trades time for memory."""
    tools: ToolsArguments = Field(default_factory=ToolsArguments)
    """Profilers."""
    inference: InferenceArguments = Field(default_factory=InferenceArguments)
    """Generating with a trained model."""
