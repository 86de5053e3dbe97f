"""A generator that is spread over the ranks of a job to draw, by the plan of a YAML: its weights, and the tokens of a
sample where that plan is context parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.experts import ExpertPair
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler, SampleBatch, deal_in_step
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.draw.loading import load_sampler
from mindspeed_mm.tasks.model_source import ModelSource


@dataclass(frozen=True)
class RankSampler:
    """A generator on this rank, and which samples the rank makes with it."""

    sampler: DiffusionSampler
    ranks: Ranks
    state: ParallelState | None = None
    """How the model is spread; None: each rank holds all of it."""

    def deal(self, batches: Sequence[SampleBatch]) -> Iterator[tuple[SampleBatch, bool]]:
        """This rank's batches, and whether their samples are its own to write: ranks that share a model make calls that
        others need."""
        if self.state is None:
            return ((batch, True) for batch in batches[self.ranks.rank :: self.ranks.world_size])
        is_first = self.state.is_first_of_its_samples
        dealt = deal_in_step(batches, self.state.data_rank, self.state.data_size)
        return ((batch, is_kept and is_first) for batch, is_kept in dealt)

    def agrees(self, wish: bool) -> bool:
        """Whether this rank, or one that shares a model with others, wishes something."""
        return wish if self.state is None else any(self.ranks.gather(wish))


def load_on_ranks(
    adapter: DiffusionAdapter, source: ModelSource, model: ModelArguments | None, plan: Path | None, ranks: Ranks
) -> RankSampler:
    """The whole generator on each rank or, by the plan of a YAML, this rank's part of it.

    Args:
        adapter: Of `source.folder`.
        source: The folder, and what was trained of it.
        model: The section of the run, if the model is one.
        plan: The YAML whose section `parallel` says how the transformer is spread, and in which type it computes.
        ranks: Of the job.

    Raises:
        ConfigError: The plan does not fit the model or the number of ranks; it spreads samples of two transformers.
        ModelFolderError: As `load_sampler`.
    """
    if plan is None:
        return RankSampler(load_sampler(adapter, source, current_device()), ranks)
    from mindspeed_mm.tasks.spread_model import load_part, read_plan  # all of training's plans: half a second

    sections = {} if model is None else {"model": model}
    arguments = read_plan(plan, source.folder, {}, features=FeatureArguments(), **sections)
    arguments = arguments.model_copy(update={"model": arguments.model.model_copy(update={"task": adapter.task})})
    part = load_part(arguments, source.transformer)
    if part.state.sizes.cp > 1:
        _spread_samples(part.model, plan)
    compute_dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
    sampler = DiffusionSampler(adapter, part.model, load_encoders(adapter, current_device()), compute_dtype)
    return RankSampler(sampler, ranks, part.state)


def _spread_samples(model: nn.Module, plan: Path) -> None:
    """Ask for it in each call, as a batch of training does; a pipeline does not know of it."""
    if isinstance(model, ExpertPair):
        raise ConfigError(
            "samples of two transformers are not spread over ranks",
            where=str(plan),
            key="parallel.ring_attention_size · parallel.ulysses_parallel_size",
            way_out="Set both sizes to 1, and spread the weights: fully_shard_parallel_size.",
        )
    model.register_forward_pre_hook(_ask, with_kwargs=True, prepend=True)


def _ask(_: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**inputs, CONTEXT_KEY: True}
