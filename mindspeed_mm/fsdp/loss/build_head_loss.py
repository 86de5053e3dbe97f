"""The loss of a model's output head, as the `features` section asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.head_outputs import LogitSteps, find_logit_steps, known_logit_steps
from mindspeed_mm.fsdp.loss.sliced_head import SlicedHead, Slices, find_liger, is_plain_linear
from mindspeed_mm.fsdp.params.feature_args import ChunkLossPlan, FeatureArguments
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import module_names

PLAN = "features.chunkloss_plan"
AUTO_VOCABULARY = 64_000
"""From so many tokens on `auto` takes slices. `python -m benchmarks chunk_loss` measures 151,936 tokens: less time than
the plain loss, and an eighth of its memory. Nothing that is kept measures where slices begin to pay."""


@dataclass(frozen=True)
class HeadPlan:
    """What is done to a model's output head."""

    name: str
    """Of the module that turns hidden states into logits."""
    z_loss_coef: float = 0.0
    slices: Slices | None = None
    """How rows go through the head; None: all at once."""
    behind: LogitSteps = field(default_factory=LogitSteps)
    """What the model does to logits behind its head, which a head in slices must do itself."""


def resolve_head(
    model: nn.Module, head_name: str, features: FeatureArguments, *, may_slice: bool = True
) -> HeadPlan | None:
    """What the `features` section asks of a model's output head; None when there is no head. Pure.

    Args:
        model: Whole, with adapters.
        head_name: The module that turns hidden states into logits; empty when there is none.
        features: The section.
        may_slice: Whether the loss may be computed in slices where that was not asked for.

    Raises:
        ConfigError: A loss of a head is asked for and there is none, or not the one that is named, or the model
            changes its logits in a way that slices cannot follow.
    """
    if not head_name:
        _refuse_without_head(model, features)
        return None
    z_loss_coef, slices = features.loss_cfg.z_loss_coef, slices_of(features)
    if slices is None:
        return _unasked(model, head_name, features, may_slice=may_slice)
    _check_named(model, head_name, features.chunkloss_plan.apply_module)
    return HeadPlan(head_name, z_loss_coef, slices, find_logit_steps(model, head_name))


def apply_head_loss(model: nn.Module, plan: HeadPlan) -> HeadLoss:
    """Behind adapters and the cut into stages, before layers are split over ranks.

    Args:
        model: Built, or this rank's part of it.
        plan: Of the whole model.
    """
    head = model.get_submodule(plan.name)
    if plan.slices is None:
        return HeadLoss(head, z_loss_coef=plan.z_loss_coef)
    sliced = SlicedHead(head, plan.slices, plan.behind, find_liger(get_device_type()))
    return HeadLoss(head, sliced=sliced, behind=plan.behind, z_loss_coef=plan.z_loss_coef)


def build_head_loss(model: nn.Module, head_name: str, features: FeatureArguments) -> HeadLoss | None:
    """`resolve_head` and `apply_head_loss` in one, for a whole model."""
    plan = resolve_head(model, head_name, features)
    if plan is not None:
        return apply_head_loss(model, plan)
    return None


def _unasked(model: nn.Module, head_name: str, features: FeatureArguments, *, may_slice: bool) -> HeadPlan:
    """All rows at once, or with `auto` in slices where that is no slower and sure to give the same loss."""
    plan = features.chunkloss_plan
    head = model.get_submodule(head_name)
    whole = HeadPlan(head_name, features.loss_cfg.z_loss_coef)
    if features.enable_chunk_loss != "auto" or not may_slice or features.loss_cfg.loss_type == "raw":
        return whole
    if not is_plain_linear(head) or head.out_features < AUTO_VOCABULARY:  # type: ignore[operator]
        return whole
    named = compile_pattern(plan.apply_module, key=f"{PLAN}.apply_module", allow_suffix=True).fullmatch(head_name)
    behind = known_logit_steps(model, head_name)
    if named is None or behind is None:
        return whole
    return replace(whole, slices=Slices(plan.chunk_size or ChunkLossPlan().chunk_size or 1), behind=behind)


def slices_of(features: FeatureArguments) -> Slices | None:
    """How rows go through the head; None: all at once."""
    plan, default = features.chunkloss_plan, ChunkLossPlan()
    if features.enable_dynamic_chunk_loss:
        return Slices(plan.total_chunk_size or default.total_chunk_size or 1, is_dynamic=True)
    if features.enable_chunk_loss is True:
        return Slices(plan.chunk_size or default.chunk_size or 1)
    return None


def _refuse_without_head(model: nn.Module, features: FeatureArguments) -> None:
    asked = {
        "features.enable_chunk_loss": features.enable_chunk_loss,
        "features.enable_dynamic_chunk_loss": features.enable_dynamic_chunk_loss,
        "features.loss_cfg.z_loss_coef": features.loss_cfg.z_loss_coef,
    }
    for key, value in asked.items():
        if value and value != "auto":
            raise ConfigError(
                f"{type(model).__name__} has no output head that makes logits of a vocabulary",
                key=key,
                way_out="Leave it out: it is for causal language models.",
            )


def _check_named(model: nn.Module, head_name: str, pattern: str) -> None:
    key = f"{PLAN}.apply_module"
    expression = compile_pattern(pattern, key=key, allow_suffix=True)
    if expression.fullmatch(head_name):
        return
    what, names = f"'{pattern}' is not the output head of {type(model).__name__}", module_names(model)[1:]
    if not any(map(expression.fullmatch, names)):
        what += f" (modules of such a name: {', '.join(nearest(pattern, names, most=3)) or 'none'})"
    raise ConfigError(
        what,
        key=key,
        way_out=f"The head is '{head_name}'.",
    )
