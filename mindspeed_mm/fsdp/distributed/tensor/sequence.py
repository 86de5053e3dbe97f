"""Sequence parallelism: between split layers each tensor-parallel rank keeps its own tokens only.

A *stretch* is a run of modules, one after the other, whose hidden states are cut along the sequence: decoder blocks,
and the norm behind them if the plan names it. Inside a block, attention and MLP gather all tokens on their way in (they
read the sequence's length off their input) and leave with a rank's own; all other parameters see a rank's own tokens,
and their gradients are summed over ranks, as are those of what a block takes beside its hidden states (timesteps, text
to attend to).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.tensor.collectives import (
    TensorRanks,
    copy_to_ranks,
    gather_tokens,
    join_tokens,
    split_tokens,
)
from mindspeed_mm.fsdp.distributed.tensor.forward import LocalForward
from mindspeed_mm.fsdp.distributed.tensor.plan import KEY, Style, TensorPlan
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.ops.forward_stack import CallArguments, ForwardKind, replace_forward

SEQUENCE_KEY = f"{KEY}.sequence_parallel"


@dataclass(frozen=True)
class SequenceRegion:
    """Modules that hand each other their tokens without leaving the slice."""

    modules: tuple[str, ...]


def sequence_regions(model: nn.Module, plan: TensorPlan) -> list[SequenceRegion]:
    """The stretches that a plan's `sequence` makes, each block on its own unless the class says that nothing but
    hidden states goes from block to block. Pure.

    Raises:
        ConfigError: A block has parameters that are neither split nor named, or the model has experts, or takes text
            and image through its blocks side by side.
    """
    if not plan.sequence:
        return []
    experts = set(plan.whole) - {name for name, _ in model.named_modules()}  # patterns; a whole tower is a module
    if experts:
        raise ConfigError(
            "sequence parallelism would take the router's statistics from one rank's tokens",
            key=SEQUENCE_KEY,
            way_out="Leave it empty for models with experts.",
        )
    _check_one_stream(model)
    blocks = [block for block in find_blocks(model) if any(is_inside(name, (block,)) for name in plan.sequence)]
    _check_covered(model, plan, blocks)
    outside = [name for name in plan.sequence if not is_inside(name, blocks)]
    stretches: list[list[str]] = []
    for name in [*blocks, *outside]:
        if stretches and _follows(model, stretches[-1][-1], name):
            stretches[-1].append(name)
        else:
            stretches.append([name])
    return [SequenceRegion(tuple(names)) for names in stretches]


def apply_sequence_parallel(
    model: nn.Module, plan: TensorPlan, stretches: Sequence[SequenceRegion], ranks: TensorRanks
) -> None:
    """Cut hidden states at the start of each stretch and join them at its end; sum gradients of what is in between.

    Args:
        model: Its split layers are replaced already.
        plan: Names the modules that run on a slice.
        stretches: From `sequence_regions`.
        ranks: Of the group.
    """
    for parent in plan.sequence:
        for name, module in model.get_submodule(parent).named_modules(prefix=parent):
            if any(p is not None for p in module._parameters.values()) and not is_split(name, plan):
                replace_forward(module, ForwardKind.SEQUENCE, LocalForward(module, ranks))
    for stretch in stretches:
        crossing = _Borders(ranks)
        first, last = (model.get_submodule(stretch.modules[end]) for end in (0, -1))
        for name in stretch.modules:
            model.get_submodule(name).register_forward_pre_hook(crossing.share_others, with_kwargs=True)
        first.register_forward_pre_hook(crossing.cut, with_kwargs=True)
        last.register_forward_hook(crossing.join)
        for name in split_children(model, plan, stretch.modules):
            model.get_submodule(name).register_forward_pre_hook(_GatherInput(ranks), with_kwargs=True)


def is_split(name: str, plan: TensorPlan) -> bool:
    """Whether a module has a rule of its own, or lies inside a layer that is split."""
    return name in plan.rules or is_inside(
        name, (n for n, r in plan.rules.items() if r.style is not Style.HEAD_NUMBERS)
    )


class _Borders:
    """Start and end of one stretch. Both hooks stand outside of recompute: they run once a pass, in this order."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks, self._length = ranks, 0

    def cut(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        hidden = _hidden(args, kwargs)
        self._length = hidden.shape[-2]
        if self._length % self._ranks.size and _length(kwargs) is None and not _is_pointwise(module):
            raise ConfigError(
                f"{self._ranks.size} ranks do not divide {self._length} tokens, and the blocks of this model are not "
                "told how many there are",
                key=SEQUENCE_KEY,
                way_out="Leave it empty, or pad rows to a multiple.",
            )
        return _with_hidden(split_tokens(hidden, self._ranks), args, kwargs)

    def share_others(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """What comes beside hidden states is used for own tokens or heads: its gradients are parts of a sum."""
        hidden = _hidden(args, kwargs)

        def shared(tensor: torch.Tensor) -> torch.Tensor:
            return copy_to_ranks(tensor, self._ranks) if tensor.requires_grad and tensor is not hidden else tensor

        return tree_map_only(torch.Tensor, shared, (args, kwargs))

    def join(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return join_tokens(output, self._ranks, self._length)
        return (join_tokens(output[0], self._ranks, self._length), *output[1:])


def _is_pointwise(module: nn.Module) -> bool:
    """A norm behind the blocks: it has no children, and treats every token on its own."""
    return next(module.children(), None) is None


class _GatherInput:
    """The way into an attention or MLP. Attention mixes tokens, so it must not see the padding that makes slices equal:
    its rotary table says how many tokens there are. An MLP may."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        tokens = gather_tokens(_hidden(args, kwargs), self._ranks)
        length = _length(kwargs)
        return _with_hidden(tokens if length is None else tokens.narrow(-2, 0, length), args, kwargs)


def split_children(model: nn.Module, plan: TensorPlan, blocks: Iterable[str]) -> list[str]:
    """The children of blocks that hold split layers."""
    return [
        f"{block}.{child}"
        for block in blocks
        for child, _ in model.get_submodule(block).named_children()
        if any(is_inside(name, (f"{block}.{child}",)) for name in plan.names(Style.COLUMN))
    ]


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _with_hidden(hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _length(kwargs: dict[str, Any]) -> int | None:
    """Tokens of a row, from the rotary table (cosine, sine) of shape (…, L, D) that transformers hands down."""
    table = kwargs.get("position_embeddings")
    return None if table is None else int(table[0].shape[-2])


def _follows(model: nn.Module, before: str, name: str) -> bool:
    """Whether `name` takes what `before` returns, unchanged: transformers' pipeline plan of the class says so."""
    stack, _, _ = before.rpartition(".")
    parent_name, _, stack_name = stack.rpartition(".")
    if not stack:
        return False
    config = getattr(model.get_submodule(parent_name), "config", None)
    pipeline = getattr(config, "base_model_pp_plan", None) or {}
    if stack_name not in pipeline:
        return False
    same_stack = name.rpartition(".")[0] == stack
    order = list(pipeline)
    behind = order[order.index(stack_name) + 1 :][:1]
    return same_stack or [name.removeprefix(f"{parent_name}.")] == behind


def _check_one_stream(model: nn.Module) -> None:
    adapter = facts_of(model).adapter
    if adapter is not None and (adapter.sample_plan is None or not adapter.sample_plan.is_of_images_alone):
        raise ConfigError(
            f"text and image go through the blocks of {type(model).__name__} side by side, and join inside of them: "
            "slices of both would stand in another order than their positions",
            key=SEQUENCE_KEY,
            way_out="Leave it empty. parallel.ulysses_parallel_size spreads the tokens of this model, with "
            "tensor_parallel_size or without.",
        )


def _check_covered(model: nn.Module, plan: TensorPlan, blocks: Sequence[str]) -> None:
    """Beside split layers a block holds modules that the plan names, and attention and MLP hold nothing else."""
    split = split_children(model, plan, blocks)
    problems = [
        Problem("is split right inside its block, which cannot gather tokens for it", key=name)
        for name in plan.names(Style.COLUMN)
        if name in split
    ]
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if all(p is None for p in module._parameters.values()) or is_split(name, plan):
                continue
            if is_inside(name, split):
                problems.append(Problem("takes all tokens, among split layers: it cannot stay whole", key=name))
            elif not is_inside(name, plan.sequence):
                problems.append(Problem("runs on a slice of the sequence too", key=name, way_out="Name it as well."))
    if problems:
        raise ConfigError(f"{SEQUENCE_KEY} does not fit the model's blocks", problems=problems)
