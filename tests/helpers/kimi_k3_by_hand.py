"""Kimi-K3 by its published formulas, written out in plain torch on weights under their released names. Nothing of the
package is used here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tests.helpers.decoder_logits import Weights
from tests.helpers.tiny_kimi_k3 import (
    BETA,
    BLOCK,
    CHOSEN,
    CONVOLVED,
    EXPERTS,
    GROUPS,
    HEADS,
    HEADS_SEE,
    KV_RANK,
    LATENT_LAYERS,
    LAYERS,
    LINEAR_BETA,
    LOWER,
    PLAIN,
    SCALED,
    SEEN_HEADS,
    SEEN_LAYERS,
    SHARED_KEY,
    STATE_HEAD,
    STATE_HEADS,
)

Grid = tuple[int, int]
TEXT = "language_model.model."


def linear(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows @ w[f"{name}.weight"].flatten(1).T


def rms_norm(w: Weights, name: str, rows: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]


# --- pictures ---------------------------------------------------------------------------------------------------------


def seen(w: Weights, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
    """(rows · columns, 3, side, side) of one picture → (tokens, hidden)."""
    rows, columns = grid
    hidden = linear(w, "vision_tower.patch_embed.proj", patches.flatten(1))
    table = w["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
    places = F.interpolate(table, size=(rows, columns), mode="bilinear")[0]
    hidden = hidden + places.permute(1, 2, 0).flatten(0, 1)
    width = SEEN_HEADS // HEADS_SEE
    turns = _turned(rows, columns, width)
    eps = torch.finfo(torch.float32).eps
    for block in (f"vision_tower.encoder.blocks.{number}." for number in range(SEEN_LAYERS)):
        mixed = linear(w, f"{block}wqkv", rms_norm(w, f"{block}norm0", hidden, eps))
        q, k, v = (each.split(width, dim=1) for each in mixed.split(SEEN_HEADS, dim=1))
        heads = []
        for own_q, own_k, own_v in zip(q, k, v, strict=True):
            scores = _turn(own_q, turns) @ _turn(own_k, turns).T / math.sqrt(width)
            heads.append(scores.softmax(dim=1) @ own_v)
        hidden = hidden + linear(w, f"{block}wo", torch.cat(heads, dim=1))
        inner = linear(w, f"{block}mlp.fc0", rms_norm(w, f"{block}norm1", hidden, eps))
        hidden = hidden + linear(w, f"{block}mlp.fc1", F.gelu(inner, approximate="tanh"))
    squares = rms_norm(w, "vision_tower.encoder.final_layernorm", hidden, eps).view(rows, columns, -1)
    found = []
    for y in range(0, rows, 2):
        for x in range(0, columns, 2):
            inner = linear(w, "mm_projector.proj.0", squares[y : y + 2, x : x + 2].flatten())
            found.append(linear(w, "mm_projector.proj.2", F.gelu(inner)))
    return rms_norm(w, "mm_projector.post_norm", torch.stack(found))


def _turned(rows: int, columns: int, width: int) -> torch.Tensor:
    """(patches, width / 2) complex numbers: each frequency turns one pair by the column and the next by the row."""
    speeds = 1 / 10000 ** (torch.arange(0, width, 4) / width)  # in fp32, as models of transformers have them
    found = []
    for y in range(rows):
        for x in range(columns):
            angles = torch.stack([x * speeds, y * speeds], dim=1).flatten()
            found.append(torch.complex(angles.cos().double(), angles.sin().double()))
    return torch.stack(found)


def _turn(rows: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(rows.unflatten(1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(1)


# --- text -------------------------------------------------------------------------------------------------------------


def with_state(w: Weights, layer: str, hidden: torch.Tensor) -> torch.Tensor:
    """Kimi delta attention, (L, hidden) → the same, token by token."""
    attention = f"{layer}self_attn."
    parts = {}
    for name in "qkv":
        before = torch.cat([hidden.new_zeros(CONVOLVED - 1, hidden.shape[1]), hidden])
        mixed, kernel = linear(w, f"{attention}{name}_proj", before), w[f"{attention}{name}_conv1d.weight"][:, 0]
        windows = torch.stack([mixed[t : t + CONVOLVED] for t in range(len(hidden))])  # (L, taps, channels)
        parts[name] = F.silu((windows * kernel.T).sum(1)).unflatten(1, (STATE_HEADS, STATE_HEAD))
    q, k = (parts[name] / (parts[name].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for name in "qk")
    raised = linear(w, f"{attention}f_b_proj", linear(w, f"{attention}f_a_proj", hidden)) + w[f"{attention}dt_bias"]
    rates = w[f"{attention}A_log"][:STATE_HEADS].exp()
    kept = (LOWER * (rates[:, None] * raised.unflatten(1, (STATE_HEADS, STATE_HEAD))).sigmoid()).exp()
    beta = linear(w, f"{attention}b_proj", hidden).sigmoid()
    gates = linear(w, f"{attention}g_proj", hidden).sigmoid().unflatten(1, (STATE_HEADS, STATE_HEAD))
    outputs = []
    for head in range(STATE_HEADS):
        state = hidden.new_zeros(STATE_HEAD, STATE_HEAD)
        said = []
        for t in range(len(hidden)):
            key = k[t, head][:, None]
            state = kept[t, head][:, None] * state
            state = state - beta[t, head] * key @ (key.T @ state) + beta[t, head] * key * parts["v"][t, head]
            said.append(state.T @ q[t, head] / math.sqrt(STATE_HEAD))
        outputs.append(rms_norm(w, f"{attention}o_norm", torch.stack(said)) * gates[:, head])
    return linear(w, f"{attention}o_proj", torch.cat(outputs, dim=1))


def latent(w: Weights, layer: str, hidden: torch.Tensor) -> torch.Tensor:
    """Latent attention without places, gated. (L, hidden) → the same."""
    attention = f"{layer}self_attn."
    narrow = rms_norm(w, f"{attention}q_a_layernorm", linear(w, f"{attention}q_a_proj", hidden), 1e-6)
    queries = linear(w, f"{attention}q_b_proj", narrow).split(PLAIN + SHARED_KEY, dim=1)
    low, shared = linear(w, f"{attention}kv_a_proj_with_mqa", hidden).split([KV_RANK, SHARED_KEY], dim=1)
    both = linear(w, f"{attention}kv_b_proj", rms_norm(w, f"{attention}kv_a_layernorm", low, 1e-6))
    places = torch.arange(len(hidden))
    found = []
    for query, pair in zip(queries, both.chunk(HEADS, dim=1), strict=True):
        key = torch.cat([pair[:, :PLAIN], shared], dim=1)
        scores = query @ key.T / math.sqrt(PLAIN + SHARED_KEY)
        scores = scores.masked_fill(places[:, None] < places, -math.inf)
        found.append(scores.softmax(dim=1) @ pair[:, PLAIN:])
    gated = torch.cat(found, dim=1) * linear(w, f"{attention}g_proj", hidden).sigmoid()
    return linear(w, f"{attention}o_proj", gated)


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return BETA * (gate / BETA).tanh() * gate.sigmoid() * LINEAR_BETA * (up / LINEAR_BETA).tanh()


def dense(w: Weights, name: str, rows: torch.Tensor, parts: Sequence[str]) -> torch.Tensor:
    gate, up, down = (f"{name}.{part}" for part in parts)
    return linear(w, down, situ(linear(w, gate, rows), linear(w, up, rows)))


def routed(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Each row through the experts that its scores choose, of the group whose two best are best; a bias takes part in
    the choice alone."""
    scores = linear(w, f"{name}.gate", rows).sigmoid()
    wanted = scores + w[f"{name}.gate.e_score_correction_bias"]
    narrow = linear(w, f"{name}.routed_expert_down_proj", rows)
    found = []
    for row, own, biased in zip(narrow, scores, wanted, strict=True):
        groups = biased.view(GROUPS, -1)
        best = int(groups.topk(2, dim=1).values.sum(1).argmax())
        size = EXPERTS // GROUPS
        experts = [best * size + int(number) for number in groups[best].topk(CHOSEN).indices]
        parts = [own[e] * dense(w, f"{name}.experts.{e}", row, ("w1", "w3", "w2")) for e in experts]
        found.append(SCALED * torch.stack(parts).sum(0) / own[experts].sum())
    normed = rms_norm(w, f"{name}.routed_expert_norm", torch.stack(found))
    wide = linear(w, f"{name}.routed_expert_up_proj", normed)
    return wide + dense(w, f"{name}.shared_experts", rows, ("gate_proj", "up_proj", "down_proj"))


def over_depth(w: Weights, name: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of what each token was, weighted by a softmax over depth."""
    scores = [linear(w, f"{name}_proj", rms_norm(w, f"{name}_norm", source)) for source in sources]
    shares = torch.cat(scores, dim=1).softmax(dim=1)
    return (torch.stack(list(sources), dim=1) * shares[..., None]).sum(1)


def text_hidden(w: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """(L, hidden) embeddings → what the last norm makes."""
    finished: list[torch.Tensor] = []
    total = hidden
    for number in range(LAYERS):
        layer = f"{TEXT}layers.{number}."
        shown = over_depth(w, f"{layer}self_attention_res", [*finished, total]) if finished else total
        if number % BLOCK == 0:
            finished.append(total)
            total = torch.zeros_like(total)
        attend = latent if number in LATENT_LAYERS else with_state
        total = total + attend(w, layer, rms_norm(w, f"{layer}input_layernorm", shown))
        shown = over_depth(w, f"{layer}mlp_res", [*finished, total])
        normed = rms_norm(w, f"{layer}post_attention_layernorm", shown)
        if number == 0:
            total = total + dense(w, f"{layer}mlp", normed, ("gate_proj", "up_proj", "down_proj"))
        else:
            total = total + routed(w, f"{layer}block_sparse_moe", normed)
    return rms_norm(w, f"{TEXT}norm", over_depth(w, f"{TEXT}output_attn_res", [*finished, total]))


def logits(w: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """(L, hidden) embeddings → (L, words)."""
    return linear(w, "language_model.lm_head", text_hidden(w, hidden))


def embedded(w: Weights, ids: torch.Tensor, token: int, features: torch.Tensor | None) -> torch.Tensor:
    """(L, hidden) of tokens, with features in the places of those that stand for pictures."""
    found = w[f"{TEXT}embed_tokens.weight"][ids].clone()
    if features is not None:
        found[ids == token] = features
    return found
