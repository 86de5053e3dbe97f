"""The loss of a language model's output head, from logits or without ever holding them.

Hidden states go through the head as a module, so that hooks of sharding fire. The head works on labelled tokens only:
logits of tokens that no loss reads are never computed. A pre-hook on it keeps the rows of the flattened hidden states
that carry a label. It runs inside the head's own forward, after FSDP has gathered the head's weight, and works for
every model whose head is a module of its own. Without slices the head returns logits and the loss is computed from what
the model returns; with slices it returns the sums of the loss itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.loss.head_outputs import LogitSteps, check_untouched, named_output
from mindspeed_mm.fsdp.loss.sliced_head import LogProbRequest, LossRequest, SlicedHead
from mindspeed_mm.fsdp.ops.forward_stack import Args
from mindspeed_mm.fsdp.ops.linear_cross_entropy import LossSums, VocabularyShare, whole_cross_entropy
from mindspeed_mm.fsdp.ops.linear_log_probs import token_log_probs


def labelled_rows(shift_labels: torch.Tensor) -> torch.Tensor:
    """Indices (n,) int64 into the flattened (B·L) tokens that carry a label.

    Call it while the labels are on the host: on an accelerator, finding the indices would be a synchronisation.
    """
    return (shift_labels.reshape(-1) != IGNORED_LABEL).nonzero().squeeze(1)


def labels_per_sample(batch: Batch) -> torch.Tensor:
    """(samples,) how many labels each has: by row, in a packed row by document (padding is one without)."""
    is_label_BL = batch["shift_labels"] != IGNORED_LABEL
    borders = batch.get("cu_seq_lens_q")
    if borders is None:
        return is_label_BL.sum(dim=1)
    # (L + 1,) labels in front of each place; between two borders lies one document.
    before = torch.cat([borders.new_zeros(1, dtype=torch.long), is_label_BL[0].cumsum(0)])
    return before.index_select(0, borders.long()).diff()


class LabelledRowsHead:
    """Hook on an output head, off until `select` names the rows.

    Args:
        head: The module that turns hidden states (B, L, H) into logits; registered before sharding.
    """

    def __init__(self, head: nn.Module) -> None:
        self._rows: torch.Tensor | None = None
        self._labelled: torch.Size | None = None
        self._request: tuple[object, ...] = ()
        head.register_forward_pre_hook(self._keep_rows)

    @contextmanager
    def select(self, rows: torch.Tensor, *request: object, labelled: torch.Size | None = None) -> Iterator[None]:
        """While inside, the head sees only `rows` (n,) of the flattened tokens and returns logits (1, n, V).

        Args:
            rows: Their indices.
            request: A further argument for the head, which may ask for something else than logits.
            labelled: The shape of the labels that the indices were found in; None: it is known to fit.
        """
        self._rows, self._request, self._labelled = rows, request, labelled
        try:
            yield
        finally:
            self._rows, self._request, self._labelled = None, (), None

    def _keep_rows(self, _module: nn.Module, inputs: Args) -> Args | None:
        if self._rows is None:
            return None
        hidden, *rest = inputs
        tokens = hidden.shape[:-1]
        if self._labelled is not None and self._labelled.numel() != tokens.numel():
            raise DataError(
                f"labels of shape {tuple(self._labelled)} do not fit the model's outputs, of shape {tuple(tokens)}",
                key="labels",
                way_out="Let the data set's collate_fn give a label for each token that the model gives logits for, "
                "-100 where it is not trained.",
            )
        kept = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._rows)
        if not self._request:  # models that change their logits expect as many dims as there were
            kept = kept[(None,) * (hidden.dim() - 2)]
        return (kept, *rest, *self._request)


# --- the loss ---------------------------------------------------------------------------------------------------------


class HeadLoss:
    """Cross-entropy at an output head. Made before sharding.

    Args:
        head: The module that turns hidden states (…, H) into logits.
        sliced: What the head does instead of its own forward while a loss is asked of it; None: logits are held.
        behind: What the model does with logits.
        z_loss_coef: `features.loss_cfg.z_loss_coef`.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        sliced: SlicedHead | None = None,
        behind: LogitSteps | None = None,
        z_loss_coef: float = 0.0,
    ) -> None:
        self._head, self._sliced = head, sliced
        self._behind = behind or LogitSteps()
        self._rows = LabelledRowsHead(head)
        self.z_loss_coef = z_loss_coef
        self.vocabulary: VocabularyShare | None = None
        """Set where each rank computes the logits of a part of the vocabulary."""

    def __call__(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum of the cross-entropies (0-d) of hidden states that are not the model's last ones, without z-loss.

        Args:
            hidden: (…, H).
            rows: (n,) indices into the flattened hidden states.
            targets: (n,) ids.
            weights: (n,); 1 each when None.
        """
        if self._sliced is None:
            with self._rows.select(rows):
                logits = self._head(hidden)
            return self._sums(self._behind(logits), targets, weights, 0.0).loss
        with self._rows.select(rows, LossRequest(targets, weights, 0.0, self.vocabulary)):
            sums = self._head(hidden)
        return sums.as_subclass(torch.Tensor)[0]

    def of_model(
        self,
        model: nn.Module,
        inputs: Mapping[str, object],
        rows: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        labelled: torch.Size | None = None,
    ) -> LossSums:
        """The sums of a model's own last hidden states; arguments as above, and of `LabelledRowsHead.select`.

        Raises:
            ConfigError: The model returns no logits, or changes them in a way that slices cannot follow.
            DataError: There are more or fewer labels than tokens.
        """
        if self._sliced is None:
            with self._rows.select(rows, labelled=labelled):
                logits = output_of(model(**inputs), "logits")
            return self._sums(logits, targets, weights, self.z_loss_coef)
        request = LossRequest(targets, weights, self.z_loss_coef, self.vocabulary)
        with self._rows.select(rows, request, labelled=labelled):
            returned = output_of(model(**inputs), "logits")
        check_untouched(model, returned, request.sums, self._behind)
        assert request.sums is not None
        loss, z_loss = request.sums.as_subclass(torch.Tensor).unbind()
        return LossSums(loss, z_loss)

    def log_probs(
        self,
        model: nn.Module,
        inputs: Mapping[str, object],
        rows: torch.Tensor,
        targets: torch.Tensor,
        suppressed: torch.Tensor | None = None,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> torch.Tensor:
        """(n,) log p(target) of a model's own last hidden states, in fp32 at least; differentiable.

        Args:
            model: Called once.
            inputs: Arguments of its `forward`.
            rows: (n,) indices into the flattened hidden states.
            targets: (n,) ids.
            suppressed: (s,) ids that the model is never to give (placeholders of media): they are left out of the
                softmax.
            temperature: Logits are divided by it.
            with_entropy: Return (n, 2): beside it the entropy of the row's softmax, in nats.

        Raises:
            ConfigError: The model returns no logits, or changes them in a way that slices cannot follow.
        """
        if self._sliced is None:
            with self._rows.select(rows):
                logits = output_of(model(**inputs), "logits")
            logits_NV = logits.reshape(-1, logits.shape[-1])
            return token_log_probs(
                logits_NV,
                targets,
                suppressed=suppressed,
                temperature=temperature,
                vocabulary=self.vocabulary,
                with_entropy=with_entropy,
            )
        request = LogProbRequest(targets, suppressed, temperature, self.vocabulary, with_entropy)
        with self._rows.select(rows, request):
            returned = output_of(model(**inputs), "logits")
        check_untouched(model, returned, request.found, self._behind)
        assert request.found is not None
        return request.found.as_subclass(torch.Tensor)

    def describe(self) -> str:
        """For the log: which loss runs."""
        described = "plain, from whole logits" if self._sliced is None else self._sliced.describe()
        if self.z_loss_coef:
            described += f", z-loss {self.z_loss_coef:g}"
        return described

    def _sums(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, z_loss_coef: float
    ) -> LossSums:
        logits_NV = logits.reshape(-1, logits.shape[-1])
        return whole_cross_entropy(logits_NV, targets, weights, z_loss_coef=z_loss_coef, vocabulary=self.vocabulary)


def output_of(output: object, name: str) -> torch.Tensor:
    """The named tensor of a model's output, a dict or an object.

    Raises:
        ConfigError: The model does not return it.
    """
    value: torch.Tensor | None = named_output(output, name)
    if value is None:
        raise ConfigError(
            f"the model's output has no '{name}'",
            key="features.loss_cfg.loss_type",
            way_out="'raw' takes the model's own `loss`, the other types take its `logits`: return it, choose the "
            "other, or name a model with an output head (…ForCausalLM).",
        )
    return value
