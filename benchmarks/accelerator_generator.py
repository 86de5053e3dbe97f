"""A bf16 training step of a Wan2.1-shaped transformer: our own engine, or a bare diffusers loop; fp32 masters, random
weights, latents and text, one clip a step, clipping and fused AdamW in it.

`python -m benchmarks.accelerator_generator WHO CLIP FOLDER [PEAK_TFLOPS]` prints one JSON line; WHO is ours or bare.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402

from benchmarks.accelerator_engine import build_engine, leave  # noqa: E402
from benchmarks.accelerator_sizes import Clip  # noqa: E402
from benchmarks.accelerator_step import clock  # noqa: E402
from mindspeed_mm.core.batch import Batch  # noqa: E402
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class  # noqa: E402
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter  # noqa: E402
from mindspeed_mm.fsdp.models.loading.meta_device import parameters_on_meta  # noqa: E402
from mindspeed_mm.fsdp.params.argument import Arguments  # noqa: E402
from mindspeed_mm.fsdp.tools.flops_tool.peaks import peak_tflops  # noqa: E402
from mindspeed_mm.fsdp.tools.flops_tool.reading import count_flops  # noqa: E402
from mindspeed_mm.fsdp.tools.flops_tool.units import CAPTION, LATENTS, SAMPLES  # noqa: E402
from mindspeed_mm.fsdp.utils.device import (  # noqa: E402
    get_device_type,
    get_torch_device,
    peak_memory_bytes,
    set_local_device,
)

CONVENTION = (
    "model FLOPs of the forward and the backward pass: matrix products, a multiplication and an addition being two, "
    "and attention in full (non-causal); norms, activations and rotations left out; nothing that is recomputed counts"
)
LEARNING_RATE = 1e-5

Step = Callable[[int], float]
"""Trains one step on the clip of this number; gives the loss."""


def main(who: str, clip: Clip, folder: Path, peak: float | None) -> None:
    """Measure and print."""
    print(json.dumps(measure(who, clip, folder, peak)))


def measure(who: str, clip: Clip, folder: Path, peak: float | None = None) -> dict[str, Any]:
    """Build, warm up, time."""
    began = time.perf_counter()
    write_model_folder(clip, folder)
    with {"ours": ours, "bare": bare}[who](clip, folder) as step:
        ready_s = time.perf_counter() - began
        losses = [step(number) for number in range(clip.warm_up_steps)]
        stop = clock(torch.device(get_device_type()))
        losses += [step(clip.warm_up_steps + number) for number in range(clip.measured_steps)]
        step_s = stop() / clip.measured_steps
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"losses are not finite: {losses}")
    return report(clip, folder, step_s, peak) | {
        "ready_s": ready_s,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def report(clip: Clip, folder: Path, step_s: float, peak: float | None) -> dict[str, Any]:
    """What a step of so many seconds amounts to."""
    adapter = find_adapter(folder)
    tokens = adapter.geometry.tokens(clip.latent_shape)
    tflops = model_flops(clip, folder) / step_s / 1e12
    peak = peak or peak_tflops(get_torch_device().get_device_name(0) if get_device_type() != "cpu" else "cpu")
    return {
        "model": clip.name,
        "latents": clip.latent_shape,
        "text": (clip.text_tokens, clip.text_width),
        "recompute": clip.recompute,
        "precision": "bf16 compute, fp32 masters, gradients and optimizer",
        "measured_steps": clip.measured_steps,
        "step_s": step_s,
        "tokens_a_step": tokens,
        "tokens_per_s": tokens / step_s,
        "model_tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "peak_tflops": peak,
        "convention": CONVENTION,
        "peak_memory_gib": peak_memory_bytes() / 2**30,
    }


def model_flops(clip: Clip, folder: Path) -> float:
    """Of a step on one clip, every weight being trained."""
    adapter = find_adapter(folder)
    with parameters_on_meta():
        model = diffusers_class(adapter.transformer_class).from_config(adapter.transformer_config)
    facts_of(model).adapter = adapter
    count = count_flops(model)
    assert count is not None
    lengths = {LATENTS: [adapter.geometry.tokens(clip.latent_shape)], CAPTION: [clip.text_tokens], SAMPLES: [1]}
    return count.of(lengths).full.model


@contextmanager
def ours(clip: Clip, folder: Path) -> Iterator[Step]:
    """Our engine; noise is drawn on the host within the step, as in a run."""
    engine = build_engine(arguments(clip, folder), clip.warm_up_steps + clip.measured_steps)
    clips = [features(clip, number) for number in range(clip.warm_up_steps + clip.measured_steps)]

    def step(number: int) -> float:
        engine.train_step([clips[number]])
        return engine.settle().loss

    try:
        yield step
    finally:
        leave()


@contextmanager
def bare(clip: Clip, folder: Path) -> Iterator[Step]:
    """diffusers' model in bf16 with fp32 masters of its weights; everything lies ready on the device."""
    from diffusers import WanTransformer3DModel

    device = set_local_device(0)
    torch.manual_seed(0)
    with device:
        model = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder, subfolder="transformer"))
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    weights = list(model.to(torch.bfloat16).train().parameters())
    if clip.recompute:
        model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    clips = [ready(clip, number, device) for number in range(clip.warm_up_steps + clip.measured_steps)]

    def step(number: int) -> float:
        latents, noise, text, sigma = clips[number]
        noisy = ((1 - sigma) * latents + sigma * noise).to(torch.bfloat16)
        predicted = model(noisy, 1000 * sigma.reshape(1), text, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted.float(), noise - latents)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.item()

    yield step


def ready(clip: Clip, number: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Latents, noise, text and σ on the device."""
    batch = features(clip, number)
    noise = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(1000 + number))
    sigma = torch.tensor((number + 1) / (clip.warm_up_steps + clip.measured_steps + 1))
    text = batch["prompt_embeds"].to(torch.bfloat16)
    return tuple(tensor.to(device) for tensor in (batch["latents"], noise, text, sigma))


def features(clip: Clip, number: int) -> Batch:
    """A clip as features of it are read: random, another one every step."""
    generator = torch.Generator().manual_seed(number)
    return {
        "latents": torch.randn(1, *clip.latent_shape, generator=generator),
        "prompt_embeds": torch.randn(1, clip.text_tokens, clip.text_width, generator=generator),
        "sample_ids": [str(number)],
        "epochs": [0],
    }


def arguments(clip: Clip, folder: Path) -> Arguments:
    """As a YAML would say it."""
    return Arguments.model_validate(
        {
            "model": {"model_name_or_path": str(folder), "train_from_scratch": True},
            "parallel": {"fsdp_plan": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
            "training": {"lr": LEARNING_RATE, "micro_batch_size": 1},
            "features": {"recompute": clip.recompute},
        }
    )


def write_model_folder(clip: Clip, folder: Path) -> None:
    """The configurations that training reads, without weights and without encoders."""
    parts = {
        "transformer/config.json": {
            "_class_name": "WanTransformer3DModel",
            "patch_size": [1, 2, 2],
            "num_attention_heads": clip.heads,
            "attention_head_dim": clip.head_width,
            "in_channels": clip.channels,
            "out_channels": clip.channels,
            "text_dim": clip.text_width,
            "freq_dim": 256,
            "ffn_dim": clip.feed_forward,
            "num_layers": clip.layers,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "eps": 1e-6,
        },
        "vae/config.json": {"_class_name": "AutoencoderKLWan", "z_dim": clip.channels},
        "scheduler/scheduler_config.json": {"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0},
        "model_index.json": {
            "_class_name": "WanPipeline",
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        },
    }
    for name, content in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(
        sys.argv[1],
        Clip.from_json(sys.argv[2]),
        Path(sys.argv[3]),
        float(sys.argv[4]) if sys.argv[4:] and sys.argv[4] else None,
    )
