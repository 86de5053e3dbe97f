"""The floor of extraction: the same encoders over pixels and token ids that lie ready in memory; nothing is written.

`python -m benchmarks.bare_encoders FAMILY MODEL INPUTS BATCH` prints one JSON line: when each batch was done, and the
mean absolute feature of each sample, which tells that the work was the same.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.host_memory import keep_freed_memory
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402
from diffusers import AutoencoderKL, AutoencoderKLWan  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import CLIPTextModel, T5EncoderModel, UMT5EncoderModel  # noqa: E402

Inputs = dict[str, torch.Tensor]
Encode = Callable[[Inputs], tuple[torch.Tensor, torch.Tensor]]
"""A batch → normalised latents and text features."""


@torch.no_grad()
def main(family: str, model_folder: Path, inputs_file: Path, batch_size: int) -> None:
    """Encode and print. Freed memory stays at hand as it does in `mm extract`: otherwise a quarter of the time goes by
    chance, as glibc gives it back or not."""
    keep_freed_memory()
    encode = {"flux": flux, "wan": wan}[family](model_folder)
    inputs = load_file(inputs_file)
    inputs["pixels"] = inputs["pixels"].float() / 127.5 - 1
    times, latents, texts = [], [], []
    for batch in batches(inputs, batch_size):
        latent, text = encode(batch)
        latents.append(latent)
        texts.append(text)
        times.append({"time": time.time(), "samples": len(latent)})
    means = {"latents": means_of(torch.cat(latents)), "text": means_of(torch.cat(texts))}
    print(json.dumps({"batches": times, "means": means}))


def batches(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """So many samples at a time."""
    for first in range(0, len(inputs["pixels"]), size):
        yield {name: tensor[first : first + size] for name, tensor in inputs.items()}


def flux(folder: Path) -> Encode:
    """AutoencoderKL, CLIP and T5."""
    vae = loaded(AutoencoderKL, folder / "vae")
    clip, t5 = loaded(CLIPTextModel, folder / "text_encoder"), loaded(T5EncoderModel, folder / "text_encoder_2")

    def encode(batch: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        latents = vae.encode(batch["pixels"][:, :, 0]).latent_dist.mode()
        clip(batch["tokenizer.ids"])
        text = t5(batch["tokenizer_2.ids"])[0]
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor, text

    return encode


def wan(folder: Path) -> Encode:
    """AutoencoderKLWan and UMT5; features of padding are zeros."""
    vae, umt5 = loaded(AutoencoderKLWan, folder / "vae"), loaded(UMT5EncoderModel, folder / "text_encoder")
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))

    def encode(batch: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        latents = vae.encode(batch["pixels"]).latent_dist.mode()
        mask = batch["tokenizer.mask"]
        text = umt5(batch["tokenizer.ids"], mask).last_hidden_state * mask[..., None]
        return (latents - mean) / std, text

    return encode


def loaded(component: Any, folder: Path) -> Any:
    """A frozen component."""
    return component.from_pretrained(folder).eval()


def means_of(features: torch.Tensor) -> list[float]:
    """Mean absolute feature of each sample."""
    return features.abs().flatten(1).mean(dim=1).tolist()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
