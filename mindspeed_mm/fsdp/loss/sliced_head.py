"""An output head that answers with a loss: `features.enable_chunk_loss`.

The head's `forward` is replaced on the instance. What is asked travels with the hidden states, as a second argument:
hooks and other forwards around this one (sharding, layers split over ranks, recompute) hand it on.

The fused linear cross-entropy of liger-kernel (Hsu et al. 2024, arXiv:2410.10989) is used where it is installed. It
does on CUDA and NPU devices, in one Triton kernel a slice, what `ops/linear_cross_entropy.py` does in torch operations
everywhere. It chooses the slices itself and takes no weights of rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.fsdp.loss.head_outputs import LogitSteps, RecordingTensor, recording
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.ops.linear_cross_entropy import (
    LossPlan,
    LossSums,
    VocabularyShare,
    linear_cross_entropy,
    recomputed_cross_entropy,
)
from mindspeed_mm.fsdp.ops.linear_log_probs import recomputed_log_probs


@dataclass
class LossRequest:
    """Asks a head for the sums of the loss over the rows that it gets, instead of for logits."""

    targets: torch.Tensor
    """(n,) ids."""
    weights: torch.Tensor | None
    """(n,); 1 each when None."""
    z_loss_coef: float = 0.0
    vocabulary: VocabularyShare | None = None
    sums: RecordingTensor | None = None
    """(2,): loss and z-loss; the head fills them in."""


@dataclass
class LogProbRequest:
    """Asks a head for the log-probability of each row's target, instead of for logits."""

    targets: torch.Tensor
    """(n,) ids."""
    suppressed: torch.Tensor | None = None
    """(s,) ids that are left out of the softmax."""
    temperature: float = 1.0
    vocabulary: VocabularyShare | None = None
    with_entropy: bool = False
    """Ask for the entropy of each row's softmax, too."""
    found: RecordingTensor | None = None
    """(n,), or with entropies (n, 2); the head fills them in."""


@dataclass(frozen=True)
class Slices:
    """How many rows a slice has."""

    rows: int
    is_dynamic: bool = False
    """Choose the size by the rows there are: as few slices as `rows` allows, all alike."""

    def size(self, rows: int) -> int:
        """Return the rows of a slice when the head gets `rows` rows; the last slice may be shorter. The size depends on
        nothing else."""
        if not self.is_dynamic:
            return self.rows
        slices = max(1, -(-rows // self.rows))
        return max(1, -(-rows // slices))

    def describe(self) -> str:
        """Return the size of the slices in words, for the log."""
        if self.is_dynamic:
            return f"equal slices of at most {self.rows} rows"
        return f"slices of {self.rows} rows"


def is_plain_linear(head: nn.Module) -> bool:
    """Whether a head is torch's linear layer, with nothing put around it."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)


class SlicedHead:
    """A head's `forward` while a loss is asked of it, and its own for all other calls.

    Args:
        head: A plain linear layer forms gradients in the forward pass. Of any other (an adapter on it, a quantised
            one) the logits of a slice are computed once more in the backward pass.
        slices: How the rows go through.
        behind: What the model does with logits.
        liger: The kernel that does all this on an accelerator, if there is one.
    """

    def __init__(
        self, head: nn.Module, slices: Slices, behind: LogitSteps | None = None, liger: LigerKernel | None = None
    ) -> None:
        self._head, self._slices, self._behind = head, slices, behind
        self._is_linear = is_plain_linear(head)
        self._liger = liger if self._is_linear and not behind else None
        self._forward = replace_forward(head, ForwardKind.HEAD_LOSS, self)

    def __call__(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """(…, H) → logits; with a request, (n, H) → (2,) the sums of loss and z-loss, or (n,) log-probabilities."""
        if args and isinstance(args[-1], LogProbRequest):
            args[-1].found = recording(self._log_probs(hidden, args[-1]))
            return args[-1].found
        if not args or not isinstance(args[-1], LossRequest):
            return self._forward(hidden, *args, **kwargs)
        request: LossRequest = args[-1]
        request.sums = recording(torch.stack(self._sums(hidden, request)))
        return request.sums

    def describe(self) -> str:
        """For the log: what computes the loss."""
        if self._liger is not None:
            return self._liger.describe()
        how = "gradients formed in the forward pass" if self._is_linear else "computed again in the backward pass"
        return f"in {self._slices.describe()}, {how}"

    def _log_probs(self, hidden_NH: torch.Tensor, request: LogProbRequest) -> torch.Tensor:
        rows = self._slices.size(len(request.targets))
        plan = LossPlan(rows, behind=self._behind or None, vocabulary=request.vocabulary)
        logits_of = self._forward
        if self._is_linear:
            # As they are now: around this call, split layers and sharding have put plain tensors in their places.
            weight, bias = self._head._parameters["weight"], self._head._parameters["bias"]
            assert weight is not None
            logits_of = partial(_linear, weight, bias)
        return recomputed_log_probs(
            logits_of,
            hidden_NH,
            request.targets,
            plan,
            suppressed=request.suppressed,
            temperature=request.temperature,
            with_entropy=request.with_entropy,
        )

    def _sums(self, hidden_NH: torch.Tensor, request: LossRequest) -> LossSums:
        targets, weights, head = request.targets, request.weights, self._head
        plan = LossPlan(self._slices.size(len(targets)), request.z_loss_coef, self._behind or None, request.vocabulary)
        if not self._is_linear:
            return recomputed_cross_entropy(self._forward, hidden_NH, targets, plan, weights_N=weights)
        weight, bias = head._parameters["weight"], head._parameters["bias"]
        assert weight is not None
        if self._liger is not None and self._liger.takes(hidden_NH, weights, plan):
            return self._liger(hidden_NH, weight, bias, targets, plan)
        return linear_cross_entropy(hidden_NH, weight, targets, plan, bias_V=bias, weights_N=weights)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, weight, bias)


PACKAGE, _FUNCTIONS = "liger_kernel", "liger_kernel.transformers.functional"
_DEVICES = {"cuda", "npu"}
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class LigerKernel:
    """The kernel of an installed version."""

    def __init__(self) -> None:
        self._function: Any = importlib.import_module(_FUNCTIONS).liger_fused_linear_cross_entropy

    def takes(self, hidden_NH: torch.Tensor, weights_N: torch.Tensor | None, plan: LossPlan) -> bool:
        """Whether it computes this: rows that count alike, a vocabulary in one part, a type that it knows."""
        is_known = hidden_NH.device.type in _DEVICES and hidden_NH.dtype in _DTYPES and len(hidden_NH) > 0
        return is_known and weights_N is None and plan.vocabulary is None and plan.behind is None

    def __call__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        plan: LossPlan,
    ) -> LossSums:
        """As `linear_cross_entropy`; the gradient of both sums flows through the first."""
        found = self._function(
            hidden_NH,
            weight_VH,
            targets_N,
            bias=bias_V,
            reduction="sum",
            lse_square_scale=plan.z_loss_coef,
            return_z_loss=bool(plan.z_loss_coef),
            accum_dtype=torch.float32,
        )
        if not plan.z_loss_coef:
            return LossSums(found, torch.zeros_like(found))
        z_loss = found.z_loss.detach().to(found.loss.dtype)
        return LossSums(found.loss - z_loss, z_loss)

    def describe(self) -> str:
        """Return a phrase for the log, with the package's version."""
        return f"liger-kernel {metadata.version('liger-kernel')}, fused linear cross-entropy where tokens count alike"


def find_liger(device_type: str) -> LigerKernel | None:
    """The kernel, where the device can run it and the package is installed."""
    if device_type not in _DEVICES or importlib.util.find_spec(PACKAGE) is None:
        return None
    return LigerKernel()
