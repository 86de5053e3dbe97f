"""Runs modules on a few rows of the micro-batch at a time, inside one call.

Sharding gathers a module's parameters once around the call, however many slices it makes; what the module holds while
it computes is that of one slice. Outputs are put together again. Random numbers are drawn slice by slice: with dropout
they are others than for all rows at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.memory.recompute import without_caches
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Forward, ForwardKind, Kwargs, replace_forward
from mindspeed_mm.fsdp.params.feature_args import ChunkMbsPlan

PLACES = "features.chunkmbs_plan.chunk_arg_indexs"
NAMES = "features.chunkmbs_plan.chunk_kwarg_names"
MODULES = "features.chunkmbs_plan.apply_modules"
Value = TypeVar("Value")
Key = int | str
"""An argument: its place, or its name."""
_BORDERS = ("cu_seq_lens_q", "cu_seqlens")
"""Arguments that say that what looks like rows are pieces of one."""


def run_in_slices(model: nn.Module, names: Iterable[str], plan: ChunkMbsPlan) -> None:
    """Slice what these modules are called with; call it before sharding, after recomputation and offloading.

    Args:
        model: Parameters on meta or real.
        names: Modules.
        plan: Rows of a slice, and which arguments have rows.
    """
    for name in names:
        module = model.get_submodule(name)
        replace_forward(module, ForwardKind.SLICES, SlicedForward(module, name, plan))


def check_slices(model: nn.Module, names: Iterable[str], plan: ChunkMbsPlan) -> None:
    """Raise `ConfigError` for arguments that a module does not take."""
    for name in names:
        parameters = inspect.signature(type(model.get_submodule(name)).forward).parameters
        kinds = set()
        by_place = []
        for parameter in list(parameters.values())[1:]:  # the first is the module itself
            kinds.add(parameter.kind)
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                by_place.append(parameter.name)
        missing = [place for place in plan.chunk_arg_indexs if not 0 <= place < len(by_place)]
        if missing and inspect.Parameter.VAR_POSITIONAL not in kinds:
            numbered = [f"{place} {argument}" for place, argument in enumerate(by_place)]
            raise ConfigError(
                f"{missing[0]} is not an argument of '{name}', which takes {len(by_place)}",
                key=PLACES,
                way_out=f"They are counted from 0: {', '.join(numbered)}.",
            )
        unknown = [given for given in plan.chunk_kwarg_names if given not in parameters]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ConfigError(
                f"'{unknown[0]}' is not an argument of '{name}'",
                key=NAMES,
                way_out=f"It takes {', '.join(by_place)}.",
            )


class SlicedForward:
    """A module's `forward`, a few rows at a time.

    Args:
        module: Its own forward is called once a slice.
        name: Of the module, for errors.
        plan: See `run_in_slices`.
    """

    def __init__(self, module: nn.Module, name: str, plan: ChunkMbsPlan) -> None:
        self._forward: Forward = module.forward
        self._name = name
        self._plan = plan
        self._places, self._names = frozenset(plan.chunk_arg_indexs), frozenset(plan.chunk_kwarg_names)
        """As sets: dynamo, which traces this where blocks are compiled, takes numbers in lists for variables when sizes
        are, and then finds no place among them."""
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        self._by_name = {parameters[place] for place in plan.chunk_arg_indexs if place < len(parameters)}
        """Arguments given by place, should the caller give them by name."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Outputs of the module for all rows.

        Raises:
            ConfigError: An argument has as many rows but is not named, or is named and has not; the rows are pieces of
                packed ones; an output has no rows.
        """
        if not torch.is_grad_enabled():  # nothing is kept; and at its end, a validation set has ranks with fewer rows
            return self._forward(*args, **kwargs)
        rows = self._rows(args, kwargs)
        size = self._plan.chunk_mbs
        if rows <= size:
            return self._forward(*args, **kwargs)
        self._check_borders(kwargs)
        kwargs = without_caches(kwargs)
        # All are cut before the first one runs: a mistake in the plan shows before anything is computed.
        slices = list(self._slices(args, kwargs, rows))
        leaves_of_slices = []
        for own_args, own_kwargs in slices:
            leaves, structure = tree_flatten(self._forward(*own_args, **own_kwargs))
            leaves_of_slices.append(leaves)
        lengths = [min(size, rows - start) for start in range(0, rows, size)]
        joined = [self._join(parts, lengths) for parts in zip(*leaves_of_slices, strict=True)]
        return tree_unflatten(joined, structure)

    def _rows(self, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
        for value in self._sliced(args, kwargs).values():
            for rows in self._row_counts(value):
                return rows
        raise ConfigError(
            f"none of the arguments that '{self._name}' is called with is to be sliced",
            key=f"{PLACES} · {NAMES}",
            way_out=f"It gets {len(args)} by place and {', '.join(kwargs) or 'none'} by name: name those with rows.",
        )

    def _sliced(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[Key, object]:
        """What is to be sliced."""
        sliced: dict[Key, object] = {}
        for place, value in enumerate(args):
            if place in self._places:
                sliced[place] = value
        for name, value in kwargs.items():
            if name in self._names or name in self._by_name:
                sliced[name] = value
        return sliced

    def _slices(self, args: Args, kwargs: Kwargs, rows: int) -> Iterator[CallArguments]:
        """Yield the arguments of each slice. Raises `ConfigError` where numbers of rows contradict the plan."""
        sliced = self._sliced(args, kwargs)
        given: list[tuple[Key, object]] = [*enumerate(args), *kwargs.items()]
        for key, value in given:
            if key in sliced:
                self._check_rows(key, value, rows)
            else:
                self._check_rowless(key, value, rows)
        for start in range(0, rows, self._plan.chunk_mbs):
            own_args, own_kwargs = list(args), dict(kwargs)
            for key, value in sliced.items():
                if isinstance(key, int):
                    own_args[key] = self._cut(value, start)
                else:
                    own_kwargs[key] = self._cut(value, start)
            yield tuple(own_args), own_kwargs

    def _cut(self, value: Value, start: int) -> Value:
        dim, size = self._plan.batch_dim, self._plan.chunk_mbs

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() <= dim or tensor.shape[dim] == 1:
                return tensor
            return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))

        cut_value: Value = tree_map_only(torch.Tensor, cut, value)
        return cut_value

    def _join(self, parts: Sequence[object], lengths: Sequence[int]) -> object:
        first, dim = parts[0], self._plan.batch_dim
        if not isinstance(first, torch.Tensor):
            return first
        if list(chain.from_iterable(map(self._row_counts, parts))) != list(lengths):
            raise ConfigError(
                f"'{self._name}' returns a tensor of shape {tuple(first.shape)}, which has no rows along "
                f"{dim} (features.chunkmbs_plan.batch_dim) to be put together by",
                key=MODULES,
                way_out="Name other modules.",
            )
        return torch.cat(list(parts), dim)

    # --- what would be wrong and not be seen --------------------------------------------------------------------------

    def _check_borders(self, kwargs: Mapping[str, object]) -> None:
        for name in _BORDERS:
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"'{self._name}' gets document borders ({name}): what looks like rows are parts that belong "
                    "together",
                    key=MODULES,
                    way_out="Name modules that get whole rows, or set features.enable_chunk_mbs to false.",
                )

    def _check_rows(self, key: Key, value: object, rows: int) -> None:
        """Raise for a tensor that is to be sliced and has another number of rows; one row goes to every slice."""
        for shape in self._shapes(value):
            if shape[self._plan.batch_dim] not in (1, rows):
                raise ConfigError(
                    f"{_argument_words(key)} of '{self._name}' has the shape {shape}, but there are {rows} rows",
                    key=_where(key),
                    way_out="Take it out, or set features.chunkmbs_plan.batch_dim to the dimension of the rows.",
                )

    def _check_rowless(self, key: Key, value: object, rows: int) -> None:
        """Raise for a tensor that is not to be sliced and has as many rows: every slice would get all of them."""
        for shape in self._shapes(value):
            if shape[self._plan.batch_dim] == rows:
                raise ConfigError(
                    f"{_argument_words(key)} of '{self._name}' has the shape {shape}, {rows} rows, and is not among "
                    "those that are sliced",
                    key=_where(key),
                    way_out=f"Add {key!r} to it.",
                )

    def _shapes(self, value: object) -> Iterator[tuple[int, ...]]:
        """Of the tensors in an argument or output that have the dimension of rows."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() > self._plan.batch_dim:
                yield tuple(leaf.shape)

    def _row_counts(self, value: object) -> Iterator[int]:
        for shape in self._shapes(value):
            yield shape[self._plan.batch_dim]


def _where(key: Key) -> str:
    """The setting that lists arguments of this kind."""
    if isinstance(key, str):
        return NAMES
    return PLACES


def _argument_words(key: Key) -> str:
    if isinstance(key, str):
        return f"argument '{key}'"
    return f"argument {key}"
