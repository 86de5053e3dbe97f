"""Step-Video by its formulas (arXiv 2502.10248), written out for the tests sample by sample: nothing is shared with the
package. Weights are tables of the released names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def part(weights: Weights, start: str) -> dict[str, Tensor]:
    """What stands below a name."""
    return {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}


def _linear(weights: Weights, name: str, states: Tensor) -> Tensor:
    return F.linear(states, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _standard(states: Tensor, eps: float) -> Tensor:
    centred = states - states.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def _root(states: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _waves(number: float, channels: int = 256) -> Tensor:
    """cos, then sin, of a number at falling rates."""
    rates = torch.tensor([10_000 ** (-i / (channels // 2)) for i in range(channels // 2)], dtype=torch.float64)
    return torch.cat([(number * rates).cos(), (number * rates).sin()])


def _embedded(weights: Weights, name: str, number: float) -> Tensor:
    hidden = _linear(weights, f"{name}.linear_1", _waves(number))
    return _linear(weights, f"{name}.linear_2", hidden * hidden.sigmoid())


def _turned(head_LD: Tensor, places: Sequence[tuple[int, int, int]]) -> Tensor:
    """A head's features as complex numbers, turned by time (one half), height and width (a quarter each)."""
    width, start, parts = head_LD.shape[-1], 0, []
    for axis, size in enumerate((width // 2, width // 4, width // 4)):
        pairs, half = head_LD[:, start : start + size], size // 2
        rates = torch.tensor([10_000 ** (-2 * i / size) for i in range(half)], dtype=torch.float64)
        angle = torch.tensor([place[axis] for place in places], dtype=torch.float64)[:, None] * rates
        turned = torch.complex(pairs[:, :half], pairs[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        parts += [turned.real, turned.imag]
        start += size
    return torch.cat(parts, dim=-1)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.T / math.sqrt(query.shape[-1])).softmax(-1) @ value


def transformer_reference(
    weights: Weights,
    head_dim: int,
    x_TCHW: Tensor,
    time: float,
    words_ND: Tensor,
    clip_ND: Tensor,
    first_CHW: Tensor | None = None,
    motion: float = 5.0,
) -> Tensor:
    """x − ε of one sample, (T, C, H, W); `words_ND` are the caption's own, without padding."""
    T, _, H, W = x_TCHW.shape
    if first_CHW is not None:
        behind = torch.zeros_like(x_TCHW)
        behind[0] = first_CHW
        x_TCHW = torch.cat([x_TCHW, behind], dim=1)
    places = [(t, h, w) for t in range(T) for h in range(H) for w in range(W)]
    kernel = weights["pos_embed.proj.weight"][:, :, 0, 0]
    tokens = torch.stack([kernel @ x_TCHW[t, :, h, w] for t, h, w in places]) + weights["pos_embed.proj.bias"]
    times = _embedded(weights, "adaln_single.emb.timestep_embedder", 1000 * time)
    if first_CHW is not None:
        times = times + _embedded(weights, "adaln_single.emb.motion_score_embedder", motion)
    modulation = _linear(weights, "adaln_single.linear", times * times.sigmoid()).view(6, -1)
    caption = _linear(weights, "caption_projection.linear_1", _standard(words_ND, 1e-6))
    caption = _linear(weights, "caption_projection.linear_2", F.gelu(caption, approximate="tanh"))
    caption = torch.cat([_linear(weights, "clip_projection", clip_ND), caption])
    for layer in range(len({name.split(".")[1] for name in weights if name.startswith("transformer_blocks.")})):
        block = part(weights, f"transformer_blocks.{layer}.")
        shift, scale, gate, ff_shift, ff_scale, ff_gate = block["scale_shift_table"] + modulation
        normed = _standard(tokens, 1e-5) * block["norm1.weight"] + block["norm1.bias"]
        normed = normed * (1 + scale) + shift
        heads = []
        for q, k, v in ((each[:, i : i + head_dim] for i in range(0, 3 * head_dim, head_dim)) for each in
                        _linear(block, "attn1.wqkv", normed).split(3 * head_dim, dim=-1)):  # fmt: skip
            q, k = (_turned(_root(each, block[f"attn1.{n}_norm.weight"]), places) for each, n in ((q, "q"), (k, "k")))
            heads.append(_attended(q, k, v))
        tokens = tokens + gate * _linear(block, "attn1.wo", torch.cat(heads, dim=-1))
        heads = []
        queries = _linear(block, "attn2.wq", tokens).split(head_dim, dim=-1)
        for q, kv in zip(queries, _linear(block, "attn2.wkv", caption).split(2 * head_dim, dim=-1), strict=True):
            q = _root(q, block["attn2.q_norm.weight"])
            heads.append(_attended(q, _root(kv[:, :head_dim], block["attn2.k_norm.weight"]), kv[:, head_dim:]))
        tokens = tokens + _linear(block, "attn2.wo", torch.cat(heads, dim=-1))
        normed = _standard(tokens, 1e-5) * block["norm2.weight"] + block["norm2.bias"]
        hidden = F.gelu(_linear(block, "ff.net.0.proj", normed * (1 + ff_scale) + ff_shift), approximate="tanh")
        tokens = tokens + ff_gate * _linear(block, "ff.net.2", hidden)
    shift, scale = weights["scale_shift_table"] + times
    said = _linear(weights, "proj_out", _standard(tokens, 1e-6) * (1 + scale) + shift)
    return said.view(T, H, W, -1).permute(0, 3, 1, 2)


def step_llm_reference(weights: Weights, heads: int, groups: int, ids: Sequence[int]) -> Tensor:
    """(L, D) of one caption."""
    states = weights["tok_embeddings.word_embeddings.weight"][list(ids)]
    width = states.shape[-1] // heads
    for layer in range(len({name.split(".")[2] for name in weights if name.startswith("transformer.")})):
        block = part(weights, f"transformer.layers.{layer}.")
        made = _linear(block, "attention.wqkv", _root(states, block["attention_norm.weight"], 1e-5))
        seen = []
        for head in range(heads):
            start = states.shape[-1] + head * groups // heads * 2 * width
            q, k = made[:, head * width : (head + 1) * width], made[:, start : start + width]
            v, below = made[:, start + width : start + 2 * width], 2 ** int(math.log2(heads))
            slope = 2.0 ** (-8 * (head + 1) / below) if head < below else 2.0 ** (-4 * (2 * (head - below) + 1) / below)
            rows = []
            for i in range(len(ids)):
                scores = [float(q[i] @ k[j]) / math.sqrt(width) - slope * math.sqrt(i - j) for j in range(i + 1)]
                rows.append(torch.tensor(scores, dtype=torch.float64).softmax(0) @ v[: i + 1])
            seen.append(torch.stack(rows))
        states = states + _linear(block, "attention.wo", torch.cat(seen, dim=-1))
        gate, up = _linear(block, "feed_forward.w1", _root(states, block["ffn_norm.weight"], 1e-5)).chunk(2, dim=-1)
        states = states + _linear(block, "feed_forward.w2", gate * gate.sigmoid() * up)
    return states


# --- the VAE: (C, T, H, W) of one clip --------------------------------------------------------------------------------


def _conv(weights: Weights, name: str, media: Tensor, stride: int = 1) -> Tensor:
    """No later frame is seen: zeros stand before the first, and around each."""
    weight = weights[f"{name}.conv.weight"]
    side = weight.shape[-1] // 2
    padded = F.pad(media, (side, side, side, side, weight.shape[2] - 1, 0))
    return F.conv3d(padded[None], weight, weights[f"{name}.conv.bias"], stride=stride)[0]


def _grouped(weights: Weights, name: str, media: Tensor, groups: int) -> Tensor:
    """Normalised in each frame."""
    C, T, H, W = media.shape
    frames = media.view(groups, C // groups, T, H, W)
    centred = frames - frames.mean((1, 3, 4), keepdim=True)
    normed = (centred / (centred.square().mean((1, 3, 4), keepdim=True) + 1e-5).sqrt()).view(C, T, H, W)
    return normed * weights[f"{name}.weight"].view(-1, 1, 1, 1) + weights[f"{name}.bias"].view(-1, 1, 1, 1)


def _resnet(weights: Weights, media: Tensor, groups: int) -> Tensor:
    hidden = _conv(weights, "conv1", F.silu(_grouped(weights, "norm1", media, groups)))
    hidden = _conv(weights, "conv2", F.silu(_grouped(weights, "norm2", hidden, groups)))
    return hidden + (_conv(weights, "nin_shortcut", media) if "nin_shortcut.conv.weight" in weights else media)


def _middle(weights: Weights, media: Tensor, groups: int) -> Tensor:
    media = _resnet(part(weights, "mid.block_1."), media, groups)
    normed = _grouped(weights, "mid.attn_1.norm", media, groups)
    q, k, v = (_conv(weights, f"mid.attn_1.{name}", normed).flatten(1).T for name in "qkv")
    rows = [_attended(q[i : i + 1], k[: i + 1], v[: i + 1]) for i in range(len(q))]
    media = media + _conv(weights, "mid.attn_1.proj_out", torch.cat(rows).T.reshape(media.shape))
    return _resnet(part(weights, "mid.block_2."), media, groups)


def _folded(media: Tensor) -> Tensor:
    """2 × 2 × 2 positions as channels, a frame of zeros in front."""
    media = torch.cat([torch.zeros_like(media[:, :1]), media], dim=1)
    cut = [media[:, t::2, h::2, w::2] for t in (0, 1) for h in (0, 1) for w in (0, 1)]
    return torch.stack(cut, dim=1).flatten(0, 1)


def _spread(media: Tensor) -> Tensor:
    """Invert `_folded`."""
    C, T, H, W = media.shape
    whole = media.new_zeros(C // 8, 2 * T, 2 * H, 2 * W)
    for number in range(8):
        whole[:, number // 4 :: 2, number // 2 % 2 :: 2, number % 2 :: 2] = media[number::8]
    return whole[:, 1:]


def encoder_reference(weights: Weights, frames_CTHW: Tensor, groups: int) -> Tensor:
    """Means and logarithms of variances, (2 C, T, H, W), of up to 17 frames."""
    hidden, levels = _conv(weights, "conv_in", frames_CTHW), len({n.split(".")[1] for n in weights if "down." in n[:5]})
    for level in range(levels):
        below = part(weights, f"down.{level}.")
        for block in sorted({name.split(".")[1] for name in below if name.startswith("block.")}):
            hidden = _resnet(part(below, f"block.{block}."), hidden, groups)
        if "downsample.conv.conv.weight" in below:
            hidden = _conv(below, "downsample.conv", hidden, stride=2)
        elif "downsample.conv.weight" in below:
            frames = F.pad(hidden, (0, 1, 0, 1)).transpose(0, 1)
            weight, bias = below["downsample.conv.weight"], below["downsample.conv.bias"]
            hidden = F.conv2d(frames, weight, bias, stride=2).transpose(0, 1)
    hidden = F.silu(_grouped(weights, "norm_out", _middle(weights, hidden, groups), groups))
    made = _folded(_conv(weights, "conv_patchify.conv", hidden))
    hidden = made + _folded(hidden).view(made.shape[0], -1, *made.shape[1:]).mean(1)
    said = _conv(weights, "conv_out", hidden)
    return said + hidden.view(said.shape[0], -1, *said.shape[1:]).mean(1)


def decoder_reference(weights: Weights, latents_CTHW: Tensor, groups: int) -> Tensor:
    """Pixels, (3, T, H, W), of up to 3 latent frames."""
    made = _conv(weights, "conv_in", latents_CTHW)
    hidden = made + latents_CTHW.repeat_interleave(len(made) // len(latents_CTHW), dim=0)
    made = _conv(weights, "conv_unpatchify.conv", hidden)
    hidden = _middle(
        weights, _spread(made) + _spread(hidden.repeat_interleave(len(made) // len(hidden), dim=0)), groups
    )
    for level in sorted({int(name.split(".")[1]) for name in weights if name.startswith("up.")}, reverse=True):
        above = part(weights, f"up.{level}.")
        for block in sorted({name.split(".")[1] for name in above if name.startswith("block.")}):
            hidden = _resnet(part(above, f"block.{block}."), hidden, groups)
        if "upsample.conv.weight" in above:
            frames = hidden.repeat_interleave(2, 2).repeat_interleave(2, 3).transpose(0, 1)
            weight, bias = above["upsample.conv.weight"], above["upsample.conv.bias"]
            hidden = F.conv2d(frames, weight, bias, padding=1).transpose(0, 1)
        elif "upsample.conv3d.conv1.conv.weight" in above:
            large = hidden.repeat_interleave(2, 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
            smooth = part(above, "upsample.conv3d.")
            inner = F.silu(_grouped(smooth, "norm1", _conv(smooth, "conv1", large), groups))
            inner = _grouped(smooth, "norm2", _conv(smooth, "conv2", inner), groups)
            hidden = F.silu(inner + large) + large
    return _conv(weights, "conv_out", F.silu(_grouped(weights, "norm_out", hidden, groups)))[:, 3:]


def decoded_reference(weights: Weights, latents_CTHW: Tensor, groups: int) -> Tensor:
    """A whole clip: groups of 3 latent frames, whose borders are mixed 0.6 : 0.4, the frame behind a border first."""
    made = [
        decoder_reference(weights, latents_CTHW[:, at : at + 3], groups) for at in range(0, latents_CTHW.shape[1], 3)
    ]
    for left, right in itertools.pairwise(made):
        right[:, 0] = 0.6 * right[:, 0] + 0.4 * left[:, -1]
        left[:, -1] = 0.6 * left[:, -1] + 0.4 * right[:, 0]
    return torch.cat(made, dim=1)
