"""Faults to plant, each by swapping one function: `mm verify --inject FAULT` must notice every one of them.

The table answers `--help` without torch; what a fault swaps is imported when it is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import LANGUAGE, ModelKind
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from mindspeed_mm.core.batch import Batch
    from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
    from mindspeed_mm.fsdp.loss.objectives import Terms, TokenCrossEntropy
    from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
    from mindspeed_mm.fsdp.train.run.resume import ResumePoint
    from mindspeed_mm.fsdp.train.step.forward_backward import PlainForwardBackward
    from mindspeed_mm.fsdp.train.step.tally import Tally

Planting = AbstractContextManager[None]
"""Inside, the mistake is made."""


@dataclass(frozen=True)
class PlannedRun:
    """What decides whether a fault can show."""

    sizes: ParallelSizes
    kind: ModelKind = LANGUAGE


@dataclass(frozen=True)
class PlantedFault:
    """A mistake that `mm verify --inject` can plant, and the plans under which it shows."""

    what: str
    """What goes wrong, for `--help`."""
    shows_in: Callable[[PlannedRun], bool]
    needs: str
    """The plan in which it shows, for the message when it cannot."""
    plant: Callable[[], Planting]
    """Makes the mistake."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """While inside, the fault is in the code of this process; nothing happens for None."""
    if name is None:
        yield
        return
    with find_fault(name).plant():
        yield


def find_fault(name: str) -> PlantedFault:
    """The fault of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in FAULTS:
        raise ConfigError(
            f"'{name}' is not a fault",
            key="--inject",
            way_out=f"{did_you_mean(name, FAULTS)}Faults: {', '.join(FAULTS)}.",
        )
    return FAULTS[name]


def check_fault(name: str, planned: PlannedRun) -> None:
    """Raise `ConfigError` for a fault that is unknown, or that nobody could see under this plan."""
    fault = find_fault(name)
    if not fault.shows_in(planned):
        raise ConfigError(
            f"'{name}' ({fault.what}) cannot show under this plan", key="--inject", way_out=f"It needs {fault.needs}."
        )


@contextmanager
def swapped(owner: object, name: str, replacement: object) -> Iterator[None]:
    """While inside, an attribute of a module or class is another one."""
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


_INHERITED = object()


# --- sums over ranks --------------------------------------------------------------------------------------------------


def _dropped_all_reduce() -> Planting:
    from mindspeed_mm.fsdp.distributed import torch_parallelize
    from mindspeed_mm.fsdp.distributed.sharding.fully_shard import fsdp_modules, sum_gradients

    def sum_without_copies(model: nn.Module) -> None:
        sum_gradients(model)
        for module in fsdp_modules(model):
            _leave_copies_alone(module)

    return swapped(torch_parallelize, "sum_gradients", sum_without_copies)


def _leave_copies_alone(module: FSDPModule) -> None:
    """Sharding never sums this module's gradients over copies, whatever it is told of the next backward pass."""
    tell = module.set_requires_gradient_sync

    def told(enabled: bool, *, recurse: bool = True) -> None:
        tell(enabled, recurse=recurse)
        module.set_requires_all_reduce(False, recurse=False)

    module.set_requires_gradient_sync = told
    module.set_requires_all_reduce(False, recurse=False)


def _averaged_gradients() -> Planting:
    from mindspeed_mm.fsdp.distributed import torch_parallelize

    return swapped(torch_parallelize, "sum_gradients", lambda model: None)


def _wrong_divisor() -> Planting:
    from mindspeed_mm.fsdp.train.step.tally import Tally

    summed = Tally.summed_over

    def with_own_counts(tally: Tally, group: dist.ProcessGroup, counts_samples: bool = True) -> Tally:
        return replace(summed(tally, group, counts_samples), counts=tally.counts)

    return swapped(Tally, "summed_over", with_own_counts)


def _averaged_micro_batches() -> Planting:
    from mindspeed_mm.fsdp.train.step.forward_backward import PlainForwardBackward

    plain = PlainForwardBackward.__call__

    def averaged(
        self: PlainForwardBackward, micro_batches: Sequence[Batch], denominators: Mapping[str, float]
    ) -> Terms:
        too_large = {name: count * len(micro_batches) for name, count in denominators.items()}
        return plain(self, micro_batches, too_large)

    return swapped(PlainForwardBackward, "__call__", averaged)


def _local_clip_norm() -> Planting:
    import torch
    from torch.distributed.tensor import DTensor

    from mindspeed_mm.fsdp.train import train_engine

    def norm_of_shards(parameters: Iterable[nn.Parameter], *_groups: object) -> torch.Tensor:
        norms = []
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            if gradient is not None:
                norms.append(gradient.norm())
        return torch.stack(norms).norm()

    return swapped(train_engine, "grad_norm", norm_of_shards)


# --- tensor, context, expert and pipeline parallelism -----------------------------------------------------------------


def _missing_norm_sum() -> Planting:
    from mindspeed_mm.fsdp.distributed.tensor import forward as tensor_parallel_forward

    return swapped(tensor_parallel_forward, "sum_gradient", lambda parameter, ranks: parameter)


def _dropped_tensor_sum() -> Planting:
    from mindspeed_mm.fsdp.distributed.tensor import forward as tensor_parallel_forward

    return swapped(tensor_parallel_forward, "sum_over_ranks", lambda tensor, ranks: tensor)


def _lost_border_token() -> Planting:
    import torch

    from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare

    attend = ContextShare.attend

    def forgetful(
        share: ContextShare, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        without_first = torch.cat([torch.zeros_like(values[:, :1]), values[:, 1:]], dim=1)
        return attend(share, queries, keys, without_first, **how)

    return swapped(ContextShare, "attend", forgetful)


def _doubled_expert_gradient() -> Planting:
    from mindspeed_mm.fsdp.ops import experts

    own = experts.local

    def counted_twice(parameter: torch.Tensor) -> torch.Tensor:
        return 2 * own(parameter) - own(parameter).detach()

    return swapped(experts, "local", counted_twice)


def _stage_norm() -> Planting:
    from mindspeed_mm.fsdp.optimizer.clip_grad import grad_norm
    from mindspeed_mm.fsdp.train import train_engine

    return swapped(train_engine, "grad_norm", lambda parameters, *_groups: grad_norm(parameters))


# --- labels and resuming ----------------------------------------------------------------------------------------------


def _labels_off_by_one() -> Planting:
    from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy

    prepare = TokenCrossEntropy.prepare

    def shifted(self: TokenCrossEntropy, batch: Batch, **how: Any) -> Batch:
        prepared = prepare(self, batch, **how)
        return prepared | {"_targets": prepared["_targets"].roll(1)}

    return swapped(TokenCrossEntropy, "prepare", shifted)


def _packed_leak() -> Planting:
    import torch

    from mindspeed_mm.fsdp.data.data_utils import data_collator
    from mindspeed_mm.fsdp.data.data_utils.packing import packed_row

    def as_one_document(documents: Sequence[Mapping[str, np.ndarray]], *how: Any) -> Batch:
        row = packed_row(documents, *how)
        tokens = row["input_ids"].shape[1]
        borders = torch.tensor([0, tokens], dtype=torch.int32)
        one = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": tokens, "max_length_k": tokens}
        return row | one

    return swapped(data_collator, "packed_row", as_one_document)


def _lost_optimizer_state() -> Planting:
    from mindspeed_mm.fsdp.train.run.resume import ResumePoint

    load = ResumePoint.load

    def forgetful(self: ResumePoint, *whole: Any) -> LoopState | None:
        return load(replace(self, with_optimizer=False), *whole)

    return swapped(ResumePoint, "load", forgetful)


def _copies(planned: PlannedRun) -> bool:
    return planned.sizes.dp_replicate > 1


def _shares_parameters(planned: PlannedRun) -> bool:
    return planned.sizes.fsdp * planned.sizes.dp_replicate > 1


FAULTS: dict[str, PlantedFault] = {
    "dropped-all-reduce": PlantedFault(
        "gradients are not summed over copies of the model",
        _copies,
        "copies: parallel.fully_shard_parallel_size=1, or less than the data ranks",
        _dropped_all_reduce,
    ),
    "averaged-gradients": PlantedFault(
        "gradients are averaged over data ranks, not summed",
        _shares_parameters,
        "more than one data or context rank: --nproc 2, data_parallel_size left out",
        _averaged_gradients,
    ),
    "wrong-divisor": PlantedFault(
        "every rank divides its loss by its own count",
        lambda planned: planned.sizes.dp > 1,
        "more than one data rank: --nproc 2, data_parallel_size left out",
        _wrong_divisor,
    ),
    "averaged-micro-batches": PlantedFault(
        "accumulated gradients are averaged over micro-batches",
        lambda planned: planned.sizes.pp == 1,
        "parallel.pipeline_parallel_size=1",
        _averaged_micro_batches,
    ),
    "local-clip-norm": PlantedFault(
        "the clip norm is that of a rank's own shards",
        lambda planned: planned.sizes.fsdp * planned.sizes.tp * planned.sizes.pp > 1,
        "parameters in parts: sharding (parallel.fully_shard_parallel_size=auto), tensor or pipeline parallelism",
        _local_clip_norm,
    ),
    "missing-norm-sum": PlantedFault(
        "the gradient of a replicated norm is not summed over tensor ranks",
        lambda planned: planned.sizes.tp > 1,
        "parallel.tensor_parallel_size=2",
        _missing_norm_sum,
    ),
    "dropped-tensor-sum": PlantedFault(
        "the parts of a split layer's output are not summed over tensor ranks",
        lambda planned: planned.sizes.tp > 1,
        "parallel.tensor_parallel_size=2",
        _dropped_tensor_sum,
    ),
    "lost-border-token": PlantedFault(
        "attention forgets the first token of each rank's share of a sequence",
        lambda planned: planned.sizes.cp > 1,
        "parallel.ring_attention_size=2 or parallel.ulysses_parallel_size=2",
        _lost_border_token,
    ),
    "doubled-expert-gradient": PlantedFault(
        "the gradients of experts are counted twice",
        lambda planned: planned.sizes.ep > 1,
        "parallel.expert_parallel_size=2",
        _doubled_expert_gradient,
    ),
    "stage-norm": PlantedFault(
        "the clip norm is that of a rank's own pipeline stages",
        lambda planned: planned.sizes.pp > 1,
        "parallel.pipeline_parallel_size=2",
        _stage_norm,
    ),
    "labels-off-by-one": PlantedFault(
        "each label is that of the neighbouring position",
        lambda planned: planned.kind.has_tokens,
        "a language model",
        _labels_off_by_one,
    ),
    "packed-leak": PlantedFault(
        "samples that share a row attend to each other",
        lambda planned: planned.kind.has_tokens,
        "a language model whose samples can share a row",
        _packed_leak,
    ),
    "lost-optimizer-state": PlantedFault(
        "a resumed run starts with fresh optimizer state",
        lambda planned: True,
        "nothing",
        _lost_optimizer_state,
    ),
}
"""Name → fault."""
