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


def _shift(value: object) -> object:
    if value is None or value == "resolution":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise fault(f"{show(value)} is not null, resolution or a number above 0")


def _range(value: Any) -> object:
    if value is None:
        return value
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if is_pair and all(isinstance(each, int | float) and not isinstance(each, bool) for each in value):
        low, high = map(float, value)
        if 0 <= low < high <= 1:
            return low, high
    raise fault(f"{show(value)} is not null or two numbers, the smaller one first, between 0 and 1")


class DiffusionArguments(Section):
    """How noise levels, or steps, are drawn and weighted. Flow matching: x_σ = (1 − σ) x + σ ε, the model learns ε − x.
    Models that were released with another objective (CogVideoX) are trained with theirs."""

    timestep_density: Literal["uniform", "logit_normal", "mode", "beta"] | None = None
    """Density of the noise level before the shift (Esser et al. 2024, section 3.1; beta: Black et al. 2024). null:
    logit_normal for flow matching, uniform for models that count steps."""
    logit_mean: Number = 0.0
    """Mean of the logit of the noise level (`timestep_density: logit_normal`)."""
    logit_std: Above0 = 1.0
    """Standard deviation of the logit of the noise level (`timestep_density: logit_normal`)."""
    mode_scale: Annotated[Number, Field(ge=-1, le=1.7519)] = 1.29
    """Scale of `timestep_density: mode`: above 0 it favours middle noise levels, below 0 the two ends."""
    beta_alpha: Above0 = 1.5
    """Parameter α of the beta distribution of `timestep_density: beta`; above `beta_beta`, noisy levels are drawn more
    often."""
    beta_beta: Above0 = 1.0
    """Parameter β of the beta distribution of `timestep_density: beta`."""
    shift: Annotated[float | Literal["resolution"] | None, BeforeValidator(_shift)] = None
    """Shift s of the noise level: σ ← s σ / (1 + (s − 1) σ). A number; `resolution`: s grows with the number of tokens
    of a sample, as the folder's scheduler says; null: what the folder's scheduler does when it generates."""
    sigma_range: Annotated[tuple[float, float] | None, BeforeValidator(_range)] = None
    """Smallest and largest noise level that is trained, after the shift, e.g. [0.875, 1]; null: all of them."""
    loss_weighting: Literal["none", "sigma_sqrt", "sigma_squared", "cosmap", "bell"] = "none"
    """Weight of a sample in the loss by its noise level. sigma_sqrt: 1/σ²; sigma_squared: σ², the squared error of the
    clean sample; cosmap: Esser et al. 2024; bell: a Gaussian around the middle with mean 1."""
    snr_gamma: Above0 | None = None
    """γ of min-SNR weighting for models that count steps (Hang et al. 2023, arXiv 2303.09556): a sample weighs as much
    as the error of its clean latents, at most γ times; null: all samples weigh the same."""
    caption_dropout: Ratio = 0.0
    """Share of samples trained with an empty caption, which makes classifier-free guidance possible."""
    prior_loss_weight: Annotated[Number, Field(ge=0)] | None = None
    """Weight of the prior-preservation loss, the mean over samples of datasets with `prior: true`, beside the mean loss
    of the others (DreamBooth, Ruiz et al. 2022, equation 2); null: no dataset has `prior: true`."""
    guidance: Annotated[Number, Field(ge=0)] = 3.5
    """Guidance scale passed to models that take it as an input (FLUX.1-dev)."""


class EmaArguments(Section):
    """An exponential moving average of the weights that are trained."""

    enable: Flag = False
    """Keep a moving average of the weights, sharded like them; it is saved, resumed and exported."""
    decay: Annotated[Number, Field(gt=0, lt=1)] = 0.999
    """Share of the previous average that is kept at each update."""
    warmup: Flag = True
    """Let the decay grow as (1 + n) / (10 + n) with the number of steps n until it reaches `decay`."""
    interval: Positive = 1
    """Number of steps between updates of the average; the decay is raised to this power, so that the average looks back
    over as many steps whatever the interval is."""
    use_for_evaluation: Flag = True
    """Use the averaged weights for validation and samples."""


class SamplingArguments(Section):
    """How pictures and clips are generated, by the folder's diffusers pipeline."""

    prompts: Names = ()
    """List of prompts to generate from."""
    prompts_file: PathText | None = None
    """File with one prompt per line, or JSON lines with `prompt` and, for image-to-video, `image`."""
    interval: Natural = 0
    """Number of training steps between two rounds of samples; 0: none."""
    num_inference_steps: Positive | None = None
    """Number of denoising steps per sample; null: what the model was released with (4 for FLUX.1 schnell), otherwise
    the default of its diffusers pipeline."""
    guidance_scale: Annotated[Number, Field(ge=0)] | None = None
    """Guidance scale: an input of transformers that take one (FLUX.1 dev), otherwise that of classifier-free guidance,
    which 1 switches off (Z-Image: 0). null: what the model was released with, otherwise its pipeline's default."""
    strength: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Denoising strength for v2v: the share of the denoising steps that are run on the input video; 1 ignores the input
    video."""
    negative_prompt: str = ""
    """Prompt that guidance steers away from."""
    height: Positive | None = None
    """Height of a sample in pixels; null: that of the run's media where all have one size, otherwise the release's or
    the pipeline's default."""
    width: Positive | None = None
    """Width of a sample in pixels; null: as of `height`."""
    num_frames: Positive | None = None
    """Number of frames of a video; null: as of `height`."""
    fps: Above0 | None = None
    """Frames per second of the video files written, which LTX models are also told; null:
    `preprocess_parameters.fps` of the run, otherwise the rate of the clips that the model makes."""
    seed: Natural = 42
    """Seed of the noise. The noise of a sample depends only on this seed, the prompt's number and the sample's
    number."""
    num_samples: Positive = 1
    """Number of samples generated from each prompt."""
    batch_size: Positive = 1
    """Number of samples generated at a time."""
