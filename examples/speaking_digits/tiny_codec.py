"""A small codec in the format of Qwen3-TTS's: frames of 40 ms, four codebooks of 64 codes.

Its codes are found by clustering the spectra of the clips, each codebook what the ones before it leave over. Its
decoder, that of Qwen3-TTS at a small size, learns to make sound of codes whose spectra are those of the clips. It knows
the clips' voices and no others, and it has no encoder: the codes of its training clips are all that is needed here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers.audio_utils import mel_filter_bank

from mindspeed_mm.fsdp.models.qwen3tts.speech_codec import Qwen3TTSSpeechDecoder, decoder_config

RATE, FRAME = 16_000, 640
CODEBOOKS, CODES = 4, 64
DECODER: dict[str, Any] = {
    "codebook_size": CODES,
    "num_quantizers": CODEBOOKS,
    "codebook_dim": 128,
    "latent_dim": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "sliding_window": 16,
    "layer_scale_initial_scale": 0.1,
    "decoder_dim": 96,
    "upsampling_ratios": [2, 2],
    "upsample_rates": [8, 5, 4],
}
MELS = 40
HOP, WINDOWS = 160, (400, 128, 1024)
"""Samples from one spectrum to the next, and the lengths of windows by which sounds are compared."""
STEPS, BATCH, LEARNING_RATE = 500, 8, 2e-3


def padded(samples: np.ndarray) -> np.ndarray:
    """A clip with silence up to a whole frame."""
    return np.pad(samples, (0, -len(samples) % FRAME)).astype(np.float32)


def log_mel(sounds: torch.Tensor, window: int) -> torch.Tensor:
    """(B, T) → (B, bands, T / HOP) logarithms of mel spectra."""
    shape = torch.hann_window(window)
    pieces = torch.stft(sounds, window, HOP, window, shape, return_complex=True)[..., :-1].abs()
    bands = torch.from_numpy(
        mel_filter_bank(window // 2 + 1, MELS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    )
    return (bands.float().T @ pieces + 1e-4).log()


def features(samples: np.ndarray) -> np.ndarray:
    """(frames, numbers) that codes are clustered by: the spectra of each frame."""
    mel = log_mel(torch.from_numpy(samples)[None], WINDOWS[0])[0]
    return mel.T.reshape(len(samples) // FRAME, -1).numpy()


def clustered(points: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`CODES` centres, and the nearest one of each point (Lloyd 1982)."""
    centres = points[draw.choice(len(points), CODES, replace=False)].copy()
    for _ in range(25):
        nearest = _nearest(points, centres)
        for code in range(CODES):
            own = points[nearest == code]
            centres[code] = own.mean(0) if len(own) else points[draw.integers(len(points))]
    return centres, _nearest(points, centres)


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    found: np.ndarray = ((centres**2).sum(1)[None] - 2 * points @ centres.T).argmin(1)
    return found


def codes_of(clips: Sequence[np.ndarray], draw: np.random.Generator) -> list[np.ndarray]:
    """(frames, CODEBOOKS) of each clip."""
    left = np.concatenate([features(clip) for clip in clips])
    books = []
    for _ in range(CODEBOOKS):
        centres, nearest = clustered(left, draw)
        left = left - centres[nearest]
        books.append(nearest)
    borders = np.cumsum([len(clip) // FRAME for clip in clips])[:-1]
    return np.split(np.stack(books, axis=1), borders)


def loss_of(made: torch.Tensor, sounds: torch.Tensor) -> torch.Tensor:
    """How far spectra are apart, by windows of several lengths."""
    apart = [F.l1_loss(log_mel(made, window), log_mel(sounds, window)) for window in WINDOWS]
    return torch.stack(apart).sum()


def train_decoder(clips: Sequence[np.ndarray], codes: Sequence[np.ndarray], seed: int) -> Qwen3TTSSpeechDecoder:
    """A decoder that makes the sounds of codes."""
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    decoder = Qwen3TTSSpeechDecoder(decoder_config(DECODER)).train()
    for name, parameter in decoder.named_parameters():
        if name.endswith("embedding_sum"):
            torch.nn.init.normal_(parameter)
        if name.endswith("gamma"):
            torch.nn.init.constant_(parameter, 0.1)
    optimizer = torch.optim.AdamW(decoder.parameters(), LEARNING_RATE, betas=(0.8, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.05)
    began, losses = time.monotonic(), []
    for step in range(1, STEPS + 1):
        chosen = draw.choice(len(clips), BATCH, replace=False)
        frames = max(len(codes[number]) for number in chosen)
        told = np.stack([np.pad(codes[n], ((0, frames - len(codes[n])), (0, 0)), mode="edge") for n in chosen])
        sounds = np.stack([np.pad(clips[n], (0, frames * FRAME - len(clips[n]))) for n in chosen])
        real = torch.arange(frames * FRAME) < torch.tensor([[len(clips[n])] for n in chosen])
        made = decoder(torch.from_numpy(told).permute(0, 2, 1)) * real
        loss = loss_of(made, torch.from_numpy(sounds))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"codec  step {step}/{STEPS}  loss {np.mean(losses[-100:]):.3f}  {time.monotonic() - began:.0f} s")
    return decoder.eval()


def write_codec(decoder: Qwen3TTSSpeechDecoder, folder: Path) -> None:
    """`speech_tokenizer/` of a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"decoder.{name}": tensor.contiguous() for name, tensor in decoder.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "output_sample_rate": RATE,
        "input_sample_rate": RATE,
        "decode_upsample_rate": FRAME,
        "encode_downsample_rate": FRAME,
        "encoder_valid_num_quantizers": CODEBOOKS,
        "decoder_config": DECODER,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
