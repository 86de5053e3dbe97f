"""A bf16 training step of our own engine: fp32 masters, random weights, random tokens, clipping and fused AdamW in it.

`python -m benchmarks.accelerator_step ATTEMPT FOLDER [PEAK_TFLOPS [SECTIONS]]` prints one JSON line.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402

from benchmarks.accelerator_engine import build_engine, leave  # noqa: E402
from benchmarks.accelerator_sizes import Attempt  # noqa: E402
from mindspeed_mm.core.batch import Batch  # noqa: E402
from mindspeed_mm.fsdp.params.argument import Arguments  # noqa: E402
from mindspeed_mm.fsdp.tools.flops_tool.peaks import peak_tflops  # noqa: E402
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine  # noqa: E402
from mindspeed_mm.fsdp.utils.device import get_device_type, get_torch_device, peak_memory_bytes  # noqa: E402

CONVENTION = (
    "model FLOPs = 6 · N · tokens + 6 · layers · length² · heads · head width a row (causal half); N counts every "
    "weight that multiplies, the tied head once, the look-up of embeddings not; nothing is recomputed"
)


def main(attempt: Attempt, folder: Path, peak: float | None, sections: dict[str, Any]) -> None:
    """Build, warm up, measure, print. `sections` are laid over the configuration."""
    began = time.perf_counter()
    write_model_folder(attempt, folder)
    engine = build_engine(arguments(attempt, folder, sections), attempt.warm_up_steps + attempt.measured_steps)
    ready_s = time.perf_counter() - began
    multiplied = sum(p.numel() for p in engine.model.parameters())
    losses = losses_of(engine, [batches(attempt, step) for step in range(attempt.warm_up_steps)])
    ahead = [batches(attempt, attempt.warm_up_steps + step) for step in range(attempt.measured_steps)]
    step_s = timed(engine, ahead, losses) / attempt.measured_steps
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"losses are not finite: {losses}")
    flops = 6 * multiplied * attempt.tokens + attempt.attention_flops()
    name = get_torch_device().get_device_name(0) if get_device_type() != "cpu" else "cpu"
    peak = peak or peak_tflops(name)
    print(
        json.dumps(
            {
                "model": attempt.name,
                "parameters": multiplied,
                "rows": attempt.rows,
                "length": attempt.length,
                "micro_batches": attempt.micro_batches,
                "tokens_a_step": attempt.tokens,
                "precision": "bf16 compute, fp32 masters, gradients and optimizer",
                "ready_s": ready_s,
                "measured_steps": attempt.measured_steps,
                "step_s": step_s,
                "tokens_per_s": attempt.tokens / step_s,
                "model_tflops": flops / step_s / 1e12,
                "mfu": flops / step_s / 1e12 / peak if peak else None,
                "peak_tflops": peak,
                "convention": CONVENTION,
                "matrix_product_tflops": matrix_product_tflops(engine.device) if get_device_type() != "cpu" else None,
                "peak_memory_gib": peak_memory_bytes() / 2**30,
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "loss_of_guessing": math.log(attempt.vocabulary),
            }
        )
    )
    leave()


def write_model_folder(attempt: Attempt, folder: Path) -> None:
    """A Qwen3 configuration without weights."""
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=attempt.vocabulary,
        hidden_size=attempt.hidden,
        intermediate_size=attempt.intermediate,
        num_hidden_layers=attempt.layers,
        num_attention_heads=attempt.heads,
        num_key_value_heads=attempt.kv_heads,
        head_dim=attempt.head_width,
        max_position_embeddings=max(attempt.length, 4096),
        tie_word_embeddings=True,
    ).save_pretrained(folder)


def arguments(attempt: Attempt, folder: Path, sections: dict[str, Any]) -> Arguments:
    """As a YAML would say it."""
    tree: dict[str, Any] = {
        "model": {"model_name_or_path": str(folder), "train_from_scratch": True},
        "parallel": {"fsdp_plan": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
        "training": {
            "lr": 1e-4,
            "micro_batch_size": attempt.rows,
            "gradient_accumulation_steps": attempt.micro_batches,
        },
    }
    if attempt.documents > 1:
        tree["data"] = {"dataset_param": {"basic_parameters": {"packing": True}}}
    for name, content in sections.items():
        tree.setdefault(name, {}).update(content)
    return Arguments.model_validate(tree)


def batches(attempt: Attempt, step: int) -> list[Batch]:
    """The micro-batches of a step: other random tokens every time, each predicting the next."""
    generator = torch.Generator().manual_seed(step)
    shape = (attempt.samples, attempt.document_tokens)
    made = []
    for _ in range(attempt.micro_batches):
        ids = torch.randint(attempt.vocabulary, shape, generator=generator)
        shifted = torch.cat([ids[:, 1:], torch.full((attempt.samples, 1), -100)], dim=1)
        ids_of_samples = [str(sample) for sample in range(attempt.samples)]
        batch: Batch = {"input_ids": ids, "labels": ids, "shift_labels": shifted, "sample_ids": ids_of_samples}
        made.append(packed(batch) if attempt.documents > 1 else batch)
    return made


def packed(batch: Batch) -> Batch:
    """Rows of one length as documents of one row."""
    samples, length = batch["input_ids"].shape
    borders = torch.arange(0, (samples + 1) * length, length, dtype=torch.int32)
    in_one_row = {name: batch[name].reshape(1, -1) for name in ("input_ids", "labels", "shift_labels")}
    return in_one_row | {
        "sample_ids": batch["sample_ids"],
        "position_ids": torch.arange(length).repeat(samples)[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": length,
        "max_length_k": length,
    }


def timed(engine: TrainEngine, steps: list[list[Batch]], losses: list[float]) -> float:
    """Seconds of these steps: between device events where there is a device, on the host's clock otherwise."""
    stop = clock(engine.device)
    losses += losses_of(engine, steps)
    return stop()


class KeptLosses(Hook):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Keep it."""
        self.losses.append(result.loss)


def losses_of(engine: TrainEngine, steps: list[list[Batch]]) -> list[float]:
    """Losses of these steps; as in a run, each is read when the next step is launched."""
    kept = KeptLosses()
    engine.hooks = [kept]
    for step in steps:
        engine.train_step(step)
    return [*kept.losses, engine.settle().loss]


def clock(device: torch.device) -> Any:
    """Starts now; the function that it returns stops it and gives the seconds."""
    if device.type == "cpu":
        began = time.perf_counter()
        return lambda: time.perf_counter() - began
    first, last = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    first.record()

    def stop() -> float:
        last.record()
        torch.accelerator.synchronize()
        return first.elapsed_time(last) / 1000

    return stop


def matrix_product_tflops(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """What a large bf16 product reaches on random data: the practical roof."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    stop = clock(device)
    for _ in range(repeats):
        left @ right
    return 2 * size**3 * repeats / stop() / 1e12


if __name__ == "__main__":
    peak = sys.argv[3] if sys.argv[3:] else ""
    main(
        Attempt.from_json(sys.argv[1]),
        Path(sys.argv[2]),
        float(peak) if peak else None,
        json.loads(sys.argv[4]) if sys.argv[4:] else {},
    )
