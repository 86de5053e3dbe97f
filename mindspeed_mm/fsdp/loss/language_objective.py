"""What a language model is trained for, as the configuration says: its loss, with the terms that stand beside it.

A code predictor's loss, over the codebooks behind the first of all frames; N counts these codes:

    code_predictor = factor · Σ (−log p(code_g | codes before it)) / N

The losses of heads that look further ahead, over labelled tokens whose label lies in the same document; N_k counts
those:

    mtp_k = factor / depths · Σ w · (−log p(token_{t+k+1})) / N_k

Both denominators are counted over the whole step like any other. Pictures as answers: labels that stand for the tokens
of a picture become these tokens in the forward pass, where the model turns pictures into tokens (arXiv:2405.09818,
arXiv:2408.02657); they are words of the vocabulary like all others, so that loss, z-loss and denominators are those of
words. The load-balancing loss of routers is in `router_aux.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.code_heads import WithCodeHeads
from mindspeed_mm.fsdp.loss.drawn_pictures import WithDrawnPictures, draws_pictures
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss, output_of
from mindspeed_mm.fsdp.loss.objectives import (
    MICRO_BATCHES,
    BatchTokens,
    Objective,
    Terms,
    TokenCrossEntropy,
    build_objective,
    code_heads,
)
from mindspeed_mm.fsdp.loss.reward_pairs import RewardPairObjective, scores_videos
from mindspeed_mm.fsdp.loss.router_aux import WithRouterAux
from mindspeed_mm.fsdp.models.behaviour.multi_token import Pass
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs
from mindspeed_mm.fsdp.ops.linear_cross_entropy import whole_cross_entropy
from mindspeed_mm.fsdp.params.argument import FeatureArguments, ModelArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


def build_language_objective(
    model_args: ModelArguments,
    features: FeatureArguments,
    model: nn.Module,
    head: HeadLoss | None,
    token_groups: Callable[[], Sequence[ProcessGroup]],
) -> Objective:
    """The objective of a model that is not a generator.

    Args:
        model_args: Depths of multi-token prediction, and their weight.
        features: The loss, and its term for routers.
        model: Under any plan.
        head: The loss of its output head, if it has one.
        token_groups: Says which groups of ranks statistics of routers are summed over.

    Raises:
        ConfigError: The model has not what the loss needs: an output head, routers; or it draws, and the loss knows
            only words.
    """
    if scores_videos(model):
        return RewardPairObjective(model)
    loss_cfg = features.loss_cfg
    objective: Objective = build_objective(loss_cfg.loss_type, model, head)
    if model_args.mtp_num_layers:
        watch = facts_of(model).multi_token
        assert isinstance(objective, TokenCrossEntropy) and head is not None and watch is not None
        depths, factor = model_args.mtp_num_layers, model_args.mtp_loss_scaling_factor
        objective = WithMultiToken(objective, head, watch.watching, depths, factor)
    if isinstance(objective, TokenCrossEntropy) and (factor := code_loss_factor(model)):
        objective = WithCodePredictor(objective, factor)
    if isinstance(objective, TokenCrossEntropy) and (heads := code_heads(model)):
        objective = WithCodeHeads(objective, len(model.get_submodule(heads)) - 1)  # type: ignore[arg-type]
    if isinstance(objective, TokenCrossEntropy) and tells_pictures(model):
        objective = WithPictureLabels(objective)
    if draws_pictures(model):
        if not isinstance(objective, TokenCrossEntropy):
            raise ConfigError(
                f"{loss_cfg.loss_type}, but pictures in answers are learned by cross-entropy over words and codes",
                key="features.loss_cfg.loss_type",
                way_out="Leave it out; or leave model.model_id out, to train on answers in words.",
            )
        objective = WithDrawnPictures(objective, attribute_at(model, "picture_placeholder"))
    if loss_cfg.router_aux_loss_coef:
        coefficient, offload = loss_cfg.router_aux_loss_coef, loss_cfg.router_aux_loss_offload
        return WithRouterAux(objective, model, coefficient, token_groups(), offload=offload)
    return objective


# --- codebooks behind the first ---------------------------------------------------------------------------------------

_CODES = "_codes"


def code_loss_factor(model: nn.Module) -> float:
    """The weight of the code predictor's loss, which a model with one states (`code_loss_factor`); 0 without one."""
    return float(attribute_at(model, "code_loss_factor", 0.0))


class WithCodePredictor:
    """Next-token cross-entropy of the first codebook with that of the others beside it.

    The model returns `code_logits`, (N, G − 1, rows), and `code_targets`, (N, G − 1).

    Args:
        objective: Of the first codebook.
        factor: Of the others.
    """

    term = "code_predictor"

    def __init__(self, objective: TokenCrossEntropy, factor: float) -> None:
        self._objective, self._factor = objective, factor

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective does; counts the codes."""
        # (frames, codebooks); the first one is what the objective trains, and what is below 0 is no code.
        codes = int((batch["codec_ids"][..., 1:] >= 0).sum())
        return self._objective.prepare(batch, training=training) | {_CODES: codes}

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the objective's counts, and the number of codes behind the first codebook."""
        return {**self._objective.count(batches), self.term: sum(batch[_CODES] for batch in batches)}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's, and factor × the sum over codes."""
        seen: list[Any] = []
        # The cross-entropy calls the model and takes its logits; its other outputs are caught here.
        hook = model.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        try:
            terms = self._objective.terms(model, batch)
        finally:
            hook.remove()
        logits, targets = output_of(seen[-1], "code_logits"), output_of(seen[-1], "code_targets")
        terms[self.term] = self._factor * whole_cross_entropy(logits.flatten(0, 1), targets.flatten()).loss
        return terms

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, and the factor of the further codebooks."""
        return f"{self._objective.describe()}; codebooks behind the first, factor {self._factor:g}"


# --- further tokens ---------------------------------------------------------------------------------------------------

KEPT = ("_rows", "_targets", "_weights", "_weight_sum", "_labelled_samples", MICRO_BATCHES)
"""What the objective adds to a batch that it prepares."""


class WithMultiToken:
    """Next-token cross-entropy with that of further tokens beside it. Validation has the first alone.

    Args:
        objective: Next-token cross-entropy.
        head: The loss of the model's output head.
        watching: Enters a watch over the decoder's pass.
        depths: Further tokens.
        factor: `model.mtp_loss_scaling_factor`.
    """

    def __init__(
        self,
        objective: TokenCrossEntropy,
        head: HeadLoss,
        watching: Callable[[], AbstractContextManager[Pass]],
        depths: int,
        factor: float,
    ) -> None:
        self._objective, self._head, self._watching = objective, head, watching
        self._depths, self._scale = range(1, depths + 1), factor / depths

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective does, and in training once more for each depth, with its labels."""
        prepared = self._objective.prepare(batch, training=training)
        if not training:
            return prepared
        for depth in self._depths:
            own = self._objective.prepare(further(batch, depth), training=training)
            prepared |= {_depth_key(depth, name): own[name] for name in KEPT if name in own}
        return prepared

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The objective's, and of each depth its own."""
        counts = self._objective.count(batches)
        for depth in self._depths:
            own = [_of_depth(batch, depth) for batch in batches if _depth_key(depth, "_rows") in batch]
            if own:
                counts[_depth_term(depth)] = self._objective.count(own)[self._objective.term]
        return counts

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's, and factor / depths × the sum of each depth."""
        if _depth_key(1, "_rows") not in batch:
            return self._objective.terms(model, batch)
        with self._watching() as seen:
            terms = self._objective.terms(model, batch)
        hidden = model.mtp(seen.hidden, seen.embeddings, **seen.arguments)  # type: ignore[operator]
        for depth, hidden_BLH in zip(self._depths, hidden, strict=True):
            own = _of_depth(batch, depth)
            loss = self._head(hidden_BLH, own["_rows"], own["_targets"], own.get("_weights"))
            terms[_depth_term(depth)] = self._scale * loss
        return terms

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, the number of further tokens, and the factor of each."""
        return f"{self._objective.describe()}; {len(self._depths)} further tokens, factor {self._scale:g} each"


def further(batch: Batch, depth: int) -> Batch:
    """A collated batch with the labels (and their weights) of `depth` tokens further on, within each document."""
    labels_BL = batch["shift_labels"]
    # A label further on may be of the next document, which a token says nothing of.
    inside_BL = _documents(batch)[:, depth:] == _documents(batch)[:, :-depth]
    shifted = torch.full_like(labels_BL, IGNORED_LABEL)
    shifted[:, :-depth] = torch.where(inside_BL, labels_BL[:, depth:], IGNORED_LABEL)
    moved = batch | {"shift_labels": shifted}
    if (weights_BL := batch.get("loss_weights")) is not None:
        moved["loss_weights"] = torch.cat([weights_BL[:, depth:], torch.zeros_like(weights_BL[:, :depth])], dim=1)
    return moved


def _documents(batch: Batch) -> torch.Tensor:
    """(B, L): to which document of its row a token belongs."""
    length = batch["shift_labels"].shape[1]
    borders = batch.get("cu_seq_lens_q")
    if borders is None:
        return torch.zeros(1, length, dtype=torch.long)
    # Borders are 0, the end of the first document, …: the token at one belongs to the next document.
    return torch.searchsorted(borders[1:].contiguous(), torch.arange(length, dtype=borders.dtype), right=True)[None]


def _of_depth(batch: Batch, depth: int) -> Batch:
    """What was prepared for a depth, under the objective's own names."""
    return {name: batch[_depth_key(depth, name)] for name in KEPT if _depth_key(depth, name) in batch}


def _depth_key(depth: int, name: str) -> str:
    return f"_mtp{depth}{name}"


def _depth_term(depth: int) -> str:
    return f"mtp_{depth}"


# --- pictures as answers ----------------------------------------------------------------------------------------------


def tells_pictures(model: nn.Module) -> bool:
    """Whether a model says pictures as tokens: it has `picture_tokens(pixel_values)` and `picture_placeholder`."""
    return bool(attribute_at(model, "tells_pictures", False))


class WithPictureLabels:
    """Next-token cross-entropy over words and the tokens of pictures.

    Args:
        objective: Of the words.
    """

    def __init__(self, objective: TokenCrossEntropy) -> None:
        self._objective = objective

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Prepare a batch in the same way as the objective of words."""
        return self._objective.prepare(batch, training=training)

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The objective's: a token of a picture counts as a word."""
        return self._objective.count(batches)

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Return the objective's sums, after labels that stand for pictures have become the pictures' tokens."""

        def say(model: Any, args: Args, kwargs: Kwargs) -> CallArguments:
            pixels = kwargs.pop("pixel_values", None)
            if pixels is None:
                return args, kwargs
            ids_BL = _with_tokens(model, kwargs["input_ids"], pixels)
            _fill_targets(batch["_targets"], batch["_rows"], ids_BL, model.picture_placeholder)
            return args, {**kwargs, "input_ids": ids_BL}

        # Behind the hooks of sharding, which have gathered the encoder when this one runs.
        hook = model.register_forward_pre_hook(say, with_kwargs=True)
        try:
            return self._objective.terms(model, batch)
        finally:
            hook.remove()

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, and that pictures are answers, too."""
        return f"{self._objective.describe()}; of pictures in answers, too"


def _with_tokens(model: Any, ids_BL: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """(B, L) with the tokens of pictures in the places of their placeholders."""
    with torch.no_grad():
        tokens = model.picture_tokens(pixels)
    return ids_BL.masked_scatter(ids_BL == model.picture_placeholder, tokens.to(ids_BL.dtype))


def _fill_targets(targets_n: torch.Tensor, rows_n: torch.Tensor, ids_BL: torch.Tensor, placeholder: int) -> None:
    """In place: a row's target is the token behind it. Who computes the loss holds this very tensor."""
    # The last place of a row gets the first token of the next one; it has no label.
    following_T = ids_BL.flatten().roll(-1)
    targets_n.copy_(torch.where(targets_n == placeholder, following_T.index_select(0, rows_n), targets_n))
