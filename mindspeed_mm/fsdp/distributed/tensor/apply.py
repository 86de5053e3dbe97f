"""Applies tensor parallelism to a model in place: parameters become DTensors on the axis `tp`, forwards work on this
rank's part. Before recompute and `fully_shard`, on the whole model on meta or with values.

No parameter is renamed or reshaped: initialisation, loading, checkpoints and export see the full tensors.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.tensor.collectives import SplitVocabulary, TensorRanks
from mindspeed_mm.fsdp.distributed.tensor.forward import (
    ColumnForward,
    EmbeddingForward,
    HeadNumbersForward,
    LocalForward,
    RowForward,
    SplitInput,
    WideNormForward,
)
from mindspeed_mm.fsdp.distributed.tensor.plan import (
    CUT_DIMS,
    SplitRule,
    Style,
    TensorPlan,
    gathers_features,
    output_head,
)
from mindspeed_mm.fsdp.distributed.tensor.sequence import (
    apply_sequence_parallel,
    sequence_regions,
)
from mindspeed_mm.fsdp.distributed.tensor.sizes import HEAD_COUNTS
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.stages import own_names
from mindspeed_mm.fsdp.ops.collectives import sharded_along
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all


def apply_tensor_parallel(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, gather_logits: bool = False) -> None:
    """Split a model over the ranks of a mesh. Every rank calls it.

    Args:
        model: Built, ties live, adapters in it, not recomputed, not sharded; of a pipeline, this rank's part.
        plan: Of the whole model, from `resolve_tensor_parallel`.
        mesh: `ParallelState.axis_mesh("tp")`: of one parent with the mesh that `fully_shard` gets.
        gather_logits: Let the output head return all logits on every rank. Otherwise it returns this rank's part of the
            vocabulary, for the loss of `split_vocabulary`.
    """
    own = plan.only(own_names(model, (*plan.rules, *plan.cuts, *plan.sequence)))
    _Splitter(model, own, TensorRanks(mesh), gather_logits).split()


class _Splitter:
    def __init__(self, model: nn.Module, plan: TensorPlan, ranks: TensorRanks, gather_logits: bool) -> None:
        self._model, self._plan, self._ranks, self._gathers = model, plan, ranks, gather_logits
        self._stretches = sequence_regions(model, plan)
        self._entry, self._head = SplitInput(ranks), output_head(model)
        self._split: dict[int, nn.Parameter] = {}

    def split(self) -> None:
        for name, rule in self._plan.cuts.items():
            self._apply(name, rule)
        for parent in {name.rpartition(".")[0] for name in self._plan.names(Style.COLUMN)}:
            divide_heads(self._model.get_submodule(parent), self._ranks.size)
        apply_sequence_parallel(self._model, self._plan, self._stretches, self._ranks)
        if self._head in self._plan.names(Style.HEAD) and not self._gathers:
            facts_of(self._model).note(SplitVocabulary(self._ranks))

    def _apply(self, name: str, rule: SplitRule) -> None:
        module = self._model.get_submodule(name)
        if rule.style in CUT_DIMS and not rule.blocks:
            self._cut_parameters(module, rule.style)
        replace_forward(module, ForwardKind.TENSOR, self._forward(module, name, rule))

    def _forward(self, module: nn.Module, name: str, rule: SplitRule) -> LocalForward:
        in_sequence = self._in_sequence(name)
        if rule.style in (Style.COLUMN, Style.HEAD):
            gathers = gathers_features(name, rule, self._head, gather_logits=self._gathers)
            entry: SplitInput | None = self._entry
            if in_sequence:  # the attention or MLP around this layer has gathered its tokens already
                entry = None
            return ColumnForward(module, self._ranks, entry, rule.blocks, gathers)
        if rule.style is Style.ROW:
            return RowForward(module, self._ranks, in_sequence, rule.blocks)
        return _OTHERS[rule.style](module, self._ranks)

    def _in_sequence(self, name: str) -> bool:
        return any(is_inside(name, stretch.modules) for stretch in self._stretches)

    def _cut_parameters(self, module: nn.Module, style: Style) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is None or (style is Style.ROW and name == "bias"):
                continue
            if id(parameter) not in self._split:  # a tied parameter is met twice, and stays tied
                self._split[id(parameter)] = sharded_along(parameter, CUT_DIMS[style], self._ranks)
            module._parameters[name] = self._split[id(parameter)]


_OTHERS: dict[Style, type[LocalForward]] = {
    Style.EMBEDDING: EmbeddingForward,
    Style.WIDE_NORM: WideNormForward,
    Style.OWN_PART: LocalForward,
    Style.HEAD_NUMBERS: HeadNumbersForward,
}


def divide_heads(attention: nn.Module, size: int) -> None:
    """Set how many heads an attention module sees, and how many features they have where it counts by these."""
    # Attentions of diffusers reshape by the width of all heads.
    counts: tuple[str, ...] = HEAD_COUNTS
    if has_all(attention, "to_q"):
        counts = (*HEAD_COUNTS, "inner_dim")
    for name in counts:
        count = attribute_at(attention, name)
        if isinstance(count, int) and not isinstance(count, bool):
            setattr(attention, name, count // size)
