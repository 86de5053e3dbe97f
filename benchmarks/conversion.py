"""Hugging Face folder → distributed checkpoint → the folder again, and → Megatron-style files of two tensor ranks and
two stages: seconds over those of `cp` and peak memory, beside what does the same:
`torch.distributed.checkpoint.format_utils`, which writes from and to one pickled file, and transformers'
`from_pretrained` and `save_pretrained`.

`MM_CONVERSION_BYTES` sets the size; the folder is a Qwen3-VL's in shards of 256 MiB.
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

MOST_TIMES_CP_MEGATRON = 8.0
TENSOR_RANKS, STAGES = 2, 2
VERIFIED = ", verified"
"""Runs that read back and compare what they wrote, of small models the logits too: in models in memory."""

MAKE = """
import sys, torch
from pathlib import Path
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
prepare_for_transformers()
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from mindspeed_mm.checkpoint.hf_folder import safetensors_files
from mindspeed_mm.checkpoint.lazy_tensor import Computed
folder, wanted, shard = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
text = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
            vocab_size=32768)
vision = dict(depth=4, hidden_size=512, intermediate_size=2048, num_heads=8, out_hidden_size=2048,
              deepstack_visual_indexes=[1, 2])
def outline(layers):
    own = text | dict(num_hidden_layers=layers)
    config = Qwen3VLConfig(text_config=own, vision_config=vision, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    config.architectures, config.dtype = ["Qwen3VLForConditionalGeneration"], "bfloat16"
    return config, {key: tuple(value.shape) for key, value in model.state_dict().items() if key != "lm_head.weight"}
def size(shapes):
    return 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
least, two = size(outline(2)[1]), size(outline(4)[1])
config, shapes = outline(2 + 2 * max(0, (wanted - least) // (two - least)))
tensors = {key: Computed([], lambda _, shape=shape: torch.randn(shape).bfloat16(), shape, torch.bfloat16)
           for key, shape in shapes.items()}
folder.mkdir(parents=True)
files, texts = safetensors_files(tensors, shard)
for name, file in files.items():
    file.write(folder / name, lambda key, tensor: None)
for name, content in texts.items():
    (folder / name).write_text(content)
config.save_pretrained(folder)
"""
OURS = """
import json, resource, sys, time
from pathlib import Path
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter as Converter
from mindspeed_mm.tasks.convert.convert import Division, run
way, source, target, verify, *more = sys.argv[1:]
verify = verify == "True"
began = time.time()
if way == "hf_to_dcp":
    done = Converter().hf_to_dcp(Path(source), Path(target), verify=verify)
elif way == "dcp_to_hf":
    done = Converter().dcp_to_hf(Path(source), Path(target), Path(more[0]), verify=verify)
else:
    division = Division(*map(int, more))
    done = run(Path(source), Path(target), "megatron", division=division, verify=verify)[1]
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
TRANSFORMERS = """
import json, resource, sys, time
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
prepare_for_transformers()
from transformers import Qwen3VLForConditionalGeneration
source, target = sys.argv[1:]
began = time.time()
Qwen3VLForConditionalGeneration.from_pretrained(source, dtype="auto").save_pretrained(target)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": time.time() - began, "peak_mib": peak}))
"""


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "conversion"
    source = folder / "hf"
    print(f"  writing {BYTES / 1e9:.1f} GB of random weights", flush=True)
    call(MAKE, source, BYTES, SHARD_BYTES)
    ours = ["hf_to_dcp", "dcp_to_hf", "hf_to_megatron"]
    peers = ["dcp_to_torch_save", "torch_save_to_dcp", "save_pretrained"]
    names = ["cp", *ours, *(f"{way}{VERIFIED}" for way in ours), *peers]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(REPEATS):
        for name in ("copy", "torch_dcp", "saved"):
            shutil.rmtree(folder / name, ignore_errors=True)
        runs["cp"].append(copied(source, folder / "copy"))
        for verify in (True, False):
            for name in ("dcp", "back", "megatron"):
                shutil.rmtree(folder / name, ignore_errors=True)
            kind = VERIFIED if verify else ""
            runs[f"hf_to_dcp{kind}"].append(call(OURS, "hf_to_dcp", source, folder / "dcp", verify))
            back = call(OURS, "dcp_to_hf", folder / "dcp", folder / "back", verify, source)
            runs[f"dcp_to_hf{kind}"].append(back)
            divided = call(OURS, "hf_to_megatron", source, folder / "megatron", verify, TENSOR_RANKS, STAGES)
            runs[f"hf_to_megatron{kind}"].append(divided)
        runs["dcp_to_torch_save"].append(call(TORCH, "dcp_to_torch_save", folder / "dcp/release", folder / "one.pt"))
        runs["torch_save_to_dcp"].append(call(TORCH, "torch_save_to_dcp", folder / "one.pt", folder / "torch_dcp"))
        runs["save_pretrained"].append(call(TRANSFORMERS, source, folder / "saved"))
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
    ways = {"hf_to_dcp": MOST_TIMES_CP, "dcp_to_hf": MOST_TIMES_CP, "hf_to_megatron": MOST_TIMES_CP_MEGATRON}
    for way, most in ways.items():
        times = [one["write_s"] / plain["seconds"] for one, plain in zip(runs[way], runs["cp"], strict=True)]
        found.append(of_spread(f"{way}: seconds of writing over cp", spread(times), "×", at_most=most))
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
