"""`training.diffusion`, `training.ema` and the `sampling` sections: how generators are trained and tried out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.fsdp.params.value_types import (
    Flag,
    Names,
    Natural,
    Number,
    PathText,
    Positive,
    Ratio,
    Section,
    fault,
    show,
)

Above0 = Annotated[Number, Field(gt=0)]


def _shift(value: Any) -> Any:
    if value is None or value == "resolution":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise fault(f"{show(value)} is not null, resolution or a number above 0")


class DiffusionArguments(Section):
    """Flow matching: how noise levels are drawn and weighted. x_σ = (1 − σ) x + σ ε, the model learns ε − x."""

    timestep_density: Literal["uniform", "logit_normal", "mode", "beta"] = "logit_normal"
    """Density of the noise level before the shift (Esser et al. 2024, section 3.1; beta: Black et al. 2024)."""
    logit_mean: Number = 0.0
    """logit_normal: mean of the logit."""
    logit_std: Above0 = 1.0
    """logit_normal: standard deviation of the logit."""
    mode_scale: Annotated[Number, Field(ge=-1, le=1.7519)] = 1.29
    """mode: above 0 favours the middle, below 0 the ends."""
    beta_alpha: Above0 = 1.5
    """beta: first parameter; above the second, noisy levels come more often."""
    beta_beta: Above0 = 1.0
    """beta: second parameter."""
    shift: Annotated[float | Literal["resolution"] | None, BeforeValidator(_shift)] = None
    """σ ← s σ / (1 + (s − 1) σ). A number; `resolution`: s grows with the tokens of a sample, as the folder's scheduler
    says; null: what the folder's scheduler does when it generates."""
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap", "bell"] = "none"
    """Weight of a sample by its noise level. sigma_sqrt: 1/σ²; cosmap: Esser et al. 2024; bell: a Gaussian around the
    middle, mean 1."""
    caption_dropout: Ratio = 0.0
    """Share of samples that are trained with an empty caption, so that guidance works without a second model."""
    guidance: Annotated[Number, Field(ge=0)] = 3.5
    """Guidance scale told to models that take one as an input (FLUX.1-dev)."""


class EmaArguments(Section):
    """An exponential moving average of the weights that are trained."""

    enable: Flag = False
    """Keep the average, sharded as the weights; it is saved, resumed and exported."""
    decay: Annotated[Number, Field(gt=0, lt=1)] = 0.999
    """Share of the old average that stays after a step."""
    warmup: Flag = True
    """Decay grows as (1 + n) / (10 + n) with the number of steps until it reaches `decay`."""
    interval: Positive = 1
    """Steps between two updates; an update then counts for all of them: its decay is taken to this power."""
    use_for_evaluation: Flag = True
    """Validate and sample with the average."""


class SamplingArguments(Section):
    """How pictures and clips are generated, by the folder's diffusers pipeline."""

    prompts: Names = ()
    """Prompts; each is generated from."""
    prompts_file: PathText | None = None
    """File with one prompt a line; or JSON lines with `prompt` and, for image-to-video, `image`."""
    interval: Natural = 0
    """Training: steps between two rounds of samples; 0: none."""
    num_inference_steps: Positive = 28
    """Denoising steps."""
    guidance_scale: Annotated[Number, Field(ge=0)] = 4.0
    """Classifier-free guidance; 1 switches it off."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    height: Positive | None = None
    """Pixels; null: the pipeline's own."""
    width: Positive | None = None
    """Pixels; null: the pipeline's own."""
    num_frames: Positive | None = None
    """Frames of a video; null: the pipeline's own."""
    fps: Above0 = 16.0
    """Frames a second of the files written."""
    seed: Natural = 42
    """The noise of a sample is a function of this seed, its prompt's number and its own number."""
    num_samples: Positive = 1
    """Samples of each prompt."""
    batch_size: Positive = 1
    """Samples generated at a time."""
