"""What each optimizer keeps of a parameter, on the device and on the host, what its update takes besides, and how long
it lasts: 52 M parameters, fp32, on the CPU.

`python -m benchmarks.optimizer_states CASE` is one process; it prints one JSON line. On a CPU host and device are one
memory: what the optimizer would have on a device is told apart by where it says that it keeps it, and the copies that
swapping makes are made.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

HIDDEN, INNER, LAYERS, VOCABULARY = 768, 2048, 6, 12288
STEPS = 3
ROUNDS = 2
TIMEOUT_S = 600.0
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, bf16 states": {"optimizer_state_dtype": "bf16"},
    "adamw, int8 states": {"optimizer_state_dtype": "int8"},
    "adamw_swap": {"optimizer": "adamw_swap"},
    "adamw_swap, bf16 states": {"optimizer": "adamw_swap", "optimizer_state_dtype": "bf16"},
    "adamw_swap, gradients on the host": {"optimizer": "adamw_swap", "gradients_on_host": True},
    "muon": {"optimizer": "muon"},
}
TARGETS = {
    "adamw": (8.001, 0.0), "adamw, bf16 states": (4.001, 0.0), "adamw, int8 states": (2.04, 0.0),
    "adamw_swap": (0.0, 8.001), "adamw_swap, bf16 states": (0.0, 4.001),
    "adamw_swap, gradients on the host": (0.0, 12.001), "muon": (5.0, 0.0),
}  # fmt: skip
"""Bytes a parameter on the device and on the host, gradients there included, at most."""


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name in CASES:
            command = [sys.executable, "-m", "benchmarks.optimizer_states", name]
            found[name].append(processes.run(command, timeout_s=TIMEOUT_S).last_json())
    figures = [figure for name, results in found.items() for figure in figures_of(name, results)]
    return {
        "parameters": found["adamw"][0]["parameters"],
        "steps": STEPS,
        "unit": "bytes a parameter: of the tensors' storages; peak: resident size during updates above that before "
        "them, states included. s: of an update, one thread",
        "cases": found,
        "figures": [figure.to_dict() for figure in figures],
    }


def figures_of(name: str, results: list[dict[str, Any]]) -> list[Figure]:
    """Of one case, over its rounds."""
    device, host = TARGETS[name]
    first = results[0]
    return [
        Figure(f"{name}: kept on the device", first["device_bytes"], "bytes a parameter", device),
        Figure(f"{name}: kept on the host", first["host_bytes"], "bytes a parameter", host),
        of_spread(f"{name}: peak of updates", spread([r["peak_bytes"] for r in results]), "bytes a parameter"),
        of_spread(f"{name}: an update", spread([min(r["seconds"]) for r in results]), "s"),
    ]


def main(name: str) -> None:
    """One case in this process."""
    import torch

    from mindspeed_mm.fsdp.optimizer.build import build_optimizer
    from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
    from mindspeed_mm.fsdp.params.training_args import TrainingArguments

    settings = dict(CASES[name])
    features = FeatureArguments(enable_gradient_offload=settings.pop("gradients_on_host", False))
    torch.manual_seed(0)
    model = build_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = build_optimizer(model, TrainingArguments(**settings), features, note=print)
    give_gradients(model, features.enable_gradient_offload)
    before, seconds = processes.status_kb("self", "VmRSS"), []
    reset_peak()
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    peak = processes.status_kb("self", "VmHWM") - before
    kept = bytes_kept(model, optimizer)
    result = {"parameters": count, "seconds": seconds, "peak_bytes": peak * 1024 / count}
    print(json.dumps(result | {f"{place}_bytes": held / count for place, held in kept.items()}))


def build_model() -> Any:
    """Blocks of attention and gated projections without their arithmetic, between an embedding and a head's norm."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
            self.up = nn.ModuleList(nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
            self.down = nn.Linear(INNER, HIDDEN, bias=False)
            self.norm = nn.LayerNorm(HIDDEN)

    class Model(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    return Model()


def give_gradients(model: Any, on_host: bool) -> None:
    """Made-up gradients; through a backward pass where they are to leave the device."""
    import torch

    for parameter in model.parameters():
        gradient = torch.randn_like(parameter)
        if on_host:
            (parameter * gradient).sum().backward()
        else:
            parameter.grad = gradient


def bytes_kept(model: Any, optimizer: Any) -> dict[str, int]:
    """Storage of the optimizer's state, and of gradients on the host, by where it is kept."""
    from mindspeed_mm.fsdp.optimizer.offload import offloaded

    kept = {"device": 0, "host": 0}
    for state in optimizer.state.values():
        for key, tensor in state.items():
            is_away = key.startswith("exp_avg") and getattr(optimizer, "swaps", False)
            kept["host" if is_away else "device"] += tensor.untyped_storage().nbytes() if key != "step" else 0
    gone = [offloaded(parameter) for parameter in model.parameters()]
    kept["host"] += sum(gradient.host.untyped_storage().nbytes() for gradient in gone if gradient is not None)
    return kept


def reset_peak() -> None:
    """Let VmHWM begin again."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(sys.argv[1])
