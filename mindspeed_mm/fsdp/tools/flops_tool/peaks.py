"""Peaks of accelerators as their vendors publish them: dense, without sparsity, at the boost clock.

Sources: NVIDIA's data sheets of V100, T4, A100, A800, A40, A10, L4, L40, L40S, H100, H200, HGX B200/B300 and GB200
(half of what they state with sparsity), the white papers of the Ampere GA102, Ada and Blackwell RTX processors (bf16
and fp16 with fp32 accumulation); Huawei's data sheets of Atlas 800T A2 and 900 A2, and for the two-die 910C, whose dies
are devices of their own, the CloudMatrix384 paper (752 TFLOP/s a package). fp32 is without TF32 or HF32.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.suggest import did_you_mean


class Peak(NamedTuple):
    """TFLOP/s of one device by format; 0 where it has none, or where it is not published."""

    half: float
    """bf16 and fp16."""
    tf32: float
    fp32: float
    fp8: float


PEAKS = {
    "GB200": Peak(2500, 1250, 80, 5000),
    "B300": Peak(2250, 1100, 75, 4500),
    "B200": Peak(2250, 1100, 75, 4500),
    "H200 NVL": Peak(835, 417, 60, 1671),
    "H200": Peak(989, 494, 67, 1979),
    "GH200": Peak(989, 494, 67, 1979),
    "H100 NVL": Peak(835, 417, 60, 1671),
    "H100 PCIe": Peak(756, 378, 51, 1513),
    "H100": Peak(989, 494, 67, 1979),
    "H800": Peak(989, 494, 67, 1979),
    "H20": Peak(148, 74, 44, 296),
    "A100": Peak(312, 156, 19.5, 0),
    "A800": Peak(312, 156, 19.5, 0),
    "A40": Peak(149.7, 74.8, 37.4, 0),
    "A10": Peak(125, 62.5, 31.2, 0),
    "L40S": Peak(362, 183, 91.6, 733),
    "L40": Peak(181, 90.5, 90.5, 362),
    "L4": Peak(121, 60, 30.3, 242),
    "RTX 6000 Ada": Peak(364, 182, 91.1, 728),
    "RTX 5090": Peak(209.5, 104.8, 104.8, 419),
    "RTX 4090": Peak(165.2, 82.6, 82.6, 330.3),
    "RTX 3090": Peak(71, 35.6, 35.6, 0),
    "V100": Peak(125, 0, 15.7, 0),
    "T4": Peak(65, 0, 8.1, 0),
    "910B4": Peak(280, 0, 0, 0),
    "910B3": Peak(313, 0, 0, 0),
    "910B2": Peak(376, 0, 0, 0),
    "910B": Peak(376, 0, 0, 0),
    "910_93": Peak(376, 0, 0, 0),
    "910C": Peak(376, 0, 0, 0),
}
"""Part of a device's name → its peaks; the first that fits counts."""

_ONLY_HALF = ("V100", "T4")
"""Devices whose half precision is fp16 alone."""


def peak_tflops(device_name: str, precision: str = "bf16") -> float | None:
    """The peak of a device that calls itself so, in a precision such as bf16; None when it is not known here."""
    words = device_name.lower()
    name = next((name for name in PEAKS if _fits(name.lower(), words)), None)
    if name is None or (precision == "bf16" and name in _ONLY_HALF):
        return None
    # 0 stands for what is not published, and becomes None.
    peak = PEAKS[name]
    return {"bf16": peak.half, "fp16": peak.half, "tf32": peak.tf32, "fp32": peak.fp32, "fp8": peak.fp8}[
        precision
    ] or None


def known_peak(device_name: str, precision: str = "bf16") -> float:
    """As `peak_tflops`, for a name that a person typed.

    Raises:
        ConfigError: The device, or its peak in this format, is not known here.
    """
    found = peak_tflops(device_name, precision)
    if found is None:
        raise ConfigError(
            f"the {precision} peak of '{device_name}' is not known",
            key="--device",
            way_out=did_you_mean(device_name, PEAKS) or f"Known: {', '.join(PEAKS)}; or give --peak-tflops.",
        )
    return found


def _fits(name: str, words: str) -> bool:
    """Whole words only: an L4 is not an L40; what Ascend devices put in front or behind does not matter."""
    place = words.find(name)
    while place >= 0:
        behind = words[place + len(name) : place + len(name) + 1]
        before = words[place - 1 : place] if place else ""
        if name.startswith("910") or not (behind.isalnum() or before.isalnum()):
            return True
        place = words.find(name, place + 1)
    return False
