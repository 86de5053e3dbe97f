"""What kinds of adapters cost: bytes of the frozen base, seconds of loading and of a step, on the CPU.

    python -m benchmarks.adapters lora dora nf4 int8

A Qwen3 of eight layers of width 1,024 (101 M numbers in linear layers, bf16), adapters of rank 16 on all of them, one
row of 256 tokens; each kind in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "nf4": {"quantize": "nf4"},
    "int8": {"quantize": "int8"},
}
_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_TOKENS, _STEPS = 256, 4


def write_model(folder: Path) -> None:
    """The base, with random weights."""
    ensure_torchvision()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 64}
    config = Qwen3Config(vocab_size=1024, num_attention_heads=16, num_key_value_heads=8, **sizes)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def load(folder: Path, kind: str) -> Any:
    """The model with adapters and weights."""
    from mindspeed_mm.fsdp.models.lora.apply import apply_lora, initialize_lora
    from mindspeed_mm.fsdp.models.modelhub import ModelHub
    from mindspeed_mm.fsdp.params.lora_args import LoraArguments
    from mindspeed_mm.fsdp.params.model_args import ModelArguments

    section = {"enable": True, "rank": 16, "alpha": 32, "target_modules": _LAYERS, **KINDS[kind]}
    arguments, lora = ModelArguments(model_name_or_path=str(folder)), LoraArguments.model_validate(section)
    model = ModelHub.build(arguments, param_dtype=torch.bfloat16)
    apply_lora(model, lora, param_dtype=torch.bfloat16)
    loaded = ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    initialize_lora(model, lora, 0, folder=loaded.folder)
    return model


def measure(folder: Path, kind: str) -> str:
    """One line of the table."""
    began = time.perf_counter()
    model = load(folder, kind)
    loading = time.perf_counter() - began
    layers = [module for name, module in model.named_modules() if name.endswith("base_layer")]
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    size_bytes = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    tokens, steps = torch.randint(0, 1000, (1, _TOKENS)), []
    for _ in range(_STEPS):
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens).logits.float().square().mean()
        loss.backward()
        steps.append(time.perf_counter() - began)
    return f"| {kind} | {size_bytes / numbers:.4f} | {loading:.1f} | {min(steps[1:]):.2f} |"


def main(words: list[str]) -> None:
    """Print a table of the kinds that are named, of all without."""
    if words[:1] == ["--one"]:
        print(measure(Path(words[1]), words[2]), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        print("| kind | bytes a number of the base | s to load | s a step |\n|---|---|---|---|", flush=True)
        for kind in words or KINDS:
            subprocess.run([sys.executable, "-m", "benchmarks.adapters", "--one", name, kind], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
