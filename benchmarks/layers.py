"""Operations of a decoder's layer, plain and with compiled norms, rotary embeddings and gates: what a host launches one
by one. Counts, not times: they are the same on every machine.

Counted is what reaches torch's dispatcher and is more than a view, and each kernel that inductor made and that ran. The
packed row of two documents goes through attention document by document, as on a CPU; on a device one kernel takes both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from benchmarks.figures import Figure
from mindspeed_mm import ensure_torchvision
from mindspeed_mm.fsdp.features.speed.choice import COMPILED, SpeedChoice
from mindspeed_mm.fsdp.features.speed.fused_kernels import apply_fused_kernels
from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME, register_attention
from mindspeed_mm.fsdp.ops.experts import fused_experts, use_own_experts

FORWARD, BACKWARD = 25, 45
"""Most operations of a dense layer with fused kernels."""
VIEWS = frozenset({
    "view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "split", "split_with_sizes", "unbind",
    "select", "unsqueeze", "squeeze", "detach", "alias", "_reshape_alias", "as_strided", "reshape",
})  # fmt: skip
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Operations(TorchDispatchMode):
    """Counts operations that compute; compiled graphs run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_inside = False

    @contextmanager
    def as_one(self, name: str) -> Iterator[None]:
        """Count all that is computed within as one operation of that name."""
        self.counts[name] += 1
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).split(".")[1]
        if name not in VIEWS and not self._is_inside:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def run(_work: Path) -> dict[str, Any]:
    """Count, and compare with the bars."""
    ensure_torchvision()
    register_attention()
    layers = {}
    for name in ("dense", "experts"):
        for fused in (False, True):
            forward, backward = of_a_layer(name, fused=fused)
            words = f"{name}, {'fused' if fused else 'plain'}"
            layers[words] = {"forward": dict(forward), "backward": dict(backward)}
    figures = []
    for words, counts in layers.items():
        for way, most in (("forward", FORWARD), ("backward", BACKWARD)):
            at_most = most if words == "dense, fused" else None
            figures.append(Figure(f"{words}: {way}", sum(counts[way].values()), "operations", at_most))
    return {"layers": layers, "figures": [figure.to_dict() for figure in figures]}


def of_a_layer(name: str, *, fused: bool) -> tuple[Counter[str], Counter[str]]:
    """Operations of a layer's forward and backward pass: half of what three layers do more than one."""
    one, three = (_operations(_build(name, layers, fused=fused)) for layers in (1, 3))
    return _half(three[0], one[0]), _half(three[1], one[1])


def _half(three: Counter[str], one: Counter[str]) -> Counter[str]:
    return Counter({name: (three[name] - one[name]) // 2 for name in three if three[name] > one[name]})


def _build(name: str, layers: int, *, fused: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model: nn.Module
    if name == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=layers, attn_implementation=ATTENTION_NAME))
    else:
        config = Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=layers, attn_implementation=ATTENTION_NAME)
        model = Qwen3MoeForCausalLM(config)
        for experts in fused_experts(model).values():
            use_own_experts(experts)
    if fused:
        apply_fused_kernels(model, SpeedChoice(COMPILED, "it is counted"), is_wish=True)
    return model


def _operations(model: nn.Module) -> tuple[Counter[str], Counter[str]]:
    """Of a step's forward and backward pass, once everything is compiled: dispatched, and kernels of inductor."""
    borders = torch.tensor([0, 30, 64], dtype=torch.int32)
    inputs = {
        "input_ids": torch.randint(0, 50, (1, 64)),
        "position_ids": torch.cat([torch.arange(30), torch.arange(34)])[None],
        "cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 34, "max_length_k": 34, "use_cache": False,
    }  # fmt: skip
    from torch._inductor import config

    with config.patch({"cpp.enable_kernel_profile": True, "force_disable_caches": True}):
        for _ in range(2):
            _step(model, inputs, Operations())
    forward, backward = _step(model, inputs, Operations())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output = _output(model, inputs)
        with torch.profiler.record_function("the way back"):
            output.sum().backward()
    events = list(profile.events() or [])
    turn = next(event.time_range.start for event in events if event.name == "the way back")
    for event in events:
        if "cpp_fused" in event.name:
            way = forward if event.time_range.start < turn else backward
            way["kernel of inductor"] += 1
    return forward, backward


def _output(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = model.model(**inputs).last_hidden_state
    return hidden


def _step(model: nn.Module, inputs: dict[str, Any], operations: Operations) -> tuple[Counter[str], Counter[str]]:
    model.zero_grad()  # a first gradient is kept, not added
    with operations:
        output = _output(model, inputs)
        forward = Counter(operations.counts)
        output.sum().backward()
    return forward, operations.counts - forward
