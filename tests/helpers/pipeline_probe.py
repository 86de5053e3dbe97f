"""What a diffusers pipeline itself gives its transformer and its VAE: the reference for what our adapters give them."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

IMAGE_VAES = ("AutoencoderKL", "AutoencoderDC", "AutoencoderKLFlux2")
"""VAEs that take pictures without a time axis."""


def plain_pipeline(folder: Path, name: str | None = None) -> Any:
    """The folder's pipeline as diffusers loads it, or another one of the same parts by the name of its class."""
    prepare_for_transformers()
    import diffusers

    name = name or read_json_object(folder / "model_index.json", ValueError)["_class_name"]
    home: Any = diffusers
    if not hasattr(diffusers, name):
        home = importlib.import_module(find_adapter(folder).own_classes[name])
    pipeline = getattr(home, name).from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def encoded(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The VAE's own latents of (1, 3, T, H, W) uint8 pixels, as they are."""
    media = 2 * (pixels.float() / 255) - 1
    media = media[:, :, 0] if type(vae).__name__ in IMAGE_VAES else media
    with torch.no_grad():
        output = vae.encode(media)
    return output.latent if hasattr(output, "latent") else output.latent_dist.mode()


def of_the_mode(encode: Any) -> Any:
    """A VAE's `encode` whose posterior has no deviation: some pipelines draw from it, and features are the mode."""

    def encoded(*args: Any, **kwargs: Any) -> Any:
        found = encode(*args, **kwargs)
        if hasattr(found, "latent_dist"):
            found.latent_dist.sample = lambda generator=None: found.latent_dist.mode()
        return found

    return encoded


def in_layout_of(latents: torch.Tensor, like: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Latents as a pipeline was given them in the layout that it works in: FLUX.2's packs (B, C, H, W) itself, that of
    LTX's image to video steps on `plain` ones, (B, C, T, H, W)."""
    if latents.dim() == like.dim():
        return latents
    return plain if plain.dim() == like.dim() else latents.flatten(2).transpose(1, 2)


class OneStep:
    """Stands for a scheduler of one step.

    Args:
        real: Whose settings a pipeline may ask for.
        time: The time that the model is asked at.
        result: What comes out, whatever the model says.
        plain: The same before a pipeline's own layout was made of it.
    """

    order, init_noise_sigma = 1, 1.0

    def __init__(self, real: Any, time: torch.Tensor, result: torch.Tensor, plain: torch.Tensor) -> None:
        self.config, self.timesteps, self.sigmas = real.config, time.reshape(1), torch.tensor([0.5, 0.0])
        self._result, self._plain = result, plain
        self.mu: float | None = None
        """The shift that the pipeline asks for."""
        self.said = torch.empty(0)
        """What the pipeline made of the model's output: the velocity, or v."""

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, mu: float | None = None
    ) -> None:
        self.mu = mu

    def scale_model_input(self, sample: torch.Tensor, time: Any = None) -> torch.Tensor:
        return sample

    def set_begin_index(self, index: int = 0) -> None:
        pass

    def step(self, said: torch.Tensor, time: Any, sample: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        self.said = said.detach().double()
        result = in_layout_of(self._result, sample, self._plain)
        if result.dim() == 5:  # some pipelines leave out the frame that is given
            result = result[:, :, -sample.shape[2] :]
        return (result.to(sample.dtype),)


class Probed:
    """One call of a pipeline, watched.

    Args:
        pipeline: From `plain_pipeline`.
        arguments: Of its call, with `latents` in its own layout.
        time: As its scheduler would have it: 1000 σ, or the number of the step.
        result: Latents that are decoded in the end, in its own layout.
        plain: The same as adapters have them.
    """

    def __init__(
        self, pipeline: Any, arguments: dict[str, Any], time: torch.Tensor, result: torch.Tensor, plain: torch.Tensor
    ) -> None:
        self.given: list[Any] = []
        """What the transformer was called with."""
        self.decoded = torch.empty(0)
        """What the VAE was given to decode."""
        scheduler, decode = pipeline.scheduler, pipeline.vae.decode
        parts = [part for name, part in pipeline.components.items() if part and name.startswith("transformer")]
        handles = [part.register_forward_pre_hook(self._watch, with_kwargs=True) for part in parts]
        pipeline.scheduler = step = OneStep(scheduler, time, result, plain)

        def watched(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.decoded = latents
            as_stored = torch.empty(latents.shape, dtype=pipeline.vae.dtype).copy_(latents)  # whatever `.to` does here
            return decode(as_stored, *args, **kwargs)

        pipeline.vae.decode = watched
        try:
            with torch.no_grad():
                pipeline(**arguments)
        finally:
            for handle in handles:
                handle.remove()
            pipeline.scheduler, pipeline.vae.decode = scheduler, decode
        self.said, self.mu = step.said, step.mu

    def _watch(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given += [*args, *kwargs.values()]

    def has_text(self, rows_LD: torch.Tensor) -> bool:
        """Whether the transformer was given these rows, with any padding behind."""
        tensors = [item for given in self.given for item in (given if isinstance(given, list) else [given])]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() not in (2, 3):
                continue
            found = tensor[0] if tensor.dim() == 3 else tensor
            fits = found.shape[-1] == rows_LD.shape[-1] and len(found) >= len(rows_LD)
            if fits and torch.allclose(found[: len(rows_LD)].double(), rows_LD.double(), rtol=1e-4, atol=1e-5):
                return True
        return False


def drawn_time(random: np.random.Generator, scheduler: Any, mu: float | None) -> float:
    """The time that training draws for a sample, written out: Esser et al. 2024 (section 3.1, equation 23) with the
    scheduler's shift and end, or a step of as many as there are, all alike."""
    if hasattr(scheduler, "alphas_cumprod") and not scheduler.config.get("use_flow_sigmas"):
        return float(int(random.random() * scheduler.config.num_train_timesteps))
    sigma = 1 / (1 + math.exp(-random.normal(0.0, 1.0)))
    config = scheduler.config
    shift = math.exp(mu) if config.get("use_dynamic_shifting") and mu is not None else None
    shift = shift or config.get("flow_shift") or config.get("shift") or 1.0
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    end = config.get("shift_terminal") or 0.0
    return 1 - (1 - sigma) * (1 - end)
