"""Wan in blocks of frames: with keys and values that are kept it computes what one pass over all frames does whose
attention is masked, block by block; a student is drawn as by such passes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.models.wan.causal import BlockPositions, CausalWan
from mindspeed_mm.fsdp.sampling.few_steps import StudentDrawing
from tests.helpers.tiny_generators import TEXT_TOKENS, TEXT_WIDTH, make_tiny_wan

FRAMES, BLOCK, SIDE = 6, 2, 4
TOKENS = (SIDE // 2) ** 2
"""Of a frame."""


class MaskedAttention:
    """Self-attention by its definition, with a mask: token i sees j where j's block is not a later one."""

    def __call__(self, attn: Any, x: Any, _text: Any = None, _mask: Any = None, rotary_emb: Any = None) -> Any:
        cos, sin = rotary_emb
        turn = torch.complex(cos[0, :, 0, 0::2], sin[0, :, 0, 1::2])[None, :, None]
        query, key = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x))
        query, key, value = (each.unflatten(2, (attn.heads, -1)) for each in (query, key, attn.to_v(x)))
        query, key = (
            torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
            for each in (query, key)
        )
        block = torch.arange(x.shape[1]) // (TOKENS * BLOCK)
        scores = torch.einsum("bihd,bjhd->bhij", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(block[:, None] < block[None, :], float("-inf"))
        mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), value).flatten(2)
        return attn.to_out[0](mixed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_wan(tmp_path_factory.mktemp("wan") / "model")


def wan(folder: Path) -> Any:
    model = diffusers_class("WanTransformer3DModel").from_pretrained(folder / "transformer").double()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    model.rope.double()
    return model


def masked_wan(folder: Path) -> Any:
    model = wan(folder)
    for block in model.blocks:
        block.attn1.processor = MaskedAttention()
    return model


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_one_pass(model: Any, latents: torch.Tensor, times: list[float], text: torch.Tensor) -> torch.Tensor:
    """v of all frames, of which each block has a time of its own (0..1000)."""
    of_tokens = torch.tensor(times, dtype=torch.float64).repeat_interleave(TOKENS * BLOCK)[: latents.shape[2] * TOKENS]
    found = model(latents, of_tokens.expand(len(latents), -1), text, return_dict=False)[0]
    assert isinstance(found, torch.Tensor)
    return found


def in_blocks(model: Any, latents: torch.Tensor, times: list[float], text: torch.Tensor) -> torch.Tensor:
    """The same by kept keys and values, a block after the other."""
    causal, found = CausalWan(model), []
    with torch.no_grad(), causal.opened():
        for number, time in enumerate(times):
            own = latents[:, :, number * BLOCK : (number + 1) * BLOCK]
            with causal.block(number * BLOCK, keeps=True):
                found.append(model(own, torch.full((len(own),), time).double(), text, return_dict=False)[0])
    return torch.cat(found, dim=2)


def test_kept_keys_and_values_are_a_mask(folder: Path) -> None:
    """Blocks at times of their own; a model that has drawn in blocks computes whole clips as before."""
    latents, text = normal(2, 2, 16, FRAMES, SIDE, SIDE), normal(3, 2, TEXT_TOKENS, TEXT_WIDTH)
    times, model = [0.0, 300.0, 950.0], wan(folder)
    before = model(latents, torch.tensor([500.0, 20.0]).double(), text, return_dict=False)[0]
    wanted = in_one_pass(masked_wan(folder), latents, times, text)
    assert float((in_blocks(model, latents, times, text) - wanted).detach().abs().max()) < 1e-11
    after = model(latents, torch.tensor([500.0, 20.0]).double(), text, return_dict=False)[0]
    assert torch.equal(before, after)


def test_what_is_kept_is_what_the_forecast_counts(folder: Path) -> None:
    model, adapter = wan(folder), find_adapter(folder)
    causal = CausalWan(model)
    with torch.no_grad(), causal.opened(), causal.block(0, keeps=True):
        model(normal(2, 3, 16, BLOCK, SIDE, SIDE), torch.zeros(3), normal(3, 3, TEXT_TOKENS, TEXT_WIDTH))
        kept = sum(each.numel() for layer in causal._kept for pair in layer for each in pair)
    assert kept == 3 * adapter.kept_of_blocks(BLOCK * TOKENS)


def test_a_block_that_comes_late_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a block does not see the one right before it; its frames stand at the clip's beginning."""
    latents, text, times = (
        normal(2, 1, 16, FRAMES, SIDE, SIDE),
        normal(3, 1, TEXT_TOKENS, TEXT_WIDTH),
        [0.0, 300.0, 950.0],
    )
    wanted = in_one_pass(masked_wan(folder), latents, times, text)
    real = CausalWan.block

    def late(self: Any, first: int, *, keeps: bool = False) -> Any:
        kept = self._kept
        self._kept = [each[:-1] for each in kept]
        return real(self, first, keeps=keeps)

    def unplaced(self: Any, _first: int, *, keeps: bool = False) -> Any:
        return real(self, 0, keeps=keeps)

    for fault in (late, unplaced):
        monkeypatch.setattr(CausalWan, "block", fault)
        assert float((in_blocks(wan(folder), latents, times, text) - wanted).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("context_noise", [0, 100])
def test_a_student_draws_as_by_whole_passes(folder: Path, context_noise: int) -> None:
    """Three blocks, each to an end of its own, and each seen by later ones clean or with some noise; gradients are
    those of each block's last step, with what it sees held fixed."""
    few = FewSteps((1000, 500), 3.0, 3.5, BLOCK, context_noise)
    levels, exits = (1.0, 0.75), (1, 0, 1)
    text = normal(3, 2, TEXT_TOKENS, TEXT_WIDTH)
    batch = {
        "prompt_embeds": text,
        "_start": normal(4, 2, 16, FRAMES, SIDE, SIDE),
        "_renoise": normal(5, 2, 1, 16, FRAMES, SIDE, SIDE),
        "_context": normal(6, 2, 16, FRAMES, SIDE, SIDE),
    }
    model, masked = wan(folder), masked_wan(folder)
    draw = StudentDrawing(Denoiser(find_adapter(folder), torch.float64, 3.5), few)
    draw(model, {**batch, "prompt_embeds": 2 * text}, exits)  # nothing of what was drawn before is left
    drawn = draw(model, batch, exits)
    seen, pieces = [], []
    for number, exit_ in enumerate(exits):
        frames = slice(number * BLOCK, (number + 1) * BLOCK)
        x = batch["_start"][:, :, frames]
        for index, level in enumerate(levels[: exit_ + 1]):
            whole = torch.cat([*seen, x], dim=2)
            times = [float(context_noise)] * number + [1000 * level]
            with torch.set_grad_enabled(index == exit_):
                v = in_one_pass(masked, whole, times, text)[:, :, frames]
                x0 = x - level * v
            if index < exit_:
                x = (1 - levels[index + 1]) * x0 + levels[index + 1] * batch["_renoise"][:, index, :, frames]
        pieces.append(x0)
        share = context_noise / 1000
        seen.append((1 - share) * x0.detach() + share * batch["_context"][:, :, frames])
    wanted = torch.cat(pieces, dim=2)
    assert float((drawn - wanted).detach().abs().max()) < 1e-11
    weights = normal(7, *wanted.shape)
    name = "blocks.1.attn2.to_k.weight"  # no gradient leads to it but through a block's own step
    own = torch.autograd.grad((drawn * weights).sum(), dict(model.named_parameters())[name])[0]
    assert own.abs().max() > 0
    other = torch.autograd.grad((wanted * weights).sum(), dict(masked.named_parameters())[name])[0]
    assert float((own - other).abs().max()) < 1e-10


def gap_of_prediction(folder: Path, *, recomputes: bool = False) -> float:
    """Largest difference of x₀, and of the gradients of keys that later blocks see, from those of one masked pass."""
    few, times = FewSteps((1000, 500), 3.0, 3.5, BLOCK), [950.0, 0.0, 300.0]
    latents, text = normal(4, 2, 16, FRAMES, SIDE, SIDE), normal(3, 2, TEXT_TOKENS, TEXT_WIDTH)
    model, masked = wan(folder), masked_wan(folder)
    if recomputes:
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False))
        model.train()
    draw = StudentDrawing(Denoiser(find_adapter(folder), torch.float64, 3.5), few)
    time = torch.tensor(times, dtype=torch.float64) / 1000
    found = draw.predicted(model, {"prompt_embeds": text}, latents, time.expand(2, -1))
    level = time.repeat_interleave(BLOCK).view(1, 1, -1, 1, 1)
    wanted = latents - level * in_one_pass(masked, latents, times, text)
    weights, worst = normal(7, *wanted.shape), float((found - wanted).detach().abs().max())
    for name in ("blocks.0.attn1.to_k.weight", "blocks.1.attn1.to_v.weight", "patch_embedding.weight"):
        own = torch.autograd.grad((found * weights).sum(), dict(model.named_parameters())[name], retain_graph=True)[0]
        other = torch.autograd.grad((wanted * weights).sum(), dict(masked.named_parameters())[name], retain_graph=True)
        worst = max(worst, float((own - other[0]).abs().max()))
    return worst


@pytest.mark.parametrize("recomputes", [False, True])
def test_blocks_at_levels_of_their_own_are_one_masked_pass(folder: Path, recomputes: bool) -> None:
    """With the gradients that lead through what later blocks see, also where layers are computed again."""
    assert gap_of_prediction(folder, recomputes=recomputes) < 1e-10


def test_gradients_that_do_not_lead_to_earlier_blocks_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is kept of a block is held fixed."""
    real = BlockPositions.before

    def fixed(self: Any, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        self._seen[layer] = tuple((key.detach(), value.detach()) for key, value in self._seen[layer])
        return real(self, layer, keys, values)

    monkeypatch.setattr(BlockPositions, "before", fixed)
    assert gap_of_prediction(folder) > 1e-3
