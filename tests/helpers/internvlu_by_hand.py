"""InternVL-U written from the published formulas, in fp64, on the released names: what the tests of the model compare
it with. Nothing of the package is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.helpers.tiny_internvlu import CHANNELS, SEEN_SIDE

State = dict[str, torch.Tensor]
OWN = ("</box>", "<box>", "<IMG_CONTEXT>", "</img>", "<img>", "</quad>", "<quad>", "</ref>", "<ref>", "<img_uncond>")


def state_of(released: Path) -> State:
    """All tensors of a released folder, behind the names of their parts."""
    found = {}
    for part in ("vlm", "generation_decoder"):
        stored = load_file(released / part / "model.safetensors")
        found |= {f"{part}.{name}": tensor.double() for name, tensor in stored.items()}
    return found


def linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = state.get(f"{name}.bias")
    return x @ state[f"{name}.weight"].T + (0 if bias is None else bias)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def layer_norm(x: torch.Tensor, state: State | None = None, name: str = "", eps: float = 1e-6) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    y = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()
    return y if state is None else y * state[f"{name}.weight"] + state[f"{name}.bias"]


def seen_features(state: State, pixels: torch.Tensor) -> torch.Tensor:
    """(4, H) of a picture (3, 8, 8): InternViT with one tensor of queries, keys and values, the published pixel
    shuffle, and the projector."""
    own = "vlm.vision_model."
    weight = state[f"{own}embeddings.patch_embedding.weight"]
    patches = [
        (weight * pixels[None, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2]).sum((1, 2, 3))
        + state[f"{own}embeddings.patch_embedding.bias"]
        for r in range(4)
        for c in range(4)
    ]
    x = torch.cat([state[f"{own}embeddings.class_embedding"][0], torch.stack(patches)])
    x = x + state[f"{own}embeddings.position_embedding"][0]
    for layer in range(2):
        at = f"{own}encoder.layers.{layer}."
        q, k, v = linear(state, f"{at}attn.qkv", layer_norm(x, state, f"{at}norm1")).view(17, 3, 2, 12).unbind(1)
        heads = [(q[:, h] @ k[:, h].T / math.sqrt(12)).softmax(-1) @ v[:, h] for h in range(2)]
        x = x + linear(state, f"{at}attn.proj", torch.cat(heads, dim=-1)) * state[f"{at}ls1"]
        y = F.gelu(linear(state, f"{at}mlp.fc1", layer_norm(x, state, f"{at}norm2")))
        x = x + linear(state, f"{at}mlp.fc2", y) * state[f"{at}ls2"]
    # N, H, W, C: columns in pairs into channels, transposed, rows in pairs into channels, transposed back
    y = x[1:].reshape(1, 4, 2, 48).permute(0, 2, 1, 3).reshape(1, 2, 2, 96).permute(0, 2, 1, 3).reshape(4, 96)
    y = layer_norm(y, state, "vlm.mlp1.0", 1e-5)
    return linear(state, "vlm.mlp1.3", F.gelu(linear(state, "vlm.mlp1.1", y)))


def language_states(
    state: State, ids: Sequence[int], own_ids: Sequence[int], features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, H) states behind the last norm, and in front of the last layer: Qwen3 on one row."""
    table, own = state["vlm.language_model.model.embed_tokens.weight"], state["vlm.special_token_embedding.weight"]
    pictures = iter(features)
    rows = []
    for token in ids:
        row = own[own_ids.index(token)] if token in own_ids else table[token]
        rows.append(next(pictures) if token == own_ids[OWN.index("<IMG_CONTEXT>")] else row)
    x = torch.stack(rows)
    count = len(ids)
    angles = torch.arange(count)[:, None] / 1e6 ** (torch.arange(4) / 4)
    angles = angles.double()

    def turn(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads[..., :4], heads[..., 4:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    mask = torch.ones(count, count).tril().bool()
    before = x
    for layer in range(3):
        before, at = x, f"vlm.language_model.model.layers.{layer}."
        y = rms(x, state[f"{at}input_layernorm.weight"])
        q = turn(
            rms(linear(state, f"{at}self_attn.q_proj", y).view(count, 4, 8), state[f"{at}self_attn.q_norm.weight"])
        )
        k = turn(
            rms(linear(state, f"{at}self_attn.k_proj", y).view(count, 2, 8), state[f"{at}self_attn.k_norm.weight"])
        )
        v = linear(state, f"{at}self_attn.v_proj", y).view(count, 2, 8)
        heads = []
        for head in range(4):
            scores = (q[:, head] @ k[:, head // 2].T / math.sqrt(8)).masked_fill(~mask, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, head // 2])
        x = x + linear(state, f"{at}self_attn.o_proj", torch.cat(heads, dim=-1))
        y = rms(x, state[f"{at}post_attention_layernorm.weight"])
        gate, up = (linear(state, f"{at}mlp.{name}_proj", y) for name in ("gate", "up"))
        x = x + linear(state, f"{at}mlp.down_proj", F.silu(gate) * up)
    return rms(x, state["vlm.language_model.model.norm.weight"]), before


def centred(count: int, scale: float) -> list[float]:
    """Places of rows or columns: from the middle, and stretched between the ends of a side of 1 / scale of its size."""
    places = list(range(-(count - count // 2), count // 2))
    if scale == 1:
        return [float(place) for place in places]
    low, high = -int((count - count // 2) / scale), int((count // 2) / scale) - 1
    return [low + (high - low) * number / (count - 1) for number in range(count)]


def positions(grids: Sequence[tuple[int, int]], seen: Sequence[bool]) -> list[tuple[float, float, float]]:
    """Of latents, picture by picture, and of states behind them; pictures that are seen have a scale of 1 / 2."""
    found = [
        (float(frame), down, across)
        for frame, (rows, columns) in enumerate(grids)
        for down in centred(rows, 1)
        for across in centred(columns, 1)
    ]
    at = int(max(map(max, found))) + 1
    number = 0
    while number < len(seen):
        block = [(0.0, 0.0, 0.0)]
        if seen[number]:
            sides = centred(SEEN_SIDE, 0.5)
            block = [(float(at), down, across) for down in sides for across in sides]
        else:
            block = [(float(at),) * 3]  # type: ignore[list-item]
        found += block
        at, number = int(max(map(max, block))) + 1, number + len(block)
    return found


def velocity(
    state: State, latents: list[torch.Tensor], time: float, states: torch.Tensor, seen: Sequence[bool]
) -> torch.Tensor:
    """(C, h, w) of the first of the latents (C, h, w); the others are given. By the published order of a token's
    numbers: channels, rows, columns."""
    own = "generation_decoder.decoder."
    grids = [(each.shape[1] // 2, each.shape[2] // 2) for each in latents]
    squares = []
    for each, (rows, columns) in zip(latents, grids, strict=True):
        pieces = each.view(CHANNELS, rows, 2, columns, 2).permute(1, 3, 0, 2, 4)
        squares.append(pieces.reshape(rows * columns, 4 * CHANNELS))
    image = linear(state, f"{own}img_in", torch.cat(squares))
    text = linear(state, f"{own}txt_in", rms(states, state[f"{own}txt_norm.weight"]))
    # the published module multiplies a timestep, 1000 · time, by 1000 once more, in fp32
    speeds = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
    waves = (1000 * (torch.tensor(1000 * time, dtype=torch.float32) * speeds)).double()
    waves = torch.cat([waves.cos(), waves.sin()])
    embedder = f"{own}time_text_embed.timestep_embedder.linear_"
    temb = linear(state, f"{embedder}2", F.silu(linear(state, f"{embedder}1", waves)))
    places = torch.tensor(positions(grids, seen), dtype=torch.float32)
    speeds = 1 / 10000 ** (torch.arange(0, 4, 2, dtype=torch.float32) / 4)
    angles = torch.cat([places[:, axis, None] * speeds for axis in range(3)], dim=1)
    turns = torch.complex(angles.cos(), angles.sin()).to(torch.complex128)[:, None]
    count = len(image)

    def turn(heads: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(2)

    for block in range(2):
        at = f"{own}transformer_blocks.{block}."
        mods = {name: linear(state, f"{at}{name}_mod.1", F.silu(temb)).chunk(6) for name in ("img", "txt")}
        shown = {}
        for name, x in (("img", image), ("txt", text)):
            shift, scale = mods[name][:2]
            shown[name] = layer_norm(x) * (1 + scale) + shift
        made = {}
        for name, query, key, value, norm in (
            ("img", "to_q", "to_k", "to_v", "norm_"), ("txt", "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_"),
        ):  # fmt: skip
            both = linear(state, f"{at}attn.{query}", shown[name]).unflatten(-1, (2, 24))
            q, gate = both[..., :12], both[..., 12:].flatten(1)
            k, v = (linear(state, f"{at}attn.{each}", shown[name]).unflatten(-1, (2, 12)) for each in (key, value))
            q, k = (rms(each, state[f"{at}attn.{norm}{n}.weight"]) for n, each in (("q", q), ("k", k)))
            made[name] = (q, k, v, gate)
        q, k, v = (torch.cat([made["img"][n], made["txt"][n]]) for n in range(3))
        q, k = turn(q), turn(k)
        heads = [(q[:, h] @ k[:, h].T / math.sqrt(12)).softmax(-1) @ v[:, h] for h in range(2)]
        joined = torch.cat(heads, dim=-1)
        outs = {"img": linear(state, f"{at}attn.to_out.0", joined[:count]),
                "txt": linear(state, f"{at}attn.to_add_out", joined[count:])}  # fmt: skip
        streams = []
        for name, x in (("img", image), ("txt", text)):
            _, _, gate1, shift2, scale2, gate2 = mods[name]
            x = x + gate1 * (outs[name] * made[name][3].sigmoid())
            y = linear(state, f"{at}{name}_mlp.net.0.proj", layer_norm(x) * (1 + scale2) + shift2)
            streams.append(x + gate2 * linear(state, f"{at}{name}_mlp.net.2", F.gelu(y, approximate="tanh")))
        image, text = streams
    scale, shift = linear(state, f"{own}norm_out.linear", F.silu(temb)).chunk(2)
    rows, columns = grids[0]
    out = linear(state, f"{own}proj_out", layer_norm(image[: rows * columns]) * (1 + scale) + shift)
    return out.view(rows, columns, CHANNELS, 2, 2).permute(2, 0, 3, 1, 4).reshape(CHANNELS, 2 * rows, 2 * columns)
