"""Draws the same clips with teacher and student, times both at equal batch, and asks the judges of moving_digits_wan.

    python examples/self_forcing/judge_student.py [STUDENT] [TEACHER]

Times are the processor's, so that what else it does is not in them. The student is a folder that `mm export` wrote, by
default `runs/moving_digits_dmd/student`; the teacher by default `runs/moving_digits_wan/pipeline`. It ends with exit
code 1 when the student keeps less than 90 % of the teacher's score or is less than 5 times as fast.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "moving_digits_wan"))

from clips import DIRECTIONS, caption  # (first: it finds the others)
from judge_moving_digits import judge_clips, train_window_judges
from scans import NAMES, load_scans, split_scans

from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import plan_batches
from mindspeed_mm.tasks.draw.loading import load_sampler
from mindspeed_mm.tasks.model_source import ModelSource

STUDENT, TEACHER = Path("runs/moving_digits_dmd/student"), Path("runs/moving_digits_wan/pipeline")
CLIPS_OF_A_PROMPT, BATCH = 20, 100
TEACHER_STEPS, TEACHER_GUIDANCE = 20, 2.0
LEAST_KEPT, LEAST_FASTER = 0.9, 5.0


def drawn(folder: Path, texts: list[str], sampling: SamplingArguments) -> tuple[np.ndarray, list[str], float]:
    """(n, 5, 16, 16) grey clips of all captions, the caption of each, and the processor's seconds for drawing."""
    sampler = load_sampler(find_adapter(folder), ModelSource(folder), torch.device("cpu"))
    prompts = [Prompt(number, text, text) for number, text in enumerate(texts)]
    settings = sampler.prepared(prompts, sampling)
    sampler.make(plan_batches(prompts[:1], settings.model_copy(update={"num_samples": 1}))[0], settings)  # warms up
    clips: list[np.ndarray] = []
    asked: list[str] = []
    began = time.process_time()
    for batch in plan_batches(prompts, settings):
        clips += [made.frames.mean(axis=-1).round().astype(np.uint8) for made in sampler.make(batch, settings)]
        asked += [order.prompt.text for order in batch]
    return np.stack(clips), asked, time.process_time() - began


def main(student: Path = STUDENT, teacher: Path = TEACHER) -> int:
    """Print scores and seconds of both; returns the exit code."""
    texts = [caption(digit, direction) for digit in range(len(NAMES)) for direction in DIRECTIONS]
    common = SamplingArguments(
        height=16, width=16, num_frames=5, fps=4.0, batch_size=BATCH, num_samples=CLIPS_OF_A_PROMPT
    )
    guided: dict[str, Any] = {"num_inference_steps": TEACHER_STEPS, "guidance_scale": TEACHER_GUIDANCE}
    judges = train_window_judges(split_scans(load_scans())["judge"])
    scores: list[float] = []
    seconds: list[float] = []
    for name, folder, settings in (("teacher", teacher, guided), ("student", student, {})):
        clips, asked, spent = drawn(folder, texts, common.model_copy(update=settings))
        right = judge_clips(judges, clips, asked)
        scores.append(float(np.all(list(right.values()), axis=0).mean()))
        seconds.append(spent)
        parts = ", ".join(f"{part} {outcomes.mean():.1%}" for part, outcomes in right.items())
        print(f"{name}: {len(clips)} clips in {spent:.1f} s of the processor, all right {scores[-1]:.1%} ({parts})")
    kept, faster = scores[1] / scores[0], seconds[0] / seconds[1]
    print(f"the student keeps {kept:.1%} of the teacher's score and is {faster:.1f} times as fast")
    return 0 if kept >= LEAST_KEPT and faster >= LEAST_FASTER else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
