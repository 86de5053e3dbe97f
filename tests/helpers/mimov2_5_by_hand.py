"""MiMo-V2.5 by its published formulas, written out in plain torch on weights under their released names. Nothing of the
package is used here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tests.helpers.decoder_logits import Weights
from tests.helpers.tiny_mimov2_5 import (
    CHOSEN,
    CODEBOOKS,
    GROUP,
    HEAD,
    HEADS,
    KINDS,
    LOCAL,
    LOCAL_HEADS,
    LOCAL_LAYERS,
    REACH,
    ROUTED,
    SEE,
    SEE_ALL,
    SEE_GROUPS,
    SEE_HEAD,
    SEE_HEADS,
    SEE_KINDS,
    TURNED,
    VALUE,
    WINDOW,
    rows_of_attention,
)

Grid = tuple[int, int, int]


def linear(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    product = rows @ w[f"{name}.weight"].T
    return product + w[f"{name}.bias"] if f"{name}.bias" in w else product


def rms_norm(w: Weights, name: str, rows: torch.Tensor, eps: float) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]


def gated(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    inner = F.silu(linear(w, f"{name}.gate_proj", rows)) * linear(w, f"{name}.up_proj", rows)
    return linear(w, f"{name}.down_proj", inner)


def turn(rows: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each feature of the first half with its own of the other half as one complex number, turned. (L, width) by
    (L, width / 2)."""
    first, second = rows.chunk(2, dim=1)
    turned = torch.complex(first, second) * torch.complex(angles.cos().double(), angles.sin().double())
    return torch.cat([turned.real, turned.imag], dim=1)


# --- pictures ---------------------------------------------------------------------------------------------------------


def seen(w: Weights, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
    """(P, numbers) of one picture or clip → (tokens, hidden), frame by frame."""
    _, height, width = grid
    frames = patches.split(height * width)
    return torch.cat([_frame(w, frame, height, width) for frame in frames])


def _frame(w: Weights, patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
    kernel = w["visual.patch_embed.proj.weight"].flatten(1)
    places, columns = _squares(height, width)
    hidden = patches @ kernel.T
    by_column = [4 * square + part for square in columns for part in range(4)]
    for number, kind in enumerate(SEE_KINDS):
        order = torch.tensor(by_column if kind == 1 else range(len(patches)))
        hidden = _see_block(w, number, hidden[order], places[order])[order.argsort()]
    normed = hidden - hidden.mean(dim=1, keepdim=True)
    normed = normed / (normed.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * w["visual.merger.ln_q.weight"]
    inner = F.gelu(normed.reshape(-1, 4 * SEE) @ w["visual.merger.mlp.0.weight"].T)
    return inner @ w["visual.merger.mlp.2.weight"].T


def _squares(height: int, width: int) -> tuple[torch.Tensor, list[int]]:
    """(P, 2) row and column of each patch, square of 2 × 2 by square along rows; and the squares along columns."""
    across, down = width // 2, height // 2
    places = [
        (2 * row + y, 2 * column + x) for row in range(down) for column in range(across) for y in (0, 1) for x in (0, 1)
    ]
    return torch.tensor(places), [row * across + column for column in range(across) for row in range(down)]


def _see_block(w: Weights, number: int, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    block = f"visual.blocks.{number}"
    mixed = linear(w, f"{block}.attn.qkv", rms_norm(w, f"{block}.norm1", hidden, 1e-6))
    speeds = 1 / 10000 ** (torch.arange(0, SEE_HEAD // 2, 2) / (SEE_HEAD // 2))
    angles = torch.cat([places[:, :1] * speeds, places[:, 1:] * speeds], dim=1)
    heads = mixed.split(SEE_HEAD, dim=1)
    queries, rest = heads[:SEE_HEADS], heads[SEE_HEADS:]
    apart = (torch.arange(len(hidden))[:, None] - torch.arange(len(hidden))).abs()
    found = []
    for head in range(SEE_HEADS):
        group = head * SEE_GROUPS // SEE_HEADS
        q, k = turn(queries[head], angles), turn(rest[group], angles)
        scores = q @ k.T / math.sqrt(SEE_HEAD)
        if number not in SEE_ALL:
            scores[:, 0] += w[f"{block}.attn.sinks"][head]
            scores = scores.masked_fill(apart > REACH, -math.inf)
        found.append(scores.softmax(dim=1) @ rest[SEE_GROUPS + group])
    hidden = hidden + linear(w, f"{block}.attn.proj", torch.cat(found, dim=1))
    return hidden + gated(w, f"{block}.mlp", rms_norm(w, f"{block}.norm2", hidden, 1e-6))


# --- sound ------------------------------------------------------------------------------------------------------------


def heard(w: Weights, codes: torch.Tensor) -> torch.Tensor:
    """(frames, codebooks) → (groups, hidden)."""
    tables = [w[f"speech_embeddings.{number}.weight"] for number in range(CODEBOOKS)]
    frames = torch.stack([table[codes[:, number]] for number, table in enumerate(tables)]).sum(0)
    return torch.cat([_group(w, group) for group in frames.split(GROUP)])


def _group(w: Weights, hidden: torch.Tensor) -> torch.Tensor:
    tower = "audio_encoder.input_local_transformer"
    width = LOCAL // LOCAL_HEADS
    angles = torch.arange(GROUP)[:, None] * (1 / 640000 ** (torch.arange(0, width, 2) / width))
    for layer in (f"{tower}.layers.{number}" for number in range(LOCAL_LAYERS)):
        normed = rms_norm(w, f"{layer}.input_layernorm", hidden, 1e-6)
        q, k, v = (linear(w, f"{layer}.self_attn.{name}_proj", normed).split(width, dim=1) for name in "qkv")
        heads = []
        for own_q, own_k, own_v in zip(q, k, v, strict=True):
            scores = turn(own_q, angles) @ turn(own_k, angles).T / math.sqrt(width)
            heads.append(scores.softmax(dim=1) @ own_v)
        hidden = hidden + torch.cat(heads, dim=1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        hidden = hidden + gated(w, f"{layer}.mlp", rms_norm(w, f"{layer}.post_attention_layernorm", hidden, 1e-6))
    joined = rms_norm(w, f"{tower}.norm", hidden, 1e-6).reshape(1, -1)
    inner = F.gelu(joined @ w["audio_encoder.projection.mlp.0.weight"].T)
    return inner @ w["audio_encoder.projection.mlp.2.weight"].T


# --- text -------------------------------------------------------------------------------------------------------------


def attended(w: Weights, layer: str, hidden: torch.Tensor, windowed: bool) -> torch.Tensor:
    """Of the text model: normed rows (L, hidden) → the same."""
    q, k, v = linear(w, f"{layer}.self_attn.qkv_proj", hidden).split(rows_of_attention(windowed), dim=1)
    queries, keys, values = q.split(HEAD, dim=1), k.split(HEAD, dim=1), (0.707 * v).split(VALUE, dim=1)
    theta = 10000.0 if windowed else 10000000.0
    places = torch.arange(len(hidden))
    angles = places[:, None] * (1 / theta ** (torch.arange(0, TURNED, 2) / TURNED))
    before = places[:, None] - places
    hidden_from = (before < 0) | (before >= WINDOW) if windowed else before < 0
    found = []
    for head in range(HEADS):
        group = head * len(keys) // HEADS
        own_q, own_k = (
            torch.cat([turn(each[:, :TURNED], angles), each[:, TURNED:]], dim=1)
            for each in (queries[head], keys[group])
        )
        scores = (own_q @ own_k.T / math.sqrt(HEAD)).masked_fill(hidden_from, -math.inf)
        if windowed:  # a further key whose value is nothing
            sink = w[f"{layer}.self_attn.attention_sink_bias"][head].expand(len(hidden), 1)
            scores = torch.cat([scores, sink], dim=1)
        found.append(scores.softmax(dim=1)[:, : len(hidden)] @ values[group])
    return torch.cat(found, dim=1) @ w[f"{layer}.self_attn.o_proj.weight"].T


def routed(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Each row through the experts that its scores choose; a bias takes part in the choice alone."""
    scores = (rows @ w[f"{name}.gate.weight"].T).sigmoid()
    chosen = (scores + w[f"{name}.gate.e_score_correction_bias"]).topk(CHOSEN, dim=1).indices
    found = []
    for row, own, experts in zip(rows, scores, chosen.tolist(), strict=True):
        parts = [own[expert] * gated(w, f"{name}.experts.{expert}", row[None])[0] for expert in experts]
        found.append(torch.stack(parts).sum(0) / own[experts].sum())
    return torch.stack(found)


def text_hidden(w: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """(L, hidden) embeddings → what the last norm makes."""
    for number, (windowed, is_routed) in enumerate(zip(KINDS, ROUTED, strict=True)):
        layer = f"model.layers.{number}"
        hidden = hidden + attended(w, layer, rms_norm(w, f"{layer}.input_layernorm", hidden, 1e-5), bool(windowed))
        normed = rms_norm(w, f"{layer}.post_attention_layernorm", hidden, 1e-5)
        through: Callable[[Weights, str, torch.Tensor], torch.Tensor] = routed if is_routed else gated
        hidden = hidden + through(w, f"{layer}.mlp", normed)
    return rms_norm(w, "model.norm", hidden, 1e-5)


def further_hidden(w: Weights, depth: int, hidden: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
    """(L, hidden) of a depth, from what the depth before made and the embeddings of the tokens ahead."""
    layer = f"model.mtp.layers.{depth - 1}"
    both = [rms_norm(w, f"{layer}.enorm", ahead, 1e-5), rms_norm(w, f"{layer}.hnorm", hidden, 1e-5)]
    hidden = torch.cat(both, dim=1) @ w[f"{layer}.eh_proj.weight"].T
    hidden = hidden + attended(w, layer, rms_norm(w, f"{layer}.input_layernorm", hidden, 1e-5), windowed=True)
    hidden = hidden + gated(w, f"{layer}.mlp", rms_norm(w, f"{layer}.pre_mlp_layernorm", hidden, 1e-5))
    return rms_norm(w, f"{layer}.final_layernorm", hidden, 1e-5)


def losses(w: Weights, embeddings: torch.Tensor, labels: torch.Tensor, depths: int) -> list[tuple[torch.Tensor, int]]:
    """Of the next token and of each depth: the sum over labels, and how many there are. (L, hidden), (L,)."""
    hidden, found = text_hidden(w, embeddings), []
    for depth in range(depths + 1):
        if depth:
            ahead = torch.cat([embeddings[depth:], torch.zeros_like(embeddings[:depth])])
            hidden = further_hidden(w, depth, hidden, ahead)
        logits, targets = hidden @ w["lm_head.weight"].T, labels[depth + 1 :]
        total = F.cross_entropy(logits[: len(targets)], targets, ignore_index=-100, reduction="sum")
        found.append((total, int((targets != -100).sum())))
    return found


def embedded(w: Weights, ids: torch.Tensor, media: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """(L, hidden) of tokens, with features in the places of those that stand for media."""
    found = w["model.embed_tokens.weight"][ids].clone()
    for token, features in media:
        found[ids == token] = features
    return found
