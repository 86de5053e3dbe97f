"""Which tensor-parallel sizes a model allows, by its layers, and its tensor plan with everything that speaks against
it. Pure: nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import gcd

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import UNIFIED
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.tensor.plan import (
    CUT_DIMS,
    SplitRule,
    Style,
    TensorPlan,
    head_width,
    resolve_tensor_plan,
)
from mindspeed_mm.fsdp.distributed.tensor.sequence import sequence_regions
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.parallel_args import TpPlan
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, base_layer_of, weight_of

KEY = "parallel.tensor_parallel_size"

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "heads")
"""Attributes of attention modules that some reshape by; the others leave the number of heads to be found."""

_SHOWN = 4
"""Numbers, and modules of each, that a message names."""
_NEAREST = 3


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Up to three divisors of a number, those nearest to `wanted`, in rising order."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:_NEAREST])


def check_split_sizes(model: nn.Module, plan: TensorPlan, size: int) -> None:
    """Raise `ConfigError` where the ranks do not divide layers and heads of a built model. One size is wrong, so one
    problem names all that it does not divide, and the sizes that fit everything."""
    places: dict[tuple[int, str], list[str]] = {}
    for name, count, what in _split_counts(model, plan):
        places.setdefault((count, what), []).append(name)
    failing = []
    for count, what in sorted(places):
        if count % size:
            failing.append(f"the {count} {what} of {_some_of_each_kind(places[count, what])}")
    if failing:
        raise ConfigError(
            f"{size} does not divide {_first_in_words(failing)}",
            key=KEY,
            way_out=_sizes_that_fit(places, set(plan.names(Style.HEAD, Style.EMBEDDING)), size),
        )


def _sizes_that_fit(places: Mapping[tuple[int, str], Sequence[str]], vocabulary: Set[str], size: int) -> str:
    """The sizes that fit everything; where a vocabulary alone stands in the way of others, those too: it may be left
    whole, as no layer behind it needs a part."""
    most = gcd(*(count for count, _ in places))
    for_all = f"Sizes that fit the whole model: {_divisors_in_words(most, size)}."
    others = gcd(*(count for (count, _), names in places.items() if not vocabulary & set(names)))
    if others <= most:
        return for_all
    return (
        f"{for_all} With {_some_of_each_kind(sorted(vocabulary))} whole on every rank, "
        f"{_divisors_in_words(others, size)}: name the other layers in parallel.tp_plan (colwise_parallel, "
        "rowwise_parallel)."
    )


def _divisors_in_words(number: int, wanted: int) -> str:
    return ", ".join(map(str, nearest_divisors(number, wanted)))


def _first_in_words(items: Sequence[str]) -> str:
    """`a, b, c, d and 3 more`."""
    shown = list(items[:_SHOWN])
    if len(items) > _SHOWN:
        shown.append(f"{len(items) - _SHOWN} more")
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _some_of_each_kind(names: Sequence[str]) -> str:
    """The first of the modules that differ by more than numbers, a few of them."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "*", name), name)
    return _first_in_words(list(kinds.values()))


def _split_counts(model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, int, str]]:
    """(module, how many, of what) for everything that is cut. Whole heads are cut: a layer with heads is counted by
    them, not by features, and an attention whose layers were counted is not counted again by the same number."""
    counted: set[tuple[str, int]] = set()
    for name, rule in plan.rules.items():
        if rule.style in CUT_DIMS:
            module, parent = model.get_submodule(name), name.rpartition(".")[0]
            width = weight_of(module).shape[CUT_DIMS[rule.style]]
            of_head = head_width(model.get_submodule(parent))
            if rule.style is Style.COLUMN and not rule.blocks and of_head is not None:
                counted.add((parent, width // of_head))
                yield name, width // of_head, "heads"
            else:
                unit = width // (sum(rule.blocks) or 1)
                yield name, unit * (gcd(*rule.blocks) or 1), "features"
    for name in dict.fromkeys(name.rpartition(".")[0] for name in plan.names(Style.COLUMN)):
        for attribute in HEAD_COUNTS:
            count = attribute_at(model.get_submodule(name), attribute)
            if isinstance(count, int) and not isinstance(count, bool) and (name, count) not in counted:
                yield name, count, attribute


def resolve_tensor_parallel(model: nn.Module, tp_plan: TpPlan, size: int, *, whole: Collection[str] = ()) -> TensorPlan:
    """How a model is split over the ranks of the axis `tp`.

    Args:
        model: Whole, with adapters, parameters on meta or real, ties live.
        tp_plan: The section `parallel.tp_plan`.
        size: Ranks of the axis.
        whole: Names of modules that are not split, whatever the plan says.

    Raises:
        ConfigError: The plan does not fit the model, or the number of ranks does not divide what is split.
    """
    if facts_of(model).kind is UNIFIED:
        raise ConfigError(
            f"{size}, but tensor parallelism is not built for models that answer and draw",
            key="parallel.tensor_parallel_size",
            way_out="Set it to 1: FSDP2 shards these models.",
        )
    plan = resolve_tensor_plan(model, tp_plan).without(whole)
    check_split_sizes(model, plan, size)
    stretches = sequence_regions(model, plan)
    cuts: dict[str, SplitRule] = {}
    for name, rule in plan.rules.items():
        in_sequence = any(is_inside(name, stretch.modules) for stretch in stretches)
        cuts |= _with_adapters(model, name, rule, in_sequence)
    return replace(plan, cuts=cuts)


def _with_adapters(model: nn.Module, name: str, rule: SplitRule, in_sequence: bool) -> dict[str, SplitRule]:
    """The rules of a module and of the low-rank adapters on it: (x A) B is cut where x W is.

    The half that stays whole works, under sequence parallelism, on what only this rank makes of it.

    Raises:
        ConfigError: The layer is fused of several, which an adapter cuts differently.
    """
    module = model.get_submodule(name)
    if base_layer_of(module) is module:
        return {name: rule}
    if rule.blocks or rule.style is Style.EMBEDDING:
        raise ConfigError(
            f"tensor parallelism cannot cut the adapter on {name}",
            key="training.lora.target_modules",
            way_out="Leave this module out of the adapters, or of parallel.tp_plan.",
        )
    # A reads what W reads, B writes what W writes: rows are cut in A, columns in B.
    cut_half, whole_half = ("lora_A", "lora_B") if rule.style is Style.ROW else ("lora_B", "lora_A")
    rules = {f"{name}.base_layer": rule}
    for adapter in attribute_at(module, cut_half):
        rules[f"{name}.{cut_half}.{adapter}"] = rule
        if in_sequence:
            rules[f"{name}.{whole_half}.{adapter}"] = SplitRule(Style.OWN_PART)
    return rules
