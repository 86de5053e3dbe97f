"""Latents as media: what a family's own pipeline decodes of the same latents, to the rounding of a byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindspeed_mm.fsdp.models.diffusion.components import load_encoders, load_pipeline
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_decoding_is_the_pipelines(family: str, tmp_path: Path) -> None:
    make_tiny_flux(tmp_path) if family == "flux" else make_tiny_wan(tmp_path)
    adapter = find_adapter(tmp_path)
    encoders = load_encoders(adapter, torch.device("cpu"))
    pipeline = load_pipeline(adapter, still(adapter), encoders)
    shape = (2, 4, 8, 8) if family == "flux" else (1, 16, 2, 4, 4)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    settings = SamplingArguments(num_inference_steps=1, guidance_scale=1.0)
    arguments = adapter.pipeline_arguments(settings, ["a"] * len(latents), latents)
    made = pipeline(prompt=["a"] * len(latents), **arguments | {"output_type": "np"}, return_dict=False)[0]
    expected = torch.tensor(made * 255).round().to(torch.uint8)
    found = adapter.decode(encoders, latents)
    assert found.dtype == torch.uint8
    as_pipelines = found[:, :, 0].permute(0, 2, 3, 1) if family == "flux" else found.permute(0, 2, 3, 4, 1)
    assert (as_pipelines.int() - expected.int()).abs().max() <= 1
    assert found.float().std() > 1


def still(adapter: object) -> torch.nn.Module:
    """The folder's transformer with zeros for output, so that the pipeline decodes what it was given."""
    from diffusers import FluxTransformer2DModel, WanTransformer3DModel

    folder = adapter.folder  # type: ignore[attr-defined]
    model = FluxTransformer2DModel if "Flux" in type(adapter).__name__ else WanTransformer3DModel
    transformer = model.from_pretrained(folder / "transformer")
    for parameter in transformer.proj_out.parameters():
        torch.nn.init.zeros_(parameter)
    return transformer
