"""Objectives against formulas written out by hand, in fp64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy, build_objective
from mindspeed_mm.fsdp.loss.sliced_head import SlicedHead, Slices


class TinyModel(nn.Module):
    """Embedding and head; its own loss is the mean over label tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 11, bias=False, dtype=torch.float64)
        self.rows_seen = 0

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        self.rows_seen = logits.shape[:-1].numel()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), ignore_index=-100)
        return SimpleNamespace(logits=logits, loss=loss)


def batch(seed=1, trained=((2, 5), (1, 6))):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (2, 7), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, (start, stop) in enumerate(trained):
        labels[row, start:stop] = ids[row, start:stop]
    shift = torch.full_like(labels, -100)
    shift[:, :-1] = labels[:, 1:]
    return {"input_ids": ids, "labels": labels, "shift_labels": shift, "sample_ids": ["a", "b"]}


def weighted(given, seed=3):
    """The batch with weights: fractions, zeros at labels, one sample of several messages."""
    weights = torch.rand(given["shift_labels"].shape, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    return given | {"loss_weights": weights * (given["shift_labels"] != -100)}


def run(loss_type, given):
    model = TinyModel()
    head = HeadLoss(model.head)
    objective = build_objective(loss_type, model, head)
    prepared = [objective.prepare(b) for b in given]
    counts = objective.count(prepared)
    total = sum(objective.terms(model, b)["loss"] for b in prepared) / counts["loss"]
    total.backward()
    return model, counts, total


def by_hand(given, per_sample):
    """Every token's −log p from full logits, then the mean over tokens, or over samples of means over tokens."""
    model = TinyModel()
    means, total, count = [], 0.0, 0.0
    for b in given:
        log_p = F.log_softmax(model(b["input_ids"]).logits, dim=-1)
        for row, targets in enumerate(b["shift_labels"]):
            labelled = [(at, target) for at, target in enumerate(targets.tolist()) if target >= 0]
            weights = [b["loss_weights"][row, at].item() if "loss_weights" in b else 1.0 for at, _ in labelled]
            summed = sum(
                -weight * log_p[row, at, target] for weight, (at, target) in zip(weights, labelled, strict=True)
            )
            total, count = total + summed, count + sum(weights)
            means += [summed / sum(weights)] if sum(weights) else []
    loss = sum(means) / len(means) if per_sample else total / count
    loss.backward()
    return model, loss


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize(
    ("loss_type", "per_sample"), [("default", False), ("per_token_loss", False), ("per_sample_loss", True)]
)
def test_cross_entropy_equals_the_formula(loss_type, per_sample, weigh):
    given = [batch(1), batch(2, trained=((0, 2), (3, 7)))]
    given = [weighted(given[0]), given[1]] if weigh else given  # beside a micro-batch without weights
    model, _, loss = run(loss_type, given)
    reference, expected = by_hand(given, per_sample)
    assert abs(loss.item() - expected.item()) < 1e-14
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-14


def mean_of_micro_batches(given):
    """Megatron-Core without `calculate_per_token_loss`: each micro-batch's own mean, over the number of micro-batches;
    one without a label adds 0 (`forward_step_calc_loss` divides by at least one token)."""
    model, losses = TinyModel(), []
    for b in given:
        log_p = F.log_softmax(model(b["input_ids"]).logits, dim=-1)
        targets = b["shift_labels"]
        weights = b.get("loss_weights", (targets != -100).double()).double()
        nll = -log_p.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
        losses.append((nll * weights).sum() / (weights.sum() if weights.any() else 1.0))
    loss = torch.stack(losses).mean()
    loss.backward()
    return model, loss


@pytest.mark.edge("BN7")
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("weigh", [False, True])
def test_every_micro_batch_counts_alike(has_head, weigh):
    given = [batch(1), batch(2, trained=((0, 2), (5, 6))), batch(3, trained=((0, 0), (0, 0)))]
    if weigh and not has_head:
        return  # a model's own loss takes no weights
    given = [weighted(given[0]), *given[1:]] if weigh else given
    model = TinyModel()
    objective = build_objective("per_micro_batch_loss", model, HeadLoss(model.head) if has_head else None)
    prepared = [objective.prepare(b) for b in given]
    blank = objective.prepare(batch(4, trained=((0, 0), (0, 0))) | {"blank_rows": 2})
    counts = objective.count([*prepared, blank])
    assert counts["loss"] == 3  # on a rank for which there was no sample, nothing is counted
    loss = sum(objective.terms(model, b)["loss"] for b in prepared) / counts["loss"]
    loss.backward()
    reference, expected = mean_of_micro_batches(given)
    assert abs(loss.item() - expected.item()) < 1e-14
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-14
    assert abs(loss.item() - run("default", given)[2].item()) > 1e-3
    assert objective.count([objective.prepare(b, training=False) for b in given]) == run("default", given)[1]


def test_weights_matter_and_a_sum_below_one_is_a_denominator_like_any():
    given = [weighted(batch())]
    assert abs(run("default", given)[2].item() - run("default", [batch()])[2].item()) > 1e-3
    small = [given[0] | {"loss_weights": given[0]["loss_weights"] * 0.01}]
    assert abs(run("default", small)[2].item() - run("default", given)[2].item()) < 1e-7  # fp32 weights


def test_the_models_own_loss_takes_no_weights():
    with pytest.raises(ConfigError, match="weights other than 0 and 1"):
        run("raw", [weighted(batch())])


def test_per_sample_and_per_token_differ_on_uneven_masks():
    given = [batch(1, trained=((1, 2), (1, 7)))]
    assert abs(run("default", given)[2].item() - run("per_sample_loss", given)[2].item()) > 1e-3


def test_head_sees_labelled_rows_only():
    model, counts, _ = run("default", [batch()])
    assert model.rows_seen == counts["loss"] == 8


def test_row_without_label_has_weight_zero_per_sample():
    given = [batch(1, trained=((2, 5), (0, 0)))]
    _, counts, loss = run("per_sample_loss", given)
    assert counts["loss"] == 1
    assert abs(loss.item() - by_hand(given, per_sample=True)[1].item()) < 1e-14


def test_a_sample_whose_labels_weigh_nothing_counts_for_nothing():
    given = weighted(batch())
    given["loss_weights"][0] = 0.0
    _, counts, loss = run("per_sample_loss", [given])
    assert counts["loss"] == 1
    assert abs(loss.item() - by_hand([given], per_sample=True)[1].item()) < 1e-14


@pytest.mark.parametrize("slices", [None, Slices(2), Slices(3, is_dynamic=True)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_z_loss_has_the_denominator_and_the_weights_of_the_loss(per_sample, slices):
    given = weighted(batch())
    model = TinyModel()
    sliced = SlicedHead(model.head, slices) if slices is not None else None
    share = "sample" if per_sample else "token"
    objective = TokenCrossEntropy(model, HeadLoss(model.head, sliced=sliced, z_loss_coef=0.25), share=share)
    prepared = objective.prepare(given)
    counts, terms = objective.count([prepared]), objective.terms(model, prepared)
    (terms["loss"] / counts["loss"] + terms["z_loss"] / counts["z_loss"]).backward()

    reference, loss = by_hand([given], per_sample=per_sample)
    assert terms["loss"].item() / counts["loss"] == pytest.approx(loss.item(), abs=1e-14)
    rows, weights = given["shift_labels"] >= 0, given["loss_weights"].double()
    if per_sample:
        weights = weights / weights.sum(dim=1, keepdim=True)
    squares = reference(given["input_ids"]).logits.exp().sum(dim=-1).log() ** 2
    z_loss = 0.25 * (squares * weights)[rows].sum() / weights[rows].sum()
    assert terms["z_loss"].item() / counts["z_loss"] == pytest.approx(z_loss.item(), abs=1e-14)
    z_loss.backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (own.grad - other.grad).abs().max() < 1e-14


@pytest.mark.parametrize("slices", [None, Slices(2)])
def test_hidden_states_that_are_not_the_models_last_ones(slices):
    """What further heads ask for: the same head on other hidden states, through the module."""
    model, hidden = TinyModel(), torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    sliced = SlicedHead(model.head, slices) if slices is not None else None
    head = HeadLoss(model.head, sliced=sliced, z_loss_coef=0.25)
    rows, targets, weights = torch.tensor([1, 4, 9]), torch.tensor([3, 0, 5]), torch.tensor([1.0, 0.5, 2.0])
    loss = head(hidden, rows, targets, weights)
    loss.backward()
    found = [hidden.grad, model.head.weight.grad]
    expected = (F.cross_entropy(model.head(hidden).view(14, 11)[rows], targets, reduction="none") * weights).sum()
    for own, other in zip(found, torch.autograd.grad(expected, [hidden, model.head.weight]), strict=True):
        assert (own - other).abs().max() < 1e-14
    assert loss.shape == () and loss.item() == pytest.approx(expected.item(), abs=1e-14)


def test_sizes_of_slices():
    assert [Slices(4).size(rows) for rows in (0, 3, 4, 5, 100)] == [4] * 5
    dynamic = Slices(4, is_dynamic=True)
    assert [dynamic.size(rows) for rows in (0, 1, 4, 5, 8, 9, 100)] == [1, 1, 4, 3, 4, 3, 4]


def test_batch_without_labels_gives_zero_and_zero_gradients():
    model = TinyModel()
    objective = build_objective("default", model, HeadLoss(model.head))
    prepared = objective.prepare(batch(trained=((0, 0), (0, 0))))
    loss = objective.terms(model, prepared)["loss"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad.abs().max() == 0.0 for p in model.parameters())


def test_raw_is_the_mean_over_the_label_tokens_of_all_micro_batches():
    given = [batch(1), batch(2, trained=((0, 2), (6, 7)))]
    _, counts, loss = run("raw", given)
    tokens = [int((b["shift_labels"] != -100).sum()) for b in given]
    means = [TinyModel()(b["input_ids"], b["labels"]).loss.item() for b in given]
    assert tokens[0] != tokens[1] and counts["loss"] == sum(tokens)
    expected = (tokens[0] * means[0] + tokens[1] * means[1]) / sum(tokens)
    assert loss.item() == pytest.approx(expected, abs=1e-14)


def test_cross_entropy_without_a_head_is_an_error():
    with pytest.raises(ConfigError, match="needs a model with an output head"):
        build_objective("default", TinyModel(), None)
