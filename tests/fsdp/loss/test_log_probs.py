"""Log-probabilities of targets equal log_softmax and gather, with every gradient, however the head computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mindspeed_mm.fsdp.distributed.tensor.collectives import SplitVocabulary, TensorRanks
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.head_outputs import LogitSteps, find_logit_steps
from mindspeed_mm.fsdp.loss.sliced_head import SlicedHead, Slices
from mindspeed_mm.fsdp.ops.linear_log_probs import token_log_probs
from tests.helpers.distributed import run_ranks

VOCABULARY, WIDTH = 10, 6
ROWS, TARGETS = torch.tensor([0, 2, 3, 6, 7]), torch.tensor([1, 9, 0, 4, 4])
SUPPRESSED = torch.tensor([3, 8])


class SmallModel(nn.Module):
    """A head behind an embedding, with soft-capped logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": torch.tanh(self.lm_head(self.embedding(input_ids)) / 3) * 3}


IDS = torch.tensor([[1, 5, 2, 2], [7, 0, 9, 1]])
WEIGHTS = torch.tensor([0.3, -1.0, 2.0, 0.5, -0.25], dtype=torch.float64)


def expected(suppressed: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = SmallModel()
    logits = model(IDS)["logits"].reshape(-1, VOCABULARY)[ROWS]
    if suppressed is not None:
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[suppressed] = True
        logits = logits.masked_fill(mask, -torch.inf)
    found = logits.log_softmax(-1).gather(1, TARGETS[:, None])[:, 0]
    return found.detach(), list(torch.autograd.grad((found * WEIGHTS).sum(), list(model.parameters())))


def measured(slice_rows: int | None, suppressed: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = SmallModel()
    behind, sliced = LogitSteps(), None
    if slice_rows is not None:
        behind = find_logit_steps(model, "lm_head")
        sliced = SlicedHead(model.lm_head, Slices(slice_rows), behind)
    head = HeadLoss(model.lm_head, sliced=sliced, behind=behind)
    found = head.log_probs(model, {"input_ids": IDS}, ROWS, TARGETS, suppressed)
    return found.detach(), list(torch.autograd.grad((found * WEIGHTS).sum(), list(model.parameters())))


@pytest.mark.parametrize("slice_rows", [None, 1, 2, 8])
@pytest.mark.parametrize("suppressed", [None, SUPPRESSED])
def test_log_probs_and_gradients(slice_rows: int | None, suppressed: torch.Tensor | None) -> None:
    lp, gradients = measured(slice_rows, suppressed)
    reference, reference_gradients = expected(suppressed)
    assert lp.dtype == torch.float64
    assert torch.allclose(lp, reference, rtol=0, atol=1e-14)
    for found, wanted in zip(gradients, reference_gradients, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("slice_rows", [None, 2])
@pytest.mark.parametrize("suppressed", [None, SUPPRESSED])
def test_entropies_beside_them(slice_rows: int | None, suppressed: torch.Tensor | None) -> None:
    """Against `torch.distributions`, of the ids that are left alone, with gradients of both columns."""
    kept = torch.tensor([n for n in range(VOCABULARY) if suppressed is None or n not in suppressed])
    model, temperature = SmallModel(), 1.7
    logits = model(IDS)["logits"].reshape(-1, VOCABULARY)[ROWS][:, kept] / temperature
    wanted = torch.distributions.Categorical(logits=logits).entropy()
    reference = torch.autograd.grad((wanted * WEIGHTS).sum(), list(model.parameters()))
    behind = find_logit_steps(model, "lm_head") if slice_rows else LogitSteps()
    sliced = SlicedHead(model.lm_head, Slices(slice_rows), behind) if slice_rows else None
    head = HeadLoss(model.lm_head, sliced=sliced, behind=behind)
    inputs = {"input_ids": IDS}
    alone = head.log_probs(model, inputs, ROWS, TARGETS, suppressed, temperature=temperature)
    found = head.log_probs(model, inputs, ROWS, TARGETS, suppressed, temperature=temperature, with_entropy=True)
    assert torch.equal(found[:, 0], alone)
    assert torch.allclose(found[:, 1], wanted, rtol=0, atol=1e-14)
    gradients = torch.autograd.grad((found[:, 1] * WEIGHTS).sum(), list(model.parameters()))
    for own, wanted_gradient in zip(gradients, reference, strict=True):
        assert torch.allclose(own, wanted_gradient, rtol=0, atol=1e-14)


def test_suppressed_ids_change_the_numbers_and_have_no_gradient() -> None:
    (plain, _), (masked, gradients) = measured(None, None), measured(2, SUPPRESSED)
    assert (masked > plain).all()
    assert gradients[1][SUPPRESSED].abs().sum() == 0 and gradients[1].abs().sum() > 0


def test_slices_hold_no_logits_of_all_rows() -> None:
    widths: list[int] = []
    model = SmallModel()
    behind = find_logit_steps(model, "lm_head")
    head = HeadLoss(model.lm_head, sliced=SlicedHead(model.lm_head, Slices(2), behind), behind=behind)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        widths.append(tensor.numel() if tensor.shape[-1:] == (VOCABULARY,) else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head.log_probs(model, {"input_ids": IDS}, ROWS, TARGETS)
    assert max(widths) <= VOCABULARY * WIDTH  # the weight itself; five rows of logits would not be sliced ones
    assert sum(width == VOCABULARY * len(ROWS) for width in widths) == 0


def split(suppressed: torch.Tensor | None) -> Any:
    vocabulary = SplitVocabulary(TensorRanks(init_device_mesh("cpu", (2,))))
    torch.manual_seed(0)
    logits = torch.randn(len(TARGETS), VOCABULARY, dtype=torch.float64)
    own = logits.chunk(2, dim=1)[vocabulary.rank].clone().requires_grad_()
    found = token_log_probs(own, TARGETS, suppressed=suppressed, vocabulary=vocabulary, with_entropy=True)
    (gradient,) = torch.autograd.grad((found * WEIGHTS[:, None]).sum(), own)
    return found.detach(), gradient


@pytest.mark.slow
@pytest.mark.parametrize("suppressed", [None, SUPPRESSED, torch.arange(5, 9)])
def test_a_split_vocabulary(suppressed: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(TARGETS), VOCABULARY, dtype=torch.float64, requires_grad=True)
    masked = logits if suppressed is None else logits.index_fill(1, suppressed, -torch.inf)
    kept = masked[0].isfinite()
    entropy = torch.distributions.Categorical(logits=masked[:, kept]).entropy()
    wanted = torch.stack([masked.log_softmax(-1).gather(1, TARGETS[:, None])[:, 0], entropy], dim=1)
    (gradient,) = torch.autograd.grad((wanted * WEIGHTS[:, None]).sum(), logits)
    results = run_ranks(2, split, suppressed)
    for (found, own), part in zip(results, gradient.chunk(2, dim=1), strict=True):
        assert torch.allclose(found, wanted.detach(), rtol=0, atol=1e-14)
        assert torch.allclose(own, part, rtol=0, atol=1e-14)
