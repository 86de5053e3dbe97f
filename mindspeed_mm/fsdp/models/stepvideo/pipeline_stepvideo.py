"""Step-Video's pipeline and its noise levels, in the manner of diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from diffusers.video_processor import VideoProcessor
from PIL import Image

from mindspeed_mm.fsdp.models.diffusion.text_rows import text_of_each
from mindspeed_mm.fsdp.models.stepvideo.sizes import CLIP_TOKENS, GROUP_FRAMES, GROUP_LATENTS, MOTION_SCORE, SHIFT


class FlowMatchDiscreteScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Euler steps over n equal parts of 1 … 0, shifted.

    Args:
        num_train_timesteps: What σ is counted in.
        shift: s in s·σ / (1 + (s − 1)·σ).
        reverse: False: the transformer's time is 1 − σ.
        solver: `euler`.
        device: Of no effect.

    Raises:
        ValueError: It describes another schedule.
    """

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = SHIFT,
        reverse: bool = False,
        solver: str = "euler",
        device: str | None = None,
    ) -> None:
        if reverse or solver != "euler":
            raise ValueError(f"reverse: {reverse}, solver: {solver}; Step-Video's are False and 'euler'")
        super().__init__(num_train_timesteps=num_train_timesteps, shift=shift)


class StepVideoOutput(BaseOutput):  # type: ignore[misc]
    """Clips, under the name that other video pipelines of diffusers use."""

    frames: Any


class StepVideoPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Text to video; with a transformer of TI2V text and a first frame to video.

    Args:
        transformer: `StepVideoModel`.
        vae: `StepVideoVAE`.
        text_encoder: `StepLLMModel`.
        tokenizer: Its own.
        text_encoder_2: Hunyuan's CLIP, a `BertModel`.
        tokenizer_2: Its own.
        scheduler: `FlowMatchDiscreteScheduler`.
    """

    def __init__(
        self,
        transformer: Any,
        vae: Any,
        text_encoder: Any,
        tokenizer: Any,
        text_encoder_2: Any,
        tokenizer_2: Any,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            scheduler=scheduler,
        )
        self.video_processor = VideoProcessor(vae_scale_factor=16)

    @torch.no_grad()
    def encode_prompt(
        self, prompt: Sequence[str], max_sequence_length: int = 320
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features by Step-LLM (B, N, 6144) and by CLIP (B, 77, 1024), and the mask of the former, (B, N): 1 for a
        caption's own tokens.

        Args:
            prompt: Captions.
            max_sequence_length: Tokens of a caption that are read, BOS and EOS among them.
        """
        rows = self.tokenizer(text=list(prompt), max_length=max_sequence_length, truncation=True)["input_ids"]
        length, device = max(map(len, rows)), self.text_encoder.device
        ids = torch.zeros(len(rows), length, dtype=torch.int64, device=device)
        mask = torch.zeros_like(ids)
        for row, words in enumerate(rows):
            ids[row, : len(words)] = torch.tensor(words, device=device)
            mask[row, : len(words)] = 1
        sizes = {"padding": "max_length", "max_length": CLIP_TOKENS, "truncation": True, "return_tensors": "pt"}
        of_clip = self.tokenizer_2(text=list(prompt), **sizes).to(device)
        clip = self.text_encoder_2(of_clip["input_ids"], attention_mask=of_clip["attention_mask"])
        return self.text_encoder(ids).last_hidden_state, clip.last_hidden_state, mask

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        image: Image.Image | None = None,
        height: int = 544,
        width: int = 992,
        num_frames: int = 204,
        num_inference_steps: int = 50,
        guidance_scale: float = 9.0,
        negative_prompt: str | Sequence[str] | None = None,
        motion_score: float = MOTION_SCORE,
        latents: torch.Tensor | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        max_sequence_length: int = 320,
        output_type: str = "np",
        return_dict: bool = True,
    ) -> StepVideoOutput | tuple[Any]:
        """Clips of prompts.

        Args:
            prompt: One or several.
            image: TI2V: the first frame of all, in the size of the clip.
            height: A multiple of 16.
            width: A multiple of 16.
            num_frames: A multiple of 17, or 1.
            num_inference_steps: Euler steps.
            guidance_scale: Of classifier-free guidance; at most 1: none.
            negative_prompt: What is guided away from: one text for all prompts, or one for each; None: empty ones.
            motion_score: TI2V: how much moves.
            latents: (B, C, T, H, W) noise; None: it is drawn.
            generator: Draws it.
            max_sequence_length: Tokens of a caption that are read.
            output_type: `np`, `pil`, `pt`, or `latent`.
            return_dict: False: a tuple.
        """
        device, dtype = self.vae.device, self.transformer.dtype
        texts, guides = text_of_each(prompt), guidance_scale > 1
        count = len(texts)
        if guides:
            texts += text_of_each(negative_prompt or "", count)
        words, clip, mask = self.encode_prompt(texts, max_sequence_length)
        given: dict[str, Any] = {
            "encoder_hidden_states": words.to(device, dtype),
            "encoder_hidden_states_2": clip.to(device, dtype),
            "encoder_attention_mask": mask.to(device),
        }
        if latents is None:
            frames = max(num_frames // GROUP_FRAMES * GROUP_LATENTS, 1)  # a picture is one latent frame
            shape = (count, self.transformer.config.in_channels, frames, height // 16, width // 16)
            source = list(generator) if isinstance(generator, Sequence) else generator
            latents = self._drawn(shape, source)
        latents = latents.to(device, torch.float32)
        if self.transformer.config.use_additional_conditions:
            picture = self.video_processor.preprocess(image, height=height, width=width).to(device, self.vae.dtype)
            first = self.vae.encode(picture.unsqueeze(2)).latent_dist.mode()
            behind = first_frame_alone(first.expand(len(texts), *first.shape[1:]), latents.shape[2])
            given["condition_hidden_states"] = behind.transpose(1, 2).to(dtype)
            given["motion_score"] = torch.full((len(texts),), motion_score, device=device)
        steps = np.linspace(1, 0, num_inference_steps + 1)[:-1]
        self.scheduler.set_timesteps(sigmas=steps, device=device)
        for time in self.progress_bar(self.scheduler.timesteps):
            noisy = torch.cat([latents] * 2) if guides else latents
            # The scheduler counts σ in thousandths; the transformer takes 1 − σ.
            level = (1 - time / self.scheduler.config.num_train_timesteps).expand(len(noisy))
            hidden = noisy.transpose(1, 2).to(dtype)
            (predicted,) = self.transformer(hidden_states=hidden, timestep=level, return_dict=False, **given)
            predicted = predicted.transpose(1, 2).float()
            if guides:
                wanted, away = predicted.chunk(2)
                predicted = away + guidance_scale * (wanted - away)
            # The transformer predicts x − ε, and the scheduler steps along ε − x.
            (latents,) = self.scheduler.step(-predicted, time, latents, return_dict=False)
        if output_type == "latent":
            clips: Any = latents
        else:
            pixels = self.vae.decode((latents / self.vae.config.scaling_factor).to(self.vae.dtype)).sample
            clips = self.video_processor.postprocess_video(pixels, output_type=output_type)
        return StepVideoOutput(frames=clips) if return_dict else (clips,)

    def _drawn(self, shape: tuple[int, ...], generator: object) -> torch.Tensor:
        from diffusers.utils.torch_utils import randn_tensor

        made: torch.Tensor = randn_tensor(shape, generator=generator, device=self.vae.device, dtype=torch.float32)
        return made


def first_frame_alone(picture_BCTHW: torch.Tensor, frames: int) -> torch.Tensor:
    """(B, C, frames, H, W): a picture's latents, and zeros behind them."""
    B, C, _, H, W = picture_BCTHW.shape
    behind = picture_BCTHW.new_zeros(B, C, frames - 1, H, W)
    return torch.cat([picture_BCTHW, behind], dim=2)
