"""Hugging Face folder → distributed checkpoint → the folder again: seconds over those of `cp` and peak memory, beside
`torch.distributed.checkpoint.format_utils`, which writes from and to one pickled file.

`MM_CONVERSION_BYTES` sets the size; the folder has tensors of a language model's proportions in shards of 256 MiB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

BYTES = int(os.environ.get("MM_CONVERSION_BYTES", str(10**9)))
SHARD_BYTES = 256 * 2**20
REPEATS = 3
TIMEOUT_S = 900.0
MIB = 2**20
MEMORY_MARGIN_MIB = 300
MOST_TIMES_CP = 5.0

MAKE = """
import json, sys, torch
from pathlib import Path
from mindspeed_mm.checkpoint.hf_folder import safetensors_files
from mindspeed_mm.checkpoint.lazy_tensor import Computed
folder, wanted, shard = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True)
def tensor(*shape):
    return Computed([], lambda _: torch.randn(shape).bfloat16(), shape, torch.bfloat16)
layer = lambda n: {f"model.layers.{n}.mlp.{name}.weight": tensor(*s) for name, s in
    (("gate_proj", (8192, 2048)), ("up_proj", (8192, 2048)), ("down_proj", (2048, 8192)))}
tensors = {"model.embed_tokens.weight": tensor(32768, 2048)}
while sum(t.size_bytes for t in tensors.values()) < wanted:
    tensors |= layer(len(tensors) // 3)
files, texts = safetensors_files(tensors, shard)
for name, file in files.items():
    file.write(folder / name, lambda key, tensor: None)
for name, text in texts.items():
    (folder / name).write_text(text)
(folder / "config.json").write_text("{}")
"""
OURS = """
import json, resource, sys, time
from pathlib import Path
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter as Converter
way, *paths = sys.argv[1:]
began = time.time()
if way == "hf_to_dcp":
    done = Converter().hf_to_dcp(*map(Path, paths))
else:
    done = Converter().dcp_to_hf(*map(Path, paths))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
times = {"seconds": time.time() - began, "write_s": done.write_s, "verify_s": done.verify_s}
print(json.dumps({**times, "peak_mib": peak}))
"""
TORCH = """
import json, resource, sys, time
from torch.distributed.checkpoint import format_utils
way, source, target = sys.argv[1:]
began = time.time()
getattr(format_utils, way)(source, target)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": time.time() - began, "peak_mib": peak}))
"""


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "conversion"
    source = folder / "hf"
    print(f"  writing {BYTES / 1e9:.1f} GB of random weights", flush=True)
    call(MAKE, source, BYTES, SHARD_BYTES)
    runs: dict[str, list[dict[str, float]]] = {
        name: [] for name in ("cp", "hf_to_dcp", "dcp_to_hf", "dcp_to_torch_save", "torch_save_to_dcp")
    }
    for _ in range(REPEATS):
        for name in ("copy", "dcp", "back", "torch_dcp"):
            shutil.rmtree(folder / name, ignore_errors=True)
        runs["cp"].append(copied(source, folder / "copy"))
        runs["hf_to_dcp"].append(call(OURS, "hf_to_dcp", source, folder / "dcp"))
        runs["dcp_to_hf"].append(call(OURS, "dcp_to_hf", folder / "dcp", folder / "back", source))
        runs["dcp_to_torch_save"].append(call(TORCH, "dcp_to_torch_save", folder / "dcp/release", folder / "one.pt"))
        runs["torch_save_to_dcp"].append(call(TORCH, "torch_save_to_dcp", folder / "one.pt", folder / "torch_dcp"))
    shard_mib = max(file.stat().st_size for file in source.glob("*.safetensors")) / MIB
    shutil.rmtree(folder)
    return {
        "bytes": BYTES,
        "largest_shard_mib": shard_mib,
        "runs": runs,
        "figures": [figure.to_dict() for figure in figures(runs, shard_mib)],
    }


def figures(runs: dict[str, list[dict[str, float]]], shard_mib: float) -> list[Figure]:
    """Seconds over those of `cp`, hashing in and verification apart; peak memory over its limit."""
    found = []
    for way in ("hf_to_dcp", "dcp_to_hf"):
        times = [one["write_s"] / plain["seconds"] for one, plain in zip(runs[way], runs["cp"], strict=True)]
        found.append(of_spread(f"{way}: seconds of writing over cp", spread(times), "×", at_most=MOST_TIMES_CP))
        limit = 2 * shard_mib + MEMORY_MARGIN_MIB
        peaks = [one["peak_mib"] for one in runs[way]]
        found.append(of_spread(f"{way}: peak memory", spread(peaks), "MiB", at_most=limit))
    return found


def copied(source: Path, target: Path) -> dict[str, float]:
    """`cp -r`, to the disk."""
    began = time.time()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)
    return {"seconds": time.time() - began}


def call(code: str, *arguments: object) -> dict[str, float]:
    """Run a program in a process of its own; the last line that it prints."""
    done = processes.run([sys.executable, "-c", code, *map(str, arguments)], timeout_s=TIMEOUT_S)
    said: dict[str, float] = done.last_json() if done.output.strip() else {}
    return said
