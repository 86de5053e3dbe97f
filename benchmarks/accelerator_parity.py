"""One step of the digits model, fp32: our engine on this device against plain transformers on the CPU.

`python -m benchmarks.accelerator_parity MODEL BATCHES` prints one JSON line; `agrees` says how it went.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import Qwen3VLForConditionalGeneration  # noqa: E402

from benchmarks.accelerator_engine import build_engine, leave  # noqa: E402
from mindspeed_mm.core.batch import Batch  # noqa: E402
from mindspeed_mm.fsdp.params.argument import Arguments  # noqa: E402
from mindspeed_mm.fsdp.train.train_engine import move  # noqa: E402

LOSS_RTOL = 1e-5
GRADIENT_RTOL, GRADIENT_ATOL = 1e-4, 1e-6
"""‖ours − reference‖ ≤ rtol · ‖reference‖ + atol · ‖all gradients‖, for every parameter."""
PLANTED = 1.001
"""A gradient that is off by this factor must be found."""

Gradients = dict[str, torch.Tensor]


def main(model_folder: Path, batches: Path) -> None:
    """Compare and print."""
    full_precision()
    batch = load_file(batches / "0001.safetensors")
    reference_loss, reference = plain_step(model_folder, batch)
    loss, gradients = our_step(model_folder, batch)
    worst, where = worst_gradient(gradients, reference)
    planted, _ = worst_gradient({name: PLANTED * value for name, value in gradients.items()}, reference)
    loss_off = abs(loss - reference_loss) / abs(reference_loss)
    agrees = loss_off <= LOSS_RTOL and worst <= 1.0 and planted > 1.0
    print(
        json.dumps(
            {
                "agrees": agrees,
                "loss": loss,
                "loss_on_the_cpu": reference_loss,
                "loss_relative_difference": loss_off,
                "worst_gradient": worst,
                "worst_gradient_is_of": where,
                "parameters": len(reference),
                "planted_fault_gives": planted,
                "tolerance": f"loss {LOSS_RTOL:g} relative; gradients {GRADIENT_RTOL:g} of their norm + "
                f"{GRADIENT_ATOL:g} of the norm of all; worst_gradient is the share of that which is used",
            }
        )
    )
    leave()


def full_precision() -> None:
    """fp32 means fp32: no TF32 in products or convolutions."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def plain_step(model_folder: Path, batch: dict[str, torch.Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients by transformers alone, on the CPU."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_folder).train()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def our_step(model_folder: Path, batch: dict[str, torch.Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients by our engine, on this device."""
    engine = build_engine(Arguments.model_validate({"model": {"model_name_or_path": str(model_folder)}}), 1)
    prepared = engine.objective.prepare(with_shifted_labels(batch))
    denominators = engine.objective.count([prepared])
    losses = engine.forward_backward([move(prepared, engine.device)], denominators)
    found = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
    return float(sum(losses.values())), {name: on_host(gradient) for name, gradient in found.items()}


def with_shifted_labels(batch: dict[str, torch.Tensor]) -> Batch:
    """The batch with what the collator adds to it."""
    labels = batch["labels"]
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    return {**batch, "shift_labels": shifted, "sample_ids": [str(row) for row in range(len(labels))]}


def on_host(gradient: torch.Tensor) -> torch.Tensor:
    """A plain copy on the CPU."""
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()


def worst_gradient(found: Gradients, reference: Gradients) -> tuple[float, Any]:
    """Largest difference as a share of what is allowed, and the parameter that has it."""
    if found.keys() != reference.keys():
        return float("inf"), sorted(found.keys() ^ reference.keys())[:5]
    everything = float(torch.stack([g.double().square().sum() for g in reference.values()]).sum().sqrt())
    shares = {
        name: float((found[name].double() - g.double()).norm())
        / (GRADIENT_RTOL * float(g.double().norm()) + GRADIENT_ATOL * everything)
        for name, g in reference.items()
    }
    return max((share, name) for name, share in shares.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
