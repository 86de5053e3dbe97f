"""Open-Sora Plan 1.3 and 1.5 written out in fp64 over dictionaries of weights, with nothing of the package:
transformers (who attends to whom is a table of all pairs), WF-VAE (loops over bands), and the table of noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

Weights = Mapping[str, torch.Tensor]


def seen_pairs(tokens: int, sets: int, in_runs: bool) -> torch.Tensor:
    """(L, L) bool: tokens that are congruent modulo n, or whose runs of n are."""
    pairs = torch.zeros(tokens, tokens, dtype=torch.bool)
    for one, other in itertools.product(range(tokens), repeat=2):
        if in_runs:
            pairs[one, other] = (one // sets - other // sets) % sets == 0
        else:
            pairs[one, other] = (one - other) % sets == 0
    return pairs


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, seen: torch.Tensor) -> torch.Tensor:
    """(B, L, width); `seen` broadcasts to (B, H, L, S)."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def turn(x: torch.Tensor, heads: int, grid: tuple[int, int, int], widths: tuple[int, ...] = ()) -> torch.Tensor:
    """Each part of a head, of width W, is turned by one coordinate: pairs (i, i + W/2) by place · 10000^(−2i / W). The
    parts are thirds, or of `widths`."""
    x = x.unflatten(2, (heads, -1)).clone()
    widths = widths or (x.shape[-1] // 3,) * 3
    places = list(itertools.product(*map(range, grid)))
    for axis, width in enumerate(widths):
        start = sum(widths[:axis])
        for pair in range(width // 2):
            first, second = start + pair, start + pair + width // 2
            angle = torch.tensor([place[axis] * 10000.0 ** (-2 * pair / width) for place in places]).double()
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = x[..., first].clone(), x[..., second].clone()
            x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    return x.flatten(2)


def patches(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    frames = [F.conv2d(x[:, :, t], w[f"{name}.weight"], w[f"{name}.bias"], stride=2) for t in range(x.shape[2])]
    return torch.stack(frames, dim=2).flatten(2).transpose(1, 2)


def transformer(
    w: Weights,
    config: Mapping[str, Any],
    x: torch.Tensor,
    time: torch.Tensor,
    text: torch.Tensor,
    text_mask: torch.Tensor,
    given: torch.Tensor | None = None,
) -> torch.Tensor:
    """The prediction, (B, C, T, H, W); `given`: the masked video and the mask behind each other."""
    heads, channels = config["num_attention_heads"], config["in_channels"]
    grid = (x.shape[2], x.shape[3] // 2, x.shape[4] // 2)
    h = patches(w, "pos_embed.proj", x)
    if given is not None:
        for name, part in (("masked_hidden_states", given[:, :channels]), ("mask", given[:, channels:])):
            h = h + linear(w, f"pos_embed_{name}.1", patches(w, f"pos_embed_{name}.0.proj", part))
    waves = torch.exp(-math.log(10000) * torch.arange(128).float() / 128) * time.float()[:, None]  # fp32 everywhere
    at = "adaln_single.emb.timestep_embedder"
    embedded = linear(w, f"{at}.linear_1", torch.cat([waves.cos(), waves.sin()], dim=1).double())
    embedded = linear(w, f"{at}.linear_2", F.silu(embedded))
    modulation = linear(w, "adaln_single.linear", F.silu(embedded)).unflatten(1, (6, -1))
    text = F.gelu(linear(w, "caption_projection.linear_1", text), approximate="tanh")
    text = linear(w, "caption_projection.linear_2", text)
    told = text_mask.bool()[:, None, None]
    width, tokens = h.shape[-1], h.shape[1]
    for at_block in range(config["num_layers"]):
        block = f"transformer_blocks.{at_block}"
        table = (w[f"{block}.scale_shift_table"] + modulation)[:, :, None]
        seen = torch.ones(tokens, tokens, dtype=torch.bool)
        if config["sparse1d"] and 1 < at_block < 30:
            seen = seen_pairs(tokens, config["sparse_n"], at_block % 2 == 1)
        n = F.layer_norm(h, (width,), eps=1e-6) * (1 + table[:, 1]) + table[:, 0]
        q, k, v = (linear(w, f"{block}.attn1.to_{each}", n) for each in "qkv")
        made = attention(turn(q, heads, grid), turn(k, heads, grid), v, heads, seen)
        h = h + table[:, 2] * linear(w, f"{block}.attn1.to_out.0", made)
        q = linear(w, f"{block}.attn2.to_q", h)
        k, v = (linear(w, f"{block}.attn2.to_{each}", text) for each in "kv")
        h = h + linear(w, f"{block}.attn2.to_out.0", attention(q, k, v, heads, told))
        n = F.layer_norm(h, (width,), eps=1e-6) * (1 + table[:, 4]) + table[:, 3]
        inner = F.gelu(linear(w, f"{block}.ff.net.0.proj", n), approximate="tanh")
        h = h + table[:, 5] * linear(w, f"{block}.ff.net.2", inner)
    shift, scale = (w["scale_shift_table"] + embedded[:, None]).unbind(1)
    h = linear(w, "proj_out", F.layer_norm(h, (width,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None])
    return put_together(h, grid)


def put_together(h: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """(B, L, 4 C) patches → (B, C, T, H, W)."""
    out = h.new_zeros(len(h), h.shape[2] // 4, grid[0], 2 * grid[1], 2 * grid[2])
    for token, (t, row, column) in enumerate(itertools.product(*map(range, grid))):
        square = h[:, token].unflatten(1, (2, 2, -1)).permute(0, 3, 1, 2)
        out[:, :, t, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = square
    return out


def time_waves(time: torch.Tensor, width: int) -> torch.Tensor:
    """In fp32, as everywhere."""
    waves = torch.exp(-math.log(10000) * torch.arange(width // 2).float() / (width // 2)) * time.float()[:, None]
    return torch.cat([waves.cos(), waves.sin()], dim=1).double()


def layer_norm(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def rms_norm(w: Weights, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Over each head."""
    x = x.unflatten(2, (heads, -1))
    return (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]).flatten(2)


def joint_attention(
    w: Weights, at: str, x: torch.Tensor, c: torch.Tensor, heads: int, grid: Any, sets: int, in_runs: bool, told: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of video and caption: for each set of the video apart, and of the caption the mean over all sets."""
    dim = x.shape[-1] // heads
    widths = (dim // 16 * 4, dim // 16 * 6, dim // 16 * 6)
    q = turn(rms_norm(w, f"{at}.norm_q", linear(w, f"{at}.to_q", x), heads), heads, grid, widths)
    k = turn(rms_norm(w, f"{at}.norm_k", linear(w, f"{at}.to_k", x), heads), heads, grid, widths)
    v = linear(w, f"{at}.to_v", x)
    cq = rms_norm(w, f"{at}.norm_added_q", linear(w, f"{at}.add_q_proj", c), heads)
    ck = rms_norm(w, f"{at}.norm_added_k", linear(w, f"{at}.add_k_proj", c), heads)
    cv = linear(w, f"{at}.add_v_proj", c)
    pairs = seen_pairs(x.shape[1], sets, in_runs)
    video, captions, done = torch.zeros_like(x), [], set()
    for first in range(sets * sets if in_runs else sets):
        members = pairs[first].nonzero().flatten() if first < x.shape[1] else torch.empty(0, dtype=torch.long)
        number = first // sets % sets if in_runs else first
        if number in done:
            continue
        done.add(number)
        seen = torch.cat([torch.ones(len(x), len(members), dtype=torch.bool), told], dim=1)[:, None, None]
        joined = (torch.cat([own[:, members], text], dim=1) for own, text in ((q, cq), (k, ck), (v, cv)))
        made = attention(*joined, heads, seen)
        video[:, members] = made[:, : len(members)]
        captions.append(made[:, len(members) :])
    assert len(captions) == sets
    return video, torch.stack(captions).mean(0)


def joint_transformer(
    w: Weights,
    config: Mapping[str, Any],
    x: torch.Tensor,
    time: torch.Tensor,
    text: torch.Tensor,
    text_mask: torch.Tensor,
    pooled: torch.Tensor,
) -> torch.Tensor:
    """That of 1.5: the prediction, (B, C, T, H, W)."""
    heads, grid = config["num_attention_heads"], (x.shape[2], x.shape[3] // 2, x.shape[4] // 2)
    h, c = patches(w, "patch_embed.proj", x), linear(w, "caption_projection", text)
    at = "time_text_embed.timestep_embedder"
    temb = linear(w, f"{at}.linear_1", time_waves(time, config["timestep_embed_dim"]))
    temb = linear(w, f"{at}.linear_2", F.silu(temb))
    at = "time_text_embed.text_embedder"
    temb = F.silu(temb + linear(w, f"{at}.linear_2", F.silu(linear(w, f"{at}.linear_1", pooled))))

    def projected(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(w, f"{name}.net.2", F.gelu(linear(w, f"{name}.net.0.proj", x), approximate="tanh"))

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    depths, half = config["num_layers"], len(config["num_layers"]) // 2
    for stage, (depth, sets) in enumerate(zip(depths, config["sparse_n"], strict=True)):
        if stage > half:
            before = kept.pop()
            h = linear(w, f"skip_norm_linear.{stage - half - 1}.1", torch.cat([h, before[0]], dim=2))
            c = linear(w, f"skip_norm_linear_enc.{stage - half - 1}.1", torch.cat([c, before[1]], dim=2))
        for number in range(depth):
            block, is_last = f"transformer_blocks.{stage}.{number}", stage == 2 * half and number == depth - 1
            s, m, g, cs, cm, cg = (each[:, None] for each in linear(w, f"{block}.norm1.linear", temb).chunk(6, 1))
            n = layer_norm(w, f"{block}.norm1.norm", h) * (1 + m) + s
            cn = layer_norm(w, f"{block}.norm1.norm_enc", c) * (1 + cm) + cs
            in_runs = sets > 1 and number % 2 == 1
            attn = f"{block}.attn1"
            made, told = joint_attention(w, attn, n, cn, heads, grid, sets, in_runs, text_mask.bool())
            h = h + g * linear(w, f"{attn}.to_out.0", made)
            c = c if is_last else c + cg * linear(w, f"{attn}.to_add_out", told)
            s, m, g, cs, cm, cg = (each[:, None] for each in linear(w, f"{block}.norm2.linear", temb).chunk(6, 1))
            h = h + g * projected(f"{block}.ff", layer_norm(w, f"{block}.norm2.norm", h) * (1 + m) + s)
            if not is_last:
                c = c + cg * projected(f"{block}.ff_enc", layer_norm(w, f"{block}.norm2.norm_enc", c) * (1 + cm) + cs)
        if stage < half:
            kept.append((h, c))
    shift, scale = linear(w, "norm_out.linear", temb).chunk(2, 1)
    h = layer_norm(w, "norm_out.norm", layer_norm(w, "norm_final", h)) * (1 + scale[:, None]) + shift[:, None]
    return put_together(linear(w, "proj_out", h), grid)


# --- WF-VAE -----------------------------------------------------------------------------------------------------------


def signs(axes: int) -> list[torch.Tensor]:
    """Of each band over (time, height, width): the first of two is added, the second added or taken away."""
    bands = []
    for band in range(2**axes):
        if axes == 3:
            flips = [band // 4 % 2, band // 2 % 2, band % 2]
        else:
            flips = [0, band % 2, band // 2 % 2]
        cube = torch.ones(2 if axes == 3 else 1, 2, 2).double()
        for axis, flip in enumerate(flips):
            if flip:
                cube.select(axis, 1).neg_()
        bands.append(cube * (float(torch.tensor(0.3536)) if axes == 3 else 0.5))  # as it is stored
    return bands


def haar(x: torch.Tensor, axes: int) -> torch.Tensor:
    if axes == 3:
        x = torch.cat([x[:, :, :1], x], dim=2)
    step = 2 if axes == 3 else 1
    bands = []
    for cube in signs(axes):
        total: Any = 0
        for t, i, j in itertools.product(range(step), range(2), range(2)):
            total = total + cube[t, i, j] * x[:, :, t::step, i::2, j::2]
        bands.append(total)
    return torch.cat(bands, dim=1)


def inverse_haar(bands: torch.Tensor, axes: int) -> torch.Tensor:
    step, channels = (2 if axes == 3 else 1), bands.shape[1] // 2**axes
    size = (bands.shape[2] * step, bands.shape[3] * 2, bands.shape[4] * 2)
    x = bands.new_zeros(len(bands), channels, *size)
    for band, cube in enumerate(signs(axes)):
        part = bands[:, band * channels : (band + 1) * channels]
        for t, i, j in itertools.product(range(step), range(2), range(2)):
            x[:, :, t::step, i::2, j::2] += cube[t, i, j] * part
    return x[:, :, 1:] if axes == 3 else x


def causal(w: Weights, name: str, x: torch.Tensor, stride: int = 1, padding: int = 1) -> torch.Tensor:
    weight, bias = w[f"{name}.conv.weight"], w[f"{name}.conv.bias"]
    x = torch.cat([x[:, :, :1]] * (weight.shape[2] - 1) + [x], dim=2)
    return F.conv3d(x, weight, bias, stride=stride, padding=(0, padding, padding))


def each_frame(w: Weights, name: str, x: torch.Tensor, stride: int = 1, padding: int = 1) -> torch.Tensor:
    made = [
        F.conv2d(x[:, :, t], w[f"{name}.weight"], w[f"{name}.bias"], stride=stride, padding=padding)
        for t in range(x.shape[2])
    ]
    return torch.stack(made, dim=2)


def normed(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
    weight, bias = (w[f"{name}.norm.{each}"].view(1, -1, 1, 1, 1) for each in ("weight", "bias"))
    return (x - mean) / (var + 1e-6).sqrt() * weight + bias


def resnet(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    of_frames = f"{name}.conv1.weight" in w
    made = x
    for at in "12":
        made = F.silu(normed(w, f"{name}.norm{at}", made))
        made = each_frame(w, f"{name}.conv{at}", made) if of_frames else causal(w, f"{name}.conv{at}", made)
    if f"{name}.nin_shortcut.conv.weight" in w:
        x = causal(w, f"{name}.nin_shortcut", x, padding=0)
    return x + made


def attended(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    n = normed(w, f"{name}.norm", x)
    q, k, v = (causal(w, f"{name}.{each}", n, padding=0).movedim(1, -1).flatten(2, 3) for each in "qkv")
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1)
    made = (scores @ v).unflatten(2, x.shape[-2:]).movedim(-1, 1)
    return x + causal(w, f"{name}.proj_out", made, padding=0)


def encode(w: Weights, x: torch.Tensor, blocks: int, axes: int) -> torch.Tensor:
    """The mean of the posterior; `axes` of the first block's wavelet, 3 where time is halved there."""
    w = {key.removeprefix("encoder."): value for key, value in w.items() if key.startswith("encoder.")}
    bands = haar(x, 3)
    low_1 = haar(bands[:, :3], axes)
    low_2 = haar(low_1[:, :3], 3)
    h = each_frame(w, "down1.0", bands)
    for at in range(blocks):
        h = resnet(w, f"down1.{1 + at}", h)
    h = F.pad(h, (0, 1, 0, 1))
    last = f"down1.{1 + blocks}.conv"
    h = causal(w, last, h, 2, 0) if axes == 3 else each_frame(w, last, h, 2, 0)
    h = each_frame(w, "down2.0", torch.cat([h, each_frame(w, "connect_l1", low_1)], dim=1))
    for at in range(blocks):
        h = resnet(w, f"down2.{1 + at}", h)
    h = causal(w, f"down2.{1 + blocks}.conv", F.pad(h, (0, 1, 0, 1)), 2, 0)
    h = torch.cat([h, each_frame(w, "connect_l2", low_2)], dim=1)
    h = resnet(w, "mid.2", attended(w, "mid.1", resnet(w, "mid.0", h)))
    return causal(w, "conv_out", F.silu(normed(w, "norm_out", h))).chunk(2, dim=1)[0]


def between(x: torch.Tensor) -> torch.Tensor:
    """Twice the frames behind the first one: three quarters of each and a quarter of a neighbour among them."""
    first, others = x[:, :, :1], x[:, :, 1:]
    if not others.shape[2]:
        return first
    before = torch.cat([others[:, :, :1], others[:, :, :-1]], dim=2)
    behind = torch.cat([others[:, :, 1:], others[:, :, -1:]], dim=2)
    pairs = torch.stack([0.75 * others + 0.25 * before, 0.75 * others + 0.25 * behind], dim=3).flatten(2, 3)
    return torch.cat([first, pairs], dim=2)


def upsampled(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """By the block's kind: weights of a picture's convolution, or of one in time."""
    if f"{name}.conv.weight" in w:
        return each_frame(w, f"{name}.conv", x.repeat_interleave(2, 3).repeat_interleave(2, 4))
    return causal(w, f"{name}.conv", F.interpolate(between(x), scale_factor=(1, 2, 2), mode="trilinear"))


def decode(w: Weights, z: torch.Tensor, blocks: int, axes: int, flow: int, connections: int) -> torch.Tensor:
    w = {key.removeprefix("decoder."): value for key, value in w.items() if key.startswith("decoder.")}

    def connected(name: str, h: torch.Tensor) -> torch.Tensor:
        for at in range(connections):
            h = resnet(w, f"{name}.{at}", h)
        return each_frame(w, f"{name}.{connections}", h)

    h = resnet(w, "mid.2", attended(w, "mid.1", resnet(w, "mid.0", causal(w, "conv_in", z))))
    h, around = h[:, :-flow], h[:, -flow:]
    low_2 = inverse_haar(connected("connect_l2", around), 3)
    for at in range(blocks):
        h = resnet(w, f"up2.{at}", h)
    h = resnet(w, f"up2.{blocks + 1}", upsampled(w, f"up2.{blocks}", h))
    h, around = h[:, :-flow], h[:, -flow:]
    bands = connected("connect_l1", around)
    bands = torch.cat([bands[:, :3] + low_2, bands[:, 3:]], dim=1)
    low_1 = inverse_haar(bands, axes)
    for at in range(blocks):
        h = resnet(w, f"up1.{at}", h)
    h = resnet(w, f"up1.{blocks + 1}", upsampled(w, f"up1.{blocks}", h))
    h = resnet(w, "layer.1", resnet(w, "layer.0", h))
    bands = each_frame(w, "conv_out", F.silu(normed(w, "norm_out", h)))
    return inverse_haar(torch.cat([bands[:, :3] + low_1, bands[:, 3:]], dim=1), 3)


# --- steps ------------------------------------------------------------------------------------------------------------


def signal_shares(steps: int = 1000) -> torch.Tensor:
    """ᾱ_t of betas that grow linearly from 0.0001 to 0.02, moved and scaled so that the last one is 0 (Lin et al. 2023,
    algorithm 1)."""
    roots = (1 - torch.linspace(0.0001, 0.02, steps, dtype=torch.float32)).cumprod(0).sqrt().double()
    return ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
