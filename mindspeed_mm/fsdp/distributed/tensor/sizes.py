"""Which tensor-parallel sizes a model allows, by its layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from math import gcd

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.tensor.plan import CUT_DIMS, Style, TensorPlan, head_width
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, weight_of

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
