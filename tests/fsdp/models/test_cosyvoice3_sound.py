"""CosyVoice3's flow and vocoder: in fp64 they are what their formulas say, with the names that the released weights
have."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.fsdp.models.cosyvoice3.flow import NOISE_FRAMES, CosyVoice3Flow, FlowSizes, released_noise
from mindspeed_mm.fsdp.models.cosyvoice3.vocoder import CosyVoice3Vocoder, VocoderSizes
from tests.helpers.tiny_cosyvoice3 import FLOW, VOCODER, small_flow, small_vocoder

Weights = dict[str, torch.Tensor]
RELEASED = Path(__file__).parents[2] / "released" / "sound"


@pytest.mark.parametrize(
    ("module", "file"),
    [
        (lambda: CosyVoice3Flow(FlowSizes()), "cosyvoice3-flow.json"),
        (lambda: CosyVoice3Vocoder(VocoderSizes()), "cosyvoice3-hift.json"),
    ],
)
def test_names_and_shapes_are_the_released_ones(module: Any, file: str) -> None:
    """Those of the published module definitions at the published sizes."""
    with torch.device("meta"):
        state = module().state_dict()
    numbered = re.compile(r"(transformer_blocks|convs1|convs2|activations1|activations2)\.\d+\.")
    found = Counter((numbered.sub(r"\1.N.", name), tuple(value.shape)) for name, value in state.items())
    record = json.loads((RELEASED / file).read_text())["layout"]
    assert found == {(entry["key"], tuple(entry["shape"])): entry["n"] for entry in record}


# --- flow -------------------------------------------------------------------------------------------------------------


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(x: torch.Tensor) -> torch.Tensor:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-6).sqrt()


def velocity(w: Weights, x: torch.Tensor, t: float, cond: Any, mu: Any, spk: Any, chunk: int | None) -> torch.Tensor:
    """(T, M) of one sequence, after cosyvoice/flow/DiT of FunAudioLLM/CosyVoice."""
    w = {name.removeprefix("decoder.estimator."): value for name, value in w.items()}
    frames, half = len(x), FLOW.time_dim // 2
    exponents = torch.arange(half).float() * -(math.log(10000) / (half - 1))  # in fp32, as published
    angles = [1000 * t * frequency for frequency in exponents.exp().tolist()]
    time = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
    time = linear(w, "time_embed.time_mlp.2", F.silu(linear(w, "time_embed.time_mlp.0", time)))
    h = linear(w, "input_embed.proj", torch.cat((x, cond, mu, spk.expand(frames, -1)), -1))
    placed = h.T[None]
    for layer in ("conv1", "conv2"):
        placed = F.pad(placed, (FLOW.conv_pos_kernel - 1, 0))
        name = f"input_embed.conv_pos_embed.{layer}.0"
        placed = F.mish(F.conv1d(placed, w[f"{name}.weight"], w[f"{name}.bias"], groups=FLOW.conv_pos_groups))
    h = h + placed[0].T
    visible = torch.ones(frames, frames, dtype=torch.bool)
    for row in range(frames if chunk else 0):
        visible[row, (row // chunk + 1) * chunk :] = False  # type: ignore[operator]
    for block in range(FLOW.depth):
        at = f"transformer_blocks.{block}."
        shift, scale, gate, shift2, scale2, gate2 = linear(w, f"{at}attn_norm.linear", F.silu(time)).chunk(6)
        inner = norm(h) * (1 + scale) + shift
        q, k, v = (linear(w, f"{at}attn.to_{name}", inner) for name in "qkv")
        heads = []
        for head in range(FLOW.heads):
            part = slice(head * FLOW.dim_head, (head + 1) * FLOW.dim_head)
            one, other = q[:, part], k[:, part]
            if head == 0:  # alone turns
                one, other = (rotated(each, w["rotary_embed.inv_freq"]) for each in (one, other))
            scores = (one @ other.T / math.sqrt(FLOW.dim_head)).masked_fill(~visible, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, part])
        h = h + gate * linear(w, f"{at}attn.to_out.0", torch.cat(heads, -1))
        inner = linear(w, f"{at}ff.ff.0.0", norm(h) * (1 + scale2) + shift2)
        h = h + gate2 * linear(w, f"{at}ff.ff.2", F.gelu(inner, approximate="tanh"))
    scale, shift = linear(w, "norm_out.linear", F.silu(time)).chunk(2)
    return linear(w, "proj_out", norm(h) * (1 + scale) + shift)


def rotated(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    turned = x.clone()
    for place in range(len(x)):
        for pair, frequency in enumerate(inv_freq.tolist()):
            cosine, sine = math.cos(place * frequency), math.sin(place * frequency)
            left, right = x[place, 2 * pair], x[place, 2 * pair + 1]
            turned[place, 2 * pair] = left * cosine - right * sine
            turned[place, 2 * pair + 1] = right * cosine + left * sine
    return turned


def mel_by_formula(
    w: Weights, tokens: Any, speaker: Any, told: Any, known: Any, noise: Any, chunk: int | None = None
) -> torch.Tensor:
    """After cosyvoice/flow/flow.py and flow_matching.py."""
    embedded = w["input_embedding.weight"][torch.cat((told, tokens))]
    conv1, conv2 = "pre_lookahead_layer.conv1", "pre_lookahead_layer.conv2"
    ahead = F.pad(embedded.T[None], (0, FLOW.pre_lookahead_len))
    ahead = F.leaky_relu(F.conv1d(ahead, w[f"{conv1}.weight"], w[f"{conv1}.bias"]), 0.01)
    ahead = F.conv1d(F.pad(ahead, (2, 0)), w[f"{conv2}.weight"], w[f"{conv2}.bias"])
    mu = torch.stack([row for row in ahead[0].T + embedded for _ in range(2)])
    spk = linear(w, "spk_embed_affine_layer", speaker / speaker.norm())
    cond = torch.cat((known, torch.zeros(len(mu) - len(known), FLOW.mel_dim, dtype=torch.float64)))
    x, zero = noise, torch.zeros_like(mu)
    times = [1 - math.cos(math.pi / 2 * step / 10) for step in range(11)]
    for now, then in itertools.pairwise(times):
        with_all = velocity(w, x, now, cond, mu, spk, chunk)
        without = velocity(w, x, now, zero, zero, torch.zeros_like(spk), chunk)
        x = x + (then - now) * (with_all + 0.7 * (with_all - without))
    return x[len(known) :]


@pytest.mark.parametrize("has_reference", [True, False])
@pytest.mark.parametrize("by_chunks", [True, False])
def test_mel_is_that_of_the_formula(has_reference: bool, by_chunks: bool) -> None:
    flow = small_flow().double()
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, FLOW.vocab_size, (9,), generator=draw)
    speaker = torch.randn(FLOW.spk_embed_dim, generator=draw, dtype=torch.float64)
    told = torch.randint(0, FLOW.vocab_size, (4 if has_reference else 0,), generator=draw)
    known = torch.randn(2 * len(told), FLOW.mel_dim, generator=draw, dtype=torch.float64)
    noise = torch.randn(2 * (9 + len(told)), FLOW.mel_dim, generator=draw, dtype=torch.float64)
    found = flow(tokens, speaker, told, known, noise_TM=noise, by_chunks=by_chunks)
    weights = dict(flow.state_dict())
    expected = mel_by_formula(
        weights, tokens, speaker, told, known, noise, FLOW.static_chunk_size if by_chunks else None
    )
    assert found.shape == (18, FLOW.mel_dim)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_noise_is_the_same_for_every_length() -> None:
    torch.manual_seed(0)
    published = torch.randn([1, 8, NOISE_FRAMES])  # as the release draws it where it is loaded
    assert torch.equal(released_noise(7, 8), published[0, :, :7].T)
    with pytest.raises(ValueError, match="up to 15000 at a time"):
        released_noise(NOISE_FRAMES + 1, 8)


# --- vocoder ----------------------------------------------------------------------------------------------------------


def convolved(w: Weights, name: str, x: torch.Tensor, dilation: int = 1, ahead: bool = False) -> torch.Tensor:
    """As long as its input; the kernel is g · v / |v|."""
    kernel = normed(w, name)
    border = (kernel.shape[-1] - 1) * dilation
    padded = F.pad(x, (0, border) if ahead else (border, 0))
    return F.conv1d(padded, kernel, w[f"{name}.bias"], dilation=dilation)


def normed(w: Weights, name: str) -> torch.Tensor:
    if f"{name}.weight" in w:
        return w[f"{name}.weight"]
    g, v = (w[f"{name}.parametrizations.weight.original{n}"] for n in (0, 1))
    return g * v / (v**2).sum((1, 2), keepdim=True).sqrt()


def resblock(w: Weights, at: str, x: torch.Tensor) -> torch.Tensor:
    for number, dilation in enumerate(VOCODER.resblock_dilations):
        inner = snake(w, f"{at}.activations1.{number}", x)
        inner = convolved(w, f"{at}.convs1.{number}", inner, dilation)
        x = x + convolved(w, f"{at}.convs2.{number}", snake(w, f"{at}.activations2.{number}", inner))
    return x


def snake(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    alpha = w[f"{name}.alpha"][:, None]
    return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)


def wave_by_formula(w: Weights, mel: torch.Tensor) -> torch.Tensor:
    """After cosyvoice/hifigan of FunAudioLLM/CosyVoice; each sample of the source is computed by itself."""
    x = mel.T[None]
    pitch = x
    for layer in range(5):
        pitch = F.elu(convolved(w, f"f0_predictor.condnet.{2 * layer}", pitch, ahead=layer == 0))
    pitch = linear(w, "f0_predictor.classifier", pitch[0].T)[:, 0].abs()
    assert (pitch > 10).any() and (pitch <= 10).any()
    hop = 4 * 3 * 2 * 4
    noise = torch.rand(len(mel) * hop, 3, generator=torch.Generator().manual_seed(0)).double()
    turns, source = [0.0, 0.0, 0.0], []
    for frame, hertz in enumerate(pitch.tolist()):
        turns = [turn + (hertz * n / 24000) % 1 for n, turn in enumerate(turns, 1)]
        for sample in range(frame * hop, (frame + 1) * hop):
            is_voiced = hertz > 10
            loud = [0.1 * math.sin(2 * math.pi * hop * turn) if is_voiced else 0.0 for turn in turns]
            parts = torch.tensor(loud, dtype=torch.float64) + (0.003 if is_voiced else 0.1 / 3) * noise[sample]
            source.append(torch.tanh(linear(w, "m_source.l_linear", parts)[0]))
    window = torch.hann_window(16, dtype=torch.float64)
    spectrum = torch.stft(torch.stack(source)[None], 16, 4, window=window, return_complex=True)
    parts = torch.cat((spectrum.real, spectrum.imag), 1)
    x = convolved(w, "conv_pre", x, ahead=True)
    for stage, (rate, down) in enumerate(((4, 6), (3, 2), (2, 1))):
        up, name = f"ups.{stage}", f"source_downs.{stage}"
        x = convolved(w, up, torch.stack([F.leaky_relu(x, 0.1)] * rate, -1).flatten(-2))
        if stage == 2:
            x = torch.cat((x[..., 1:2], x), -1)
        added = F.conv1d(F.pad(parts, (down - 1, 0)), w[f"{name}.weight"], w[f"{name}.bias"], stride=down)
        x = x + resblock(w, f"source_resblocks.{stage}", added)
        x = sum(resblock(w, f"resblocks.{3 * stage + n}", x) for n in range(3)) / 3  # type: ignore[assignment]
    x = convolved(w, "conv_post", F.leaky_relu(x, 0.01))
    size, phase = x[:, :9].exp().clamp(max=100), x[:, 9:].sin()
    made = torch.complex(size * phase.cos(), size * phase.sin())
    return torch.istft(made, 16, 4, window=window)[0].clamp(-0.99, 0.99)


def test_wave_is_that_of_the_formula() -> None:
    vocoder = small_vocoder()
    mel = torch.randn(20, VOCODER.in_channels, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    pitch_in_fp32 = vocoder(mel.float())
    vocoder.double()
    found = vocoder(mel)
    assert found.shape == (20 * VOCODER.samples_a_frame,) and 0.01 < found.std() < 0.9
    torch.testing.assert_close(found, wave_by_formula(dict(vocoder.state_dict()), mel), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pitch_in_fp32.double(), found, rtol=1e-2, atol=1e-2)
    assert torch.equal(vocoder(mel), found)


def test_sound_depends_on_no_more_than_a_few_frames_ahead() -> None:
    """Three of the pitch and four of the first convolution, and what its transform mixes."""
    vocoder = small_vocoder().double()
    mel = torch.randn(20, VOCODER.in_channels, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    other = mel.clone()
    other[15:] += 1
    same = (vocoder(mel) == vocoder(other)).long().cumprod(0).sum()
    first_seen = 15 - VOCODER.conv_pre_look_right
    assert (first_seen - 1) * VOCODER.samples_a_frame < same <= first_seen * VOCODER.samples_a_frame
    assert not torch.equal(vocoder(mel), vocoder(other))


def test_older_names_of_weight_norm_are_read() -> None:
    vocoder = small_vocoder()
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    older = {}
    for name, value in vocoder.state_dict().items():
        for new, old in names.items():
            name = name.replace(new, old)
        older[name] = value
    other = CosyVoice3Vocoder(VOCODER)
    other.load_state_dict(older)
    mel = torch.randn(4, VOCODER.in_channels)
    assert torch.equal(other(mel), vocoder(mel))
