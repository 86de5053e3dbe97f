"""CosyVoice3's flow: from speech tokens, a speaker vector and the mel of a reference to the mel of speech.

Module names are those of the released `flow.pt`. Conditional flow matching (arXiv:2210.02747) with classifier-free
guidance; constants are those of the released YAML and code (FunAudioLLM/CosyVoice, `flow/flow_matching.py`). The
transformer that predicts the flow stands on the blocks of F5-TTS (arXiv:2410.06885). Shapes: B rows, N speech tokens,
T mel frames, M mel bins, S width of a speaker vector, D width, H heads, E width of a head, K rotated channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

_TIME_SCALE = 1000
"""Times from 0 to 1 are scaled by this before they are embedded."""
_LONGEST_PERIOD = 10_000
_EPSILON = 1e-6
"""Of layer norms."""


@dataclass(frozen=True)
class FlowSizes:
    """Sizes under the names of CosyVoice's own YAML; the defaults are the release's, Fun-CosyVoice3-0.5B-2512.

    `config.json` of a model folder may hold others as `flow_config`.
    """

    vocab_size: int = 6561
    """Tokens of the codec."""
    mel_dim: int = 80
    spk_embed_dim: int = 192
    """Width of a speaker vector."""
    token_mel_ratio: int = 2
    """Mel frames of a speech token."""
    pre_lookahead_len: int = 3
    """Number of following tokens that a frame depends on."""
    pre_lookahead_channels: int = 1024
    dim: int = 1024
    depth: int = 22
    heads: int = 16
    dim_head: int = 64
    ff_mult: int = 2
    conv_pos_groups: int = 16
    conv_pos_kernel: int = 31
    time_dim: int = 256
    """Width of the sinusoidal embedding of time."""
    static_chunk_size: int = 50
    """Frames of a chunk, if speech is generated chunk by chunk."""


class TimeEmbedding(nn.Module):
    """Embeds the time of a step: sinusoids, then two linear layers.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        self._half = sizes.time_dim // 2
        self.time_mlp = nn.Sequential(nn.Linear(sizes.time_dim, sizes.dim), nn.SiLU(), nn.Linear(sizes.dim, sizes.dim))

    def forward(self, time_B: torch.Tensor) -> torch.Tensor:
        """Times (B,) from 0 to 1 → (B, D)."""
        steps = torch.arange(self._half, device=time_B.device, dtype=torch.float32)
        frequencies = torch.exp(steps * -(math.log(_LONGEST_PERIOD) / (self._half - 1)))
        angles = _TIME_SCALE * time_B[:, None] * frequencies
        embedded: torch.Tensor = self.time_mlp(torch.cat((angles.sin(), angles.cos()), dim=-1).to(time_B.dtype))
        return embedded


class CausalPositions(nn.Module):
    """Positional embedding: two grouped causal convolutions.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        self._before = sizes.conv_pos_kernel - 1
        self.conv1 = nn.Sequential(self._convolution(sizes), nn.Mish())
        self.conv2 = nn.Sequential(self._convolution(sizes), nn.Mish())

    @staticmethod
    def _convolution(sizes: FlowSizes) -> nn.Conv1d:
        return nn.Conv1d(sizes.dim, sizes.dim, sizes.conv_pos_kernel, groups=sizes.conv_pos_groups)

    def forward(self, frames_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) → (B, T, D)."""
        hidden = frames_BTD.transpose(1, 2)
        for convolution in (self.conv1, self.conv2):
            hidden = convolution(F.pad(hidden, (self._before, 0)))
        return hidden.transpose(1, 2)


class InputEmbedding(nn.Module):
    """Projects noisy frame, reference mel, token and speaker to one vector per frame.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        self.proj = nn.Linear(4 * sizes.mel_dim, sizes.dim)
        self.conv_pos_embed = CausalPositions(sizes)

    def forward(
        self, noisy_BTM: torch.Tensor, known_BTM: torch.Tensor, tokens_BTM: torch.Tensor, speaker_BM: torch.Tensor
    ) -> torch.Tensor:
        """Four inputs of M channels each → (B, T, D)."""
        speaker_BTM = speaker_BM[:, None].expand_as(noisy_BTM)
        projected = self.proj(torch.cat((noisy_BTM, known_BTM, tokens_BTM, speaker_BTM), dim=-1))
        positioned: torch.Tensor = self.conv_pos_embed(projected) + projected
        return positioned


class RotaryAngles(nn.Module):
    """Rotary position angles. The release stores the frequencies among its weights.

    Args:
        dim_head: Number of rotated channels.
    """

    inv_freq: torch.Tensor

    def __init__(self, dim_head: int) -> None:
        super().__init__()
        exponents = torch.arange(0, dim_head, 2).float() / dim_head
        self.register_buffer("inv_freq", 1.0 / _LONGEST_PERIOD**exponents)

    def forward(self, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (T, K) for this many frames; channels 2i and 2i + 1 form a pair."""
        places = torch.arange(frames, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        angles_TK = torch.outer(places, self.inv_freq).repeat_interleave(2, dim=-1)
        return angles_TK.cos(), angles_TK.sin()


def rotate(channels_BTD: torch.Tensor, cosines_TK: torch.Tensor, sines_TK: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to the first K of D channels, before the channels are split into heads.

    K is the width of one head, so only the first head gets positions. The released model was trained this way.
    """
    rotated, rest = channels_BTD.tensor_split((cosines_TK.shape[-1],), dim=-1)
    pairs = rotated.unflatten(-1, (-1, 2))
    crossed = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    rotated = rotated * cosines_TK.to(rotated) + crossed * sines_TK.to(rotated)
    return torch.cat((rotated, rest), dim=-1)


class SelfAttention(nn.Module):
    """Multi-head attention over frames.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        inner = sizes.heads * sizes.dim_head
        self._heads = sizes.heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(sizes.dim, inner) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(inner, sizes.dim)])

    def forward(
        self,
        frames_BTD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        seen_TT: torch.Tensor | None,
    ) -> torch.Tensor:
        """(B, T, D) → (B, T, D).

        Args:
            frames_BTD: Normalised frames.
            rotation: Of `RotaryAngles`.
            seen_TT: True where a frame (row) attends to another one (column); None: everywhere.
        """
        query, key = (rotate(project(frames_BTD), *rotation) for project in (self.to_q, self.to_k))
        query_BHTE, key_BHTE, value_BHTE = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in (query, key, self.to_v(frames_BTD))
        )
        mixed_BHTE = F.scaled_dot_product_attention(query_BHTE, key_BHTE, value_BHTE, attn_mask=seen_TT)
        mixed: torch.Tensor = self.to_out[0](mixed_BHTE.transpose(1, 2).flatten(-2))
        return mixed


class Modulation(nn.Module):
    """Scales, shifts and gates computed from the time of a step (adaptive layer norm, arXiv:2212.09748).

    Args:
        dim: Model width.
        parts: Number of vectors to compute.
    """

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self._parts = parts
        self.linear = nn.Linear(dim, dim * parts)

    def forward(self, time_BD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`parts` vectors (B, 1, D)."""
        vectors: torch.Tensor = self.linear(F.silu(time_BD))
        return vectors[:, None].chunk(self._parts, dim=-1)


class FeedForward(nn.Module):
    """Two linear layers with GELU (tanh approximation) between them.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        inner = sizes.dim * sizes.ff_mult
        widen = nn.Sequential(nn.Linear(sizes.dim, inner), nn.GELU(approximate="tanh"))
        # The identity stands for the release's dropout, so that weights keep their names.
        self.ff = nn.Sequential(widen, nn.Identity(), nn.Linear(inner, sizes.dim))

    def forward(self, frames_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) → (B, T, D)."""
        transformed: torch.Tensor = self.ff(frames_BTD)
        return transformed


class Block(nn.Module):
    """Attention and feed-forward, each with modulated layer norm and a gate.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        self.attn_norm = Modulation(sizes.dim, 6)
        self.attn = SelfAttention(sizes)
        self.ff = FeedForward(sizes)

    def forward(
        self,
        frames_BTD: torch.Tensor,
        time_BD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        seen_TT: torch.Tensor | None,
    ) -> torch.Tensor:
        """(B, T, D) → (B, T, D); the other arguments as of `SelfAttention`."""
        shift, scale, gate, ff_shift, ff_scale, ff_gate = self.attn_norm(time_BD)
        mixed = self.attn(_normalised(frames_BTD) * (1 + scale) + shift, rotation, seen_TT)
        frames_BTD = frames_BTD + gate * mixed
        return frames_BTD + ff_gate * self.ff(_normalised(frames_BTD) * (1 + ff_scale) + ff_shift)


class FlowTransformer(nn.Module):
    """Predicts the velocity of noisy mel frames.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        self._chunk = sizes.static_chunk_size
        self.time_embed = TimeEmbedding(sizes)
        self.input_embed = InputEmbedding(sizes)
        self.rotary_embed = RotaryAngles(sizes.dim_head)
        self.transformer_blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm_out = Modulation(sizes.dim, 2)
        self.proj_out = nn.Linear(sizes.dim, sizes.mel_dim)

    def forward(
        self,
        noisy_BTM: torch.Tensor,
        time_B: torch.Tensor,
        known_BTM: torch.Tensor,
        tokens_BTM: torch.Tensor,
        speaker_BM: torch.Tensor,
        *,
        by_chunks: bool = False,
    ) -> torch.Tensor:
        """The velocity (B, T, M) of each mel bin.

        Args:
            noisy_BTM: Mel frames: noise at time 0, speech at time 1.
            time_B: From 0 to 1.
            known_BTM: Mel of the reference, zeros after it.
            tokens_BTM: Embedded speech tokens, one vector a frame.
            speaker_BM: The projected speaker vector.
            by_chunks: Frames attend only up to the end of their chunk, as the release does in streaming.
        """
        time_BD = self.time_embed(time_B)
        frames_BTD = self.input_embed(noisy_BTM, known_BTM, tokens_BTM, speaker_BM)
        rotation = self.rotary_embed(noisy_BTM.shape[1])
        seen_TT = _seen_by_chunks(noisy_BTM.shape[1], self._chunk, noisy_BTM.device) if by_chunks else None
        for block in self.transformer_blocks:
            frames_BTD = block(frames_BTD, time_BD, rotation, seen_TT)
        # The scale comes first here, unlike in the blocks, as in the released weights.
        scale, shift = self.norm_out(time_BD)
        velocity: torch.Tensor = self.proj_out(_normalised(frames_BTD) * (1 + scale) + shift)
        return velocity


def _normalised(frames_BTD: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(frames_BTD, frames_BTD.shape[-1:], eps=_EPSILON)


def _seen_by_chunks(frames: int, chunk: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(frames, device=device)
    # (T, T): a row's frame sees all of its own chunk and of those before.
    return places[None, :] < (places[:, None] // chunk + 1) * chunk


STEPS = 10
"""Euler steps."""
GUIDANCE = 0.7
"""Scale of classifier-free guidance; the unconditional pass has no tokens, speaker or reference."""
NOISE_FRAMES = 15_000
"""Five minutes. The release starts every generation from the same noise, drawn once with seed 0."""
_NOISE_SEED = 0


class LookAhead(nn.Module):
    """Residual convolutions: one over following tokens, then one over two previous ones.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        self._after = sizes.pre_lookahead_len
        self.conv1 = nn.Conv1d(sizes.mel_dim, sizes.pre_lookahead_channels, sizes.pre_lookahead_len + 1)
        self.conv2 = nn.Conv1d(sizes.pre_lookahead_channels, sizes.mel_dim, 3)

    def forward(self, tokens_BNM: torch.Tensor) -> torch.Tensor:
        """(B, N, M) → (B, N, M), padded with zeros after the last token."""
        # Tokens after the last one are zeros, so its frames depend on no others.
        hidden = self.conv1(F.pad(tokens_BNM.transpose(1, 2), (0, self._after)))
        hidden = self.conv2(F.pad(F.leaky_relu(hidden), (self.conv2.kernel_size[0] - 1, 0)))
        mixed: torch.Tensor = hidden.transpose(1, 2) + tokens_BNM
        return mixed


class CosyVoice3Flow(nn.Module):
    """Generates mel frames from speech tokens.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: FlowSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_embedding = nn.Embedding(sizes.vocab_size, sizes.mel_dim)
        self.spk_embed_affine_layer = nn.Linear(sizes.spk_embed_dim, sizes.mel_dim)
        self.pre_lookahead_layer = LookAhead(sizes)
        self.decoder = nn.Module()
        self.decoder.estimator = FlowTransformer(sizes)

    @torch.no_grad()
    def forward(
        self,
        tokens_N: torch.Tensor,
        speaker_S: torch.Tensor,
        reference_tokens: torch.Tensor,
        reference_mel_TM: torch.Tensor,
        *,
        noise_TM: torch.Tensor | None = None,
        steps: int = STEPS,
        guidance: float = GUIDANCE,
        by_chunks: bool = False,
    ) -> torch.Tensor:
        """The mel (T, M) of `tokens_N`, with `token_mel_ratio` frames each.

        Args:
            tokens_N: Speech tokens from 0 to `vocab_size` - 1.
            speaker_S: Speaker vector; it is normalised to length 1.
            reference_tokens: Speech tokens of the reference, empty without one.
            reference_mel_TM: Its mel, at most `token_mel_ratio` frames a token.
            noise_TM: Noise for the frames of the reference and the new ones; None: that of the release.
            steps: Number of Euler steps.
            guidance: Guidance scale; 0 switches guidance off.
            by_chunks: As of `FlowTransformer`.

        Raises:
            ValueError: Reference and tokens together last longer than the noise.
        """
        tokens = torch.cat((reference_tokens, tokens_N))
        embedded_BNM = self.pre_lookahead_layer(self.input_embedding(tokens[None]))
        # (B, N, M) → (B, T, M)
        embedded_BTM = embedded_BNM.repeat_interleave(self.sizes.token_mel_ratio, dim=1)
        speaker_BM = self.spk_embed_affine_layer(F.normalize(speaker_S[None].to(embedded_BTM), dim=1))
        known_BTM = torch.zeros_like(embedded_BTM)
        known_BTM[:, : len(reference_mel_TM)] = reference_mel_TM
        if noise_TM is None:
            noise_TM = released_noise(embedded_BTM.shape[1], self.sizes.mel_dim)
        mel_BTM = self._solve(
            noise_TM[None].to(embedded_BTM), known_BTM, embedded_BTM, speaker_BM, steps, guidance, by_chunks
        )
        return mel_BTM[0, len(reference_mel_TM) :]

    def _solve(
        self,
        frames_BTM: torch.Tensor,
        known_BTM: torch.Tensor,
        embedded_BTM: torch.Tensor,
        speaker_BM: torch.Tensor,
        steps: int,
        guidance: float,
        by_chunks: bool,
    ) -> torch.Tensor:
        """Integrate from noise at time 0 to speech at time 1, with the published cosine schedule."""
        # Short steps near the noise, long ones near speech.
        times = 1 - torch.cos(torch.linspace(0, 1, steps + 1, dtype=torch.float64) * (math.pi / 2))
        # Two rows: with all conditions, and with none.
        conditions = [torch.cat((part, torch.zeros_like(part))) for part in (known_BTM, embedded_BTM, speaker_BM)]
        for now, then in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
            time_B = frames_BTM.new_full((2,), now)
            both = self.decoder.estimator(frames_BTM.repeat(2, 1, 1), time_B, *conditions, by_chunks=by_chunks)
            conditioned, free = both.chunk(2)
            frames_BTM = frames_BTM + (then - now) * ((1 + guidance) * conditioned - guidance * free)
        return frames_BTM


def released_noise(frames: int, mel_dim: int) -> torch.Tensor:
    """The first frames (T, M) of the noise that the release starts from.

    Raises:
        ValueError: More than `NOISE_FRAMES` are asked for.
    """
    if frames > NOISE_FRAMES:
        raise ValueError(f"{frames} mel frames; the model makes up to {NOISE_FRAMES} at a time")
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    # Drawn whole and cut: a draw of fewer frames would have other numbers.
    return torch.randn(1, mel_dim, NOISE_FRAMES, generator=generator)[0, :, :frames].T
