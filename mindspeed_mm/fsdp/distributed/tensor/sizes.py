"""Which tensor-parallel sizes a model allows, by its layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import gcd

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.distributed.tensor.plan import CUT_DIMS, Style, TensorPlan

KEY = "parallel.tensor_parallel_size"

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "heads")
"""Attributes of attention modules that some reshape by; the others leave the number of heads to be found."""


def nearest_divisors(number: int, wanted: int, most: int = 3) -> list[int]:
    """Up to `most` divisors of a number, those nearest to `wanted`, in rising order."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:most])


def check_split_sizes(model: nn.Module, plan: TensorPlan, size: int) -> None:
    """Raise `ConfigError` for layers and heads of a built model that the ranks do not divide, one problem for each kind
    of layer."""
    found: dict[str, Problem] = {}
    for name, count, what in _split_counts(model, plan):
        if count % size:
            fitting = ", ".join(map(str, nearest_divisors(count, size)))
            problem = Problem(
                f"{size} does not divide the {count} {what} of {name}", key=KEY, way_out=f"Nearest that do: {fitting}."
            )
            found.setdefault(re.sub(r"\d+", "*", f"{name} {what}"), problem)
    if found:
        raise ConfigError(f"the model cannot be split over {size} ranks", problems=list(found.values()))


def _split_counts(model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, int, str]]:
    """(module, how many, of what) for everything that is cut."""
    for name, rule in plan.rules.items():
        if rule.style in CUT_DIMS:
            module = model.get_submodule(name)
            width = getattr(module, "base_layer", module).weight.shape[CUT_DIMS[rule.style]]
            unit = width // (sum(rule.blocks) or 1)
            yield name, unit * (gcd(*rule.blocks) or 1), "features"
            head_width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            if rule.style is Style.COLUMN and not rule.blocks and isinstance(head_width, int):
                yield name, width // head_width, "heads"
    for name in dict.fromkeys(name.rpartition(".")[0] for name in plan.names(Style.COLUMN)):
        for attribute in HEAD_COUNTS:
            count = getattr(model.get_submodule(name), attribute, None)
            if isinstance(count, int) and not isinstance(count, bool):
                yield name, count, attribute
