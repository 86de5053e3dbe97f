"""The `inference` section: generating with a trained model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.params.value_types import Flag, Names, Natural, Number, PathText, Positive, Section


class Generation(Section):
    """How answers are generated."""

    max_new_tokens: Positive = 512
    """Most tokens of an answer."""
    do_sample: Flag = False
    """Draw tokens instead of taking the likeliest."""
    temperature: Annotated[Number, Field(gt=0)] | None = None
    """Divides the logits."""
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Draw from the likeliest tokens that sum to this probability."""
    top_k: Positive | None = None
    """Draw from so many tokens."""
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    """Above 1 discourages repetition."""
    use_cache: Flag = True
    """Keep keys and values of earlier tokens."""


class InferenceArguments(Section):
    """Generating with a trained model."""

    load: PathText | None = None
    """Model folder, checkpoint or run folder."""
    load_format: Literal["auto", "hf", "dcp"] = "hf"
    """Layout of `load`."""
    seed: Natural = 42
    """Seed of sampling."""
    use_deter_comp: Flag = False
    """Only deterministic kernels."""
    init_model_with_meta_device: Flag = False
    """Accepted from older files: models are always built without storage first."""
    plugin: Names = ()
    """Packages to import first."""
    adapter: PathText | None = None
    """Folder of adapters that `mm infer` and `mm evaluate` of the run put beside its weights; their `--lora` wins."""
    processor_path: PathText | None = None
    """Folder of the processor; null: `load`."""
    enable_thinking: Flag = False
    """Let the model think first."""
    data_path: PathText | None = None
    """Questions."""
    generation: Generation = Field(default_factory=Generation)
    """How answers are generated."""
    sampling: SamplingArguments = Field(default_factory=SamplingArguments)
    """How pictures and clips are generated."""
