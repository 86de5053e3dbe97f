"""What a run has when its model is a generator: the encoders, the objective, samples."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.loss.flow_matching import FlowMatching
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.live_encoding import LiveEncoder
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.feature_args import LossConfig
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler
from mindspeed_mm.fsdp.train.hooks.sampling import SampleHook, build_sample_hook
from mindspeed_mm.fsdp.train.run.progress import Progress
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype


class GeneratorParts:
    """Parts of a generator's run beside the engine's.

    Args:
        adapter: The family.
        arguments: The whole configuration.
        device: Where encoders run.
    """

    def __init__(self, adapter: DiffusionAdapter, arguments: Arguments, device: torch.device) -> None:
        self.adapter, self._arguments, self._device = adapter, arguments, device
        self._encodes = False

    @cached_property
    def encoders(self) -> Any:
        """The frozen encoders, loaded when something is encoded or decoded for the first time."""
        return load_encoders(self.adapter, self._device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the transformer computes in."""
        return torch_dtype(self._arguments.parallel.fsdp_plan.param_dtype) or torch.float32

    def build_objective(self, *datasets: MMDataset | None) -> FlowMatching:
        """The objective for data sets of features, or of raw media.

        Raises:
            ConfigError: `features.loss_cfg` asks for a loss of language models.
        """
        check_loss(self._arguments.features.loss_cfg)
        sets = [dataset for dataset in datasets if dataset is not None]
        for dataset in sets:
            self.adapter.note_components(dataset.noted_components)
        self._encodes = any(dataset.is_raw for dataset in sets)
        return FlowMatching(
            self.adapter,
            self._arguments.training.diffusion,
            seed=self._arguments.training.seed,
            compute_dtype=self.compute_dtype,
            null_text=sets[0].null_text() if sets else None,
            encode=LiveEncoder(self.adapter, self.encoders) if self._encodes else None,
        )

    def build_sample_hook(
        self, model: nn.Module, state: ParallelState, group: ProcessGroup | None, record: RunRecord, progress: Progress
    ) -> SampleHook | None:
        """The hook that `training.sampling` asks for, if it does; its rounds are shared by the ranks of `group`.

        Raises:
            MMError: Prompts, sizes or encoders are off.
        """
        training = self._arguments.training
        return build_sample_hook(
            self.adapter,
            lambda: DiffusionSampler(self.adapter, model, self.encoders, self.compute_dtype),
            training.sampling,
            training.save,
            record,
            progress,
            rank=state.data_rank,
            world_size=state.data_size,
            group=group,
            keeps=state.is_first_of_its_samples,
            parks_encoders=not self._encodes,
        )


def check_loss(loss: LossConfig) -> None:
    """Raise `ConfigError` for what generators have none of (`features.loss_cfg`)."""
    loss_type = loss.loss_type
    for name in ("router_aux_loss_coef", "z_loss_coef"):
        if value := getattr(loss, name):
            raise ConfigError(
                f"{value:g} is for language models, and the model is a generator",
                key=f"features.loss_cfg.{name}",
                way_out="Leave it out: generators learn by flow matching alone.",
            )
    if loss_type not in (None, "default", "per_sample_loss"):
        raise ConfigError(
            f"'{loss_type}' is a loss of language models, and the model is a generator",
            key="features.loss_cfg.loss_type",
            way_out="Leave it out: generators learn by flow matching, see training.diffusion.",
        )
