"""TRL's losses of preference pairs: its trainer's method, on logits that are given, with a stand-in for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def trl_pair_loss(
    logits_of: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    labels: Tensor,
    reference: Tensor,
    losses: Sequence[str],
    **settings: Any,
) -> Tensor:
    """The loss that `DPOTrainer._compute_loss` gives, differentiable.

    Args:
        logits_of: Token ids (2B, L) → logits (2B, L, V).
        input_ids: (2B, L), the chosen answers first.
        labels: (2B, L), not shifted.
        reference: (2B,) log-probabilities of whole answers.
        losses: TRL's names.
        settings: Attributes of the trainer: beta, label_smoothing, ld_alpha, loss_weights.
    """
    from mindspeed_mm import ensure_torchvision

    ensure_torchvision()
    from trl.trainer.dpo_trainer import DPOTrainer

    def forward(*, labels: Tensor, **_: Any) -> Any:
        logits = logits_of(input_ids)[:, :-1]
        targets = labels[:, 1:]
        found = logits.log_softmax(-1).gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
        nothing = torch.zeros_like(found).detach()
        return SimpleNamespace(
            log_probs=found.masked_fill(targets == -100, 0.0),
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
        )

    def same(value: Any) -> Any:
        return value

    chosen, rejected = reference.chunk(2)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same),
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        loss_types=list(losses),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(discopop_tau=0.05),
        **({"loss_weights": [1.0] * len(losses), "label_smoothing": 0.0, "ld_alpha": None} | settings),
    )
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "completion_mask": (labels != -100).long(),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return DPOTrainer._compute_loss(trainer, forward, inputs, False)  # type: ignore[no-any-return]
