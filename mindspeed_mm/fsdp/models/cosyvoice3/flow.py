"""CosyVoice3's flow: from speech tokens, a speaker vector and the mel of a reference to the mel of speech.

Module names are those of the released `flow.pt`. Conditional flow matching (arXiv:2210.02747) with classifier-free
guidance; constants are those of the released YAML and code (FunAudioLLM/CosyVoice, `flow/flow_matching.py`). Shapes:
N speech tokens, T mel frames, M mel bins, S width of a speaker vector.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.fsdp.models.cosyvoice3.flow_transformer import FlowSizes, FlowTransformer

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
        times = 1 - torch.cos(torch.linspace(0, 1, steps + 1, dtype=torch.float64) * (math.pi / 2))
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
    return torch.randn(1, mel_dim, NOISE_FRAMES, generator=generator)[0, :, :frames].T
