"""Both ways of a promise that is about one piece of work: what is done by default, and what it replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.fsdp.data.data_utils.byte_pixels import Levels
from mindspeed_mm.fsdp.models.behaviour.host_grids import attend_to_pictures_at_once, read_grids_on_host
from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME, register_attention, varlen_attention
from mindspeed_mm.fsdp.ops.experts import fused_experts, use_own_experts
from mindspeed_mm.fsdp.ops.kernels_in_force import IN_FORCE, device_facts, need_of
from mindspeed_mm.fsdp.utils.device import copied_to

Results = list[torch.Tensor]


@dataclass(frozen=True)
class Ways:
    """Two calls that do the same work; each gives what is compared.

    Args:
        ours: What is done by default.
        other: What it replaced.
        note: What was chosen here.
    """

    ours: Callable[[], Results]
    other: Callable[[], Results]
    note: str = ""


def dtype_on(device: torch.device) -> torch.dtype:
    """What training computes in there."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def random(device: torch.device, *shape: int) -> torch.Tensor:
    """A leaf of random numbers."""
    return torch.randn(shape, device=device, dtype=dtype_on(device)).requires_grad_()


def with_gradients(output: torch.Tensor, leaves: list[torch.Tensor]) -> Results:
    """Of the sum of squares."""
    gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    return [output.detach(), *gradients]


# --- towers and attention ---------------------------------------------------------------------------------------------


def towers(device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """A Qwen3-VL tower of three blocks with small pictures, as it is prepared here and as the library has it."""
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    width, pictures, side = (32, 4, 4) if tiny else (1152, 256, 8)
    sizes = {"hidden_size": width, "num_heads": 2 if tiny else 16, "intermediate_size": 4 * width}
    others = {"out_hidden_size": width, "depth": 3, "deepstack_visual_indexes": [], "num_position_embeddings": 256}
    config = Qwen3VLConfig(vision_config={**sizes, **others, "patch_size": 16}).vision_config
    patches = random(device, pictures * side * side, 3 * 2 * 16 * 16).detach()
    grids = torch.tensor([[1, side, side]] * pictures, device=device)

    def way(attention: str) -> Callable[[], Results]:
        torch.manual_seed(0)
        tower: Any = Qwen3VLVisionModel(config).to(device, dtype_on(device))
        tower.config = type(config).from_dict(config.to_dict())
        tower.set_attn_implementation(attention)
        if attention == ATTENTION_NAME:
            read_grids_on_host(tower)
            attend_to_pictures_at_once(tower)
        leaves = [p for name, p in tower.named_parameters() if "blocks" in name]

        def call() -> Results:
            output = tower(patches, grid_thw=grids).last_hidden_state
            return with_gradients(output, leaves)[:1]

        return call

    register_attention()
    return Ways(way(ATTENTION_NAME), way("sdpa"))


def packed_attention(device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """A row of documents of different lengths by borders, and each by itself."""
    heads, kept, width, lengths = (4, 2, 16, [8, 24, 16]) if tiny else (32, 8, 128, [512, 2048, 1024, 512, 3072, 1024])
    q, k, v = (random(device, 1, count, sum(lengths), width) for count in (heads, kept, kept))
    device_now = IN_FORCE.serve(need_of(q, v, packed=True), device_facts())
    options = borders_of(lengths, device)

    def other() -> Results:
        parts = zip(*(each.split(lengths, dim=2) for each in (q, k, v)), strict=True)
        outputs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return with_gradients(torch.cat(outputs, dim=2).transpose(1, 2), [q, k, v])

    chosen = IN_FORCE.choose(need_of(q, v, packed=True), device.type).name
    note = f"chosen: {chosen}; installed: {dict(device_now.installed) or 'no flash attention of others'}"
    return Ways(lambda: with_gradients(attended(q, k, v, **options), [q, k, v]), other, note)


def borders_of(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """What attention is told of a packed row."""
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    return {"cu_seq_lens_q": borders, "max_length_q": max(lengths), "max_length_k": max(lengths)}


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Causal attention as layers call it: (1, T, H, D)."""
    return varlen_attention(nn.Module(), q, k, v, None, **options)[0]


def windows(device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """A layer with a window and a full one, on the same row."""
    return _windowed(device, tiny, None)


def windows_with_sinks(device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """The same with sinks, as GPT-OSS has them."""
    return _windowed(device, tiny, random(device, 4 if tiny else 16))


def _windowed(device: torch.device, tiny: bool, sinks: torch.Tensor | None) -> Ways:
    heads, tokens, window, width = (4, 2048, 32, 16) if tiny else (16, 16_384, 1024, 64)
    q, k, v = (random(device, 1, heads, tokens, width) for _ in range(3))
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]

    def way(window: int | None) -> Callable[[], Results]:
        return lambda: with_gradients(attended(q, k, v, sliding_window=window, s_aux=sinks), leaves)

    return Ways(way(window), way(None))


# --- experts ----------------------------------------------------------------------------------------------------------


def experts(device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """A layer of experts by our permutation, and by indexing whose gradient adds up row by row."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    hidden, inner, number, chosen, tokens = (32, 16, 4, 2, 32) if tiny else (2048, 768, 64, 8, 8192)
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=number, num_experts_per_tok=chosen
    )
    torch.manual_seed(0)
    layer: Any = Qwen3MoeSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    layer.to(device, dtype_on(device))
    (module,) = fused_experts(layer).values()
    use_own_experts(module)
    rows = random(device, tokens, hidden)
    choices = torch.randn(tokens, number, device=device).topk(chosen).indices
    weights = torch.rand(tokens, chosen, device=device, dtype=dtype_on(device)).requires_grad_()
    leaves = [rows, weights, module.gate_up_proj, module.down_proj]
    from mindspeed_mm.fsdp.ops.experts import Weights, own_experts_of, run_experts, sort_pairs

    def other() -> Results:
        pairs = sort_pairs(choices, number, number=choices.numel())
        taken = rows[pairs.slots_S // chosen]
        outputs = run_experts(module, Weights.of(module), taken, pairs.counts_E)
        weighted = outputs * weights.reshape(-1)[pairs.slots_S][:, None]
        summed = torch.zeros_like(rows).index_put((pairs.slots_S // chosen,), weighted, accumulate=True)
        return with_gradients(summed, leaves)

    return Ways(lambda: with_gradients(own_experts_of(module)(module, rows, choices, weights), leaves), other)


# --- disk and pictures ------------------------------------------------------------------------------------------------


def saving(device: torch.device, tiny: bool, folder: Path) -> Ways:
    """Weights and moments on the device to a checkpoint; as many bytes from a file to another, and hashed."""
    import xxhash

    from mindspeed_mm.fsdp.checkpoint.commit import CheckpointContents, commit_checkpoint
    from mindspeed_mm.fsdp.utils.ranks import Ranks

    layers, numbers = (2, 1000) if tiny else (24, 7_000_000)  # 2 GB
    tree: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for layer in range(layers):
        tree["model"][f"layers.{layer}.weight"] = torch.randn(numbers, device=device)
        for name in ("exp_avg", "exp_avg_sq"):
            tree["optimizer"][f"state.layers.{layer}.weight.{name}"] = torch.randn(numbers, device=device)
    contents = CheckpointContents(1, tree, "{}", {"cpu": torch.get_rng_state()}, "AdamW")
    source, target = folder / "source", folder / "copy"

    def save() -> Results:
        shutil.rmtree(folder / "iter_0000001", ignore_errors=True)
        commit_checkpoint(folder, contents, {}, Ranks(), lambda _line: None)
        return []

    def copy() -> Results:
        target.unlink(missing_ok=True)
        subprocess.run(["cp", str(source), str(target)], check=True)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        xxhash.xxh3_128(held).digest()
        return []

    save()
    shutil.copy(folder / "iter_0000001" / "__0_0.distcp", source)
    held = source.read_bytes()
    return Ways(save, copy, "what a file held before is removed in the time of both")


def pixels(device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """Patches of Qwen-VL to the device as bytes, looked up there, and as fp32 numbers."""
    patches, channels, numbers, repeats = (16 if tiny else 16_384), 3, 16 * 16, 2
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(channels, 256, generator=draw)
    codes = torch.randint(256, (patches, channels, numbers), dtype=torch.uint8, generator=draw)
    levels = Levels(table, (patches, channels * repeats * numbers), repeats)
    whole = levels.numbers(codes).contiguous()
    if device.type != "cpu":
        codes, whole = codes.pin_memory(), whole.pin_memory()
    note = f"{codes.nbytes / 1e6:.1f} instead of {whole.nbytes / 1e6:.1f} MB"
    return Ways(lambda: [levels.numbers(copied_to(codes, device))], lambda: [copied_to(whole, device)], note)
