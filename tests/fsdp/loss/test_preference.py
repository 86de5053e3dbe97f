"""Losses of preference pairs equal formulas written by hand and, where it is installed, TRL; any split of the pairs
gives the same.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.pair_objective import PairObjective
from mindspeed_mm.fsdp.loss.preference import PAIR_LOSS, loss_weights
from mindspeed_mm.fsdp.models.behaviour.shared_media import RepeatedMedia
from mindspeed_mm.fsdp.params.posttrain_args import PAIR_LOSSES, DpoArguments
from tests.helpers.trl_losses import trl_pair_loss

VOCABULARY, PAIRS, LENGTH = 11, 6, 7


class TinyPolicy(nn.Module):
    """Logits of a token depend on the token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.lm_head = nn.Linear(5, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lm_head(self.embedding(input_ids))}


def make_batch(pairs: slice = slice(None)) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, PAIRS, LENGTH), generator=draw)
    answer = torch.randint(1, LENGTH - 1, (2, PAIRS, 1), generator=draw)  # labelled tokens, at the end
    labels = ids.masked_fill(torch.arange(LENGTH) < LENGTH - answer, -100)
    shifted = torch.cat([labels[..., 1:], torch.full((2, PAIRS, 1), -100)], dim=-1)
    reference = -3 * torch.rand(2, PAIRS, generator=draw, dtype=torch.float64)
    rows = {"input_ids": ids, "labels": labels, "shift_labels": shifted, "attention_mask": torch.ones_like(ids)}
    batch = {name: value[:, pairs].flatten(0, 1) for name, value in rows.items()}
    count = len(batch["input_ids"]) // 2
    return batch | {"pairs": count, "sample_ids": list(range(count)), "_given": reference[:, pairs].flatten()}


class GivenReference:
    """Log-probabilities that are in the batch."""

    def answers(self, batch: Any, counts: Tensor) -> Tensor:
        return batch["_given"]

    def describe(self) -> str:
        return "given"


def losses_of(
    dpo: DpoArguments, *parts: slice, denominators: str = "global"
) -> tuple[dict[str, float], list[Tensor], TinyPolicy]:
    """Normalised terms, and the gradients of those that are minimised."""
    model = TinyPolicy()
    objective = PairObjective(model, HeadLoss(model.lm_head), dpo, GivenReference(), RepeatedMedia())
    batches = [objective.prepare(make_batch(part)) for part in parts or (slice(None),)]
    whole = objective.count(batches)
    found: dict[str, Tensor] = {}
    for batch in batches:
        counts = whole if denominators == "global" else objective.count([batch])
        for name, value in objective.terms(model, batch).items():
            own = value / (counts[name] * (1 if denominators == "global" else len(batches)))
            found[name] = found.get(name, torch.zeros(())) + own
    total = torch.stack([value for name, value in found.items() if "/" not in name]).sum()
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return {name: float(value.detach()) for name, value in found.items()}, list(gradients), model


def by_hand(name: str, beta: float, epsilon: float) -> float:
    """The mean over pairs, one pair at a time, in Python's own floating point."""
    batch, model = make_batch(), TinyPolicy()
    with torch.no_grad():
        log_p = model(batch["input_ids"])["logits"].log_softmax(-1)
    sums, tokens = [], []
    for row, labels in enumerate(batch["shift_labels"].tolist()):
        own = [float(log_p[row, place, label]) for place, label in enumerate(labels) if label != -100]
        sums.append(math.fsum(own))
        tokens.append(len(own))
    given = batch["_given"].tolist()
    pairs = [(sums[c], sums[c + PAIRS], given[c], given[c + PAIRS], tokens[c], tokens[c + PAIRS]) for c in range(PAIRS)]
    return math.fsum(one_by_hand(name, beta, epsilon, *pair) for pair in pairs) / PAIRS


def one_by_hand(
    name: str, beta: float, epsilon: float, sc: float, sj: float, given_c: float, given_j: float, nc: int, nj: int
) -> float:
    """The formulas of the papers, of one pair."""

    def s(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def log_s(x: float) -> float:
        return -math.log(1 + math.exp(-x))

    rc, rj, mc, mj = sc - given_c, sj - given_j, sc / nc, sj / nj
    h, mean_h = rc - rj, rc / nc - rj / nj
    x, y = beta * h, beta * mean_h
    blend = s(x / 0.05)
    return {
        "sigmoid": -(1 - epsilon) * log_s(x) - epsilon * log_s(-x),
        "sigmoid_norm": -(1 - epsilon) * log_s(y) - epsilon * log_s(-y),
        "hinge": max(0.0, 1 - x),
        "ipo": (mean_h - 1 / (2 * beta)) ** 2,
        "robust": (-(1 - epsilon) * log_s(x) + epsilon * log_s(-x)) / (1 - 2 * epsilon),
        "exo_pair": s(x) * (log_s(x) - math.log(1 - epsilon)) + s(-x) * (log_s(-x) - math.log(epsilon or 1)),
        "nca_pair": -log_s(beta * rc) - 0.5 * log_s(-beta * rc) - 0.5 * log_s(-beta * rj),
        "bco_pair": -log_s(beta * rc) - log_s(-beta * rj),
        "sppo_hard": (rc - 0.5 / beta) ** 2 + (rj + 0.5 / beta) ** 2,
        "apo_zero": 1 - s(beta * rc) + s(beta * rj),
        "apo_down": s(beta * rc) + 1 - s(x),
        "discopop": -log_s(x) * (1 - blend) + math.exp(-x) * blend,
        "simpo": -log_s(beta * (mc - mj) - 0.5),
        "orpo": -beta * log_s(mc - mj - math.log(1 - math.exp(mc)) + math.log(1 - math.exp(mj))),
    }[name]


def smoothing_of(name: str) -> float:
    return 0.1 if name in ("sigmoid", "sigmoid_norm", "robust", "exo_pair") else 0.0


@pytest.mark.parametrize("name", list(PAIR_LOSS))
def test_losses_by_hand(name: str) -> None:
    epsilon = smoothing_of(name)
    terms, _, _ = losses_of(DpoArguments(loss_type=(name,), beta=0.3, label_smoothing=epsilon))
    assert terms["loss"] == pytest.approx(by_hand(name, 0.3, epsilon), abs=1e-13)


def test_every_loss_that_can_be_named_is_there() -> None:
    assert set(PAIR_LOSSES) == {*PAIR_LOSS, "sft"}


@pytest.mark.parametrize("name", [name for name in PAIR_LOSSES if name not in ("simpo", "orpo")])
@pytest.mark.parametrize("ld_alpha", [None, 0.3])
def test_losses_and_gradients_are_those_of_trl(name: str, ld_alpha: float | None) -> None:
    epsilon = 0.1 if name in ("robust", "exo_pair") else 0.0  # TRL's sigmoid ignores it
    losses = {"loss_type": ("sft", name), "loss_weights": (0.5, 2)}
    dpo = DpoArguments(beta=0.3, label_smoothing=epsilon, ld_alpha=ld_alpha, **losses)
    terms, gradients, model = losses_of(dpo)
    batch = make_batch()
    expected = trl_pair_loss(
        lambda ids: model(ids)["logits"],
        batch["input_ids"],
        batch["labels"],
        batch["_given"],
        ["sft", name],
        beta=0.3,
        label_smoothing=epsilon,
        ld_alpha=ld_alpha,
        loss_weights=[0.5, 2.0],
    )
    tolerance = 1e-7 if name == "exo_pair" else 1e-14  # where TRL's ε is fp32
    assert terms.get("loss", 0.0) + terms["sft"] == pytest.approx(
        float(expected.detach()), rel=tolerance, abs=tolerance
    )
    for found, wanted in zip(gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.edge("BN8")
@pytest.mark.parametrize("split", [[slice(None)], [slice(i, i + 1) for i in range(6)]])
def test_pref_ftx_by_pair_is_the_mean_of_the_answers_own_means(split: list[slice]) -> None:
    """As `get_batch_loss_metrics` in MindSpeed-MM's dpo_trainer.py: `pref_ftx · −logps / length` of each pair, then the
    mean over pairs. Here with plain torch."""
    dpo = DpoArguments(beta=0.3, pref_ftx=0.5, pref_ftx_by="pair")
    terms, gradients, _ = losses_of(dpo, *split)
    model, labels = TinyPolicy(), make_batch()["shift_labels"][:PAIRS]
    log_p = model(make_batch()["input_ids"][:PAIRS])["logits"].log_softmax(-1)
    is_label = labels != -100
    of_labels = log_p.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2) * is_label
    expected = -0.5 * (of_labels.sum(1) / is_label.sum(1)).mean()
    assert len(set(is_label.sum(1).tolist())) > 1
    assert terms["sft_by_pair"] == pytest.approx(float(expected.detach()), abs=1e-14)
    assert "sft" not in terms
    without = losses_of(DpoArguments(beta=0.3))[1]
    for found, plain, wanted in zip(
        gradients, without, torch.autograd.grad(expected, list(model.parameters())), strict=True
    ):
        assert torch.allclose(found - plain, wanted, rtol=0, atol=1e-14)


SPLITS = {"1 × 6": [slice(i, i + 1) for i in range(6)], "1 + 2 + 3": [slice(0, 1), slice(1, 3), slice(3, 6)]}
MIXED = DpoArguments(loss_type=("sigmoid", "ipo", "orpo"), loss_weights=(1, 0.5, 0.25), pref_ftx=0.5, ld_alpha=0.25)


@pytest.mark.parametrize("split", list(SPLITS))
def test_a_split_changes_nothing(split: str) -> None:
    expected, gradients, _ = losses_of(MIXED)
    terms, own, _ = losses_of(MIXED, *SPLITS[split])
    assert terms == pytest.approx(expected, abs=1e-14)
    assert terms.keys() == expected.keys() > {"loss", "sft", "rewards/margins", "logps/chosen", "kl/reference"}
    for found, wanted in zip(own, gradients, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-15)


def test_denominators_of_a_micro_batch_are_seen() -> None:
    _, gradients, _ = losses_of(MIXED)
    _, own, _ = losses_of(MIXED, *SPLITS["1 + 2 + 3"], denominators="own")
    assert max(float((a - b).abs().max()) for a, b in zip(own, gradients, strict=True)) > 1e-2


@pytest.mark.parametrize("ld_alpha", [None, 0.25])
def test_what_is_measured(ld_alpha: float | None) -> None:
    terms, _, _ = losses_of(DpoArguments(beta=0.3, ld_alpha=ld_alpha))
    batch, model = make_batch(), TinyPolicy()
    with torch.no_grad():
        log_p = model(batch["input_ids"])["logits"].log_softmax(-1)
    labels = batch["shift_labels"]
    sums = (log_p.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2) * (labels != -100)).sum(1)
    assert terms["logps/chosen"] == pytest.approx(float(sums[:PAIRS].mean()), abs=1e-14)
    assert terms["logps/rejected"] == pytest.approx(float(sums[PAIRS:].mean()), abs=1e-14)
    ratios = sums - batch["_given"]
    kl = float(-ratios.sum() / (labels != -100).sum())
    if ld_alpha is not None:  # which weighs the tokens of what follows
        assert abs(terms["kl/reference"] - kl) > 1e-3
        return
    margins = 0.3 * (ratios[:PAIRS] - ratios[PAIRS:])
    assert terms["rewards/margins"] == pytest.approx(float(margins.mean()), abs=1e-14)
    assert terms["rewards/accuracies"] == pytest.approx(float((margins > 0).double().mean()))
    assert terms["kl/reference"] == pytest.approx(kl, abs=1e-14)


def test_pairs_that_only_fill_up_count_for_nothing() -> None:
    model = TinyPolicy()
    objective = PairObjective(model, HeadLoss(model.lm_head), MIXED, GivenReference(), RepeatedMedia())
    filled = make_batch()
    for row in (PAIRS - 1, 2 * PAIRS - 1):
        filled["shift_labels"][row] = -100
    fewer = make_batch(slice(0, PAIRS - 1))
    first, second = objective.prepare(filled), objective.prepare(fewer)
    assert objective.count([first]) == objective.count([second])
    a, b = objective.terms(model, first), objective.terms(model, second)
    for name in a.keys() - {"kl/reference"}:
        assert float(a[name].detach()) == pytest.approx(float(b[name].detach()), abs=1e-13)


def test_rows_that_are_no_pairs_are_refused() -> None:
    model = TinyPolicy()
    objective = PairObjective(model, HeadLoss(model.lm_head), DpoArguments(), None, RepeatedMedia())
    with pytest.raises(DataError, match="no preference pairs"):
        objective.prepare({key: value for key, value in make_batch().items() if key != "pairs"})


def test_weights_of_losses() -> None:
    assert loss_weights(DpoArguments(loss_type=("sigmoid", "sft"), loss_weights=(2, 0.5), pref_ftx=1)) == {
        "sigmoid": 2,
        "sft": 1.5,
    }
    assert loss_weights(DpoArguments(loss_type="orpo")) == {"orpo": 1, "sft": 1}
