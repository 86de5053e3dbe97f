"""transformers' own weight conversions (renamed modules, fused experts …) as steps over lazy tensors.

The rules are transformers'; what is ours is that they read nothing until a rank asks for its shard. Conversions that
are not plain rearrangement run transformers' code on whole tensors, one group at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from mindspeed_mm.checkpoint.expert_order import in_order_of_module, oriented
from mindspeed_mm.checkpoint.keymap import RuleMatch, natural_order
from mindspeed_mm.checkpoint.lazy_tensor import (
    Computed,
    Concatenated,
    LazyTensor,
    Reordered,
    Selected,
    Sliced,
    Stacked,
    Transposed,
)
from mindspeed_mm.core.errors import ModelFolderError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Columns = dict[str, list[LazyTensor]]
"""transformers' pattern → the tensors that it collected."""
_STORED_NAMES: WeakKeyDictionary[torch.nn.Module, dict[str, str]] = WeakKeyDictionary()
"""A model that was loaded → name after transformers' renamings → key in the folder that it came from."""


@dataclass
class Group:
    """The tensors that one application of a converter takes, by the pattern that each of them matched."""

    converter: Any
    first_target: str
    keys: dict[str, list[str]] = field(default_factory=dict)

    def columns(self, tensors: Mapping[str, LazyTensor]) -> Columns:
        """The tensors instead of their keys."""
        return {pattern: [tensors[key] for key in keys] for pattern, keys in self.keys.items()}


def conversion_rules(model: PreTrainedModel, *, legacy: bool = True) -> list[Any]:
    """transformers' rules for this model's classes, and those for very old folders. Ask before sharding: it changes the
    classes' names."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # heavy

    return get_model_conversion_mapping(model, add_legacy=legacy)


def loading_steps(
    model: PreTrainedModel, tensors: Mapping[str, LazyTensor], wanted: Collection[str], rules: Sequence[Any]
) -> list[RuleMatch]:
    """How a stored folder's tensors become those of the model.

    Args:
        model: The model, on any device, sharded or not.
        tensors: What is stored, by key.
        wanted: The keys of the model's parameters and persistent buffers.
        rules: `conversion_rules(model)`. Those that took effect are noted on the model for the way back, and so is
            what each stored key is called once it is renamed: rules turned round may rename more than they did.

    Returns:
        Steps that use every stored key once. Keys that the model has no place for come out under their new names.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # heavy

    rules = copy.deepcopy(list(rules))  # they note which of them were used
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = dict.fromkeys(wanted, True)

    def rename(key: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if target not in known and key in known:  # named as in the model already
            return rename_source_key(key, [], [], model.base_model_prefix, known)
        return target, pattern

    def renamed(key: str) -> str:
        target, pattern = rename(key)
        if pattern is None:
            return target
        name, prefix = rename_source_key(key, renamings, [])[0], f"{model.base_model_prefix}."
        return name if target.startswith(prefix) else name.removeprefix(prefix)

    steps = _steps(model, tensors, rename, converters)
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    _STORED_NAMES[model] = {renamed(key): key for key in tensors}
    return steps


def saving_steps(model: PreTrainedModel, tensors: Mapping[str, LazyTensor], rules: Sequence[Any]) -> list[RuleMatch]:
    """How the model's tensors become those of a folder in the layout of the hub: the way back of `loading_steps`.

    A model that was loaded goes back the way it came; one made from scratch takes `conversion_rules(model)`.
    """
    from transformers.core_model_loading import (  # heavy
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    used = getattr(model, "_weight_conversions", None)
    if used is None:
        # Whether a prefix once stood in front of the keys is known only of a model that was loaded.
        used = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    reverse = [rule.reverse_transform() for rule in used[::-1]]
    renamings = [rule for rule in reverse if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]

    stored_names = _STORED_NAMES.get(model, {})

    def stored_name(key: str) -> str:
        return stored_names.get(key) or rename_source_key(key, renamings, [])[0]

    steps = _steps(model, tensors, lambda key: rename_source_key(key, [], converters), converters)
    return [
        RuleMatch(step.sources, {stored_name(key): tensor for key, tensor in step.targets.items()}) for step in steps
    ]


def go_back_as(outline: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let `saving_steps` of an outline be those of the model that was loaded."""
    outline._weight_conversions = getattr(model, "_weight_conversions", None)
    _STORED_NAMES[outline] = _STORED_NAMES.get(model, {})


def _steps(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    rename: Callable[[str], tuple[str, str | None]],
    converters: Sequence[Any],
) -> list[RuleMatch]:
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, Group] = {}
    steps: list[RuleMatch] = []
    for key in sorted(tensors, key=natural_order):
        target, pattern = rename(key)
        if pattern is None:
            steps.append(RuleMatch((key,), {target: tensors[key]}))
        else:
            group = groups.setdefault(target, Group(by_pattern[pattern], target))
            group.keys.setdefault(pattern, []).append(key)
    return steps + [_convert(model, group, tensors) for group in groups.values()]


def _convert(model: PreTrainedModel, group: Group, tensors: Mapping[str, LazyTensor]) -> RuleMatch:
    sources = tuple(key for keys in group.keys.values() for key in keys)
    columns = group.columns(tensors)
    try:
        for op in group.converter.operations:
            translate = _TRANSLATIONS.get(type(op).__name__)
            if translate is None:
                return RuleMatch(sources, _computed(model, group, tensors))
            columns = translate(op, columns, group, model)
    except (ValueError, IndexError) as error:
        raise ModelFolderError(
            f"{error}, in {group.converter}",
            key=sources[0],
            way_out=getattr(error, "way_out", "Compare the folder with the original model's."),
        ) from error
    return RuleMatch(sources, _full_names(group, {pattern: column[0] for pattern, column in columns.items()}))


def _full_names(group: Group, made: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Patterns are the middle of a key: what stands around the first target stands around all."""
    full_name = group.first_target.replace("*.", "0.")
    around = next((full_name.partition(pattern) for pattern in made if pattern in full_name), ("", "", ""))
    return {f"{around[0]}{pattern}{around[2]}": tensor for pattern, tensor in made.items()}


# Translations of transformers' operations. Each keeps the naming of its counterpart: an operation that is the only one
# or ends the chain names its results by the target patterns, one before it by the source patterns.


def _one(columns: Columns) -> LazyTensor:
    if len(columns) != 1:
        raise ValueError(f"{len(columns)} inputs for an operation on one")
    (column,) = columns.values()
    return column[0]


def _merge(op: Any, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    single = len(columns) == 1
    targets = group.converter.target_patterns
    return {targets[0] if single else pattern: [Stacked(column, op.dim)] for pattern, column in columns.items()}


def _unmerge(op: Any, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    single = len(columns) == 1
    made: Columns = {}
    for pattern, (base, *_) in columns.items():
        name = group.converter.target_patterns[0] if single else pattern
        for i in range(base.shape[op.dim]):
            made[name.replace("*", str(i))] = [Selected(base, op.dim, i)]
    return made


def _concatenate(op: Any, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    ordered = [tensor for pattern in group.converter.source_patterns for tensor in columns.get(pattern, [])]
    return {group.converter.target_patterns[0]: [Concatenated(ordered, op.dim)]}


def _chunk(op: Any, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    base = _one(columns)
    targets = op.get_target_patterns(group.converter.target_patterns, config=model.config)
    length = -(-base.shape[op.dim] // len(targets))  # as torch.chunk: rounded up, the last one shorter
    starts = range(0, base.shape[op.dim], length)
    sizes = [min(length, base.shape[op.dim] - start) for start in starts]
    return {
        target: [Sliced(base, op.dim, start, size)] for target, start, size in zip(targets, starts, sizes, strict=True)
    }


def _split(op: Any, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    base, targets = _one(columns), group.converter.target_patterns
    names = [group.first_target.replace(targets[0], target) for target in targets]
    sizes = [_shape(model, name)[op.dim] for name in names]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return {
        target: [Sliced(base, op.dim, start, size)] for target, start, size in zip(targets, starts, sizes, strict=True)
    }


def _shape(model: PreTrainedModel, name: str) -> tuple[int, ...]:
    """Of a parameter, through the levels that adapters put between a module and what it was."""
    *path, last = name.split(".")
    module: Any = model
    for part in path:
        module = getattr(module, part)
        while last not in module._parameters and hasattr(module, "base_layer"):
            module = module.base_layer
    return tuple(module.get_parameter(last).shape)


def _transpose(op: Any, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    base, targets = _one(columns), group.converter.target_patterns
    name = targets[0] if len(targets) == 1 else group.converter.source_patterns[0]
    swapped = Transposed(base, op.dim0, op.dim1)
    if not op.check_dims:
        return {name: [swapped]}
    as_module = in_order_of_module(getattr(model.config, "transformers_version", None))
    made = oriented(base, swapped, _shape(model, group.first_target), as_module)
    # The rule says from now on what was done, for the rest of this folder and for the way back: turned round by its own
    # shape, a model's tensor would be left as it is, whatever way round the folder that it came from holds it.
    op.check_dims = False
    if made is base:
        op.dim1 = op.dim0
    return {name: [made]}


def _interleave(op: Any, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    base = _one(columns)
    half = base.shape[op.dim] // 2
    order = torch.arange(2 * half).view((2, half) if op.inverse else (half, 2)).T.reshape(-1)
    return {group.converter.target_patterns[0]: [Reordered(base, op.dim, order)]}


_TRANSLATIONS: dict[str, Callable[[Any, Columns, Group, PreTrainedModel], Columns]] = {
    "MergeModulelist": _merge,
    "SplitModulelist": _unmerge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
}


def _computed(model: PreTrainedModel, group: Group, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """transformers' own operations on whole tensors; shapes are found by running them on meta tensors first."""
    columns = group.columns(tensors)
    parts = [tensor for column in columns.values() for tensor in column]

    def run(read: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        remaining = iter(read)
        converter = copy.deepcopy(group.converter)
        for pattern, column in columns.items():
            converter.collected_tensors[pattern] = [next(remaining) for _ in column]
        made = converter.convert(group.first_target, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    def pick(key: str) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        return lambda read: run(read)[key]

    outlines = run([torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts])
    return {key: Computed(parts, pick(key), outline.shape, outline.dtype) for key, outline in outlines.items()}
