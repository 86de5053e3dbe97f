"""liger's fused loss is chosen where it can run, told by name, and given what it needs. Stands in for it: torch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.fsdp.loss import build_head_loss as building
from mindspeed_mm.fsdp.loss import sliced_head
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments

WORDS, HIDDEN = 11, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lm_head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a kernel in liger's place that records how it is called, on a device that is said to be CUDA's."""
    seen: list[dict[str, Any]] = []

    def kernel(hidden: Any, weight: Any, targets: Any, *, bias: Any, **how: Any) -> Any:
        seen.append(how)
        logits = F.linear(hidden, weight, bias)
        z_loss = how["lse_square_scale"] * logits.logsumexp(1).square().sum()
        loss = F.cross_entropy(logits, targets, reduction=how["reduction"]) + z_loss
        return SimpleNamespace(loss=loss, z_loss=z_loss) if how["return_z_loss"] else loss

    module: Any = ModuleType("liger_kernel.transformers.functional")
    module.liger_fused_linear_cross_entropy = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sliced_head.importlib.util, "find_spec", lambda name: name == "liger_kernel" or None)
    monkeypatch.setattr(sliced_head.metadata, "version", lambda _: "9.9")
    monkeypatch.setattr(building, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(sliced_head, "_DEVICES", {"cuda", "cpu"})
    return seen


def run(*, sliced: bool = True, weighted: bool = False, z_loss: float = 0.0) -> tuple[str, list[torch.Tensor]]:
    """What the log says; the terms and the gradients."""
    model = Model()
    features = {"enable_chunk_loss": sliced, "loss_cfg": {"z_loss_coef": z_loss}}
    head = building.build_head_loss(model, "lm_head", FeatureArguments.model_validate(features))
    assert head is not None
    objective = TokenCrossEntropy(model, head)
    batch = {"input_ids": torch.arange(6).view(2, 3), "shift_labels": torch.tensor([[1, -100, 3], [4, 5, 6]])}
    batch |= {"loss_weights": torch.tensor([[0.5, 0.0, 1.0], [2.0, 1.0, 1.0]])} if weighted else {}
    terms = objective.terms(model, objective.prepare(batch))
    torch.stack(list(terms.values())).sum().backward()
    return objective.describe(), [*(term.detach() for term in terms.values()), *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_kernel_gives_both_sums(calls: list[dict[str, Any]], z_loss: float) -> None:
    said, found = run(z_loss=z_loss)
    _, expected = run(z_loss=z_loss, sliced=False)
    assert said.startswith("cross-entropy, liger-kernel 9.9, fused linear cross-entropy")
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)
    (how,) = calls
    assert how == {
        "reduction": "sum",
        "lse_square_scale": z_loss,
        "return_z_loss": z_loss > 0,
        "accum_dtype": torch.float32,
    }


def test_weights_of_tokens_go_past_it(calls: list[dict[str, Any]]) -> None:
    for own, other in zip(run(weighted=True)[1], run(weighted=True, sliced=False)[1], strict=True):
        torch.testing.assert_close(own, other)
    assert calls == []


def test_never_on_a_cpu(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "get_device_type", lambda: "cpu")
    monkeypatch.setattr(sliced_head, "_DEVICES", {"cuda", "npu"})
    said, _ = run()
    assert calls == []
    assert said == "cross-entropy, in slices of 1024 rows, gradients formed in the forward pass"


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_head.importlib.util, "find_spec", lambda _: None)
    assert sliced_head.find_liger("cuda") is None
