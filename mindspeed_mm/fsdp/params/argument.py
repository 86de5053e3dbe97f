"""The whole configuration: one frozen tree, one class a section, attribute names equal to the YAML's keys."""

from __future__ import annotations

from pydantic import Field

from mindspeed_mm.fsdp.params.data_args import DataArguments
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.inference_args import InferenceArguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.posttrain_args import PosttrainArguments
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
    "PosttrainArguments",
    "ToolsArguments",
    "TrainingArguments",
]


class Arguments(Section):
    """A run: model, data, parallel plan, training, features, tools, inference and post-training."""

    model: ModelArguments = Field(default_factory=ModelArguments)
    """The model: its id, its folder, and which of its parts are trained."""
    data: DataArguments = Field(default_factory=DataArguments)
    """The rows that are read and how they become batches."""
    parallel: ParallelArguments = Field(default_factory=ParallelArguments)
    """How the model and each batch are spread over devices."""
    training: TrainingArguments = Field(default_factory=TrainingArguments)
    """The optimizer, its schedule, the number of steps, saving and loading."""
    features: FeatureArguments = Field(default_factory=FeatureArguments)
    """The loss, and the settings that trade time for memory."""
    tools: ToolsArguments = Field(default_factory=ToolsArguments)
    """The profilers of time and of memory."""
    inference: InferenceArguments = Field(default_factory=InferenceArguments)
    """How answers and samples are generated with a trained model."""
    posttrain: PosttrainArguments = Field(default_factory=PosttrainArguments)
    """Training on preferences and on rewards."""
