"""The Wan2.1 adapter against diffusers' own pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.models.diffusion.components import load_component, load_encoders, load_pipeline
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.latents import as_pil
from mindspeed_mm.fsdp.models.wan.modeling_wan import WanAdapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from tests.helpers.denoising import denoise, text_batch
from tests.helpers.released import WAN_2_1_I2V_14B, WAN_2_1_T2V_1_3B, WAN_2_1_T2V_14B, WAN_2_2_TI2V_5B, write_folder
from tests.helpers.tiny_generators import TEXT_TOKENS

CPU = torch.device("cpu")
PROMPTS = ["a seven moving left", "two"]


def whole_pipeline(folder: Path) -> tuple[Any, Any]:
    adapter = find_adapter(folder)
    return adapter, load_pipeline(adapter, load_component(adapter, "transformer").eval(), load_encoders(adapter, CPU))


def clip(adapter: Any, batch: int = 1) -> torch.Tensor:
    size = SIZE if adapter.geometry.temporal_ratio > 1 else MediaSize(3, 16, 32)
    random = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (batch, 3, size.frames, size.height, size.width), dtype=torch.uint8, generator=random)


SIZE = MediaSize(5, 32, 48)


def noise_for(adapter: Any, pixels: torch.Tensor, batch: int) -> torch.Tensor:
    shape = adapter.geometry.latent_shape(MediaSize(*pixels.shape[2:]))
    return torch.randn((batch, *shape), generator=torch.Generator().manual_seed(5))


class UnitTime(WanAdapter):
    """Fault: time in 0..1."""

    def inputs(self, noisy: Any, sigma: Any, batch: Any, guidance: float) -> dict[str, Any]:
        return super().inputs(noisy, sigma / 1000, batch, guidance)


class WrongSign(WanAdapter):
    """Fault: x − ε."""

    def prediction(self, output: Any, latent_shape: tuple[int, ...]) -> torch.Tensor:
        return -super().prediction(output, latent_shape)


class MaskLast(WanAdapter):
    """Fault: the condition stands before the mask."""

    def inputs(self, noisy: Any, sigma: Any, batch: Any, guidance: float) -> dict[str, Any]:
        inputs = super().inputs(noisy, sigma, batch, guidance)
        noise, mask, condition = inputs["hidden_states"].split([16, 4, 16], dim=1)
        return inputs | {"hidden_states": torch.cat([noise, condition, mask], dim=1)}


class ShortText(WanAdapter):
    """Fault: text is not padded to the pipeline's length."""

    def pad_text(self, features: Any) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": super().pad_text(features)["prompt_embeds"][:, :-4]}


def sampled_twice(adapter: Any, pipeline: Any, guidance: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """By the pipeline, and by what the adapter says."""
    sampling = SamplingArguments(num_inference_steps=3, guidance_scale=guidance, negative_prompt="grey")
    prompts = PROMPTS if adapter.task == "t2v" else PROMPTS[:1]
    pixels = clip(adapter)
    latents = noise_for(adapter, pixels, len(prompts))
    arguments = adapter.pipeline_arguments(sampling, prompts, latents) | {"output_type": "latent"}
    if adapter.task == "i2v":
        arguments["image"] = as_pil(pixels[:, :, 0])[0]
    theirs = pipeline(prompt=prompts, **arguments).frames
    conditions = adapter.encode_conditions(pipeline, {"target": pixels, "first_frame": pixels[:, :, :1]})
    unguided = text_batch(adapter, pipeline, ["grey"] * len(prompts)) | conditions if guidance > 1 else None
    batch = text_batch(adapter, pipeline, prompts) | conditions
    return theirs, denoise(adapter, pipeline, latents, batch, steps=3, guidance=guidance, unguided=unguided)


@pytest.mark.parametrize("kind", ["t2v", "t2v_pixels", "i2v", "i2v_pixels"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_sampling_equals_the_pipeline(generators: dict[str, Path], kind: str, guidance: float) -> None:
    theirs, ours = sampled_twice(*whole_pipeline(generators[kind]), guidance)
    assert theirs.shape == ours.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("kind", "fault"), [("t2v", UnitTime), ("t2v", WrongSign), ("t2v", ShortText), ("i2v", MaskLast)]
)
def test_a_wrong_convention_shows(generators: dict[str, Path], kind: str, fault: type[WanAdapter]) -> None:
    _, pipeline = whole_pipeline(generators[kind])
    theirs, ours = sampled_twice(fault(generators[kind]), pipeline)
    assert (theirs - ours).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["i2v", "i2v_pixels"])
def test_conditions_are_those_of_the_pipeline(generators: dict[str, Path], kind: str) -> None:
    adapter, pipeline = whole_pipeline(generators[kind])
    pixels = clip(adapter)
    conditions = adapter.encode_conditions(pipeline, {"target": pixels, "first_frame": pixels[:, :, :1]})
    first = as_pil(pixels[:, :, 0])[0]
    _, _, frames, height, width = pixels.shape
    image = pipeline.video_processor.preprocess(first, height=height, width=width)
    channels = adapter.geometry.latent_channels
    _, theirs = pipeline.prepare_latents(
        image, 1, channels, height, width, frames, torch.float32, CPU, torch.Generator(), None
    )
    noisy = torch.zeros(1, *adapter.geometry.latent_shape(MediaSize(*pixels.shape[2:])))
    ours = adapter.inputs(noisy, torch.ones(1), {**conditions, "prompt_embeds": None}, 1.0)["hidden_states"]
    torch.testing.assert_close(ours[:, channels:], theirs, rtol=0, atol=1e-6)
    assert torch.equal(conditions["image_embeds"], pipeline.encode_image(first, CPU))


def test_latents_are_normalised_by_mean_and_deviation(generators: dict[str, Path]) -> None:
    adapter, pipeline = whole_pipeline(generators["t2v"])
    pixels = clip(adapter, batch=2)
    latents = adapter.encode_media(pipeline, pixels)
    assert latents.shape == (2, *adapter.geometry.latent_shape(SIZE))
    raw = pipeline.vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
    for channel, (mean, std) in enumerate(
        zip(pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std, strict=True)
    ):
        torch.testing.assert_close(latents[:, channel], (raw[:, channel] - mean) / std, rtol=1e-5, atol=1e-5)


def test_captions_are_stored_unpadded(generators: dict[str, Path]) -> None:
    adapter, pipeline = whole_pipeline(generators["t2v"])
    captions = ["", "two", "a much longer caption than fits the tokens there are"]
    features = adapter.encode_text(pipeline, captions)
    assert [len(each["prompt_embeds"]) for each in features] == [1, 5, TEXT_TOKENS]
    theirs, _ = pipeline.encode_prompt(captions, None, False, max_sequence_length=adapter.text_tokens)
    assert torch.equal(adapter.pad_text(features)["prompt_embeds"], theirs)


def test_weights_from_scratch_are_those_of_the_constructor() -> None:
    """The tables are N(0, 1/width), which torch's own initialisation does not know."""
    module = nn.Module()
    module.scale_shift_table = nn.Parameter(torch.full((1, 600, 400), torch.nan), requires_grad=False)
    module.pos_embed = nn.Parameter(torch.full((1, 2, 3), torch.nan), requires_grad=False)
    WanAdapter(Path()).init_weights(module)
    assert module.scale_shift_table.std().item() == pytest.approx(400**-0.5, rel=0.01)
    assert module.pos_embed.eq(0).all()
    WanAdapter(Path()).init_weights(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("content", "shift", "task"),
    [(WAN_2_1_T2V_1_3B, 3.0, "t2v"), (WAN_2_1_T2V_14B, 5.0, "t2v"), (WAN_2_1_I2V_14B, 5.0, "i2v")],
    ids=["1.3B", "14B", "i2v 14B"],
)
def test_geometry_and_shift_of_released_models(tmp_path: Path, content: Any, shift: float, task: str) -> None:
    adapter = find_adapter(write_folder(tmp_path, content))
    geometry = adapter.geometry
    shape = geometry.latent_shape(MediaSize(81, 480, 832))
    assert shape == (16, 21, 60, 104)
    assert geometry.tokens(shape) == 32_760
    assert (geometry.side_step, geometry.frame_step, adapter.text_tokens) == (16, 4, 512)
    assert (adapter.task, adapter.released_shift(32_760)) == (task, shift)


def test_the_released_5b_has_a_time_for_each_token(tmp_path: Path) -> None:
    """704 × 1280 pixels, 121 frames: 27,280 tokens; `wan2_2` in a file stands for it, too."""
    folder = write_folder(tmp_path, WAN_2_2_TI2V_5B)
    adapter = find_adapter(folder, model_id="wan2_2", task="ti2v")
    shape = adapter.geometry.latent_shape(MediaSize(121, 704, 1280))
    assert shape == (48, 31, 44, 80)
    assert (adapter.geometry.side_step, adapter.geometry.tokens(shape)) == (32, 27_280)
    batch = {"latents": torch.zeros(1, 48, 3, 4, 4), "prompt_embeds": torch.zeros(1, 2, 4096)}
    given = adapter.given_latents(batch)
    assert given is not None and given.flatten().tolist() == [True, False, False]
    times = adapter.inputs(batch["latents"], torch.tensor([0.25]), batch, 1.0)["timestep"]
    assert times.tolist() == [[0.0] * 4 + [250.0] * 8]
    plain = find_adapter(folder)
    assert plain.task == "t2v" and plain.given_latents(batch) is None
    assert plain.inputs(batch["latents"], torch.tensor([0.25]), batch, 1.0)["timestep"].tolist() == [[250.0] * 12]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("transformer_2", ["diffusers", "WanTransformer3DModel"], "boundary_ratio"),
        ("boundary_ratio", 0.875, "transformer_2"),
    ],
)
def test_halves_of_wan_2_2_are_refused(
    copied_generator: Callable[[str], Path], key: str, value: Any, named: str
) -> None:
    folder = copied_generator("t2v")
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {key: value}))
    with pytest.raises(ModelFolderError, match=rf"{named}.*Wan2\.2"):
        find_adapter(folder)


def test_text_beside_an_image_has_512_tokens(generators: dict[str, Path]) -> None:
    """The transformer takes everything before the last 512 for the image."""
    assert find_adapter(generators["i2v"]).text_tokens == 512
    assert find_adapter(generators["t2v"]).text_tokens == TEXT_TOKENS
