"""Kinds of models, by what a run does differently for each: language models answer, generators draw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED, ModelKind
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.language_objective import build_language_objective
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import Outline
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.utils.ranks import Ranks

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.train.hooks.sampling import SampleHook
    from mindspeed_mm.fsdp.train.rollouts.order import RolloutSource

# What only post-training needs is imported inside the methods that build it: a plain run starts without it.


class Family(ABC):
    """What a kind of model asks of a run. A further kind (preferences, rewards, speech) is a further subclass.

    Args:
        arguments: The whole configuration.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments

    @abstractmethod
    def trial_options(self, model: nn.Module) -> str | None:
        """Options of `mm infer` that try a trained model, for the last line of a run; None: it cannot be tried so."""

    def warnings(self) -> list[str]:
        """What a run is warned of, in whole sentences."""
        return []

    @abstractmethod
    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        """What the model is trained for.

        Raises:
            ConfigError: `features.loss_cfg` asks for what this kind of model, or this model, does not have.
        """

    @abstractmethod
    def build_simulated_objective(self, outline: Outline, head: HeadLoss | None, plan: ModelPlan) -> Objective:
        """As `build_objective`, for one step without data, chance or other ranks.

        Args:
            outline: The model.
            head: The loss of its output head, if it has one.
            plan: Resolved for it.
        """

    @abstractmethod
    def save_model(self, model: nn.Module, save: WholeSave) -> None:
        """Write the whole model as its library loads it; called by all ranks. It may be sharded."""

    def rollout_source(self, assembled: Assembled, job: Job, data: RunData, objective: Objective) -> RolloutSource:
        """What draws and judges the samples that the model is trained on.

        Args:
            assembled: The model.
            job: This rank.
            data: Its prompts.
            objective: What it is trained for.

        Raises:
            ConfigError: This kind of model, or this model, cannot draw them.
        """
        raise ConfigError(
            f"{self.arguments.posttrain.method} is not built for this kind of model",
            key="posttrain.method",
            way_out="Leave it out.",
        )

    def sampling_hook(self, model: nn.Module, job: Job, record: RunRecord) -> SampleHook | None:
        """The hook that shows what the model makes while it is trained; None where nothing is asked for, or this kind
        of model makes nothing to look at.

        Raises:
            MMError: Prompts, sizes or encoders are off.
        """
        return None


@dataclass(frozen=True)
class WholeSave:
    """How a whole model is written."""

    folder: Path
    """Appears when complete; one that stands there is replaced."""
    source: Path
    """The folder that the run started from."""
    dtype: torch.dtype | None
    """Of the weights; None: as `source` has them."""
    ranks: Ranks
    """All of them."""
    write_view: Callable[[Path], None] | None
    """Adds to the folder how training looked at its rows."""


_QUESTIONS = {
    "text": "--prompt 'a question'",
    "see": "--image a.png --prompt 'a question'",
    "omni": "--audio a.wav --prompt 'a question'",
    "hear": "--audio a.wav",
}
"""Task of a card → options of `mm infer`. Families that speak tokens are not tried so."""


class LanguageFamily(Family):
    """Models of transformers, and of plugins, that are trained on tokens."""

    def trial_options(self, model: nn.Module) -> str | None:
        """What such models are asked, by their family's card."""
        cards = {card.model_class.rpartition(".")[2]: card for card in families()}
        for each in type(model).__mro__:  # a family that is built on another one goes before it
            if (card := cards.get(each.__name__)) is not None:
                return _QUESTIONS.get(card.task)
        return _QUESTIONS["text"]

    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        """Cross-entropy of the next token, with the terms that stand beside it; or what a method of post-training asks
        for."""
        if self.arguments.posttrain.method:
            from mindspeed_mm.fsdp.train.posttrain import build_posttrain_objective

            return build_posttrain_objective(self.arguments, assembled, job, data)
        sections = self.arguments.model, self.arguments.features
        return build_language_objective(*sections, assembled.model, assembled.applied.head, job.state.token_groups)

    def build_simulated_objective(self, outline: Outline, head: HeadLoss | None, plan: ModelPlan) -> Objective:
        """The same; statistics of routers are summed over no ranks."""
        if self.arguments.posttrain.method == "dpo":
            from mindspeed_mm.fsdp.train.posttrain import build_simulated_pairs

            return build_simulated_pairs(self.arguments, outline.model, head)
        sections = self.arguments.model, self.arguments.features
        return build_language_objective(*sections, outline.model, head, lambda: ())

    @override
    def rollout_source(self, assembled: Assembled, job: Job, data: RunData, objective: Objective) -> RolloutSource:
        from mindspeed_mm.fsdp.loss.policy_gradient import PolicyObjective
        from mindspeed_mm.fsdp.train.rollouts.build import build_text_rollouts

        assert isinstance(objective, PolicyObjective)
        return build_text_rollouts(self.arguments, assembled, job, data, objective)

    def save_model(self, model: nn.Module, save: WholeSave) -> None:
        """As `from_pretrained` of transformers loads it."""
        save_hf(
            model,
            save.folder,
            save.source,
            dtype=save.dtype,
            overwrite=True,
            ranks=save.ranks,
            write_view=save.write_view,
        )


def _generator_family(arguments: Arguments, adapter: Any, device: torch.device) -> Family:
    # What draws is imported where something is drawn: a run of a language model starts without it.
    from mindspeed_mm.fsdp.train.generator_family import GeneratorFamily

    return GeneratorFamily(arguments, adapter, device)


def _unified_family(arguments: Arguments, _adapter: object, device: torch.device) -> Family:
    from mindspeed_mm.fsdp.train.unified_family import UnifiedFamily

    return UnifiedFamily(arguments, device)


FAMILIES: dict[ModelKind, Callable[[Arguments, Any, torch.device], Family]] = {
    LANGUAGE: lambda arguments, _adapter, _device: LanguageFamily(arguments),
    GENERATOR: _generator_family,
    UNIFIED: _unified_family,
}
"""Kind of model → its family, of the configuration, the model's adapter and the device."""


def family_of(model: nn.Module, arguments: Arguments, device: torch.device) -> Family:
    """The family of a model."""
    facts = facts_of(model)
    return FAMILIES[facts.kind](arguments, facts.adapter, device)
