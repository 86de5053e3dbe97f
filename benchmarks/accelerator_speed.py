"""What makes a step faster, one by one and together: the settings of a configuration, and what is said of them."""

from __future__ import annotations

from typing import Any

from benchmarks.figures import Figure

Sections = dict[str, dict[str, Any]]


def variants(*, tiny: bool) -> dict[str, Sections]:
    """Name → sections of the configuration. On a CPU the same code, by a compiler that makes no kernels and by 8-bit
    arithmetic that is followed, and no fused kernels."""
    compiled: Sections = {"features": {"compile": True, "compile_plan": {"backend": "aot_eager"} if tiny else {}}}
    fused: Sections = {"features": {"fused_kernels": "auto" if tiny else True}}
    low: Sections = {"training": {"quantization_plan": {"recipe_name": "fp8", "extra_args": {"emulate": tiny}}}}
    return {"plain": {}, "compiled": compiled, "fused kernels": fused, "fp8": low, "compiled, fp8": compiled | low}


def speed_figures(speed: dict[str, Any]) -> list[Figure]:
    """Tokens a second of each, of the plain step's."""
    plain = speed.get("plain", {}).get("tokens_per_s")
    others = [(name, each.get("tokens_per_s")) for name, each in speed.items() if isinstance(each, dict)]
    return [
        Figure(f"bf16 step, {name}, over plain", rate / plain if rate and plain else None, "×")
        for name, rate in others
        if name != "plain"
    ]
