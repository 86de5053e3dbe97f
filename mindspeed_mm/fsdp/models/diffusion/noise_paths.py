"""How a family puts noise on latents, and what its transformer learns from them: an adapter names one path.

A sample's *time* on a path is one number: the noise level σ of flow matching, the number of the step of DDPM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

import torch
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError

Density = Literal["uniform", "logit_normal", "mode", "beta"]
Prediction = Literal["epsilon", "v_prediction"]


class NoisePath(ABC):
    """From latents x to noise ε."""

    density: ClassVar[Density]
    """What draws times when the configuration names nothing."""
    is_flow: ClassVar[bool] = False
    """Whether times are noise levels in 0..1, which settings shift, cut and weight."""

    @abstractmethod
    def describe(self) -> str:
        """Return the path in words, for the log and for messages."""

    @abstractmethod
    def time(self, drawn: float) -> float:
        """The time of a number drawn from 0..1; 1 is all noise."""

    def min_snr_weight(self, time: float, gamma: float) -> float:
        """Weight of the loss at a time by min-SNR γ. A path of noise levels has other weights: settings refuse it."""
        raise NotImplementedError

    @abstractmethod
    def mix(self, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Latents with noise.

        Args:
            latents: (B, …).
            noise: Of the same shape.
            time: Broadcastable to it.
        """

    @abstractmethod
    def target(self, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """What is predicted, in the shape of the latents. Arguments as of `mix`."""


class FlowPath(NoisePath):
    """x_σ = (1 − σ) x + σ ε, and the model learns ε − x (Lipman et al. 2022, arXiv 2210.02747; Liu et al. 2022,
    2209.03003)."""

    density = "logit_normal"
    is_flow = True

    @override
    def describe(self) -> str:
        return "flow matching"

    @override
    def time(self, drawn: float) -> float:
        return drawn

    @override
    def mix(self, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return (1 - time) * latents + time * noise

    @override
    def target(self, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return noise - latents


class DiscretePath(NoisePath):
    """x_t = √ᾱ_t x + √(1 − ᾱ_t) ε for whole t (Ho et al. 2020, arXiv 2006.11239, equation 4). The model learns ε, or
    v = √ᾱ_t ε − √(1 − ᾱ_t) x (Salimans and Ho 2022, arXiv 2202.00512, appendix D).

    Args:
        alphas_cumprod: (T,) ᾱ_t, which the folder's scheduler has: shifted, and with zero terminal signal where it says
            so (Lin et al. 2023, arXiv 2305.08891).
        prediction: What is learned: `prediction_type` of the scheduler.

    Raises:
        ConfigError: The scheduler names another prediction.
    """

    density = "uniform"

    def __init__(self, alphas_cumprod: torch.Tensor, prediction: Prediction) -> None:
        if prediction not in get_args(Prediction):
            raise ConfigError(
                f"'{prediction}' is not trained, only {' and '.join(get_args(Prediction))}",
                where="scheduler/scheduler_config.json of the model's folder",
                key="prediction_type",
                way_out="Write what the transformer's weights predict.",
            )
        self._signal = alphas_cumprod.double().sqrt()
        self._snr = [float(signal / (1 - signal)) for signal in alphas_cumprod.double()]
        self._noise = (1 - alphas_cumprod.double()).sqrt()
        self._prediction = prediction

    def describe(self) -> str:
        """Steps, and what is learned."""
        return f"denoising in {len(self._signal)} steps, learning {'ε' if self._prediction == 'epsilon' else 'v'}"

    def time(self, drawn: float) -> float:
        """The number of the step, 0 … T − 1."""
        return float(min(int(drawn * len(self._signal)), len(self._signal) - 1))

    def min_snr_weight(self, time: float, gamma: float) -> float:
        """Weight of the loss at a step: min(SNR, γ) as that of the error of the clean latents, which is SNR times that
        of ε and SNR + 1 times that of v (Hang et al. 2023, arXiv 2303.09556, section 3.4; Salimans and Ho 2022). Where
        v is learned, a last step that is all noise has the weight 0."""
        snr = self._snr[int(time)]
        if self._prediction == "epsilon":
            if snr:
                return min(1.0, gamma / snr)
            return 1.0
        return min(snr, gamma) / (snr + 1)

    def mix(self, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Signal and noise of variance 1 together."""
        signal, level = self._shares(time, latents)
        return signal * latents + level * noise

    @override
    def target(self, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        if self._prediction == "epsilon":
            return noise
        signal, level = self._shares(time, latents)
        return signal * noise - level * latents

    def _shares(self, time: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """√ᾱ_t and √(1 − ᾱ_t) in the type and on the device of `like`."""
        if self._signal.device != time.device:
            self._signal, self._noise = self._signal.to(time.device), self._noise.to(time.device)
        step = time.long()
        return self._signal[step].to(like.dtype), self._noise[step].to(like.dtype)
