"""Post-training: the objective of each method, by the kind of model that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from mindspeed_mm.core.model_kinds import LANGUAGE, ModelKind
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.loss.pair_objective import PairObjective, ReferencePolicy
from mindspeed_mm.fsdp.models.behaviour.shared_media import RepeatedMedia
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments, PosttrainArguments
from mindspeed_mm.fsdp.params.rules.posttrain import has_moving_reference, reference_kind
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.reference import (
    AdaptersOff,
    FollowingModel,
    FrozenModel,
    assemble_reference,
    check_same_inputs,
    check_start,
    describe_reference,
)
from mindspeed_mm.fsdp.train.rollouts.build import build_policy_objective
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.stored_reference import StoredReference, opened_reference

Build = Callable[[Arguments, Assembled, Job, RunData], Objective]


def build_posttrain_objective(arguments: Arguments, assembled: Assembled, job: Job, data: RunData) -> Objective:
    """The objective of `posttrain.method`, which is built for this kind of model (`check_method`)."""
    kind = facts_of(assembled.model).kind
    return BUILDERS[arguments.posttrain.method or "", kind](arguments, assembled, job, data)


def build_pair_objective(arguments: Arguments, assembled: Assembled, job: Job, data: RunData) -> Objective:
    """Preference pairs of language models.

    Raises:
        MMError: There is no such reference.
    """
    head, models = assembled.applied.head, [assembled.model]
    assert head is not None
    reference: ReferencePolicy | None = _live_reference(arguments, assembled, head, job.device)
    if isinstance(reference, FrozenModel):
        models.append(reference.model)
    if reference_kind(arguments) == "stored":
        sets = [each for each in (data.train, data.validation) if each is not None]
        reference = StoredReference(opened_reference(arguments, sets))
    return _pairs(arguments.posttrain, assembled.model, head, reference, models)


def build_answer_objective(arguments: Arguments, assembled: Assembled, job: Job, data: RunData) -> Objective:
    """Answers that a language model draws.

    Raises:
        MMError: There is no such reference.
    """
    head = assembled.applied.head
    assert head is not None  # see `check_method`
    reference = _live_reference(arguments, assembled, head, job.device)
    return build_policy_objective(arguments.posttrain, assembled, data, reference)


def build_simulated_pairs(arguments: Arguments, model: nn.Module, head: HeadLoss | None) -> Objective:
    """The same for one step without data; a frozen reference, which needs memory of its own, is left out."""
    assert head is not None
    reference: ReferencePolicy | None = None
    if reference_kind(arguments) == "adapters_off":
        reference = AdaptersOff(head)
    return _pairs(arguments.posttrain, model, head, reference, [model])


def _pairs(
    posttrain: PosttrainArguments,
    model: nn.Module,
    head: HeadLoss,
    reference: ReferencePolicy | None,
    models: Iterable[nn.Module],
) -> Objective:
    return PairObjective(model, head, posttrain.dpo, reference, RepeatedMedia(*models))


def _live_reference(
    arguments: Arguments, assembled: Assembled, head: HeadLoss, device: torch.device
) -> AdaptersOff | FollowingModel | FrozenModel | None:
    """The reference that a model computes; None where there is no such one."""
    match reference_kind(arguments):
        case "adapters_off":
            check_start(arguments.training, arguments.posttrain)
            return AdaptersOff(head)
        case "frozen" if assembled.average is not None and has_moving_reference(arguments.posttrain):
            return FollowingModel(head, assembled.average, describe_reference(arguments))
        case "frozen":
            return _frozen(arguments, assembled, device)
    return None


def _frozen(arguments: Arguments, assembled: Assembled, device: torch.device) -> FrozenModel:
    second = assemble_reference(arguments, device)
    check_same_inputs(assembled.model, second.model, arguments.posttrain.reference.model_name_or_path)
    if assembled.applied.towers is not None and second.applied.towers is not None:
        assembled.applied.towers.followers.append(second.applied.towers)
    return FrozenModel(second, describe_reference(arguments))


BUILDERS: dict[tuple[str, ModelKind], Build] = {
    ("dpo", LANGUAGE): build_pair_objective,
    ("grpo", LANGUAGE): build_answer_objective,
}
"""Method and kind of model → what builds its objective."""
