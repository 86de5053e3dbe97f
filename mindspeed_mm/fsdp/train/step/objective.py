"""What a language model is trained for, as the configuration says: its loss, with the terms that stand beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed import ProcessGroup

from mindspeed_mm.fsdp.loss.code_predictor import WithCodePredictor, code_loss_factor
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.multi_token import WithMultiToken
from mindspeed_mm.fsdp.loss.objectives import Objective, TokenCrossEntropy, build_objective
from mindspeed_mm.fsdp.loss.picture_labels import WithPictureLabels, tells_pictures
from mindspeed_mm.fsdp.loss.router_aux import WithRouterAux
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments


def build_language_objective(
    arguments: Arguments, model: nn.Module, head: HeadLoss | None, token_groups: Callable[[], Sequence[ProcessGroup]]
) -> Objective:
    """The objective of a model that is not a generator.

    Args:
        arguments: The whole configuration.
        model: Under any plan.
        head: The loss of its output head, if it has one.
        token_groups: Says which groups of ranks statistics of routers are summed over.

    Raises:
        ConfigError: The model has not what the loss needs: an output head, routers.
    """
    loss_cfg, model_args = arguments.features.loss_cfg, arguments.model
    objective: Objective = build_objective(loss_cfg.loss_type, model, head)
    if model_args.mtp_num_layers:
        watch = facts_of(model).multi_token
        assert isinstance(objective, TokenCrossEntropy) and head is not None and watch is not None
        depths, factor = model_args.mtp_num_layers, model_args.mtp_loss_scaling_factor
        objective = WithMultiToken(objective, head, watch.watching, depths, factor)
    if isinstance(objective, TokenCrossEntropy) and (factor := code_loss_factor(model)):
        objective = WithCodePredictor(objective, factor)
    if isinstance(objective, TokenCrossEntropy) and tells_pictures(model):
        objective = WithPictureLabels(objective)
    if loss_cfg.router_aux_loss_coef:
        coefficient, offload = loss_cfg.router_aux_loss_coef, loss_cfg.router_aux_loss_offload
        return WithRouterAux(objective, model, coefficient, token_groups(), offload=offload)
    return objective
