"""The pipelines of Open-Sora Plan 1.3, as diffusers has those of other families: caption, denoising, decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.video_processor import VideoProcessor
from PIL import Image

from mindspeed_mm.fsdp.models.diffusion.latent_scales import posterior_mode, standardised, unstandardised
from mindspeed_mm.fsdp.models.opensoraplan.modeling_opensoraplan import given_frames, latent_numbers, masked_video

_PIXELS = 8
"""Along a side of a latent position."""
Generators = torch.Generator | list[torch.Generator] | None


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

    def conditions(self, image: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor | None:
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
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        negative = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
        is_guided = guidance_scale > 1
        texts = negative + prompts if is_guided else prompts
        embeds, mask = self.encode_prompt(texts, max_sequence_length=max_sequence_length)
        device, dtype = embeds.device, self.transformer.dtype
        if latents is None:
            shape = (self.vae.config.latent_dim, (num_frames - 1) // self.vae.temporal_ratio + 1)
            latents = self._noise((len(prompts), *shape, height // _PIXELS, width // _PIXELS), generator)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        latents = latents.to(device) * self.scheduler.init_noise_sigma
        behind = self.conditions(image, latents, height, width)
        for time in self.progress_bar(self.scheduler.timesteps):
            noisy = self.scheduler.scale_model_input(latents, time)
            if behind is not None:
                noisy = torch.cat([noisy, behind.to(noisy.dtype)], dim=1)
            noisy = torch.cat([noisy] * 2) if is_guided else noisy
            said = self.transformer(
                hidden_states=noisy.to(dtype),
                timestep=time.expand(len(noisy)),
                encoder_hidden_states=embeds.to(dtype),
                encoder_attention_mask=mask,
                return_dict=False,
            )[0].to(latents.dtype)
            if is_guided:
                without, asked = said.chunk(2)
                said = without + guidance_scale * (asked - without)
            latents = self.scheduler.step(said, time, latents, generator=generator, return_dict=False)[0]
        ready = unstandardised(latents, *latent_numbers(self.vae)).to(self.vae.dtype)
        frames = self.vae.decode(ready, return_dict=False)[0]
        clips = self.video_processor.postprocess_video(frames, output_type=output_type)
        return {"frames": clips} if return_dict else (clips,)

    @staticmethod
    def _noise(shape: tuple[int, ...], generator: Generators) -> torch.Tensor:
        if isinstance(generator, list):
            return torch.stack([torch.randn(shape[1:], generator=each) for each in generator])
        return torch.randn(shape, generator=generator)


class OpenSoraInpaintPipeline(OpenSoraPipeline):
    """Image to video: the picture is the first frame."""

    def conditions(self, image: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
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
