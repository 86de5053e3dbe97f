"""Objectives: what a loss counts and what it sums.

The engine sums the counts over all micro-batches and data ranks of an optimizer step first, so that each term has one
global denominator; any split of a batch then gives the same loss and the same gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import nn

from mindspeed_mm.core.batch import ENGINE_KEYS, IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss, labelled_rows, labels_per_sample, output_of
from mindspeed_mm.fsdp.params.feature_args import LossConfig
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

MICRO_BATCHES = "_micro_batches"
"""Key of a prepared batch: as how many micro-batches it counts, where these count alike."""
PER_MICRO_BATCH = "per_micro_batch_loss"
Share = Literal["token", "sample", "micro_batch"]
"""What counts alike in a loss."""
_SHARES: dict[str | None, Share] = {"per_sample_loss": "sample", PER_MICRO_BATCH: "micro_batch"}
Terms = dict[str, torch.Tensor]
"""Loss terms by name, each a 0-d tensor."""


def is_measured(term: str) -> bool:
    """Whether a term is only looked at, which a slash in its name says (`rewards/margins`): it has a denominator as a
    loss has, but no gradient, and is not part of what is minimised."""
    return "/" in term


class BatchTokens(NamedTuple):
    """What a micro-batch is made of, for the speed in the log."""

    real: int
    """Tokens without padding."""
    trained: int
    """Number of tokens that a loss is computed for."""


class Objective(Protocol):
    """What the engine asks of a loss."""

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Host-side work on a batch before it moves to the device; may add keys that start with `_`.

        Args:
            batch: As collated.
            training: False in validation, where what chance decides is always the same.
        """
        ...

    def tokens(self, batch: Batch) -> BatchTokens:
        """Tokens of a prepared micro-batch."""
        ...

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """This rank's share of each term's denominator, over prepared micro-batches."""
        ...

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Run the model; each term's *sum* over this micro-batch, differentiable."""
        ...

    def describe(self) -> str:
        """For the log: which loss runs."""
        ...


class ModelInputs:
    """Keeps of a batch what a model's `forward` takes: the engine's own keys never reach it."""

    def __init__(self, model: nn.Module, keep: frozenset[str] = frozenset()) -> None:
        self._names = set(inspect.signature(model.forward).parameters)
        self._takes_any = _takes_any_keyword(model)
        self._withheld = ENGINE_KEYS - keep

    def __call__(self, batch: Batch) -> Batch:
        """The arguments of `forward` in this batch."""
        inputs = {}
        for key, value in batch.items():
            is_ours = key.startswith("_") or key in self._withheld
            if self._is_taken(key) and not is_ours:
                inputs[key] = value
        if self._is_taken("use_cache"):
            inputs["use_cache"] = False  # for drawing tokens one by one; it costs memory
        return inputs

    def _is_taken(self, name: str) -> bool:
        return self._takes_any or name in self._names


def _takes_any_keyword(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


class TokenCrossEntropy:
    """Next-token cross-entropy of labelled tokens, computed by us.

    loss = Σ w_t · (−log p(token_t | before)) / N, and beside it, where the head has a coefficient for it, the z-loss
    coefficient · Σ w_t · (log Σ exp(logits_t))² / N. With `per_sample=False`, w_t is the token's weight in
    `loss_weights` (1 where the batch has none) and N = Σ w over the whole step. With `share="sample"`, that weight is
    divided by the sum over its sample, and N = samples that have a label. With `share="micro_batch"`, it is divided in
    training by the sum over its micro-batch, and N = micro-batches, also those without a label: Megatron-Core divides
    each micro-batch's loss by their number and averages gradients over data ranks (`forward_step_calc_loss` of
    `megatron/core/pipeline_parallel/schedules.py`, without `calculate_per_token_loss`). Validation counts tokens.

    Transformers' own loss is fp32 even for fp64 models and its shift crosses the borders of packed documents; here the
    shift is the collator's, and fp64 logits stay fp64.
    """

    term, z_term = "loss", "z_loss"

    def __init__(self, model: nn.Module, head: HeadLoss, *, share: Share = "token") -> None:
        self._inputs = ModelInputs(model)
        self._head = head
        self._share = share

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Add the labelled rows, their targets and, where they do not count alike, their weights."""
        labels = batch["shift_labels"]
        rows = labelled_rows(labels)
        prepared = batch | {"_rows": rows, "_targets": labels.reshape(-1).index_select(0, rows)}
        weights = prepared.pop("loss_weights", None)
        if weights is not None:
            weights = weights.reshape(-1).index_select(0, rows).double()
        if self._share == "sample":
            prepared |= _weights_per_sample(labels_per_sample(batch), weights)
        elif self._share == "micro_batch" and training:
            one = torch.tensor([len(rows)])
            prepared |= {"_weights": _weights_per_sample(one, weights)["_weights"], MICRO_BATCHES: _is_filled(batch)}
        elif weights is not None:
            prepared |= {"_weights": weights, "_weight_sum": float(weights.sum())}
        return prepared

    def tokens(self, batch: Batch) -> BatchTokens:
        """Count the tokens that are not padding, and the labels."""
        return text_tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The weights of label tokens, labelled samples or micro-batches; the same for both terms."""
        if any(MICRO_BATCHES in batch for batch in batches):
            denominator = sum(batch[MICRO_BATCHES] for batch in batches)
        elif self._share == "sample":
            denominator = sum(batch["_labelled_samples"] for batch in batches)
        else:
            denominator = sum(batch.get("_weight_sum", len(batch["_rows"])) for batch in batches)
        return dict.fromkeys(self._terms(), denominator)

    def by_sample(self, prepared: Batch) -> Batch:
        """A prepared batch of which `terms` gives a sum for each sample, (samples,), instead of one for all of them; in
        `_weights`, (n, samples), each has a column. For passes without gradients."""
        labelled = labels_per_sample(prepared)
        weights = prepared.get("_weights")
        if weights is None:
            weights = torch.ones(len(prepared["_rows"]), dtype=torch.float64)
        sample = torch.arange(len(labelled)).repeat_interleave(labelled)
        columns = weights.new_zeros(len(weights), len(labelled)).scatter_(1, sample.unsqueeze(1), weights.unsqueeze(1))
        return prepared | {"_weights": columns}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Sums over the labelled tokens of this micro-batch."""
        labels = None if "mm_context" in batch else batch.get("shift_labels")  # in a share, rows are numbered anew
        labelled = None if labels is None else labels.shape
        rows, targets, weights = batch["_rows"], batch["_targets"], batch.get("_weights")
        sums = self._head.of_model(model, self._inputs(batch), rows, targets, weights, labelled=labelled)
        return dict(zip(self._terms(), sums, strict=False))

    def describe(self) -> str:
        """Return a phrase for the log: what counts alike, and the head's loss."""
        kind = "cross-entropy" if self._share == "token" else f"cross-entropy by {self._share.replace('_', '-')}"
        return f"{kind}, {self._head.describe()}"

    def _terms(self) -> list[str]:
        if self._head.z_loss_coef:
            return [self.term, self.z_term]
        return [self.term]


class ModelLoss:
    """The loss that the model returns itself (`loss_type: raw`), the mean over the label tokens of a micro-batch.

    Over a step it is Σ n_m · loss_m / Σ n_m, with n_m label tokens in micro-batch m: the mean over all label tokens.
    That holds for models whose loss is a mean, and for those that divide a sum by `num_items_in_batch`, which are given
    n_m: which of the two a model does need not be known, and its signature does not say it. A term that a model adds to
    its loss is weighted alike. A batch without labels weighs as many samples as it has.

    An encoder-decoder predicts `labels` where they stand: transformers' models shift the decoder's input instead. All
    of them count then, whatever shifted ones the batch has.

    With `per_micro_batch` all micro-batches of a training step count alike, see `TokenCrossEntropy`.
    """

    term = "loss"

    def __init__(self, model: nn.Module, *, per_micro_batch: bool = False) -> None:
        self._per_micro_batch = per_micro_batch
        self._inputs = ModelInputs(model, keep=frozenset({"labels"}))
        self._tells_count = _accepts_item_count(model)
        self._labels_stand = attribute_at(model, "config.is_encoder_decoder", False)

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Add the weight of the micro-batch.

        Raises:
            ConfigError: Messages have weights, which the model knows nothing of.
        """
        if "loss_weights" in batch:
            raise ConfigError(
                "messages have weights other than 0 and 1, and the model's own loss takes none",
                key="features.loss_cfg.loss_type",
                way_out="Leave it at default.",
            )
        if self._labels_stand and "labels" in batch:
            batch = batch | {"shift_labels": batch["labels"]}
        weight = _own_weight(batch)
        if weight == 0 and "labels" in batch:
            batch = batch | {"labels": _with_one_label(batch["labels"])}
        if self._per_micro_batch and training:
            return batch | {"_weight": min(weight, 1), "_items": weight, MICRO_BATCHES: _is_filled(batch)}
        return batch | {"_weight": weight, "_items": weight}

    def tokens(self, batch: Batch) -> BatchTokens:
        """Count the tokens that are not padding, and the labels."""
        return text_tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Sum the weights of the micro-batches: 1 each where they count alike, else label tokens or, without labels,
        samples."""
        return {self.term: sum(batch.get(MICRO_BATCHES, _own_weight(batch)) for batch in batches)}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The model's own loss, times the weight."""
        inputs, weight = self._inputs(batch), batch["_weight"]
        if self._tells_count:
            inputs["num_items_in_batch"] = max(batch["_items"], 1)
        loss = output_of(model(**inputs), "loss")
        return {self.term: loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight}

    def describe(self) -> str:
        """Return a phrase for the log: what the model's own loss is a mean over."""
        over = "micro-batches" if self._per_micro_batch else "label tokens"
        described = f"the model's own, as the mean over {over}"
        if self._tells_count:
            return f"{described}, which is given their number"
        return described


def _is_filled(batch: Batch) -> int:
    """1 for a micro-batch with a sample; 0 for one that only fills up, on a rank for which there was none."""
    return int(len(batch["sample_ids"]) > batch.get("blank_rows", 0))


def _own_weight(batch: Batch) -> int:
    """Label tokens; of a batch without labels, samples that do not only fill up."""
    if "shift_labels" in batch:
        return int((batch["shift_labels"] != IGNORED_LABEL).sum())
    return len(batch["sample_ids"]) - batch.get("blank_rows", 0)


def _with_one_label(labels: torch.Tensor) -> torch.Tensor:
    """Labels of which one is trained on: the mean over none is not a number, and neither are its gradients. The batch
    weighs nothing."""
    labels = labels.clone(memory_format=torch.contiguous_format)
    labels.view(-1)[-1] = 0
    return labels


def _weights_per_sample(labelled: torch.Tensor, weights: torch.Tensor | None) -> Batch:
    """What a batch is prepared with when samples count alike.

    Args:
        labelled: (samples,) labels of each.
        weights: (n,) of the labels, one sample after the other; None: all alike.
    """
    if weights is None:
        weights = torch.ones(int(labelled.sum()), dtype=torch.float64)
    sample = torch.arange(len(labelled)).repeat_interleave(labelled)
    sums = torch.zeros(len(labelled), dtype=torch.float64).index_add(0, sample, weights)
    divisors = sums.masked_fill(sums == 0, 1.0)  # labels that count for nothing make a sample that counts for nothing
    share = weights / divisors.index_select(0, sample)
    return {"_weights": share, "_labelled_samples": int((sums > 0).sum())}


def text_tokens(batch: Batch) -> BatchTokens:
    """Tokens that are not padding, and labels, of a batch of text."""
    labels = batch["shift_labels"]
    mask = batch.get("attention_mask", batch.get("decoder_attention_mask"))
    if mask is not None:
        real = int(mask.sum())
    else:
        real = labels.numel() - batch.get("pad_tokens", 0)
    return BatchTokens(real, int((labels != IGNORED_LABEL).sum()))


def _accepts_item_count(model: nn.Module) -> bool:
    if "num_items_in_batch" in inspect.signature(model.forward).parameters:
        return True
    return has_all(model, "loss_function") and _takes_any_keyword(model)


def build_objective(loss_type: str | None, model: nn.Module, head: HeadLoss | None) -> Objective:
    """The objective that `features.loss_cfg.loss_type` names; not given: cross-entropy where the model has a head.

    Args:
        loss_type: The name.
        model: Built.
        head: The loss of its output head, if it has one.

    Raises:
        ConfigError: Cross-entropy is asked for and the model has no output head.
    """
    check_loss_type(loss_type, model, has_head=head is not None)
    if head is None or is_models_own(loss_type, has_head=True):
        return ModelLoss(model, per_micro_batch=loss_type == PER_MICRO_BATCH)
    return TokenCrossEntropy(model, head, share=_SHARES.get(loss_type, "token"))


def is_models_own(loss_type: str | None, *, has_head: bool) -> bool:
    """Whether the loss that the model itself returns is minimised (`features.loss_cfg.loss_type`)."""
    return loss_type == "raw" or not has_head


def code_heads(model: nn.Module) -> str:
    """The list of heads of a model that predicts text and codebooks at once, which it states (`code_heads`): that of
    text, then those of the codebooks. Empty where a model does not."""
    return str(attribute_at(model, "code_heads", ""))


def check_loss_type(loss_type: str | None, model: nn.Module, *, has_head: bool) -> None:
    """Raise `ConfigError` when cross-entropy is asked for and the model has no output head, or when what counts alike
    is not what the losses of its heads are means over."""
    has_named = bool(code_heads(model))
    if loss_type == "dict" and not has_named:
        raise ConfigError(
            f"{type(model).__name__} has no losses by name",
            key="features.loss_cfg.loss_type",
            way_out="Leave it out, or set 'default'.",
        )
    if has_named and loss_type in _SHARES:
        raise ConfigError(
            f"'{loss_type}', but each of the heads of {type(model).__name__} has the mean over its own labels",
            key="features.loss_cfg.loss_type",
            way_out="Set 'dict' or 'default': every loss is divided by its number of labels in the whole step.",
        )
    if loss_type not in (None, "raw", PER_MICRO_BATCH) and not has_head:
        raise ConfigError(
            f"'{loss_type}' needs a model with an output head; {type(model).__name__} has none",
            key="features.loss_cfg.loss_type",
            way_out="Set 'raw' to use the loss that the model returns.",
        )


def check_no_picture_weights(loss: LossConfig) -> None:
    """Raise `ConfigError` where weights of words beside pictures are given to a model of another kind."""
    for name in ("text_loss_weight", "picture_loss_weight"):
        if getattr(loss, name) is not None:
            raise ConfigError(
                f"{getattr(loss, name):g} is for models that answer and draw by denoising",
                key=f"features.loss_cfg.{name}",
                way_out="Leave it out.",
            )


def check_generator_loss(loss: LossConfig) -> None:
    """Raise `ConfigError` for what generators have none of (`features.loss_cfg`)."""
    for name, value in (("router_aux_loss_coef", loss.router_aux_loss_coef), ("z_loss_coef", loss.z_loss_coef)):
        if value:
            raise ConfigError(
                f"{value:g} is for language models, and the model is a generator",
                key=f"features.loss_cfg.{name}",
                way_out="Leave it out: generators learn by denoising alone.",
            )
    if loss.loss_type not in (None, "raw", "default", "per_sample_loss"):
        raise ConfigError(
            f"'{loss.loss_type}' is a loss of language models, and the model is a generator",
            key="features.loss_cfg.loss_type",
            way_out="Leave it out: generators learn by denoising, see training.diffusion.",
        )
