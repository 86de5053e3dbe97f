"""The floor of generators: a bare diffusers loop over latents, text, noise and σ that lie ready in memory.

`python -m benchmarks.bare_diffusers_loop FAMILY MODEL BATCHES STEPS` prints one JSON line: time, work and loss of each
step. No data work, no logging, no checkpoints; FAMILY is flux, wan, cogvideox or ltx2.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402
from diffusers import (  # noqa: E402
    CogVideoXDDIMScheduler,
    CogVideoXTransformer3DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed  # noqa: E402
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from benchmarks.generators import CLIP_FPS, LEARNING_RATE  # noqa: E402

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


def main(family: str, model_folder: Path, batches_folder: Path, steps: int) -> None:
    """Train and print."""
    batches = [load_file(batches_folder / f"{step:04d}.safetensors") for step in range(1, steps + 1)]
    model, loss_of, tokens = FAMILIES[family](model_folder, batches[0]["latents"])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    records = []
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        records.append({"loss": loss.item(), "time": time.time()})
    work = [{"samples": len(batch["latents"]), "tokens": tokens * len(batch["latents"])} for batch in batches]
    print(json.dumps([record | each for record, each in zip(records, work, strict=True)]))


def flux(model_folder: Path, latents: torch.Tensor) -> tuple[Any, Step, int]:
    """The model, its loss of a batch, and the tokens of a sample."""
    model = FluxTransformer2DModel.from_pretrained(model_folder, subfolder="transformer")
    _, _, height, width = latents.shape
    positions = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, latents.device, latents.dtype)

    def loss_of(batch: Batch) -> torch.Tensor:
        noisy, target = noised(batch)
        predicted = model(
            hidden_states=FluxPipeline._pack_latents(noisy, *noisy.shape),
            encoder_hidden_states=batch["prompt_embeds"],
            pooled_projections=batch["pooled_prompt_embeds"],
            timestep=batch["time"],
            img_ids=positions,
            txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3),
            return_dict=False,
        )[0]
        return torch.nn.functional.mse_loss(FluxPipeline._unpack_latents(predicted, height, width, 1), target)

    return model, loss_of, len(positions)


def wan(model_folder: Path, latents: torch.Tensor) -> tuple[Any, Step, int]:
    """The model, its loss of a batch, and the tokens of a sample."""
    model = WanTransformer3DModel.from_pretrained(model_folder, subfolder="transformer")

    def loss_of(batch: Batch) -> torch.Tensor:
        noisy, target = noised(batch)
        time_of = 1000 * batch["time"]
        predicted = model(noisy, time_of, batch["prompt_embeds"], return_dict=False)[0]
        return torch.nn.functional.mse_loss(predicted, target)

    _, _, frames, height, width = latents.shape
    patch_t, patch_h, patch_w = model.config.patch_size
    return model, loss_of, (frames // patch_t) * (height // patch_h) * (width // patch_w)


def cogvideox(model_folder: Path, latents: torch.Tensor) -> tuple[Any, Step, int]:
    """The model, its loss of a batch, and the tokens of a sample."""
    model = CogVideoXTransformer3DModel.from_pretrained(model_folder, subfolder="transformer")
    scheduler = CogVideoXDDIMScheduler.from_pretrained(model_folder, subfolder="scheduler")
    _, _, frames, height, width = latents.shape
    config = model.config
    grid = (height // config.patch_size, width // config.patch_size)
    trained = (config.sample_width // config.patch_size, config.sample_height // config.patch_size)
    positions = get_3d_rotary_pos_embed(
        embed_dim=config.attention_head_dim,
        crops_coords=get_resize_crop_region_for_grid(grid, *trained),
        grid_size=grid,
        temporal_size=frames,
    )

    def loss_of(batch: Batch) -> torch.Tensor:
        steps, latents, noise = batch["time"].long(), batch["latents"], batch["noise"]
        predicted = model(
            hidden_states=scheduler.add_noise(latents, noise, steps).transpose(1, 2),
            encoder_hidden_states=batch["prompt_embeds"],
            timestep=steps,
            image_rotary_emb=positions,
            return_dict=False,
        )[0]
        return torch.nn.functional.mse_loss(predicted.transpose(1, 2), scheduler.get_velocity(latents, noise, steps))

    return model, loss_of, frames * grid[0] * grid[1]


def ltx2(model_folder: Path, latents: torch.Tensor) -> tuple[Any, Step, int]:
    """The model, its loss of a batch, of pictures and sound, and the tokens of the pictures of a sample."""
    model = LTX2VideoTransformer3DModel.from_pretrained(model_folder, subfolder="transformer")
    _, _, frames, height, width = latents.shape

    def loss_of(batch: Batch) -> torch.Tensor:
        seen, shown = map(LTX2Pipeline._pack_latents, noised(batch))
        heard, told = map(LTX2Pipeline._pack_audio_latents, noised(batch, "audio_latents", "noise_audio_latents"))
        time_of = 1000 * batch["time"]
        pictures, sound = model(
            hidden_states=seen,
            audio_hidden_states=heard,
            encoder_hidden_states=batch["prompt_embeds"],
            audio_encoder_hidden_states=batch["audio_prompt_embeds"],
            timestep=time_of,
            audio_timestep=time_of,
            sigma=time_of,
            encoder_attention_mask=batch["prompt_mask"],
            audio_encoder_attention_mask=batch["prompt_mask"],
            num_frames=frames,
            height=height,
            width=width,
            fps=CLIP_FPS,
            audio_num_frames=heard.shape[1],
            use_cross_timestep=True,
            return_dict=False,
        )
        return torch.nn.functional.mse_loss(pictures, shown) + torch.nn.functional.mse_loss(sound, told)

    return model, loss_of, frames * height * width


FAMILIES = {"flux": flux, "wan": wan, "cogvideox": cogvideox, "ltx2": ltx2}


def noised(batch: Batch, of: str = "latents", by: str = "noise") -> tuple[torch.Tensor, torch.Tensor]:
    """x_σ = (1 − σ) x + σ ε, and what is learned: ε − x."""
    latents, noise = batch[of], batch[by]
    sigma = batch["time"].view(-1, *[1] * (latents.dim() - 1))
    return (1 - sigma) * latents + sigma * noise, noise - latents


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
