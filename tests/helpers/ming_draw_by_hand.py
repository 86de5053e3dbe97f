"""What draws in Ming-Lite-Omni by the formulas, in plain torch and fp64, from weights under their released names: what
it is told of a caption, and its transformer (arXiv:2506.09344, arXiv:2403.03206). One sample at a time."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.helpers import ming_by_hand as understands
from tests.helpers.ming_by_hand import Weights, attended, linear, rms_norm, swiglu, turned
from tests.helpers.tiny_ming import HIDDEN
from tests.helpers.tiny_ming import LAYERS as LANGUAGE_LAYERS
from tests.helpers.tiny_ming_draw import DUAL, FLOORS, HEAD_DIM, LAYERS, PATCH, PLACES, QUERY_HEADS, SIDES, WHOLE, WIDTH

Faults = frozenset[str]
NONE: Faults = frozenset()


def doubles(file: Path) -> Weights:
    return {name: each.double() for name, each in load_file(file).items()}


# --- what is told -----------------------------------------------------------------------------------------------------


def condition(
    release: Path,
    ids: list[int],
    patch: int,
    picture: tuple[torch.Tensor, tuple[int, int, int]] | None = None,
    faults: Faults = NONE,
) -> torch.Tensor:
    """(Q, H) of the tokens of a caption, in which those of a picture are patch tokens.

    Args:
        release: The released folder.
        ids: Tokens, up to where the answer begins.
        patch: The token that stands for a part of a picture.
        picture: Its patches, and its grid.
        faults: What is done wrong: `causal`, `long`, `text`, `square`, `near`.
    """
    w, own = doubles(release / "model.safetensors"), doubles(release / "mlp/model.safetensors")
    kinds, features, grids = [understands.IMAGE if each == patch else understands.TEXT for each in ids], [], []
    if picture is not None:
        features.append(understands.seen(w, *picture))
        grids.append(picture[1])
    tokens = list(ids)
    for side in SIDES:
        tokens += [patch + 1, *[patch] * side**2, patch + 2]
        kinds += [0, *[0 if "text" in faults else understands.IMAGE] * side**2, 0]
        grids.append((1, 2 * side, 2 * side) if "square" in faults else (1, 2, 2 * side**2))
        features.append(own[f"query_tokens_dict.{side}x{side}"])
    embeddings = w["model.model.word_embeddings.weight"][tokens]
    embeddings[torch.tensor(tokens) == patch] = torch.cat(features)
    where = [understands.IMAGE if each == patch else 0 for each in tokens]
    places = understands.positions(where, {understands.IMAGE: grids})
    w["model.lm_head.weight"] = torch.eye(HIDDEN).double()  # states instead of scores
    states = understands.logits(w, LANGUAGE_LAYERS, embeddings, kinds, places, preview=False)
    end = len(states) - 1 - (SIDES[-1] ** 2 + 2 if "near" in faults else 0)
    rows = linear(own, "proj_in", states[end - SIDES[-1 - ("near" in faults)] ** 2 : end])
    made = linear(own, "proj_out", connected(doubles(release / "connector/model.safetensors"), rows, faults))
    return made if "long" in faults else made / made.norm(dim=1, keepdim=True)


def connected(w: Weights, rows: torch.Tensor, faults: Faults) -> torch.Tensor:
    """Qwen2 whose tokens all see one another."""
    head = WIDTH // QUERY_HEADS
    speeds = 1.0 / 10000.0 ** (torch.arange(0, head, 2, dtype=torch.float) / head)
    angles = torch.arange(len(rows), dtype=torch.float)[:, None] * speeds
    sees = torch.ones(len(rows), len(rows), dtype=torch.bool)
    if "causal" in faults:
        sees = sees.tril()
    for number in range(FLOORS):
        layer = f"model.layers.{number}"
        normed = rms_norm(w, f"{layer}.input_layernorm", rows, 1e-6)
        q, k, v = (linear(w, f"{layer}.self_attn.{part}_proj", normed) for part in "qkv")
        heads = [attended(turned(own, angles), turned(k, angles), v, sees) for own in q.split(head, dim=1)]
        rows = rows + linear(w, f"{layer}.self_attn.o_proj", torch.cat(heads, dim=1))
        rows = rows + swiglu(w, f"{layer}.mlp", rms_norm(w, f"{layer}.post_attention_layernorm", rows, 1e-6))
    return rms_norm(w, "model.norm", rows, 1e-6)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def predicted(
    w: Weights, x: torch.Tensor, time: float, rows: torch.Tensor, source: torch.Tensor | None = None
) -> torch.Tensor:
    """(C, h, w): noise minus latents.

    Args:
        w: Of `transformer`, and `mlp.*` of `mlp`.
        x: (C, h, w) with noise.
        time: 0 … 1000.
        rows: (Q, H) condition.
        source: (C, h, w) of the picture that is edited.
    """
    inner = normed(linear(w, "mlp.fc1", rows), w, "mlp.layer_norm1").relu()
    rows = normed(linear(w, "mlp.fc2", inner), w, "mlp.layer_norm2")
    whole = rows.mean(dim=0).view(WHOLE, -1).mean(dim=1)
    speeds = torch.exp(-math.log(10000.0) * torch.arange(128).float() / 128)
    angles = torch.tensor(time, dtype=torch.float) * speeds  # fp32 in every model
    waves = torch.cat([angles.cos(), angles.sin()]).double()
    told = embedded(w, "timestep_embedder", waves) + embedded(w, "text_embedder", whole)
    told = F.silu(told)
    text, picture = linear(w, "context_embedder", rows), tokens_of(w, "pos_embed", x)
    count = len(picture)
    for number in range(2):
        picture = alone(w, f"noise_refiner.{number}", picture, told)
    if source is not None:
        seen = tokens_of(w, "ref_pos_embed", source)
        for number in range(2):
            seen = alone(w, f"ref_image_refiner.{number}", seen, told)
        picture = torch.cat([picture, seen])
    for number in range(LAYERS):
        picture, text = together(w, number, picture, text, told)
    scale, shift = linear(w, "norm_out.linear", told).chunk(2)
    made = linear(w, "proj_out", normed(picture[:count]) * (1 + scale) + shift)
    high, wide = x.shape[1] // PATCH, x.shape[2] // PATCH
    result = torch.empty_like(x)
    for place, squares in enumerate(made.view(count, PATCH, PATCH, -1)):
        row, column = PATCH * (place // wide), PATCH * (place % wide)
        assert row < PATCH * high
        result[:, row : row + PATCH, column : column + PATCH] = squares.permute(2, 0, 1)
    return result


def normed(rows: torch.Tensor, w: Weights | None = None, name: str = "") -> torch.Tensor:
    eps = 1e-5 if w is not None else 1e-6
    centred = rows - rows.mean(dim=-1, keepdim=True)
    even = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return even if w is None else even * w[f"{name}.weight"] + w[f"{name}.bias"]


def embedded(w: Weights, name: str, row: torch.Tensor) -> torch.Tensor:
    name = f"time_text_embed.{name}"
    return linear(w, f"{name}.linear_2", F.silu(linear(w, f"{name}.linear_1", row)))


def tokens_of(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Squares of latents, with the places of the middle of the table."""
    high, wide = x.shape[1] // PATCH, x.shape[2] // PATCH
    places = w[f"{name}.pos_embed"].view(PLACES, PLACES, -1)
    kernel = w[f"{name}.proj.weight"].flatten(1)
    found = []
    for row in range(high):
        for column in range(wide):
            square = x[:, PATCH * row : PATCH * (row + 1), PATCH * column : PATCH * (column + 1)]
            place = places[(PLACES - high) // 2 + row, (PLACES - wide) // 2 + column]
            found.append(kernel @ square.flatten() + w[f"{name}.proj.bias"] + place)
    return torch.stack(found)


def feed(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    return linear(w, f"{name}.net.2", F.gelu(linear(w, f"{name}.net.0.proj", rows), approximate="tanh"))


def heads_of(w: Weights, name: str, parts: tuple[str, ...], norms: tuple[str, ...], rows: torch.Tensor) -> list:  # type: ignore[type-arg]
    """(heads, tokens, width) of queries, keys and values."""
    made = []
    for part, norm in zip(parts, (*norms, "", ""), strict=False):
        heads = linear(w, f"{name}.{part}", rows).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
        made.append(rms_norm(w, f"{name}.{norm}", heads, 1e-6) if norm else heads)
    return made


def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)).softmax(dim=-1)
    return (scores @ v).transpose(0, 1).flatten(1)


OWN = ("to_q", "to_k", "to_v")
NORMS = ("norm_q", "norm_k", "")


def by_itself(w: Weights, name: str, rows: torch.Tensor, norms: tuple[str, ...]) -> torch.Tensor:
    return linear(w, f"{name}.to_out.0", mixed(*heads_of(w, name, OWN, norms, rows)))


def alone(w: Weights, name: str, rows: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
    """A block that goes over one picture."""
    shift, scale, gate, shift_2, scale_2, gate_2 = linear(w, f"{name}.norm1.linear", told).chunk(6)
    rows = rows + gate * by_itself(w, f"{name}.attn", normed(rows) * (1 + scale) + shift, ("", "", ""))
    return rows + gate_2 * feed(w, f"{name}.ff", normed(rows) * (1 + scale_2) + shift_2)


def together(
    w: Weights, number: int, picture: torch.Tensor, text: torch.Tensor, told: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block in which pictures and the condition see one another."""
    name, is_last = f"transformer_blocks.{number}", number == LAYERS - 1
    parts = linear(w, f"{name}.norm1.linear", told).chunk(9 if number in DUAL else 6)
    shift, scale, gate, shift_2, scale_2, gate_2 = parts[:6]
    of_text = linear(w, f"{name}.norm1_context.linear", told).chunk(2 if is_last else 6)
    own = normed(picture) * (1 + scale) + shift
    text_scale, text_shift = of_text if is_last else (of_text[1], of_text[0])
    texts = normed(text) * (1 + text_scale) + text_shift
    attention = f"{name}.attn"
    mine = heads_of(w, attention, OWN, NORMS, own)
    theirs = heads_of(
        w, attention, ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k", ""), texts
    )
    made = mixed(*(torch.cat(pair, dim=1) for pair in zip(mine, theirs, strict=True)))
    count = len(picture)
    result = picture + gate * linear(w, f"{attention}.to_out.0", made[:count])
    if number in DUAL:
        again = normed(picture) * (1 + parts[7]) + parts[6]
        result = result + parts[8] * by_itself(w, f"{name}.attn2", again, NORMS)
    result = result + gate_2 * feed(w, f"{name}.ff", normed(result) * (1 + scale_2) + shift_2)
    if is_last:
        return result, text
    text = text + of_text[2] * linear(w, f"{attention}.to_add_out", made[count:])
    return result, text + of_text[5] * feed(w, f"{name}.ff_context", normed(text) * (1 + of_text[4]) + of_text[3])


def transformer_weights(release: Path) -> Weights:
    """Those that train: of `transformer`, and the MLP."""
    own = doubles(release / "mlp/model.safetensors")
    mlp = {name: each for name, each in own.items() if name.startswith("mlp.")}
    return doubles(release / "transformer/diffusion_pytorch_model.safetensors") | mlp
