"""Sizes of the bf16 training step, from large to small, and what accelerators can do at most."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


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
    warm_up_steps: int = 4
    measured_steps: int = 12

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
        """Of one optimizer step, forward and backward, causal half: 3 · 2 · L² · heads · width a layer and row."""
        return 6 * self.length**2 * self.heads * self.head_width * self.layers * self.rows * self.micro_batches


def _qwen3_17(needs_gib: float, rows: int) -> Attempt:
    return Attempt(f"1.7B-{rows}x4096", needs_gib, 151_936, 2048, 6144, 28, 16, 8, 128, rows, 4096, 2)


def _qwen3_06(needs_gib: float, rows: int, length: int) -> Attempt:
    return Attempt(f"0.6B-{rows}x{length}", needs_gib, 151_936, 1024, 3072, 28, 16, 8, 128, rows, length, 2)


ATTEMPTS = [_qwen3_17(120, 2), _qwen3_17(70, 1), _qwen3_06(36, 1, 4096), _qwen3_06(20, 1, 2048)]
TINY = Attempt("tiny", 0, 1000, 64, 128, 2, 4, 2, 16, 2, 64, 2, warm_up_steps=1, measured_steps=2)

PEAK_BF16_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "910B": 376.0,
}
"""Dense bf16 peaks by part of the device's name, from the vendors' data sheets; the first that fits counts."""


def peak_tflops(device_name: str) -> float | None:
    """The peak of a device, or None when nobody here knows it."""
    return next((peak for name, peak in PEAK_BF16_TFLOPS.items() if name in device_name), None)
