"""Which tensor-parallel sizes a model allows: by its configuration alone, and by its layers once it is built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.distributed.tensor.plan import CUT_DIMS, Style, TensorPlan

KEY = "parallel.tensor_parallel_size"

_CUT = {
    "num_attention_heads": "attention heads",
    "num_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "hidden_size": "hidden features",
    "intermediate_size": "intermediate features",
    "ffn_dim": "intermediate features",
    "vocab_size": "tokens in the vocabulary",
}
"""Settings that a plan cuts."""
_PARTS = ("text_config", "thinker_config")
"""Where the decoder's settings may stand. What a plan cuts of towers is known when the model is built."""

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "heads")
"""Attributes of attention modules that some reshape by; the others leave the number of heads to be found."""


def tensor_parallel_problems(config: Mapping[str, Any], size: int) -> list[Problem]:
    """What in a model's configuration a tensor-parallel size does not divide. Pure.

    Args:
        config: `config.json` as a dict, or `PreTrainedConfig.to_dict()`; parts such as `text_config` are looked into.
        size: `parallel.tensor_parallel_size`.

    Returns:
        One problem a setting, with both numbers and the nearest sizes that divide everything.
    """
    counts = dict(_counts(config))
    if not counts:
        return []
    fitting = nearest_divisors(gcd(*counts.values()), size)
    way_out = f"Nearest sizes that divide all that is split: {', '.join(map(str, fitting))}."
    what = {name: f"{count} {_CUT[name.rpartition('.')[2]]} ({name})" for name, count in counts.items() if count % size}
    return [Problem(f"{size} does not divide the {text}", key=KEY, way_out=way_out) for text in what.values()]


def check_tensor_parallel_size(config: Mapping[str, Any], size: int) -> None:
    """Raise `ConfigError` with all of `tensor_parallel_problems`."""
    problems = tensor_parallel_problems(config, size)
    if problems:
        raise ConfigError(f"the model cannot be split over {size} ranks", problems=problems)


def nearest_divisors(number: int, wanted: int, most: int = 3) -> list[int]:
    """Up to `most` divisors of a number, those nearest to `wanted`, in rising order."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:most])


def _counts(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if name in _CUT and isinstance(value, int) and not isinstance(value, bool):
            yield f"{prefix}{name}", value
        elif name in _PARTS and isinstance(value, Mapping):
            yield from _counts(value, f"{prefix}{name}.")


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
