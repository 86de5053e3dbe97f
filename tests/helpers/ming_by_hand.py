"""Ming-Lite-Omni by the formulas, token by token in plain torch and fp64, from weights under their released names
(arXiv:2506.09344; the tower's arXiv:2502.13923, the encoders of sounds' arXiv:2212.04356 and arXiv:2006.01712)."""

from __future__ import annotations

import math
from itertools import product

import torch
import torch.nn.functional as F

from tests.helpers.tiny_ming import BLOCKS, CHOSEN, EXPERTS, HEAD_DIM, HEADS, HEADS_HEAR, HEADS_SEE, HEARD, WIDTH

Weights = dict[str, torch.Tensor]
Places = list[tuple[int, int, int]]
TEXT, IMAGE, VIDEO, AUDIO = range(4)
GATES = {TEXT: "gate", IMAGE: "image_gate", VIDEO: "image_gate", AUDIO: "audio_gate"}


def linear(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    made = rows @ w[f"{name}.weight"].T
    return made + w[f"{name}.bias"] if f"{name}.bias" in w else made


def rms_norm(w: Weights, name: str, rows: torch.Tensor, eps: float) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]


def layer_norm(w: Weights, name: str, rows: torch.Tensor, eps: float) -> torch.Tensor:
    centred = rows - rows.mean(dim=-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def swiglu(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    gate = linear(w, f"{name}.gate_proj", rows)
    return linear(w, f"{name}.down_proj", gate * gate.sigmoid() * linear(w, f"{name}.up_proj", rows))


def turned(rows: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each feature of the first half with its own of the second, turned by an angle that is fp32 in every model."""
    first, second = rows.chunk(2, dim=-1)
    cos, sin = angles.cos().double(), angles.sin().double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    scores = q @ k.T / math.sqrt(q.shape[1])
    return scores.masked_fill(~sees, -torch.inf).softmax(dim=1) @ v


# --- what is seen -----------------------------------------------------------------------------------------------------


def places_of_patches(time: int, rows: int, columns: int) -> Places:
    """As processors lay them: squares of 2 × 2 row by row, and the patches of a square row by row."""
    squares = product(range(time), range(rows // 2), range(columns // 2), range(2), range(2))
    return [(t, 2 * r + i, 2 * c + j) for t, r, c, i, j in squares]


def seen(w: Weights, patches: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """The tokens of one picture or video, of length 1."""
    places = places_of_patches(*grid)
    frames = torch.tensor([t for t, _, _ in places])
    windows = torch.tensor([(t * 100 + r // 4) * 100 + c // 4 for t, r, c in places])
    width = WIDTH // HEADS_SEE
    speeds = 1.0 / 10000.0 ** (torch.arange(0, width // 2, 2, dtype=torch.float) / (width // 2))
    angles = torch.stack([torch.cat([r * speeds, c * speeds]) for _, r, c in places])
    hidden = patches @ w["vision.patch_embed.proj.weight"].flatten(1).T
    for number in range(BLOCKS):
        block = f"vision.blocks.{number}"
        where = frames if number == 1 else windows
        q, k, v = linear(w, f"{block}.attn.qkv", rms_norm(w, f"{block}.norm1", hidden, 1e-6)).split(WIDTH, dim=1)
        heads = []
        for part in torch.arange(WIDTH).split(width):
            own_q, own_k = turned(q[:, part], angles), turned(k[:, part], angles)
            heads.append(attended(own_q, own_k, v[:, part], where[:, None] == where))
        hidden = hidden + linear(w, f"{block}.attn.proj", torch.cat(heads, dim=1))
        hidden = hidden + swiglu(w, f"{block}.mlp", rms_norm(w, f"{block}.norm2", hidden, 1e-6))
    squares = rms_norm(w, "vision.merger.ln_q", hidden, 1e-6).view(-1, 4 * WIDTH)
    made = linear(w, "vision.merger.mlp.2", F.gelu(linear(w, "vision.merger.mlp.0", squares)))
    made = linear(w, "linear_proj.2", F.gelu(linear(w, "linear_proj.0", made)))
    return made / made.norm(dim=1, keepdim=True)


# --- what is heard ----------------------------------------------------------------------------------------------------


def heard(w: Weights, frames: torch.Tensor, *, preview: bool) -> torch.Tensor:
    """The tokens of one sound, of length 1."""
    encoded = by_sanm(w, frames) if preview else by_whisper(w, frames)
    kernel, stride = (1, 1) if preview else (3, 2)
    taken = F.conv1d(
        encoded.T, w["linear_proj_audio.0.weight"], w["linear_proj_audio.0.bias"], stride=stride, padding=kernel // 2
    )
    made = linear(w, "linear_proj_audio.3", F.gelu(taken.T))
    return made / made.norm(dim=1, keepdim=True)


def by_whisper(w: Weights, frames: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(F.conv1d(frames.T, w["audio.conv1.weight"], w["audio.conv1.bias"], padding=1))
    hidden = F.gelu(F.conv1d(hidden, w["audio.conv2.weight"], w["audio.conv2.bias"], stride=2, padding=1)).T
    hidden = hidden + w["audio.positional_embedding"][: len(hidden)]
    for block in ("audio.blocks.0", "audio.blocks.1"):
        normed = layer_norm(w, f"{block}.attn_ln", hidden, 1e-5)
        q, k, v = (linear(w, f"{block}.attn.{name}", normed) for name in ("query", "key", "value"))
        hidden = hidden + linear(w, f"{block}.attn.out", heads_of(q, k, v))
        inner = linear(w, f"{block}.mlp.0", layer_norm(w, f"{block}.mlp_ln", hidden, 1e-5))
        hidden = hidden + linear(w, f"{block}.mlp.2", F.gelu(inner))
    return layer_norm(w, "audio.ln_post", hidden, 1e-5)


def by_sanm(w: Weights, frames: torch.Tensor) -> torch.Tensor:
    half = frames.shape[1] // 2
    speeds = torch.exp(torch.arange(half).float() * (-math.log(10000.0) / (half - 1)))
    angles = torch.stack([(number + 1) * speeds for number in range(len(frames))])
    hidden = frames * math.sqrt(HEARD) + torch.cat([angles.sin(), angles.cos()], dim=1).double()
    for number, layer in enumerate(("audio.encoders0.0", "audio.encoders.0", "audio.encoders.1")):
        normed = layer_norm(w, f"{layer}.norm1", hidden, 1e-12)
        q, k, v = linear(w, f"{layer}.self_attn.linear_q_k_v", normed).split(HEARD, dim=1)
        memory = w[f"{layer}.self_attn.fsmn_block.weight"]
        made = linear(w, f"{layer}.self_attn.linear_out", heads_of(q, k, v))
        made = made + v + F.conv1d(v.T, memory, padding=memory.shape[2] // 2, groups=HEARD).T
        hidden = made if number == 0 else hidden + made
        inner = linear(w, f"{layer}.feed_forward.w_1", layer_norm(w, f"{layer}.norm2", hidden, 1e-12))
        hidden = hidden + linear(w, f"{layer}.feed_forward.w_2", inner.relu())
    return layer_norm(w, "audio.after_norm", hidden, 1e-12)


def heads_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    sees = torch.ones(len(q), len(q), dtype=torch.bool)
    parts = torch.arange(HEARD).split(HEARD // HEADS_HEAR)
    return torch.cat([attended(q[:, part], k[:, part], v[:, part], sees) for part in parts], dim=1)


# --- what is written --------------------------------------------------------------------------------------------------


def positions(kinds: list[int], grids: dict[int, list[tuple[int, int, int]]]) -> Places:
    """Time, height and width of every token; `grids` are those of pictures and of videos, in patches."""
    found: Places = []
    waiting = {kind: list(of_kind) for kind, of_kind in grids.items()}
    start = 0
    while len(found) < len(kinds):
        grid = waiting[kinds[len(found)]].pop(0) if kinds[len(found)] in (IMAGE, VIDEO) else None
        if grid is None:
            found.append((start, start, start))
            start += 1
            continue
        time, rows, columns = grid
        block = list(product(range(time), range(rows // 2), range(columns // 2)))
        found += [(start + t, start + r, start + c) for t, r, c in block]
        start += max(time, rows // 2, columns // 2)
    return found


def logits(
    w: Weights, layers: int, embeddings: torch.Tensor, kinds: list[int], places: Places, *, preview: bool
) -> torch.Tensor:
    """(L, vocabulary) of one row."""
    hidden = embeddings
    speeds = 1.0 / 600000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float) / HEAD_DIM)
    counted_by = torch.tensor([0] * 16 + [1] * 24 + [2] * 24)
    angles = torch.stack([torch.tensor(place, dtype=torch.float)[counted_by] * speeds for place in places])
    causal = torch.ones(len(hidden), len(hidden), dtype=torch.bool).tril()
    for number in range(layers):
        layer = f"model.model.layers.{number}"
        normed = rms_norm(w, f"{layer}.input_layernorm", hidden, 1e-5)
        q, k, v = linear(w, f"{layer}.attention.query_key_value", normed).split(
            [HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=1
        )
        heads = [attended(turned(own, angles), turned(k, angles), v, causal) for own in q.split(HEAD_DIM, dim=1)]
        hidden = hidden + linear(w, f"{layer}.attention.dense", torch.cat(heads, dim=1))
        normed = rms_norm(w, f"{layer}.post_attention_layernorm", hidden, 1e-5)
        made = [mixed(w, f"{layer}.mlp", row, kind) for row, kind in zip(normed, kinds, strict=True)]
        hidden = hidden + torch.stack(made)
    head = w["model.lm_head.weight"]
    if preview:  # the published code takes the lengths as constants
        head = head / (head.detach().pow(2).sum(dim=0).sqrt() + 1e-7)
    return rms_norm(w, "model.model.norm", hidden, 1e-5) @ head.T


def mixed(w: Weights, mlp: str, row: torch.Tensor, kind: int) -> torch.Tensor:
    """One token through the experts that its kind's router chooses, and the shared ones."""
    chances = linear(w, f"{mlp}.{GATES[kind]}", row).softmax(dim=0)
    chosen = sorted(range(EXPERTS), key=lambda expert: -float(chances[expert].detach()))[:CHOSEN]
    total = sum(chances[expert] for expert in chosen)
    made = swiglu(w, f"{mlp}.shared_experts", row)
    for expert in chosen:
        made = made + chances[expert] / total * swiglu(w, f"{mlp}.experts.{expert}", row)
    return made
