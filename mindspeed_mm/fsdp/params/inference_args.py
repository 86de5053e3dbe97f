"""The `inference` section: generating with a trained model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.params.value_types import Flag, Names, Natural, Number, PathText, Positive, Section


class Generation(Section):
    """How answers are generated: their length, the choice of tokens, and the cache."""

    max_new_tokens: Positive = 512
    """Maximum number of tokens in an answer."""
    do_sample: Flag = False
    """Sample tokens instead of taking the most likely one."""
    temperature: Annotated[Number, Field(gt=0)] | None = None
    """Sampling temperature, by which logits are divided."""
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens whose probabilities sum to this."""
    top_k: Positive | None = None
    """Sample from the k most likely tokens."""
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    """Penalty on tokens that have already appeared; values above 1 discourage repetition."""
    use_cache: Flag = True
    """Keep the keys and values of earlier tokens instead of recomputing them."""


class InferenceArguments(Section):
    """Generating with a trained model."""

    load: PathText | None = None
    """Model folder, checkpoint or run folder to load the weights from."""
    load_format: Literal["auto", "hf", "dcp"] = "hf"
    """Layout of the weights in `load`; auto detects it."""
    seed: Natural = 42
    """Seed of the random numbers used when answers are sampled."""
    use_deter_comp: Flag = False
    """Use only kernels that are deterministic."""
    init_model_with_meta_device: Flag = False
    """Accepted from older files and ignored: models are always built without storage first."""
    plugin: Names = ()
    """Packages that are imported before anything else."""
    adapter: PathText | None = None
    """Folder of adapters that `mm infer` and `mm evaluate` of the run apply to its weights; their option `--lora` takes
    precedence."""
    processor_path: PathText | None = None
    """Folder that holds the processor; null: `load`."""
    enable_thinking: Flag = False
    """Let the model think before it answers."""
    data_path: PathText | None = None
    """File of the questions that are answered."""
    generation: Generation = Field(default_factory=Generation)
    """Settings with which answers are generated."""
    sampling: SamplingArguments = Field(default_factory=SamplingArguments)
    """Settings with which images and video clips are generated."""
