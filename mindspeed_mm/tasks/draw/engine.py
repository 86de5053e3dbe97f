"""Pictures and clips for requests that arrive one by one: those of one size and one setting are made together.

A sample does not depend on the batch that it is in: its noise is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from mindspeed_mm.core.joint_work import JointWorker, WorkCounts
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler, MadeSample, SampleOrder


@dataclass(frozen=True)
class DrawJob:
    """One sample that a request asks for, with the sampling settings that were prepared for it."""

    order: SampleOrder
    sampling: SamplingArguments
    """From `DrawEngine.jobs`."""


class DrawEngine:
    """A generator that makes several samples at a time.

    Args:
        sampler: The generator.
        defaults: What a request does not say.
        most_samples: Of a batch.
    """

    def __init__(self, sampler: DiffusionSampler, defaults: SamplingArguments, *, most_samples: int = 4) -> None:
        self.sampler, self.defaults = sampler, defaults
        most = 1 if sampler.adapter.task in sampler.adapter.one_by_one else most_samples
        self._worker: JointWorker[DrawJob, MadeSample] = JointWorker(self._make, self._fits, most, "samples")

    @property
    def counts(self) -> WorkCounts:
        """What was done so far."""
        return self._worker.counts

    @property
    def waiting(self) -> int:
        """Samples that have not begun."""
        return self._worker.waiting

    def jobs(self, prompt: Prompt, sampling: SamplingArguments) -> list[DrawJob]:
        """The samples that are asked for, `sampling.num_samples` of them.

        Raises:
            DataError: The family takes no such size.
            ConfigError: A setting has no effect here.
        """
        alike = sampling.model_copy(update={"batch_size": 1, "num_samples": 1})
        prepared = self.sampler.prepared([prompt], alike)
        return [DrawJob(SampleOrder(prompt, number), prepared) for number in range(sampling.num_samples)]

    def submit(self, job: DrawJob) -> Future[MadeSample]:
        """Have a sample made. Cancelling the future takes it out of the queue."""
        return self._worker.submit(job)

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, and finish what is there."""
        self._worker.close(timeout_s)

    def _fits(self, batch: Sequence[DrawJob], job: DrawJob) -> bool:
        first = batch[0]
        return job.sampling == first.sampling and job.order.prompt.negative_prompt == first.order.prompt.negative_prompt

    def _make(self, batch: Sequence[DrawJob]) -> list[MadeSample]:
        return self.sampler.make([job.order for job in batch], batch[0].sampling)
