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
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, ForwardKind, Kwargs, replace_forward
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, module_names

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
    experts = set(plan.whole).difference(module_names(model))  # patterns; a whole tower is a module
    if experts:
        raise ConfigError(
            "sequence parallelism would take the router's statistics from one rank's tokens",
            key=SEQUENCE_KEY,
            way_out="Leave it empty for models with experts.",
        )
    _check_one_stream(model)
    blocks = []
    for block in find_blocks(model):
        if any(is_inside(name, (block,)) for name in plan.sequence):
            blocks.append(block)
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
            if _has_own_parameters(module) and not is_split(name, plan):
                replace_forward(module, ForwardKind.SEQUENCE, LocalForward(module, ranks))
    for stretch in stretches:
        crossing = _Borders(ranks)
        first, last = model.get_submodule(stretch.modules[0]), model.get_submodule(stretch.modules[-1])
        for name in stretch.modules:
            model.get_submodule(name).register_forward_pre_hook(crossing.share_others, with_kwargs=True)
        first.register_forward_pre_hook(crossing.cut, with_kwargs=True)
        last.register_forward_hook(crossing.join)
        for name in split_children(model, plan, stretch.modules):
            model.get_submodule(name).register_forward_pre_hook(_GatherInput(ranks), with_kwargs=True)


def is_split(name: str, plan: TensorPlan) -> bool:
    """Whether a module has a rule of its own, or lies inside a layer that is split."""
    if name in plan.rules:
        return True
    # An attention with numbers of heads of its own is not itself a layer, though it has a rule.
    layers = [each for each, rule in plan.rules.items() if rule.style is not Style.HEAD_NUMBERS]
    return is_inside(name, layers)


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


class _Borders:
    """Start and end of one stretch. Both hooks stand outside of recompute: they run once a pass, in this order."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks, self._length = ranks, 0

    def cut(self, module: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
        hidden = _hidden(args, kwargs)
        self._length = hidden.shape[-2]
        if self._length % self._ranks.size and _length(kwargs) is None and not _is_pointwise(module):
            raise ConfigError(
                f"{self._ranks.size} ranks do not divide {self._length} tokens, and the blocks of this model do not "
                "learn how many there are",
                key=SEQUENCE_KEY,
                way_out="Leave it empty, or pad rows to a multiple.",
            )
        return _with_hidden(split_tokens(hidden, self._ranks), args, kwargs)

    def share_others(self, _module: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
        """What comes beside hidden states is used for own tokens or heads: its gradients are parts of a sum."""
        hidden = _hidden(args, kwargs)

        def shared(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is hidden or not tensor.requires_grad:
                return tensor
            return copy_to_ranks(tensor, self._ranks)

        return tree_map_only(torch.Tensor, shared, (args, kwargs))

    def join(self, _module: nn.Module, _args: object, output: Any) -> torch.Tensor | tuple[object, ...]:
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

    def __call__(self, _module: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
        tokens = gather_tokens(_hidden(args, kwargs), self._ranks)
        length = _length(kwargs)
        if length is not None:
            tokens = tokens.narrow(-2, 0, length)
        return _with_hidden(tokens, args, kwargs)


def split_children(model: nn.Module, plan: TensorPlan, blocks: Iterable[str]) -> list[str]:
    """The children of blocks that hold split layers."""
    columns = plan.names(Style.COLUMN)
    found = []
    for block in blocks:
        for child, _ in model.get_submodule(block).named_children():
            name = f"{block}.{child}"
            if any(is_inside(column, (name,)) for column in columns):
                found.append(name)
    return found


def _hidden(args: Args, kwargs: Kwargs) -> torch.Tensor:
    if args:
        return args[0]
    return kwargs["hidden_states"]


def _with_hidden(hidden: torch.Tensor, args: Args, kwargs: Kwargs) -> CallArguments:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def _length(kwargs: Kwargs) -> int | None:
    """Tokens of a row, from the rotary table (cosine, sine) of shape (…, L, D) that transformers hands down."""
    table = kwargs.get("position_embeddings")
    if table is None:
        return None
    return int(table[0].shape[-2])


def _follows(model: nn.Module, before: str, name: str) -> bool:
    """Whether `name` takes what `before` returns, unchanged: transformers' pipeline plan of the class says so."""
    stack, _, _ = before.rpartition(".")
    parent_name, _, stack_name = stack.rpartition(".")
    if not stack:
        return False
    pipeline = list(attribute_at(model.get_submodule(parent_name), "config.base_model_pp_plan", {}))
    if stack_name not in pipeline:
        return False
    is_of_same_stack = name.rpartition(".")[0] == stack
    behind = pipeline[pipeline.index(stack_name) + 1 :]
    return is_of_same_stack or behind[:1] == [name.removeprefix(f"{parent_name}.")]


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
    problems = []
    for name in plan.names(Style.COLUMN):
        if name in split:
            problems.append(Problem("is split right inside its block, which cannot gather tokens for it", key=name))
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if not _has_own_parameters(module) or is_split(name, plan):
                continue
            if is_inside(name, split):
                problems.append(Problem("takes all tokens, among split layers: it cannot stay whole", key=name))
            elif not is_inside(name, plan.sequence):
                problems.append(Problem("runs on a slice of the sequence too", key=name, way_out="Name it as well."))
    if problems:
        raise ConfigError(f"{SEQUENCE_KEY} does not fit the model's blocks", problems=problems)
