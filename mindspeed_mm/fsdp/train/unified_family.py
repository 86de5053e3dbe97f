"""What a run does for models that answer in words and draw, in one sequence."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.fsdp.loss.denoised_pictures import Encode, WithDenoisedPictures
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.language_objective import build_language_objective
from mindspeed_mm.fsdp.loss.objectives import Objective, TokenCrossEntropy
from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import Outline
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.family import LanguageFamily
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype


class UnifiedFamily(LanguageFamily):
    """Models that answer in words and draw by denoising, in one sequence.

    Args:
        arguments: The whole configuration.
        device: Where the frozen VAE runs.
    """

    def __init__(self, arguments: Arguments, device: torch.device) -> None:
        super().__init__(arguments)
        self._device = device
        self._config: Any = None

    @override
    def trial_options(self, model: nn.Module) -> str | None:
        return "--prompt 'a prompt' --draw a.png"

    @override
    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        config: Any = assembled.model.config
        sections = self.arguments.model, self.arguments.features
        words = build_language_objective(*sections, assembled.model, assembled.applied.head, job.state.token_groups)
        self._config = config
        if any(rows is not None and rows.is_raw for rows in (data.train, data.validation)):
            _ = self._vae  # what is wrong with it is told before the first step
        return self._both(words, config, lambda pixels, seed: self._vae.encode(pixels, seed))

    @cached_property
    def _vae(self) -> PictureVAE:
        """Loaded where pictures come as pixels."""
        sizes, folder = self._config.vae_config, Path(str(self.arguments.model.model_name_or_path))
        return PictureVAE(folder, sizes["z_channels"], sizes["downsample"], self._device, self._exact_dtype)

    @property
    def _exact_dtype(self) -> torch.dtype:
        """What latents are encoded and mixed with noise in."""
        return torch.promote_types(torch_dtype(self.arguments.parallel.fsdp_plan.computed_in), torch.float32)

    @override
    def build_simulated_objective(self, outline: Outline, head: HeadLoss | None, plan: ModelPlan) -> Objective:
        sections = self.arguments.model, self.arguments.features
        words = build_language_objective(*sections, outline.model, head, lambda: ())
        return self._both(words, outline.model.config, None)

    def _both(self, words: Objective, config: Any, encode: Encode | None) -> Objective:
        assert isinstance(words, TokenCrossEntropy)  # `check_unified_loss`
        loss_cfg, diffusion = self.arguments.features.loss_cfg, self.arguments.training.diffusion
        return WithDenoisedPictures(words, config, loss_cfg, diffusion, encode, self._exact_dtype)
