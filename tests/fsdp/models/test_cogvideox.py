"""What CogVideoX's training does to a picture that is given."""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.models.cogvideox.modeling_cogvideox import noised_picture
from mindspeed_mm.fsdp.models.diffusion.latents import model_range


def test_a_given_picture_bears_noise_of_the_published_strength() -> None:
    """ln σ ~ N(−3, ½), another one for each picture, the same for the same picture in any batch."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (300, 3, 1, 16, 16), dtype=torch.uint8, generator=random)
    noise = noised_picture(pixels) - model_range(pixels)
    strengths = noise.flatten(1).std(dim=1).log()
    assert abs(float(strengths.mean()) + 3.0) < 0.12
    assert abs(float(strengths.std()) - 0.5) < 0.08
    assert torch.equal(noised_picture(pixels[7:8]), noised_picture(pixels)[7:8])
