"""Answers of models that answer in words and draw by denoising, part by part with cached keys and values
(arXiv:2505.14683).

A context is a sequence so far. Guidance asks the same noisy picture in three contexts: the whole one (v), the one
without the last text (v_t) and the one without pictures (v_p):

    u = v_t + g (v − v_t),    w = v_p + h (u − v_p),    velocity = w · min(|v| / |w|, 1)

with g the scale of the text, h that of pictures (left out where the prompt has none), and norms over the whole picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mindspeed_mm.checkpoint.safetensors_folder import find_entries
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.datasets.bagel.bagel_dataset import marks_of, size_rules
from mindspeed_mm.fsdp.data.datasets.bagel.parts import SizeRule, resized
from mindspeed_mm.fsdp.loss.denoising import noise_of, shift_sigma
from mindspeed_mm.fsdp.models.behaviour.part_cache import KeyValues
from mindspeed_mm.fsdp.models.diffusion.latents import patchified, places_of, unpatchified
from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.processor import load_processor

_HEAD = "language_model.lm_head.weight"


@dataclass(frozen=True)
class Words:
    """How the words of an answer are chosen."""

    max_new_tokens: int = 500
    temperature: float = 0.0
    """0: the likeliest."""
    seed: int = 0


@dataclass(frozen=True)
class Drawing:
    """How a picture is drawn; the defaults are those of the published inference."""

    height: int = 1024
    width: int = 1024
    steps: int = 49
    text_guidance: float = 4.0
    """g; 1 or less: there is no guidance at all."""
    picture_guidance: float = 1.5
    """h, where the prompt has pictures; 1: none."""
    guided: tuple[float, float] = (0.4, 1.0)
    """Noise levels above the first and up to the second are guided."""
    shift: float = 3.0
    """s of the noise levels: t ← s t / (1 + (s − 1) t)."""
    seed: int = 0


@dataclass
class Context:
    """A sequence in the three forms that guidance asks."""

    whole: KeyValues
    without_text: KeyValues
    without_pictures: KeyValues
    has_pictures: bool = False


class UnifiedSampler:
    """A model with its tokenizer and its VAE.

    Args:
        model: In evaluation mode, whole.
        tokenizer: Of its folder.
        vae: Frozen, on the model's device.
        folder: For messages.
        seen_size: How large a picture is that it sees.
        latent_size: How large one is that has latents.
    """

    def __init__(
        self, model: Any, tokenizer: Any, vae: PictureVAE, folder: Path, seen_size: SizeRule, latent_size: SizeRule
    ) -> None:
        self._model, self._tokenizer, self._vae = model, tokenizer, vae
        self._marks = marks_of(tokenizer, folder)
        self._seen_size, self._latent_size = seen_size, latent_size
        height, width = latent_size(Drawing.height, Drawing.width)
        self.defaults = Drawing(height, width)
        """How it draws where nothing is asked: as published, but as large as a picture of that size is in training."""
        weight = model.get_input_embeddings().weight
        self._device, self._exact = weight.device, torch.promote_types(weight.dtype, torch.float32)

    def start(self) -> Context:
        """An empty sequence, in the three forms that guidance asks."""
        return Context(KeyValues(), KeyValues(), KeyValues())

    def add_text(self, context: Context, text: str) -> None:
        """Go on with a text."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        whole = [self._marks.text_start, *ids, self._marks.text_end]
        # Before the text is read: guidance compares with the context up to here.
        context.without_text = context.whole.copy()
        for past in (context.whole, context.without_pictures):
            self._read(past, whole)

    def add_picture(self, context: Context, picture: Image.Image, *, given: bool) -> tuple[int, int]:
        """Go on with a picture that is seen, and with its latents in front where something is drawn from it. It is
        brought to the size of latents first, as published. Returns that height and width."""
        size = self._latent_size(picture.height, picture.width)
        pixels = resized(picture, size)
        if given:
            self._add_latents(context.whole, pixels)
        seen = resized(Image.fromarray(pixels.permute(1, 2, 0).numpy()), self._seen_size(*size))
        side = self._seen_size.stride
        grid = torch.tensor([[1, seen.shape[1] // side, seen.shape[2] // side]])
        patches = patchified(seen.float() / 127.5 - 1, side).to(self._device)
        features = self._model.get_image_features(patches, grid)
        self._between_marks(context.whole, features, is_latent=False, keeps=True)
        context.whole.position += 1
        context.without_text, context.has_pictures = context.whole.copy(), True
        return size

    def answer(self, context: Context, words: Words) -> tuple[str, bool]:
        """What the model says, and whether it came to an end."""
        past, draw = context.whole.copy(), torch.Generator().manual_seed(words.seed % 2**63)
        said: list[int] = []
        token = self._marks.text_start
        for _ in range(words.max_new_tokens):
            # fp64 on the host: the same seed draws the same tokens on every device.
            logits = self._model.language_model["lm_head"](self._read(past, [token])[:, -1])[0].double().cpu()
            if words.temperature:
                token = int(torch.multinomial((logits / words.temperature).softmax(0), 1, generator=draw))
            else:
                token = int(logits.argmax())
            if token == self._marks.text_end:
                return str(self._tokenizer.decode(said)), True
            said.append(token)
        return str(self._tokenizer.decode(said)), False

    def draw(self, context: Context, drawing: Drawing) -> torch.Tensor:
        """A picture (3, height, width) uint8.

        Raises:
            DataError: Its sides are no multiples of the model's tokens, or it is too large.
        """
        config = self._model.config
        side, most = config.latent_side, config.max_latent_size
        rows, columns = drawing.height // side, drawing.width // side
        if (
            drawing.height % side
            or drawing.width % side
            or not 0 < max(rows, columns) <= most
            or not min(rows, columns)
        ):
            raise DataError(
                f"{drawing.height} × {drawing.width} is no size of its pictures",
                key="--size",
                way_out=f"Give multiples of {side}, up to {most * side}.",
            )
        noisy = noise_of(drawing.seed, (rows * columns, config.latent_features)).to(self._exact)
        places = places_of(rows, columns, most)
        # One more than steps, from 1 to 0.
        times = [shift_sigma(1 - step / drawing.steps, drawing.shift) for step in range(drawing.steps + 1)]
        for time, following in pairwise(times):
            noisy = noisy - (time - following) * self._velocity(context, noisy, time, places, drawing)
        return self._vae.decode(unpatchified(noisy, rows, columns, config.latent_patch_size))

    def _velocity(
        self, context: Context, noisy: torch.Tensor, time: float, places: torch.Tensor, drawing: Drawing
    ) -> torch.Tensor:
        """(M, C · p²) on the host."""
        whole = self._predicted(context.whole, noisy, time, places)
        low, high = drawing.guided
        if drawing.text_guidance <= 1 or not low < time <= high:
            return whole
        base = self._predicted(context.without_text, noisy, time, places)
        guided = base + drawing.text_guidance * (whole - base)
        if context.has_pictures and drawing.picture_guidance > 1:
            base = self._predicted(context.without_pictures, noisy, time, places)
            guided = base + drawing.picture_guidance * (guided - base)
        # Guidance may turn the velocity, not lengthen it: the factor min(|v| / |w|, 1) of the formula above.
        return guided * (whole.norm() / (guided.norm() + 1e-8)).clamp(max=1.0)

    def _predicted(self, past: KeyValues, noisy: torch.Tensor, time: float, places: torch.Tensor) -> torch.Tensor:
        latents = self._embedded(noisy, time, places)
        hidden = self._between_marks(past, latents, is_latent=True, keeps=False)
        # Without the two marks around the picture.
        return self._model.llm2vae(hidden[0, 1:-1]).to(noisy.dtype).cpu()  # type: ignore[no-any-return]

    def _embedded(self, latents: torch.Tensor, time: float, places: torch.Tensor) -> torch.Tensor:
        times = torch.full((len(latents),), time, dtype=latents.dtype, device=self._device)
        return self._model.embed_latents(latents.to(self._device), times, places.to(self._device))  # type: ignore[no-any-return]

    def _add_latents(self, past: KeyValues, pixels: torch.Tensor) -> None:
        latents = self._vae.encode(pixels, 0)
        side = self._model.config.latent_patch_size
        places = places_of(latents.shape[1] // side, latents.shape[2] // side, self._model.config.max_latent_size)
        self._between_marks(past, self._embedded(patchified(latents, side), 0.0, places), is_latent=True, keeps=True)
        past.position += 1

    def _between_marks(self, past: KeyValues, middle: torch.Tensor, *, is_latent: bool, keeps: bool) -> torch.Tensor:
        """(1, tokens + 2, H) states of a picture between its marks; all of them see each other."""
        embed = self._model.get_input_embeddings()
        marks = torch.tensor([self._marks.picture_start, self._marks.picture_end], device=self._device)
        start, end = embed(marks).split(1)
        embeds = torch.cat([start, middle.to(start.dtype), end])[None]
        places = marks.new_zeros(0)
        if is_latent:
            places = torch.arange(1, len(middle) + 1, device=self._device)
        # One position for all of the picture, its marks too; `past.position` moves on by one.
        positions = torch.full((1, embeds.shape[1]), past.position, device=self._device)
        return self._model.go_on(embeds, positions, places, past, keeps=keeps, is_text=False)  # type: ignore[no-any-return]

    def _read(self, past: KeyValues, ids: list[int]) -> torch.Tensor:
        """(1, tokens, H) states of a text, which the context goes on with."""
        embeds = self._model.get_input_embeddings()(torch.tensor([ids], device=self._device))
        positions = torch.arange(past.position, past.position + len(ids), device=self._device)[None]
        past.position += len(ids)
        none = positions.new_zeros(0)
        return self._model.go_on(embeds, positions, none, past, keeps=True, is_text=True)  # type: ignore[no-any-return]


def load_unified(folder: Path, preprocess: PreprocessParameters, device: torch.device) -> UnifiedSampler:
    """The model of a folder of BAGEL, in the type that its weights are stored in.

    Args:
        folder: As released, or as exported.
        preprocess: How large pictures are.
        device: Where it runs.

    Raises:
        ModelFolderError: Weights, configuration, tokenizer or VAE are missing or broken.
        ConfigError: A size is none, or larger than the model has places for.
    """
    seen_size, latent_size = size_rules(preprocess, folder)
    model, tokenizer, vae = load_parts(folder, _HEAD, device)
    return UnifiedSampler(model, tokenizer, vae, folder, seen_size, latent_size)


def load_parts(folder: Path, head: str, device: torch.device) -> tuple[Any, Any, PictureVAE]:
    """A model that answers and draws, its tokenizer and its VAE.

    Args:
        folder: Of the model.
        head: The tensor by whose type weights are held.
        device: Where they run.

    Raises:
        ModelFolderError: Weights, configuration, tokenizer or VAE are missing or broken.
    """
    section = ModelArguments(model_name_or_path=str(folder))
    dtype = find_entries(folder)[head].dtype
    model: Any = ModelHub.build(section, param_dtype=dtype).requires_grad_(requires_grad=False).to(dtype)
    ModelHub.load_weights(model, section, seed=0, device=device)
    sizes = model.config.vae_config
    exact = torch.promote_types(dtype, torch.float32)
    vae = PictureVAE(folder, sizes["z_channels"], sizes["downsample"], device, exact)
    return model.eval(), load_processor(str(folder)), vae
