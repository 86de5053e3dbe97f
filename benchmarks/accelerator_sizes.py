"""Sizes of the bf16 training steps, from large to small, and what accelerators can do at most."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Attempt:
    """A Qwen3-shaped model and the batch of one optimizer step."""

    name: str
    needs_gib: float
    """Memory of the accelerator below which it is not tried: 16 bytes a parameter, activations, logits."""
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rows: int
    length: int
    micro_batches: int
    documents: int = 1
    """Of equal length in a row's tokens: above 1, ours packs all of a micro-batch into one row."""
    warm_up_steps: int = 4
    measured_steps: int = 12

    @property
    def samples(self) -> int:
        """Documents of a micro-batch."""
        return self.rows * self.documents

    @property
    def document_tokens(self) -> int:
        """Of each document."""
        return self.length // self.documents

    def packed(self, documents: int) -> Attempt:
        """The same tokens in shorter documents."""
        return replace(self, name=f"{self.name}-packed", documents=documents)

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.rows * self.length * self.micro_batches

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        """Back from the command line."""
        return cls(**json.loads(text))

    def attention_flops(self) -> int:
        """Of one optimizer step, forward and backward, causal half: 3 · 2 · L² · heads · width a layer and document."""
        squares = self.document_tokens**2 * self.samples * self.micro_batches
        return 6 * squares * self.heads * self.head_width * self.layers


def _qwen3_17(needs_gib: float, rows: int) -> Attempt:
    return Attempt(f"1.7B-{rows}x4096", needs_gib, 151_936, 2048, 6144, 28, 16, 8, 128, rows, 4096, 2)


def _qwen3_06(needs_gib: float, rows: int, length: int) -> Attempt:
    return Attempt(f"0.6B-{rows}x{length}", needs_gib, 151_936, 1024, 3072, 28, 16, 8, 128, rows, length, 2)


ATTEMPTS = [_qwen3_17(120, 2), _qwen3_17(70, 1), _qwen3_06(36, 1, 4096), _qwen3_06(20, 1, 2048)]
TINY = Attempt("tiny", 0, 1000, 64, 128, 2, 4, 2, 16, 2, 64, 2, warm_up_steps=1, measured_steps=2)


@dataclass(frozen=True)
class Clip:
    """A Wan2.1-shaped transformer, and latents of one clip a step."""

    name: str
    needs_gib: float
    """Memory of the accelerator below which it is not tried."""
    frames: int
    """Of the latents: 4 of the video each, but for the first."""
    height: int
    width: int
    recompute: bool
    layers: int = 30
    heads: int = 12
    head_width: int = 128
    feed_forward: int = 8960
    text_tokens: int = 512
    text_width: int = 4096
    channels: int = 16
    warm_up_steps: int = 3
    measured_steps: int = 8

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(C, T, H, W)."""
        return (self.channels, self.frames, self.height, self.width)

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Clip:
        """Back from the command line."""
        return cls(**json.loads(text))


def _wan_13(needs_gib: float, frames: int, recompute: bool) -> Clip:
    return Clip(f"1.3B-{frames}x60x104", needs_gib, frames, 60, 104, recompute)


# 23 GB of weights, masters, gradients and optimizer; 116 kB a token and layer where activations are kept.
CLIPS = {
    "recompute": [_wan_13(48, 21, True), _wan_13(30, 9, True)],
    "no recompute": [_wan_13(136, 21, False), _wan_13(100, 13, False), _wan_13(60, 5, False), _wan_13(36, 1, False)],
}
TINY_CLIP = Clip(
    "tiny", 0, 3, 8, 8, False, layers=2, heads=2, head_width=12, feed_forward=32, text_tokens=16, text_width=24,
    channels=4, warm_up_steps=1, measured_steps=2,
)  # fmt: skip
TINY_CLIPS = {name: [replace(TINY_CLIP, recompute=clips[0].recompute)] for name, clips in CLIPS.items()}
