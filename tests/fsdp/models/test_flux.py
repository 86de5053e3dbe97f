"""The FLUX.1 adapter against diffusers' own pipeline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.models.diffusion.components import load_component, load_encoders, load_pipeline
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.latents import as_pil, pack, unpack
from mindspeed_mm.fsdp.models.flux.modeling_flux import FluxAdapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from tests.helpers.denoising import denoise, text_batch
from tests.helpers.released import FLUX_1_DEV, write_folder
from tests.helpers.tiny_generators import TEXT_TOKENS

CPU = torch.device("cpu")
PROMPTS = ["a red boat", "seven"]


def whole_pipeline(folder: Path) -> tuple[Any, Any]:
    adapter = find_adapter(folder)
    return adapter, load_pipeline(adapter, load_component(adapter, "transformer").eval(), load_encoders(adapter, CPU))


def noise(adapter: Any, size: MediaSize, batch: int = 2) -> torch.Tensor:
    shape = (batch, *adapter.geometry.latent_shape(size))
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


class MilliTime(FluxAdapter):
    """Fault: time in 0..1000."""

    def inputs(self, noisy: Any, sigma: Any, batch: Any, guidance: float) -> dict[str, Any]:
        return super().inputs(noisy, 1000 * sigma, batch, guidance)


class WrongSign(FluxAdapter):
    """Fault: x − ε."""

    def prediction(self, output: Any, latent_shape: tuple[int, ...]) -> torch.Tensor:
        return -super().prediction(output, latent_shape)


class SwappedSides(FluxAdapter):
    """Fault: rows and columns of the positions exchanged."""

    def inputs(self, noisy: Any, sigma: Any, batch: Any, guidance: float) -> dict[str, Any]:
        inputs = super().inputs(noisy, sigma, batch, guidance)
        return inputs | {"img_ids": inputs["img_ids"][:, [0, 2, 1]]}


class PositionsFirst(FluxAdapter):
    """Fault: tokens packed with channels innermost."""

    def inputs(self, noisy: Any, sigma: Any, batch: Any, guidance: float) -> dict[str, Any]:
        inputs = super().inputs(noisy, sigma, batch, guidance)
        hidden = inputs["hidden_states"].unflatten(2, (-1, 4)).transpose(2, 3).flatten(2)
        return inputs | {"hidden_states": hidden}


def sampled_twice(
    adapter: Any, pipeline: Any, batch: Any, sampling: SamplingArguments, unguided: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the pipeline, and by what the adapter says."""
    latents = noise(adapter, MediaSize(1, 16, 24) if adapter.geometry.spatial_ratio > 1 else MediaSize(1, 8, 10))
    arguments = adapter.pipeline_arguments(sampling, PROMPTS, latents) | {"output_type": "latent"}
    theirs = unpack(pipeline(prompt=PROMPTS, **arguments).images, tuple(latents.shape))
    ours = denoise(adapter, pipeline, latents, batch, steps=3, guidance=sampling.guidance_scale, unguided=unguided)
    return theirs, ours


@pytest.mark.parametrize("kind", ["flux", "flux_guidance", "flux_pixels"])
def test_sampling_equals_the_pipeline(generators: dict[str, Path], kind: str) -> None:
    adapter, pipeline = whole_pipeline(generators[kind])
    sampling = SamplingArguments(num_inference_steps=3, guidance_scale=2.5 if kind == "flux_guidance" else 1.0)
    theirs, ours = sampled_twice(adapter, pipeline, text_batch(adapter, pipeline, PROMPTS), sampling)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_classifier_free_guidance_equals_the_pipeline(generators: dict[str, Path]) -> None:
    adapter, pipeline = whole_pipeline(generators["flux"])
    sampling = SamplingArguments(num_inference_steps=3, guidance_scale=4.0, negative_prompt="grey")
    unguided = text_batch(adapter, pipeline, ["grey", "grey"])
    theirs, ours = sampled_twice(adapter, pipeline, text_batch(adapter, pipeline, PROMPTS), sampling, unguided)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-6)


@pytest.mark.parametrize("fault", [MilliTime, WrongSign, SwappedSides, PositionsFirst])
def test_a_wrong_convention_shows(generators: dict[str, Path], fault: type[FluxAdapter]) -> None:
    right, pipeline = whole_pipeline(generators["flux"])
    sampling = SamplingArguments(num_inference_steps=3, guidance_scale=1.0)
    batch = text_batch(right, pipeline, PROMPTS)
    theirs, ours = sampled_twice(fault(generators["flux"]), pipeline, batch, sampling)
    assert (theirs - ours).abs().max() > 1e-4


def test_guidance_is_an_input_only_where_the_transformer_takes_it(generators: dict[str, Path]) -> None:
    sampling = SamplingArguments(negative_prompt="grey")
    for kind, takes in (("flux", False), ("flux_guidance", True)):
        adapter = find_adapter(generators[kind])
        batch = {"prompt_embeds": torch.zeros(2, 5, 32), "pooled_prompt_embeds": torch.zeros(2, 24)}
        inputs = adapter.inputs(torch.zeros(2, 4, 4, 4), torch.tensor([0.1, 0.9]), batch, 3.5)
        assert ("guidance" in inputs) is takes
        assert not takes or torch.equal(inputs["guidance"], torch.tensor([3.5, 3.5]))
    with pytest.raises(ConfigError, match="no effect"):
        adapter.pipeline_arguments(sampling, ["a"], torch.zeros(1, 4, 4, 4))


def test_latents_are_those_of_the_librarys_own_encoding(generators: dict[str, Path]) -> None:
    from diffusers import FluxKontextPipeline  # it encodes images by the mode

    adapter, pipeline = whole_pipeline(generators["flux"])
    pixels = torch.randint(0, 256, (2, 3, 1, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    latents = adapter.encode_media(pipeline, pixels)
    images = pipeline.image_processor.preprocess(as_pil(pixels[:, :, 0]))
    theirs = FluxKontextPipeline(**pipeline.components)._encode_vae_image(images, torch.Generator())
    assert latents.shape == (2, *adapter.geometry.latent_shape(MediaSize(1, 16, 24)))
    torch.testing.assert_close(latents, theirs.detach(), rtol=0, atol=1e-6)
    assert pipeline.vae.config.scaling_factor != 1 and pipeline.vae.config.shift_factor != 0


def test_packing_is_undone() -> None:
    latents = torch.randn(2, 4, 6, 10)
    assert pack(latents).shape == (2, 15, 16)
    assert torch.equal(unpack(pack(latents), (2, 4, 6, 10)), latents)


def test_text_is_padded_as_the_tokenizer_says(generators: dict[str, Path]) -> None:
    adapter = find_adapter(generators["flux"])
    features = adapter.encode_text(load_encoders(adapter, CPU), ["", "a boat"])
    assert [each["prompt_embeds"].shape for each in features] == [(TEXT_TOKENS, 32)] * 2
    assert features[0]["pooled_prompt_embeds"].shape == (24,)
    assert not features[0]["prompt_embeds"].requires_grad


def test_geometry_and_shift_of_the_released_model(tmp_path: Path) -> None:
    adapter = find_adapter(write_folder(tmp_path, FLUX_1_DEV))
    geometry = adapter.geometry
    assert geometry.latent_shape(MediaSize(1, 1024, 1024)) == (16, 128, 128)
    assert geometry.tokens((16, 128, 128)) == 4096
    assert (geometry.side_step, geometry.is_video, adapter.text_tokens) == (16, False, 512)
    assert adapter.released_shift(4096) == pytest.approx(math.exp(1.15))
    assert adapter.released_shift(256) == pytest.approx(math.exp(0.5))


def test_parts_that_do_not_fit_are_named(generators: dict[str, Path]) -> None:
    with pytest.raises(ModelFolderError, match=r"joint_attention_dim  64, but text_encoder_2 asks for 32"):
        find_adapter(generators["flux"], transformer={"joint_attention_dim": 64})
    with pytest.raises(ModelFolderError, match=r"in_channels  12, but vae: latent_channels × 4 asks for 16"):
        find_adapter(generators["flux"], transformer={"in_channels": 12})
