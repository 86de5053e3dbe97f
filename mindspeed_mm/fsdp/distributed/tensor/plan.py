"""Which module is split how under tensor parallelism: data, read off the configuration and the model's class.

`parallel.tp_plan` wins; without it the plan that transformers or diffusers ships with the class; what neither covers
(vision towers, video generators) by the names that layers have in these libraries.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import compile_pattern, is_inside, resolve_patterns
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.ties import shared_parameters
from mindspeed_mm.fsdp.params.parallel_args import TpPlan

KEY = "parallel.tp_plan"


class Style(Enum):
    """How a module takes part."""

    COLUMN = "colwise"
    """By output features: weight and bias cut on dim 0, output this rank's features."""
    HEAD = "colwise_gather_output"
    """By output features that leave whole, or as this rank's part of the vocabulary: an output head."""
    ROW = "rowwise"
    """By input features: weight cut on dim 1, output summed over ranks."""
    EMBEDDING = "embedding_rowwise"
    """By rows."""
    WIDE_NORM = "norm_over_ranks"
    """A norm over the heads of all ranks: weight whole, each rank uses its part, the mean is taken over ranks."""
    OWN_PART = "gradient_sum"
    """Whole on every rank, used on this rank's heads or tokens: gradients are summed over ranks."""
    HEAD_NUMBERS = "numbers_of_heads"
    """An attention's own parameters, one number a head (sinks): weight whole, each rank uses its heads' part."""


CUT_DIMS = {Style.COLUMN: 0, Style.HEAD: 0, Style.EMBEDDING: 0, Style.ROW: 1}
"""The dim of the weight that a style cuts."""


@dataclass(frozen=True)
class SplitRule:
    """The part of one module."""

    style: Style
    blocks: tuple[int, ...] = ()
    """Relative sizes of what is fused in the layer. Its parameters stay whole in memory and in checkpoints; each rank
    computes with its part of every block."""


@dataclass(frozen=True)
class TensorPlan:
    """A whole model's."""

    rules: dict[str, SplitRule]
    """Module name → its part, in the order of `named_modules()`."""
    sequence: tuple[str, ...] = ()
    """Modules that run on a slice of the sequence."""
    whole: tuple[str, ...] = ()
    """What the class's plan splits and this plan does not, as it names it: experts."""

    def names(self, *styles: Style) -> list[str]:
        """Modules of these styles."""
        return [name for name, rule in self.rules.items() if rule.style in styles]

    def without(self, modules: Collection[str]) -> TensorPlan:
        """The plan of a model in which these modules, with all below them, stay whole."""

        def is_split(name: str) -> bool:
            return not is_inside(name, modules)

        rules = {name: rule for name, rule in self.rules.items() if is_split(name)}
        return TensorPlan(rules, tuple(filter(is_split, self.sequence)), (*self.whole, *sorted(modules)))

    def only(self, modules: Collection[str]) -> TensorPlan:
        """The plan of the part of a model that has just these modules."""
        own = set(modules)
        rules = {name: rule for name, rule in self.rules.items() if name in own}
        return TensorPlan(rules, tuple(name for name in self.sequence if name in own), self.whole)

    def describe(self) -> str:
        """One line for the log: `colwise 14, rowwise 4, …`."""
        counts = {style.value: len(self.names(style)) for style in Style}
        parts = [f"{style} {count}" for style, count in counts.items() if count]
        parts += [f"sequence_parallel {len(self.sequence)}"] if self.sequence else []
        return ", ".join(parts + [f"whole on every rank: {pattern}" for pattern in self.whole])


_STYLES = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "colwise_gather_output": Style.HEAD,
    "colwise_rep": Style.HEAD,
    "embedding_rowwise": Style.EMBEDDING,
    "replicated_with_grad_allreduce": Style.OWN_PART,
}
"""Names in the plans of transformers and diffusers."""

_OF_EXPERTS = {"moe_tp_experts", "grouped_gemm", "ep_dispatch_experts", "moe_identity_expert", "replicate"}
"""Styles of experts, which are spread by expert parallelism; whole on every rank they compute the same everywhere."""

_PAIRS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"),
    (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    (("mlp.linear_fc1",), "mlp.linear_fc2"),
    (("mlp.fc1",), "mlp.fc2"),
    (("linear_fc1",), "linear_fc2"),
    (("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn1.to_out.0"),
    (("attn2.to_q", "attn2.to_k", "attn2.to_v"), "attn2.to_out.0"),
    (("attn2.add_k_proj", "attn2.add_v_proj"), "attn2.to_out.0"),
    (("attn.to_q", "attn.to_k", "attn.to_v"), "attn.to_out.0"),
    (("attention.to_q", "attention.to_k", "attention.to_v"), "attention.to_out.0"),
    *(((f"{mlp}.net.0.proj",), f"{mlp}.net.2") for mlp in ("ffn", "ff", "ff_context")),
    (("feed_forward.w1", "feed_forward.w3"), "feed_forward.w2"),
    (("feed_forward.linear_1", "feed_forward.linear_3"), "feed_forward.linear_2"),
)
"""Layers of a block whose names say what is between them: whole heads, or one number a feature."""

_OF_CAPTIONS = ("add_q_proj", "add_k_proj", "add_v_proj")
"""Layers of an attention in which captions join: they are cut as its own are."""
_GATED = ("GEGLU", "SwiGLU")
"""Classes of diffusers whose `proj` makes what is gated and the gate side by side."""

_FUSED_ATTENTION = re.compile(r"self\.qkv\(\w+\)\s*\.reshape\([^()]*, 3, self\.num_heads, -1\)")
"""What an attention's own code does with its fused `qkv` when queries, keys and values stand one after the other, each
head by head. Shapes do not tell this from heads that have their three side by side, which a cut would mix."""

_QUERIES_AND_KEYS = re.compile(r"(?:q|k|query|key|to_q|to_k|add_q|add_k)(?:_proj)?")


@dataclass
class _Draft:
    rules: dict[str, SplitRule] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)


def resolve_tensor_plan(model: nn.Module, tp_plan: TpPlan) -> TensorPlan:
    """The plan for a model, built and not sharded; adapters may be in it.

    Args:
        model: Parameters on meta or real, ties live.
        tp_plan: The section. With `colwise_parallel` or `rowwise_parallel` the two say all; else the class's own plan
            counts. `sequence_parallel` is in addition to either.

    Raises:
        ConfigError: A pattern matches nothing or something else than linear layers and embeddings, a layer is cut by
            output features and none behind it by input features, the class's plan has a style that is not supported,
            or nothing is split at all.
    """
    linear = {name: module for name, module in model.named_modules() if is_linear_or_adapted(module)}
    if tp_plan.colwise_parallel or tp_plan.rowwise_parallel:
        draft = _Draft(_given(model, tp_plan, linear))
    else:
        draft = _own(model, linear)
        whole = _stated_whole(model)
        draft.whole += whole
        found = {name: rule for name, rule in _recognised(model, linear).items() if name not in draft.rules}
        stays = [compile_pattern(pattern, key=KEY) for pattern in whole]
        draft.rules |= {name: found[name] for name in found if not any(each.fullmatch(name) for each in stays)}
    _check_pairs(draft.rules)
    _add_embeddings(model, draft.rules)
    _add_head_norms(model, draft.rules)
    _add_head_numbers(model, draft.rules)
    sequence = resolve_patterns(tp_plan.sequence_parallel, _names(model), key=f"{KEY}.sequence_parallel")
    _check_sequence(sequence, draft.rules)
    rules = {name: draft.rules[name] for name in _names(model) if name in draft.rules}
    return TensorPlan(rules, tuple(sequence), tuple(draft.whole))


def is_linear_or_adapted(module: nn.Module) -> bool:
    """Whether it is a linear layer, under an adapter or not."""
    return isinstance(getattr(module, "base_layer", module), nn.Linear)


def _given(model: nn.Module, tp_plan: TpPlan, linear: Mapping[str, nn.Module]) -> dict[str, SplitRule]:
    columns = resolve_patterns(tp_plan.colwise_parallel, _names(model), key=f"{KEY}.colwise_parallel")
    rows = resolve_patterns(tp_plan.rowwise_parallel, _names(model), key=f"{KEY}.rowwise_parallel")
    # An embedding has no output features to be cut by: it may only be named among the rows.
    embeddings = [name for name in rows if isinstance(model.get_submodule(name), nn.Embedding)]
    problems = [Problem("is in colwise_parallel and in rowwise_parallel", key=name) for name in columns if name in rows]
    for name in (*columns, *rows):
        if name not in linear and name not in embeddings:
            problems.append(Problem(f"is a {type(model.get_submodule(name)).__name__}, no linear layer", key=name))
    if problems:
        raise ConfigError(f"{KEY}: {len(problems)} module(s) cannot be split as asked", problems=problems)
    head = output_head(model)
    rules: dict[str, SplitRule] = {}
    for name in columns:
        rules[name] = SplitRule(Style.HEAD if name == head else Style.COLUMN, _fused(model, name))
    for name in rows:
        is_linear = name in linear
        rules[name] = SplitRule(Style.ROW, _blocks_of(linear[name])) if is_linear else SplitRule(Style.EMBEDDING)
    return rules


def _own(model: nn.Module, linear: Mapping[str, nn.Module]) -> _Draft:
    """What the model's class says; its patterns may match nothing, as classes share configurations."""
    draft, names = _Draft(), _names(model)
    for pattern, style in own_plan(model).items():
        expression = compile_pattern(re.sub(r"(?<![^.])\*(?![^.])", "{*}", pattern), key=KEY)
        found = [name for name in names if expression.fullmatch(name)]
        # Experts are bare parameters, or styles of their own; what remains of them is not a linear layer.
        if style in _OF_EXPERTS or (not found and ".experts" in pattern):
            draft.whole.append(pattern)
            continue
        if found:
            draft.rules |= {name: _own_rule(model, name, style, linear) for name in found}
    return draft


def own_plan(model: nn.Module) -> dict[str, Any]:
    """The plan that comes with the model's class, pattern → style."""
    return dict(getattr(model, "_tp_plan", None) or {})


def _own_rule(model: nn.Module, name: str, style: Any, linear: Mapping[str, nn.Module]) -> SplitRule:
    module = model.get_submodule(name)
    if type(style).__name__ == "PackedRowwiseParallel":  # diffusers marks a style that has settings by an object
        return SplitRule(Style.ROW, _blocks_of(module))
    if type(style).__name__ == "PackedColwiseParallel":
        stated = tuple(getattr(style, "blocks", None) or ())
        return SplitRule(Style.COLUMN, stated or _blocks_of(module, "col"))
    known = _STYLES.get(style) if isinstance(style, str) else None
    takes = {Style.EMBEDDING: isinstance(module, nn.Embedding), Style.OWN_PART: True}
    if known is None or not takes.get(known, name in linear):
        raise ConfigError(
            f"the plan of {type(model).__name__} has {name} as '{style}', which is not supported",
            key=KEY,
            way_out="Write colwise_parallel and rowwise_parallel without it: it stays whole on every rank.",
        )
    return SplitRule(known, _fused(model, name) if known is Style.COLUMN else ())


def _stated_whole(model: nn.Module) -> list[str]:
    """Patterns of layers that a generator's family keeps whole, though their names are known."""
    adapter = facts_of(model).adapter
    return [] if adapter is None else list(adapter.never_split)


def _recognised(model: nn.Module, linear: Mapping[str, nn.Module]) -> dict[str, SplitRule]:
    """Pairs of layers known by name, in blocks, towers and mergers. Not inside experts."""
    rules: dict[str, SplitRule] = {}
    for name, module in model.named_modules():
        if "experts" in name.split("."):
            continue
        for columns, row in _PAIRS:
            pair = [_join(name, inner) for inner in (*columns, row)]
            # Outside of stacks the two may be far apart: what stands there alone stays whole.
            if all(each in linear for each in pair) and not _without_partner(pair[:-1], pair[-1:]):
                cut = SplitRule(Style.COLUMN, _fused(model, pair[0]))
                rules |= dict.fromkeys(pair[:-1], cut) | {pair[-1]: SplitRule(Style.ROW)}
        added = [_join(name, each) for each in _OF_CAPTIONS]
        if _join(name, "to_q") in rules and all(each in linear for each in added):
            rules |= dict.fromkeys(added, SplitRule(Style.COLUMN))
            if (row := _join(name, "to_add_out")) in linear:  # a last block goes on without the captions
                rules[row] = SplitRule(Style.ROW)
        if is_fused_attention(module):
            rules |= {f"{name}.qkv": SplitRule(Style.COLUMN, (1, 1, 1)), f"{name}.proj": SplitRule(Style.ROW)}
    return rules


def is_fused_attention(module: nn.Module) -> bool:
    """Whether it is an attention with `qkv` for queries, keys and values, in this order, and `proj`."""
    if not (hasattr(module, "qkv") and hasattr(module, "proj")):
        return False
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):  # no source: a class made at run time
        return False
    return _FUSED_ATTENTION.search(source) is not None


def _fused(model: nn.Module, name: str) -> tuple[int, ...]:
    parent, _, last = name.rpartition(".")
    if type(model.get_submodule(parent)).__name__ in _GATED:
        return (1, 1)
    return (1, 1, 1) if last == "qkv" and is_fused_attention(model.get_submodule(parent)) else ()


def _blocks_of(module: nn.Module, side: str = "row") -> tuple[int, ...]:
    """Widths of what diffusers says is concatenated in a layer's input, or output (`col`)."""
    return tuple(getattr(getattr(module, "base_layer", module), f"_tp_packed_{side}_blocks", ()))


def _check_pairs(rules: Mapping[str, SplitRule]) -> None:
    """Features that leave a layer cut must enter one that expects them, in the same attention, MLP or block."""
    if not rules:
        raise ConfigError(
            "tensor parallelism knows no plan for this model",
            key=KEY,
            way_out="Name the layers: colwise_parallel (q, k, v, gate, up) and rowwise_parallel (o, down).",
        )
    rows = [name for name, rule in rules.items() if rule.style is Style.ROW]
    columns = [name for name, rule in rules.items() if rule.style is Style.COLUMN]
    problems = [
        Problem("is split by output features, and no layer near it by input features", key=name)
        for name in _without_partner(columns, rows)
    ]
    problems += [
        Problem("is split by input features, and no layer near it by output features", key=name)
        for name in _without_partner(rows, columns)
    ]
    if problems:
        raise ConfigError(f"{KEY}: half of a pair is missing", problems=problems)


def _without_partner(names: Iterable[str], partners: Collection[str]) -> list[str]:
    """Those of the layers that have none of the partners in their attention, MLP or block."""
    alone = []
    for name in names:
        prefixes = tuple(f"{module}." for module in _around(name))
        if not any(partner.startswith(prefixes) for partner in partners):
            alone.append(name)
    return alone


def _around(name: str) -> list[str]:
    """The modules around one, up to the block: the nearest parent that is not numbered, and the block of it."""
    parts = name.split(".")
    parents = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
    return parents[:1] if len(parents) == 1 else parents[: _levels_to_block(parts)]


def _levels_to_block(parts: Sequence[str]) -> int:
    """How far above a layer its block is: the first numbered part of the name that numbers a stack."""
    numbered = [end for end, part in enumerate(parts[:-1]) if part.isdigit()]
    return max(1, len(parts) - 1 - numbered[0]) if numbered else 1


def _add_embeddings(model: nn.Module, rules: dict[str, SplitRule]) -> None:
    """An embedding is split with the head: tied they are one parameter."""
    for group in shared_parameters(model):
        modules = [name.rpartition(".")[0] for name in group]
        styles = {rules[name].style for name in modules if name in rules}
        if styles & {Style.HEAD, Style.EMBEDDING}:
            for name in modules:
                is_embedding = isinstance(model.get_submodule(name), nn.Embedding)
                rules.setdefault(name, SplitRule(Style.EMBEDDING if is_embedding else Style.HEAD))
        elif styles:
            raise ConfigError(f"{', '.join(modules)} share a parameter and cannot be split", key=KEY)


def _head_layers(model: nn.Module, rules: Mapping[str, SplitRule]) -> list[tuple[str, str, int]]:
    """Layers of queries and keys whose heads are divided: the attention, the layer, and its features on all ranks."""
    found = []
    for name, rule in rules.items():
        attention, _, last = name.rpartition(".")
        if rule.style is Style.COLUMN and rule.blocks and last.startswith("to_qkv"):
            found.append((attention, name, rule.blocks[0]))
        elif rule.style is Style.COLUMN and not rule.blocks and _QUERIES_AND_KEYS.fullmatch(last):
            linear: Any = model.get_submodule(name)
            found.append((attention, name, getattr(linear, "base_layer", linear).weight.shape[0]))
    return found


def _add_head_norms(model: nn.Module, rules: dict[str, SplitRule]) -> None:
    """Norms of queries and keys see this rank's heads only, whether a plan lists them or not."""
    for attention_name, layer, width in _head_layers(model, rules):
        attention = model.get_submodule(attention_name)
        for child_name, child in attention.named_children():
            weight = getattr(child, "weight", None)
            if "norm" not in child_name or weight is None:
                continue
            if weight.ndim != 1:
                raise ConfigError(
                    f"{attention_name}.{child_name} has weights of its own for each head, {tuple(weight.shape)}, and a "
                    "rank has only some of the heads",
                    key=KEY,
                    way_out=f"Leave {layer} and its like out of colwise_parallel, or set "
                    "parallel.tensor_parallel_size to 1.",
                )
            style = _norm_style(child, weight.numel(), head_width(attention), width)
            if style is None:
                raise ConfigError(
                    f"{attention_name}.{child_name} norms {weight.numel()} features, which is not one head",
                    key=KEY,
                    way_out=f"Leave {layer} out of colwise_parallel: this norm needs the features of all ranks.",
                )
            rules[f"{attention_name}.{child_name}"] = SplitRule(style)


def head_width(attention: Any) -> int | None:
    """Features of a head, as transformers' attentions say, or diffusers'."""
    if isinstance(width := getattr(attention, "head_dim", None), int):
        return width
    heads, features = getattr(attention, "heads", None), getattr(attention, "inner_dim", None)
    return features // heads if isinstance(heads, int) and isinstance(features, int) else None


def _add_head_numbers(model: nn.Module, rules: dict[str, SplitRule]) -> None:
    """Sinks and the like: an attention whose heads are split reads its heads' part."""
    widths: dict[str, int] = {}
    for attention_name, _, width in _head_layers(model, rules):
        # With grouped queries there are fewer heads of keys; the numbers are those of queries.
        widths[attention_name] = max(widths.get(attention_name, 0), width)
    for name, width in widths.items():
        attention: Any = model.get_submodule(name)
        own = {key: tuple(p.shape) for key, p in attention._parameters.items() if p is not None}
        if not own:
            continue
        head_dim = getattr(attention, "head_dim", None)
        heads = width // head_dim if isinstance(head_dim, int) else 0
        strange = [f"{key} {shape}" for key, shape in own.items() if shape != (heads,)]
        if strange:
            raise ConfigError(
                f"{name} has parameters of its own, {', '.join(strange)}, that are not one number a head",
                key=KEY,
                way_out="Leave the layers of this attention out of colwise_parallel and rowwise_parallel.",
            )
        rules[name] = SplitRule(Style.HEAD_NUMBERS)


def _norm_style(norm: nn.Module, size: int, head_width: int | None, width: int) -> Style | None:
    if size == head_width:
        return Style.OWN_PART
    return Style.WIDE_NORM if size == width and type(norm) is nn.RMSNorm else None


def _check_sequence(sequence: Iterable[str], rules: Mapping[str, SplitRule]) -> None:
    problems = [
        Problem(f"is split as {rules[name].style.value} and cannot run on a slice of the sequence", key=name)
        for name in sequence
        if name in rules
    ]
    if problems:
        raise ConfigError(f"{KEY}.sequence_parallel names split layers", problems=problems)


def output_head(model: nn.Module) -> str:
    """Name of the module that makes logits; empty when there is none."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if get is not None else None
    except (AttributeError, NotImplementedError):  # transformers' way to say that there is none
        return ""
    return next((name for name, module in model.named_modules() if module is head), "")


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
