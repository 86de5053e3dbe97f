"""What makes a step faster, one by one and together: the settings of a configuration, and what is said of them."""

from __future__ import annotations

from typing import Any

from benchmarks.figures import Figure

Sections = dict[str, dict[str, Any]]


def variants(*, tiny: bool) -> dict[str, Sections]:
    """Name → sections of the configuration. On a CPU the same code, by a compiler that makes no kernels and by 8-bit
    arithmetic that is followed, and no fused kernels."""
    plan = {"compile_plan": {"backend": "aot_eager"}} if tiny else {}
    plain: Sections = {"features": {"compile": False, "fused_kernels": False}}
    compiled: Sections = {"features": {"compile": True, "fused_kernels": False, **plan}}
    fused: Sections = {"features": {"compile": False, "fused_kernels": "auto" if tiny else True}}
    low: Sections = {"training": {"quantization_plan": {"recipe_name": "fp8", "extra_args": {"emulate": tiny}}}}
    return {
        "plain": plain,
        "compiled": compiled,
        "fused kernels": fused,
        "fp8": plain | low,
        "compiled, fp8": compiled | low,
    }


def offloads() -> dict[str, Sections]:
    """Name → sections: what may live on the host, and copies from memory that is not locked."""
    features = {"activations": "enable_activation_offload", "gradients": "enable_gradient_offload"}
    ways: dict[str, Sections] = {
        f"{what} on the host": {"features": {key: True, "recompute": True}} for what, key in features.items()
    }
    ways["moments on the host"] = {"training": {"optimizer": "adamw_swap"}}
    for name, pinned in (("parameters on the host", True), ("parameters on the host, unpinned", False)):
        ways[name] = {"parallel": {"fsdp_plan": {"cpu_offload": True, "pin_memory": pinned}}}
    return {"plain": {}, "recompute": {"features": {"recompute": True}}, **ways}


def speed_figures(speed: dict[str, Any]) -> list[Figure]:
    """Tokens a second of each, of the plain step's."""
    plain = speed.get("plain", {}).get("tokens_per_s")
    others = [(name, each.get("tokens_per_s")) for name, each in speed.items() if isinstance(each, dict)]
    return [
        Figure(f"bf16 step, {name}, over plain", rate / plain if rate and plain else None, "×")
        for name, rate in others
        if name != "plain"
    ]


def kernel_figures(kernels: dict[str, Any]) -> list[Figure]:
    """Milliseconds of each; what does not run on the device has none."""
    rows = {f"grouped product, {dtype}": ways for dtype, ways in kernels.get("grouped_ms", {}).items()}
    rows["packed attention"] = kernels.get("packed_attention_ms", {})
    return [
        Figure(f"{name}, {way}", time if isinstance(time, float) else None, "ms")
        for name, ways in rows.items()
        for way, time in ways.items()
    ]
