"""The peer of `benchmarks.accelerator_step`: the same model, tokens and precision by transformers' own Trainer.

`python -m benchmarks.accelerator_peer ATTEMPT FOLDER [PEAK_TFLOPS]` prints one JSON line. fp32 weights under bf16
autocast, fused AdamW, clipping at 1; all else is at the Trainer's defaults.
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
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from benchmarks.accelerator_sizes import Attempt  # noqa: E402
from benchmarks.accelerator_step import CONVENTION, write_model_folder  # noqa: E402
from mindspeed_mm.fsdp.tools.flops_tool.peaks import peak_tflops  # noqa: E402
from mindspeed_mm.fsdp.utils.device import (  # noqa: E402
    get_device_type,
    get_torch_device,
    peak_memory_bytes,
    synchronize,
)


class RandomTokens(torch.utils.data.Dataset):
    """Documents of random tokens, each predicting the next."""

    def __init__(self, attempt: Attempt, count: int) -> None:
        self._attempt, self._count = attempt, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self._attempt.vocabulary, (self._attempt.document_tokens,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Clock(TrainerCallback):
    """When the measured steps began and ended, the device's work included."""

    def __init__(self, warm_up_steps: int) -> None:
        self._warm_up, self.times = warm_up_steps, [0.0, 0.0]

    def on_step_end(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        """Note them."""
        if state.global_step == self._warm_up or state.global_step == state.max_steps:
            synchronize()
            self.times[state.global_step == state.max_steps] = time.perf_counter()


def main(attempt: Attempt, folder: Path, peak: float | None) -> None:
    """Train, measure, print."""
    write_model_folder(attempt, folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    steps, on_cpu = attempt.warm_up_steps + attempt.measured_steps, get_device_type() == "cpu"
    clock = Clock(attempt.warm_up_steps)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=attempt.samples,
        gradient_accumulation_steps=attempt.micro_batches,
        max_steps=steps,
        learning_rate=1e-4,
        bf16=True,
        optim="adamw_torch_fused",
        use_cpu=on_cpu,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = RandomTokens(attempt, steps * attempt.samples * attempt.micro_batches)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock]).train()
    step_s = (clock.times[1] - clock.times[0]) / attempt.measured_steps
    flops = 6 * sum(p.numel() for p in model.parameters()) * attempt.tokens + attempt.attention_flops()
    peak = peak or peak_tflops("cpu" if on_cpu else get_torch_device().get_device_name(0))
    print(
        json.dumps(
            {
                "step_s": step_s,
                "tokens_per_s": attempt.tokens / step_s,
                "mfu": flops / step_s / 1e12 / peak if peak else None,
                "convention": CONVENTION,
                "peak_memory_gib": peak_memory_bytes() / 2**30,
            }
        )
    )


if __name__ == "__main__":
    main(
        Attempt.from_json(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if sys.argv[3:] and sys.argv[3] else None
    )
