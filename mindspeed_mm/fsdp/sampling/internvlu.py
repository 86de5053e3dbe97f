"""Answers of InternVL-U: words, and pictures that are drawn from the states of three prompts (arXiv:2603.09877).

Guidance asks the same noisy picture of the prompt as it is (v), of one without its words (v_p) and of one without
anything (v_n):

    velocity = v_n + h (v_p − v_n) / n(v_p − v_n) + g (v − v_p) / n(v − v_p)

with g the scale of the text, h that of pictures, and n(d) = max(|d|, 1)^0.4 of each position's channels while the noise
level is above 0.93, else 1. Steps are those of DPM-Solver++ on the flow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mindspeed_mm.core.batch import SEEN
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.datasets.internvlu.internvlu_dataset import (
    generation_size,
    opened,
    read_states,
    taken_apart,
)
from mindspeed_mm.fsdp.data.datasets.internvlu.turns import (
    LEFT,
    ReadingSizes,
    Task,
    TurnEncoder,
    TurnRow,
    seen_pixels,
)
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.models.diffusion.latents import patchified, unpatchified
from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.sampling.unified import Drawing, Words, load_parts

_HEAD = "vlm.language_model.lm_head.weight"
_TAMED_ABOVE, _TAMING = 0.93, 0.4
_TIMESTEPS = 1000


@dataclass
class PictureQuestion:
    """What is asked, so far."""

    pictures: list[Image.Image] = field(default_factory=list)
    pieces: list[str | None] = field(default_factory=list)
    """Texts of the question, and None for each picture."""
    system: str | None = None
    """Its own system prompt; None: that of the task."""
    earlier: list[tuple[list[str | None], str]] = field(default_factory=list)
    """Questions and answers in front of it."""


@dataclass(frozen=True)
class PromptStates:
    """One of the three that guidance asks."""

    states: torch.Tensor
    """(S, H · layers) that the picture is drawn from."""
    positions: torch.Tensor
    """(S, 3)."""
    given: list[torch.Tensor]
    """(C, h, w) latents of the pictures that it has."""


class InternVLUSampler:
    """A model with its tokenizer and its VAE.

    Args:
        model: In evaluation mode, whole.
        tokenizer: Of its folder.
        vae: Frozen, on the model's device.
        folder: For messages and for sizes of pictures.
        preprocess: How large pictures are.
    """

    defaults = Drawing(height=512, width=512, steps=20, text_guidance=4.5, picture_guidance=2.0)
    """Of the published pipeline."""

    def __init__(
        self, model: Any, tokenizer: Any, vae: PictureVAE, folder: Path, preprocess: PreprocessParameters
    ) -> None:
        self._model, self._tokenizer, self._vae = model, tokenizer, vae
        self._sizes = ReadingSizes.of(folder)
        self._size = generation_size(preprocess, self._sizes)
        self._turns = TurnEncoder(tokenizer, folder, self._sizes.seen_side**2)
        weight = model.get_input_embeddings().weight
        self._device, self._exact = weight.device, torch.promote_types(weight.dtype, torch.float32)

    def start(self) -> PictureQuestion:
        """A question without pictures and words, to go on with."""
        return PictureQuestion()

    def add_picture(self, context: PictureQuestion, picture: Image.Image, *, given: bool) -> tuple[int, int]:
        """Go on with a picture. Returns its height and width as one that has latents."""
        context.pictures.append(picture)
        context.pieces.append(None)
        return self._size(picture.height, picture.width)

    def add_text(self, context: PictureQuestion, text: str) -> None:
        """Go on with the words."""
        context.pieces.append(text)

    def read_row(
        self, sample: Sample, load: Callable[[Any], Image.Image]
    ) -> tuple[PictureQuestion, tuple[int, int] | None]:
        """What a row asks, as training shows it, and the size of its last picture as one that has latents.

        Args:
            sample: The row with an answer, whose words do not matter.
            load: Opens a picture of the row.

        Raises:
            DataError: Training refuses such rows, too.
        """
        told = taken_apart(sample, sample.place)
        context, turns = PictureQuestion(system=told.system), [pieces for _, pieces, _ in told.turns[:-1]]
        if [role for role, _, _ in told.turns] != ["user", "assistant"] * (len(told.turns) // 2):
            way_out = "Let questions and answers take turns, a question first."
            raise DataError("does not ask and answer in turns", key="messages", way_out=way_out)
        for pieces, said in zip(turns[:-1:2], turns[1::2], strict=True):
            context.earlier.append((pieces, "".join(filter(None, said))))
        context.pieces, context.pictures = turns[-1], [load(source) for source in told.pictures]
        if not context.pictures:
            return context, None
        last = context.pictures[-1]
        return context, self._size(last.height, last.width)

    def answer(self, context: PictureQuestion, words: Words) -> tuple[str, bool]:
        """What the model says, and whether it came to an end."""
        from transformers import DynamicCache

        row = self._turns.begin("answer", context.system)
        for pieces, said_before in context.earlier:
            self._turns.question(row, pieces, is_read=False)
            self._turns.answer(row, said_before, 0.0)
        self._turns.question(row, context.pieces, is_read=False)
        draw = torch.Generator().manual_seed(words.seed % 2**63)
        cache, said = DynamicCache(config=self._model.config.llm_config), list[int]()
        inputs = self._inputs(row, context.pictures)
        for _ in range(words.max_new_tokens):
            output = self._model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            # fp64 on the host: the same seed draws the same tokens on every device.
            logits = output.logits[0, -1].double().cpu()
            if words.temperature:
                token = int(torch.multinomial((logits / words.temperature).softmax(0), 1, generator=draw))
            else:
                token = int(logits.argmax())
            if token in (self._turns.end, self._turns.picture):
                return str(self._tokenizer.decode(said)), True
            said.append(token)
            inputs = {"input_ids": torch.tensor([[token]], device=self._device)}
        return str(self._tokenizer.decode(said)), False

    def draw(self, context: PictureQuestion, drawing: Drawing) -> torch.Tensor:
        """A picture (3, height, width) uint8.

        Raises:
            DataError: Its sides are no multiples of the model's tokens.
        """
        config, side = self._model.config, self._sizes.latent_side
        rows, columns = drawing.height // side, drawing.width // side
        if drawing.height % side or drawing.width % side or not rows or not columns:
            raise DataError(
                f"{drawing.height} × {drawing.width} is no size of its pictures",
                key="--size",
                way_out=f"Give multiples of {side}.",
            )
        prompts = self._prompts(context, (drawing.height, drawing.width))
        noisy = noise_of(drawing.seed, (rows * columns, config.latent_features)).to(self._exact)
        scheduler = _scheduler(config.timestep_shift)
        scheduler.set_timesteps(drawing.steps)
        for timestep in scheduler.timesteps:
            asked = [self._velocity(prompt, noisy, (rows, columns), float(timestep) / _TIMESTEPS) for prompt in prompts]
            velocity = guided(asked, float(timestep) / _TIMESTEPS, drawing, config.vae_config["z_channels"])
            noisy = scheduler.step(velocity, timestep, noisy, return_dict=False)[0]
        return self._vae.decode(unpatchified(noisy, rows, columns, config.latent_patch_size))

    def _prompts(self, context: PictureQuestion, size: tuple[int, int]) -> list[PromptStates]:
        pixels = [opened(picture, self._size) for picture in context.pictures]
        given = [self._vae.encode(each, None).to(self._exact) for each in pixels]
        blank = torch.zeros(3, *size, dtype=torch.uint8)
        task: Task = "draw"
        if context.pictures:
            task = "edit"
        prompts = []
        # In the order that `guided` takes them: whole, without words, without anything.
        for left in LEFT:
            row = self._turns.begin(task, context.system)
            seen = len(context.pictures)
            if left:
                seen = self._turns.left_out(row, left, seen)
            else:
                self._turns.question(row, context.pieces, is_read=True)
            self._turns.drawn(row, "", 0.0)
            states = self._model.read_states(**self._inputs(row, context.pictures[:seen]))
            told = read_states(row, [*pixels[:seen], blank], self._sizes)
            is_read = torch.tensor(row.reads, dtype=torch.bool, device=self._device)
            prompts.append(PromptStates(states[is_read], told["state_positions"], given[:seen]))
        return prompts

    def _inputs(self, row: TurnRow, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": torch.tensor([row.ids], device=self._device)}
        if pictures:
            inputs["token_kinds"] = torch.tensor([row.kinds], device=self._device)
            assert row.kinds.count(SEEN) == len(pictures) * self._sizes.seen_side**2
            inputs["pixel_values"] = seen_pixels(self._sizes, pictures).to(self._device, self._model.dtype)
        return inputs

    def _velocity(self, prompt: PromptStates, noisy: torch.Tensor, grid: tuple[int, int], time: float) -> torch.Tensor:
        """(M, p² · C) on the host."""
        side = self._model.config.latent_patch_size
        grids = [grid, *[(each.shape[1] // side, each.shape[2] // side) for each in prompt.given]]
        # (tokens, p² · C): latents of the given pictures first, the noisy ones last.
        tokens = torch.cat([*[patchified(each, side) for each in prompt.given], noisy]).to(self._device)
        times = torch.full((len(tokens),), time, dtype=tokens.dtype, device=self._device)
        positions, lengths = prompt.positions.to(self._device), [len(prompt.positions)]
        made: torch.Tensor = self._model.draw(prompt.states, positions, lengths, tokens, times, [grids])
        return made.to(noisy.dtype).cpu()


def guided(asked: list[torch.Tensor], time: float, drawing: Drawing, channels: int) -> torch.Tensor:
    """The velocity of three prompts together: as it is, without words, without anything.

    Args:
        asked: Of each (M, p² · channels), channels last.
        time: The noise level.
        drawing: The two scales.
        channels: Of a latent.
    """
    whole, without_words, nothing = asked
    changes = [without_words - nothing, whole - without_words]
    if time > _TAMED_ABOVE:
        tamed = []
        for each in changes:
            norms = each.unflatten(-1, (-1, channels)).norm(dim=-1, keepdim=True).clamp(min=1.0) ** _TAMING
            tamed.append((each.unflatten(-1, (-1, channels)) / norms).flatten(-2))
        changes = tamed
    return nothing + drawing.picture_guidance * changes[0] + drawing.text_guidance * changes[1]


def _scheduler(shift: float) -> Any:
    """As the released folder's `scheduler` says."""
    from diffusers import DPMSolverMultistepScheduler

    return DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        num_train_timesteps=_TIMESTEPS,
    )


def load_internvlu(folder: Path, preprocess: PreprocessParameters, device: torch.device) -> InternVLUSampler:
    """The model of a folder, in the type that its weights are stored in.

    Args:
        folder: As the converter of the released folder writes it, or as exported.
        preprocess: As of `InternVLUSampler`.
        device: Where it runs.

    Raises:
        ModelFolderError: Weights, configuration, tokenizer or VAE are missing or broken.
    """
    model, tokenizer, vae = load_parts(folder, _HEAD, device)
    return InternVLUSampler(model, tokenizer, vae, folder, preprocess)
