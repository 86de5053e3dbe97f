"""transformers' own weight conversions (renamed modules, fused experts …) as steps over lazy tensors.

The rules are transformers'; what is ours is that they read nothing until a rank asks for its shard. Conversions that
are not plain rearrangement run transformers' code on whole tensors, one group at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from mindspeed_mm.checkpoint.key_ops import UnknownOrder, in_order_of_module, oriented
from mindspeed_mm.checkpoint.keymap import RuleMatch, natural_order
from mindspeed_mm.checkpoint.lazy_tensor import (
    Computed,
    Concatenated,
    LazyTensor,
    Reordered,
    Selected,
    Stacked,
    Transposed,
    consecutive,
)
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform

Operation: TypeAlias = Any
"""One of transformers' `ConversionOps`; which attributes it has depends on its class, see `_TRANSLATIONS`."""
Columns = dict[str, list[LazyTensor]]
"""transformers' pattern → the tensors that it collected."""
_STORED_NAMES: WeakKeyDictionary[torch.nn.Module, dict[str, str]] = WeakKeyDictionary()
"""A model that was loaded → name after transformers' renamings → key in the folder that it came from."""

_LENGTHS: WeakKeyDictionary[Operation, dict[int, list[int]]] = WeakKeyDictionary()
"""A concatenation that was done → length of its result → those of its parts; the same of the cut that undoes it."""


@dataclass
class Group:
    """The tensors that one application of a converter takes, by the pattern that each of them matched."""

    converter: WeightConverter
    first_target: str
    keys: dict[str, list[str]] = field(default_factory=dict)

    def columns(self, tensors: Mapping[str, LazyTensor]) -> Columns:
        """The tensors instead of their keys."""
        columns: Columns = {}
        for pattern, keys in self.keys.items():
            columns[pattern] = [tensors[key] for key in keys]
        return columns


def conversion_rules(model: PreTrainedModel, *, legacy: bool = True) -> list[WeightTransform]:
    """transformers' rules for this model's classes, and those for very old folders. Ask before sharding: it changes the
    classes' names."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # heavy

    inherit_rules(type(model))
    return get_model_conversion_mapping(model, add_legacy=legacy)


def inherit_rules(model_class: type[Any]) -> None:
    """Let a class that derives from a model of transformers be stored as that model is.

    transformers gives its rules to its own classes only, and to what is registered with them
    (`get_model_conversion_mapping` of 5.17 to 5.23): a plugin's class would not find the weights of a released folder
    whose keys are those of an older module tree. The parent's rules are registered for the class, or for its model
    type, wherever transformers keeps them for the parent. What is registered already stays.

    Args:
        model_class: A class of models; one of transformers, or of another origin, is left alone.
    """
    from torch import nn
    from transformers import PreTrainedModel, conversion_mapping  # heavy

    if not issubclass(model_class, PreTrainedModel) or _is_of_transformers(model_class):
        return
    parent: Any = next(filter(_is_of_transformers, model_class.__mro__), PreTrainedModel)
    own_type, parents_type = (attribute_at(each, "config_class.model_type", "") for each in (model_class, parent))
    is_base = parent.forward is nn.Module.forward  # its children share no module tree
    if is_base or {model_class.__name__, own_type} & conversion_mapping.USER_REGISTERED_MAPPINGS:
        return
    if rules := conversion_mapping.get_checkpoint_conversion_mapping(parent.__name__):
        conversion_mapping.register_checkpoint_conversion_mapping(model_class.__name__, rules, overwrite=True)
    elif rules := conversion_mapping.get_checkpoint_conversion_mapping(parents_type):
        for name in {own_type, parents_type}:  # a folder's config.json may have either
            conversion_mapping.register_checkpoint_conversion_mapping(name, rules, overwrite=True)


def _is_of_transformers(model_class: type) -> bool:
    return model_class.__module__.startswith("transformers.")


def loading_steps(
    model: PreTrainedModel, tensors: Mapping[str, LazyTensor], wanted: Collection[str], rules: Sequence[WeightTransform]
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
    from transformers.core_model_loading import rename_source_key  # heavy

    rules = copy.deepcopy(list(rules))  # they note which of them were used
    renamings, converters = _by_kind(rules)
    known = dict.fromkeys(wanted, True)

    def rename(key: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if target not in known and key in known:  # named as in the model already
            # Rules for older folders would give it another name all the same.
            return rename_source_key(key, [], [], model.base_model_prefix, known)
        return target, pattern

    def renamed(key: str) -> str:
        target, pattern = rename(key)
        if pattern is None:
            return target
        name, _ = rename_source_key(key, renamings, [])
        prefix = f"{model.base_model_prefix}."
        if target.startswith(prefix):
            return name
        return name.removeprefix(prefix)

    steps = _rule_steps(model, tensors, rename, converters)
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    # Weak keys: this goes when the model does.
    _STORED_NAMES[model] = {renamed(key): key for key in tensors}
    return steps


def _by_kind(rules: Sequence[WeightTransform]) -> tuple[list[WeightTransform], list[WeightConverter]]:
    """The rules that only rename, and those that change tensors."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming  # heavy

    renamings: list[WeightTransform] = []
    converters: list[WeightConverter] = []
    for rule in rules:
        if isinstance(rule, WeightRenaming):
            renamings.append(rule)
        elif isinstance(rule, WeightConverter):
            converters.append(rule)
    return renamings, converters


def saving_steps(
    model: PreTrainedModel, tensors: Mapping[str, LazyTensor], rules: Sequence[WeightTransform]
) -> list[RuleMatch]:
    """How the model's tensors become those of a folder in the layout of the hub: the way back of `loading_steps`.

    A model that was loaded goes back the way it came; one made from scratch takes `conversion_rules(model)`.
    """
    from transformers.core_model_loading import PrefixChange, rename_source_key  # heavy

    used = _used_rules(model)
    if used is None:
        # Whether a prefix once stood in front of the keys is known only of a model that was loaded.
        used = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    # What was done last is undone first.
    renamings, converters = _by_kind([_turned_round(rule) for rule in reversed(used)])
    stored_names = _STORED_NAMES.get(model, {})

    def stored_name(key: str) -> str:
        return stored_names.get(key) or rename_source_key(key, renamings, [])[0]

    steps = _rule_steps(model, tensors, lambda key: rename_source_key(key, [], converters), converters)
    return [step.with_targets(stored_name) for step in steps]


def _turned_round(rule: WeightTransform) -> WeightTransform:
    """A rule for the way back, which cuts where the folder that was read did, as Molmo2's words and added words do:
    transformers cuts into equal parts."""
    back = rule.reverse_transform()
    for op, undoing in zip(_operations(rule), reversed(_operations(back)), strict=True):
        if op in _LENGTHS:
            _LENGTHS[undoing] = _LENGTHS[op]
    return back


def _operations(rule: WeightTransform) -> Sequence[Operation]:
    return attribute_at(rule, "operations", ())


def go_back_as(outline: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let `saving_steps` of an outline be those of the model that was loaded."""
    outline._weight_conversions = _used_rules(model)
    _STORED_NAMES[outline] = _STORED_NAMES.get(model, {})


def _used_rules(model: PreTrainedModel) -> list[WeightTransform] | None:
    """The rules that took effect when the model was loaded, as transformers keeps them; None of one that was not."""
    return getattr(model, "_weight_conversions", None)


def _rule_steps(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    rename: Callable[[str], tuple[str, str | None]],
    converters: Sequence[WeightConverter],
) -> list[RuleMatch]:
    by_pattern: dict[str, WeightConverter] = {}
    for converter in converters:
        by_pattern |= dict.fromkeys(converter.source_patterns, converter)
    groups: dict[str, Group] = {}
    steps: list[RuleMatch] = []
    for key in sorted(tensors, key=natural_order):
        target, pattern = rename(key)
        if pattern is None:
            steps.append(RuleMatch((key,), {target: tensors[key]}))
        else:
            # One group a target: transformers gives all experts of a layer the same one.
            group = groups.setdefault(target, Group(by_pattern[pattern], target))
            group.keys.setdefault(pattern, []).append(key)
    for group in groups.values():
        steps.append(_convert(model, group, tensors))
    return steps


def _convert(model: PreTrainedModel, group: Group, tensors: Mapping[str, LazyTensor]) -> RuleMatch:
    sources = tuple(chain.from_iterable(group.keys.values()))
    columns = group.columns(tensors)
    try:
        for op in group.converter.operations:
            translate = _TRANSLATIONS.get(type(op).__name__)
            if translate is None:
                # One operation without a translation: transformers' own code does all of the chain.
                return RuleMatch(sources, _computed(model, group, tensors))
            columns = translate(op, columns, group, model)
    except (ValueError, IndexError) as error:
        way_out = error.way_out if isinstance(error, UnknownOrder) else "Compare the folder with the original model's."
        counts = {pattern: len(keys) for pattern, keys in group.keys.items()}
        what = str(error)
        if len(set(counts.values())) > 1:  # the shapes of what was stacked would not name the one that is missing
            what = "there are " + " and ".join(f"{count} of {pattern}" for pattern, count in counts.items())
        raise ModelFolderError(f"{what}, in {group.converter}", key=sources[0], way_out=way_out) from error
    return RuleMatch(sources, _full_names(group, columns))


def _full_names(group: Group, made: Columns) -> dict[str, LazyTensor]:
    """Patterns are the middle of a key: what stands around the first target stands around all."""
    # Dealt out, the first result is number 0.
    full_name = group.first_target.replace("*.", "0.")
    before = behind = ""
    for pattern in made:
        if pattern in full_name:
            before, _, behind = full_name.partition(pattern)
            break
    return {f"{before}{pattern}{behind}": column[0] for pattern, column in made.items()}


# Translations of transformers' operations. Each keeps the naming of its counterpart: an operation that is the only one
# or ends the chain names its results by the target patterns, one before it by the source patterns.


def _one(columns: Columns) -> LazyTensor:
    if len(columns) != 1:
        raise ValueError(f"{len(columns)} inputs for an operation on one")
    (column,) = columns.values()
    return column[0]


def _merge(op: Operation, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    stacked: Columns = {pattern: [Stacked(column, op.dim)] for pattern, column in columns.items()}
    if len(stacked) == 1:
        return dict(zip(group.converter.target_patterns[:1], stacked.values(), strict=True))
    return stacked


def _unmerge(op: Operation, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    single = len(columns) == 1
    made: Columns = {}
    for pattern, (base, *_) in columns.items():
        name = group.converter.target_patterns[0] if single else pattern
        for i in range(base.shape[op.dim]):
            made[name.replace("*", str(i))] = [Selected(base, op.dim, i)]
    return made


def _concatenate(op: Operation, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    ordered: list[LazyTensor] = []
    for pattern in group.converter.source_patterns:
        ordered += columns.get(pattern, [])
    # One tensor a pattern: only then do the lengths belong to the patterns, in their order.
    if len(ordered) == len(group.converter.source_patterns):
        lengths = [tensor.shape[op.dim] for tensor in ordered]
        _LENGTHS.setdefault(op, {})[sum(lengths)] = lengths
    return {group.converter.target_patterns[0]: [Concatenated(ordered, op.dim)]}


def _chunk(op: Operation, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    base = _one(columns)
    targets = op.get_target_patterns(group.converter.target_patterns, config=model.config)
    total = base.shape[op.dim]
    length = -(-total // len(targets))  # as torch.chunk: rounded up, the last one shorter
    equal = [min(length, total - start) for start in range(0, total, length)]
    sizes = _LENGTHS.get(op, {}).get(total, equal)
    return _runs(base, op.dim, targets, sizes)


def _split(op: Operation, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    base, targets = _one(columns), group.converter.target_patterns
    sizes = []
    for target in targets:
        name = group.first_target.replace(targets[0], target)
        sizes.append(_shape(model, name)[op.dim])
    return _runs(base, op.dim, targets, sizes)


def _runs(base: LazyTensor, dim: int, targets: Sequence[str], sizes: Sequence[int]) -> Columns:
    """One run of the tensor for each target, one after another."""
    return {target: [run] for target, run in zip(targets, consecutive(base, dim, sizes), strict=True)}


def _shape(model: PreTrainedModel, name: str) -> tuple[int, ...]:
    """Of a parameter, through the levels that adapters put between a module and what it was."""
    *path, last = name.split(".")
    module: torch.nn.Module = model
    for part in path:
        module = module.get_submodule(part)
        # PEFT keeps the layer that it wraps as `base_layer`, perhaps at several levels.
        while last not in module._parameters and "base_layer" in module._modules:
            module = module.get_submodule("base_layer")
    return tuple(module.get_parameter(last).shape)


def _transpose(op: Operation, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    base, targets = _one(columns), group.converter.target_patterns
    name = targets[0] if len(targets) == 1 else group.converter.source_patterns[0]
    swapped = Transposed(base, op.dim0, op.dim1)
    if not op.check_dims:
        return {name: [swapped]}
    as_module = in_order_of_module(model.config.transformers_version)
    made = oriented(base, swapped, _shape(model, group.first_target), as_module)
    # The rule says from now on what was done, for the rest of this folder and for the way back: turned round by its own
    # shape, a model's tensor would be left as it is, whatever way round the folder that it came from holds it.
    op.check_dims = False
    if made is base:
        op.dim1 = op.dim0
    return {name: [made]}


def _interleave(op: Operation, columns: Columns, group: Group, model: PreTrainedModel) -> Columns:
    """Two halves by turns, a0 b0 a1 b1 …, or with `op.inverse` such an order back into two halves."""
    base = _one(columns)
    half = base.shape[op.dim] // 2
    # Written as rows and read as columns: the transpose of a table is the permutation.
    rows = (2, half) if op.inverse else (half, 2)
    order = torch.arange(2 * half).view(rows).T.reshape(-1)
    return {group.converter.target_patterns[0]: [Reordered(base, op.dim, order)]}


_TRANSLATIONS: dict[str, Callable[[Operation, Columns, Group, PreTrainedModel], Columns]] = {
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
    parts = list(chain.from_iterable(columns.values()))

    def run(read: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        remaining = iter(read)
        # It collects tensors in itself: each read takes a fresh one.
        converter = copy.deepcopy(group.converter)
        for pattern, column in columns.items():
            converter.collected_tensors[pattern] = list(islice(remaining, len(column)))
        made = converter.convert(group.first_target, model=model, config=model.config)
        for key, value in made.items():
            if isinstance(value, list):
                made[key] = value[0]
        return made

    def pick(key: str) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        return lambda read: run(read)[key]

    on_meta = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts]
    computed: dict[str, LazyTensor] = {}
    for key, outline in run(on_meta).items():
        computed[key] = Computed(parts, pick(key), outline.shape, outline.dtype)
    return computed
