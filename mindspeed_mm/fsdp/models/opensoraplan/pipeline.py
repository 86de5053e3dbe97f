"""The pipelines of Open-Sora Plan, as diffusers has those of other families: caption, denoising, decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.video_processor import VideoProcessor
from PIL import Image

from mindspeed_mm.fsdp.models.diffusion.latents import posterior_mode, standardised, unstandardised
from mindspeed_mm.fsdp.models.diffusion.text_rows import text_of_each
from mindspeed_mm.fsdp.models.opensoraplan.modeling_opensoraplan import given_frames, latent_numbers, masked_video

_PIXELS = 8
"""Along a side of a latent position."""
_RESCALE = 0.7
"""How much of 1.5's guidance is brought back to the deviation of the prediction."""
Generators: TypeAlias = "torch.Generator | list[torch.Generator] | None"


class OpenSoraPipeline(DiffusionPipeline):
    """Text to video.

    Args:
        vae: WF-VAE.
        text_encoder: mT5.
        tokenizer: Its.
        transformer: Of 1.3.
        scheduler: Of diffusers, with v-prediction.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(self, vae: Any, text_encoder: Any, tokenizer: Any, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer, scheduler=scheduler
        )
        self.video_processor = VideoProcessor(vae_scale_factor=_PIXELS)

    def encode_prompt(
        self, prompt: Sequence[str], do_classifier_free_guidance: bool = False, max_sequence_length: int = 512
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of captions, (B, L, D), and which of them are the captions' own, (B, L).

        Args:
            prompt: Captions.
            do_classifier_free_guidance: Of no effect: other captions take another call.
            max_sequence_length: L.
        """
        read = self.tokenizer(
            list(prompt), padding="max_length", max_length=max_sequence_length, truncation=True, return_tensors="pt"
        ).to(self.text_encoder.device)
        return self.text_encoder(read.input_ids, attention_mask=read.attention_mask)[0], read.attention_mask

    def _told(self, texts: Sequence[str], tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What the transformer is given of captions, by argument."""
        embeds, mask = self.encode_prompt(texts, max_sequence_length=tokens)
        return {"encoder_hidden_states": embeds.to(dtype), "encoder_attention_mask": mask}

    def _begin(self, steps: int, noise: torch.Tensor) -> torch.Tensor:
        """Set the sampler's times; returns what it starts from."""
        self.scheduler.set_timesteps(steps, device=noise.device)
        return noise * self.scheduler.init_noise_sigma

    def _scaled(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer takes them."""
        return self.scheduler.scale_model_input(latents, time)

    def _guided(self, without: torch.Tensor, asked: torch.Tensor, scale: float) -> torch.Tensor:
        """Classifier-free guidance of the given scale."""
        return without + scale * (asked - without)

    def conditions(self, image: object, latents: torch.Tensor, height: int, width: int) -> torch.Tensor | None:
        """What stands behind the channels of the latents; None: nothing."""
        return None

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] = "",
        image: Image.Image | None = None,
        height: int = 352,
        width: int = 640,
        num_frames: int = 93,
        num_inference_steps: int = 100,
        guidance_scale: float = 7.5,
        generator: Generators = None,
        latents: torch.Tensor | None = None,
        max_sequence_length: int = 512,
        output_type: str = "np",
        return_dict: bool = True,
    ) -> tuple[Any] | dict[str, Any]:
        """Clips, (B, T, H, W, 3) in 0..1.

        Args:
            prompt: What is to be seen.
            negative_prompt: What guidance steers away from.
            image: The first frame, for models that take one.
            height: In pixels.
            width: In pixels.
            num_frames: One more than a multiple of the frames of a latent frame.
            num_inference_steps: Steps.
            guidance_scale: Of classifier-free guidance, v₀ + s (v − v₀); 1 switches it off.
            generator: What the sampler's own noise comes from.
            latents: (B, C, T′, H / 8, W / 8) noise of variance 1; None: drawn.
            max_sequence_length: Tokens of a caption.
            output_type: `np`, `pt` or `pil`.
            return_dict: Return a dictionary with `frames`.
        """
        texts = prompts = text_of_each(prompt)
        is_guided = guidance_scale > 1
        if is_guided:
            texts = text_of_each(negative_prompt, len(prompts)) + prompts
        device, dtype = self.text_encoder.device, self.transformer.dtype
        told = self._told(texts, max_sequence_length, dtype)
        if latents is None:
            shape = (self.vae.config.latent_dim, (num_frames - 1) // self.vae.temporal_ratio + 1)
            latents = self._noise((len(prompts), *shape, height // _PIXELS, width // _PIXELS), generator)
        latents = self._begin(num_inference_steps, latents.to(device))
        behind = self.conditions(image, latents, height, width)
        for time in self.progress_bar(self.scheduler.timesteps):
            noisy = self._scaled(latents, time)
            if behind is not None:
                noisy = torch.cat([noisy, behind.to(noisy.dtype)], dim=1)
            if is_guided:
                noisy = torch.cat([noisy] * 2)
            said = self.transformer(
                hidden_states=noisy.to(dtype),
                timestep=time.expand(len(noisy)),
                **told,
                return_dict=False,
            )[0].to(latents.dtype)
            if is_guided:
                # In the order of `texts`: negative prompts first.
                without, asked = said.chunk(2)
                said = self._guided(without, asked, guidance_scale)
            latents = self.scheduler.step(said, time, latents, generator=generator, return_dict=False)[0]
        clips = self._clips(latents, output_type)
        if return_dict:
            return {"frames": clips}
        return (clips,)

    def _clips(self, latents: torch.Tensor, output_type: str) -> Any:
        ready = unstandardised(latents, *latent_numbers(self.vae)).to(self.vae.dtype)
        frames = self.vae.decode(ready, return_dict=False)[0]
        return self.video_processor.postprocess_video(frames, output_type=output_type)

    @staticmethod
    def _noise(shape: tuple[int, ...], generator: Generators) -> torch.Tensor:
        if isinstance(generator, list):
            return torch.stack([torch.randn(shape[1:], generator=each) for each in generator])
        return torch.randn(shape, generator=generator)


class OpenSoraInpaintPipeline(OpenSoraPipeline):
    """Image to video: the picture is the first frame."""

    def conditions(self, image: object, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The masked video and the mask, (B, C + frames of a latent frame, T′, H / 8, W / 8).

        Args:
            image: The first frame.
            latents: Of the video.
            height: In pixels.
            width: In pixels.

        Raises:
            ValueError: There is no picture.
        """
        if image is None:
            raise ValueError("image is not given: this model starts from a first frame")
        ratio = self.vae.temporal_ratio
        first = self.video_processor.preprocess(image, height, width).unsqueeze(2)
        video = masked_video(first, (latents.shape[2] - 1) * ratio + 1)
        masked = standardised(posterior_mode(self.vae, video), *latent_numbers(self.vae))
        masked = masked.expand(len(latents), -1, -1, -1, -1).to(latents.dtype)
        return torch.cat([masked, given_frames(latents, ratio)], dim=1)


class OpenSoraJointPipeline(OpenSoraPipeline):
    """Text to video by 1.5: flow matching, and a pooled caption beside the tokens of the other encoder.

    Args:
        vae: WF-VAE.
        text_encoder: T5.
        tokenizer: Its.
        text_encoder_2: CLIP with its projection.
        tokenizer_2: Its.
        transformer: Of 1.5.
        scheduler: `FlowMatchEulerDiscreteScheduler`.
        linear_quadratic: Sample by `linear_quadratic_levels` instead of equal steps with the scheduler's shift.
    """

    def __init__(
        self,
        vae: Any,
        text_encoder: Any,
        tokenizer: Any,
        text_encoder_2: Any,
        tokenizer_2: Any,
        transformer: Any,
        scheduler: Any,
        linear_quadratic: bool = False,
    ) -> None:
        super().__init__(vae, text_encoder, tokenizer, transformer, scheduler)
        self.register_modules(text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2)
        self.register_to_config(linear_quadratic=linear_quadratic)

    def encode_prompt(  # type: ignore[override]
        self, prompt: Sequence[str], do_classifier_free_guidance: bool = False, max_sequence_length: int = 512
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features and mask as of 1.3, and pooled ones (B, D). Arguments as there."""
        embeds, mask = super().encode_prompt(prompt, max_sequence_length=max_sequence_length)
        read = self.tokenizer_2(
            list(prompt), padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        ).to(self.text_encoder_2.device)
        pooled = self.text_encoder_2(read.input_ids, attention_mask=read.attention_mask).text_embeds
        return embeds, mask, pooled

    def _told(self, texts: Sequence[str], tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        embeds, mask, pooled = self.encode_prompt(texts, max_sequence_length=tokens)
        told = {"encoder_hidden_states": embeds.to(dtype), "encoder_attention_mask": mask}
        return told | {"pooled_projections": pooled.to(dtype)}

    def _begin(self, steps: int, noise: torch.Tensor) -> torch.Tensor:
        levels = np.linspace(1.0, 0.0, steps + 1)[:-1]  # the scheduler appends the 0
        if self.config.linear_quadratic:
            # These levels are final: a shift of the folder's scheduler would move them again.
            self.scheduler.set_shift(1.0)
            levels = linear_quadratic_levels(steps)
        self.scheduler.set_timesteps(sigmas=levels, device=noise.device)
        return noise

    def _scaled(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return latents

    def _guided(self, without: torch.Tensor, asked: torch.Tensor, scale: float) -> torch.Tensor:
        """With its deviation brought to that of the prompt's own prediction, by 0.7 (Lin et al. 2023, arXiv 2305.08891,
        section 3.4)."""
        made = super()._guided(without, asked, scale)
        over = tuple(range(1, made.dim()))
        rescaled = made * asked.std(dim=over, keepdim=True) / made.std(dim=over, keepdim=True)
        return _RESCALE * rescaled + (1 - _RESCALE) * made

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] = "",
        height: int = 576,
        width: int = 1024,
        num_frames: int = 121,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.0,
        **others: object,
    ) -> tuple[Any] | dict[str, Any]:
        """Clips; arguments as of 1.3, with the defaults of 1.5."""
        return super().__call__(
            prompt,
            negative_prompt,
            height=height,
            width=width,
            num_frames=num_frames,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            **others,
        )


def linear_quadratic_levels(steps: int) -> np.ndarray:
    """Noise levels of so many steps, the last one left out: the first half goes down by 1 / N each, as N steps do, the
    second half by a parabola that meets it and ends at 0 (Movie Gen, arXiv 2410.13720, section 3.4.2). N is 10 times
    the steps, between 250 and 1000.

    Args:
        steps: An even number.

    Raises:
        ValueError: It is not even.
    """
    if steps % 2:
        raise ValueError(f"{steps} steps: a linear and quadratic schedule has two halves of as many")
    half, fine = steps // 2, min(max(10 * steps, 250), 1000) // 2
    at = np.arange(half, steps)
    linear = np.arange(half) / (2 * fine)
    square = (fine - half) / (fine * half**2)
    slope = (5 * half - 4 * fine) / (2 * fine * half)
    start = (fine - half) / fine
    return 1 - np.concatenate([linear, square * at**2 + slope * at + start])
