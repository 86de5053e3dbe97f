"""Samples of a generator while it is trained: pictures and clips in the run folder, every so many steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.artifacts import SAMPLES_MANIFEST, RunFolder, atomic_write_text
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import encoder_files
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.fsdp.sampling.prompts import Prompt, empty_note, prompts_of
from mindspeed_mm.fsdp.sampling.sampler import (
    DiffusionSampler,
    SampleBatch,
    check_request,
    deal_in_step,
    plan_batches,
    probe_prompt,
)
from mindspeed_mm.fsdp.train.run.random_state import capture_rng, restore_rng
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.media_files import write_media

KEY = "training.sampling"
_MOST_SHOWN = 32
"""Samples of a round that trackers are given."""


@dataclass(frozen=True)
class RankSamples:
    """What one rank made of a round."""

    entries: list[JsonObject]
    """Lines of the manifest."""
    problems: list[str]


class SampleHook(Hook):
    """Samples every prompt each `sampling.interval` steps and after the last one, into
    `<folder>/iter_0000123/000_00_<words>.png` or `.mp4`, with a manifest beside them that is written last.

    Weights, their gradients, modes and random states are afterwards what they were. A sample that cannot be written, or
    is not made of numbers, is told and does not end the training.

    Args:
        sampler: Makes the sampler; called when the first round begins.
        prompts: What is sampled.
        sampling: The `training.sampling` section.
        record: Where rounds are told and written down.
        folder: Of all rounds.
        rank: Among the ranks that share the work.
        world_size: Of these.
        group: These; None for one process.
        keeps: False on ranks that compute the samples of another one with it (tensor and context parallelism).
        parks_encoders: Keep encoders on the host between rounds: nothing else needs them on the device.
    """

    def __init__(
        self,
        sampler: Callable[[], DiffusionSampler],
        prompts: Sequence[Prompt],
        sampling: SamplingArguments,
        record: RunRecord,
        folder: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        keeps: bool = True,
        parks_encoders: bool = False,
    ) -> None:
        self._keeps = keeps
        self._build, self._prompts, self._asked = sampler, prompts, sampling
        self._record, self._folder = record, folder
        self._rank, self._world_size, self._group = rank, world_size, group
        self._parks_encoders = parks_encoders

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Say which prompts are empty."""
        if note := empty_note(self._prompts):
            self._record.note(note)

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        """What draws samples are the weights after a step."""
        is_last = step == engine.schedule.total_steps
        return is_last or (step % self._asked.interval == 0 and not engine.stopping)

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Sample when it is time."""
        if not self.is_called_at_once(engine, result.step):
            return
        started = time.perf_counter()
        random_state = capture_rng()
        share = self._sample(engine)
        restore_rng(random_state)
        self._tell(self._gathered(share), result.step, time.perf_counter() - started)

    @cached_property
    def _sampler(self) -> DiffusionSampler:
        return self._build()

    def _sample(self, engine: TrainEngine) -> RankSamples:
        with engine.phase("loading the encoders", engine.training.setup_timeout_s):
            sampler = self._sampler
            sampling = sampler.prepared(self._prompts, self._asked, KEY)
        share = RankSamples([], [])
        batches = plan_batches(self._prompts, sampling)
        steps = sampling.num_inference_steps or 1
        limit_s = engine.training.step_timeout_s * steps  # a denoising step is less than one of training
        with self._encoders_on(sampler, engine.device), engine.evaluating():
            for batch, is_kept in deal_in_step(batches, self._rank, self._world_size):
                own = share if is_kept and self._keeps else None
                with engine.phase("sampling", limit_s):
                    self._make(sampler, batch, sampling, engine.iteration, own)
        return share

    def _make(
        self,
        sampler: DiffusionSampler,
        batch: SampleBatch,
        sampling: SamplingArguments,
        step: int,
        share: RankSamples | None,
    ) -> None:
        """Without a share only the calls count, which the other ranks make too."""
        assert sampling.fps
        folder = self._folder / f"iter_{step:07}"
        try:
            made = sampler.make(batch, sampling)
            if share is None:
                return
            folder.mkdir(parents=True, exist_ok=True)
            for order, sample in zip(batch, made, strict=True):
                path = write_media(folder / order.file_stem(), sample.frames, sampling.fps, sample.sound)
                share.entries.append({**order.describe(sampling), "file": path.name, "step": step})
        except (NotFiniteError, OSError) as error:
            if share is not None:
                share.problems.append(str(error))

    @contextmanager
    def _encoders_on(self, sampler: DiffusionSampler, device: torch.device) -> Iterator[None]:
        parts = sampler.pipeline.components.items()
        encoders = [part for name, part in parts if isinstance(part, nn.Module) and name != "transformer"]
        for encoder in encoders:
            encoder.to(device)
        yield
        if self._parks_encoders:
            for encoder in encoders:
                encoder.to("cpu")

    def _gathered(self, share: RankSamples) -> RankSamples:
        if self._group is None:
            return share
        shares = [share] * self._world_size
        dist.all_gather_object(shares, share, group=self._group)
        whole = RankSamples([], [])
        for each in shares:
            whole.entries.extend(each.entries)
            whole.problems.extend(each.problems)
        return whole

    def _tell(self, share: RankSamples, step: int, seconds: float) -> None:
        """Rank 0 writes the manifest and says how it went."""
        if self._rank or not self._keeps:
            return
        problems = list(share.problems)
        folder = self._folder / f"iter_{step:07}"
        entries = sorted(share.entries, key=lambda entry: (entry["number"], entry["sample"]))
        lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(folder / SAMPLES_MANIFEST, "".join(lines))
        except OSError as error:
            problems.append(str(error))
        shown = {}
        for entry in entries[:_MOST_SHOWN]:
            shown[f"samples/{Path(entry['file']).stem}"] = folder / entry["file"]
        self._record.show(shown, step)
        # What several ranks found alike is told once.
        for problem in dict.fromkeys(problems):
            self._record.note(f"warning: sampling: {problem}", step)
        line = f"step {step}: {len(lines)} samples in {folder} ({seconds:.1f} s)"
        self._record.event("samples", step, line, count=len(lines), folder=str(folder), seconds=seconds)


def build_sample_hook(
    adapter: DiffusionAdapter,
    sampler: Callable[[], DiffusionSampler],
    sampling: SamplingArguments,
    save: str | None,
    record: RunRecord,
    **ranks: Any,
) -> SampleHook | None:
    """The hook that `training.sampling` asks for; None when it asks for none. What is off is said now, not when the
    first round comes.

    Args:
        adapter: The family.
        sampler: Makes the sampler around the model that is trained.
        sampling: The `training.sampling` section.
        save: `training.save`.
        record: Of the run.
        ranks: `rank`, `world_size`, `group`, `keeps` and `parks_encoders` of `SampleHook`.

    Raises:
        ConfigError: There are no prompts, or there is no run folder.
        DataError: The file of prompts, a prompt, its picture or the size is off.
        ModelFolderError: An encoder is missing.
    """
    if not sampling.interval:
        return None
    prompts = check_sampling(adapter, sampling, save)
    return SampleHook(sampler, prompts, sampling, record, RunFolder(save or "").samples, **ranks)


def check_sampling(adapter: DiffusionAdapter, sampling: SamplingArguments, save: str | None) -> list[Prompt]:
    """The prompts of `training.sampling`, when everything that it asks for can be had.

    Raises:
        MMError: As `build_sample_hook`.
    """
    if not save:
        raise ConfigError(
            f"samples are made every {sampling.interval} steps, and there is no run folder to put them in",
            key="training.save",
            way_out=f"Set it, or {KEY}.interval=0.",
        )
    prompts = prompts_of(sampling, KEY)
    if not prompts:
        raise ConfigError(
            f"samples are made every {sampling.interval} steps, and there are no prompts",
            key=f"{KEY}.prompts",
            way_out=f"List some, name {KEY}.prompts_file, or set {KEY}.interval=0.",
        )
    check_request(adapter, prompts, sampling, KEY)
    for prompt in prompts:
        probe_prompt(prompt)
    encoder_files(adapter)
    return prompts
