"""One process of `benchmarks.loading`: makes the model folder, or loads it and says when and what.

`python -m benchmarks.loading_rank make|ours|plain FOLDER`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from benchmarks.processes import status_kb  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def make(folder: Path) -> None:
    """Write the folder: 596 M parameters of noise."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    noise = torch.empty(2**20, dtype=torch.bfloat16).normal_(std=0.02)
    for parameter in model.parameters():
        flat = parameter.detach().view(-1)
        for start in range(0, len(flat), len(noise)):
            flat[start : start + len(noise)] = noise[: len(flat) - start]
    model.save_pretrained(folder)


def plain(folder: Path) -> None:
    """As everybody loads."""
    from transformers import Qwen3ForCausalLM

    before = status_kb("self", "RssAnon")
    begin = time.time()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    report(model, before, begin)


def ours(folder: Path) -> None:
    """As `mm train` loads: build on meta, shard, stream into the shards."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (not to be counted: the plain way has it too)

    from mindspeed_mm.fsdp.distributed.job.launch import initialize_distributed, shutdown_distributed
    from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
    from mindspeed_mm.fsdp.params.argument import Arguments
    from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
    from mindspeed_mm.fsdp.train.assemble import assemble

    arguments = Arguments.model_validate({"model": {"model_name_or_path": str(folder)}})
    before = status_kb("self", "RssAnon")
    _, _, world_size = initialize_distributed(timeout_s=120.0)
    init_parallel_state(resolve_parallel_sizes(arguments.parallel, world_size), "cpu")
    begin = time.time()
    assembled = assemble(arguments, torch.device("cpu"))
    report(assembled.model, before, begin)
    destroy_parallel_state()
    shutdown_distributed()


def report(model: nn.Module, anonymous_kb_before: int, begin: float) -> None:
    """Print what is held here and when it was loaded; the sum over its first numbers makes sure that it is."""
    end = time.time()
    parameters = list(model.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    checksum = sum(float(p.detach().reshape(-1)[:64].double().sum()) for p in local if p.numel())
    print(
        json.dumps(
            {
                "begin": begin,
                "end": end,
                "anonymous_kb_before": anonymous_kb_before,
                "peak_resident_mib": status_kb("self", "VmHWM") / 1024,
                "held_bytes": sum(p.numel() * p.element_size() for p in parameters),
                "held_here_bytes": sum(p.numel() * p.element_size() for p in local),
                "largest_bytes": max(p.numel() * p.element_size() for p in parameters),
                "checksum": checksum,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    {"make": make, "ours": ours, "plain": plain}[sys.argv[1]](Path(sys.argv[2]))
