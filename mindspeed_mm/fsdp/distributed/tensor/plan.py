"""Which module is split how under tensor parallelism: data, read off the configuration and the model's class.

`parallel.tp_plan` wins; without it the plan that transformers or diffusers ships with the class; what neither covers
(vision towers, video generators) by the names that layers have in these libraries.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import compile_pattern, is_inside, resolve_patterns
from mindspeed_mm.fsdp.models.behaviour.packed_rows import find_mixers
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.parallel_args import TpPlan
from mindspeed_mm.fsdp.utils.model_parts import (
    attribute_at,
    base_layer_of,
    has_all,
    head_of,
    module_names,
    name_of,
    shared_parameters,
    weight_of,
)

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
    """How a whole model is split under tensor parallelism, module by module."""

    rules: dict[str, SplitRule]
    """Module name → its part, in the order of `named_modules()`."""
    sequence: tuple[str, ...] = ()
    """Modules that run on a slice of the sequence."""
    whole: tuple[str, ...] = ()
    """What the class's plan splits and this plan does not, as it names it: experts."""
    cuts: dict[str, SplitRule] = field(default_factory=dict)
    """The same, of the modules that hold the parameters: a layer with adapters stands for its base and their halves."""

    def names(self, *styles: Style) -> list[str]:
        """Return the names of the modules that are split in one of these styles."""
        return [name for name, rule in self.rules.items() if rule.style in styles]

    def without(self, modules: Collection[str]) -> TensorPlan:
        """The plan of a model in which these modules, with all below them, stay whole."""

        def is_split(name: str) -> bool:
            return not is_inside(name, modules)

        kept = self._filtered(is_split)
        return replace(kept, whole=(*self.whole, *sorted(modules)))

    def only(self, modules: Collection[str]) -> TensorPlan:
        """The plan of the part of a model that has just these modules."""
        return self._filtered(set(modules).__contains__)

    def _filtered(self, is_kept: Callable[[str], bool]) -> TensorPlan:
        rules = {name: rule for name, rule in self.rules.items() if is_kept(name)}
        cuts = {name: rule for name, rule in self.cuts.items() if is_kept(name)}
        return TensorPlan(rules, tuple(filter(is_kept, self.sequence)), self.whole, cuts)

    def describe(self) -> str:
        """One line for the log: `colwise 14, rowwise 4, …`."""
        parts = []
        for style in Style:
            count = len(self.names(style))
            if count:
                parts.append(f"{style.value} {count}")
        if self.sequence:
            parts.append(f"sequence_parallel {len(self.sequence)}")
        for pattern in self.whole:
            parts.append(f"whole on every rank: {pattern}")
        return ", ".join(parts)


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
head by head. Heads that have their three side by side, which a cut would mix, have the same shapes."""

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
        draft.whole += _stated_whole(model)
        for name, rule in _recognised(model, linear).items():
            draft.rules.setdefault(name, rule)  # what the class says of a layer wins over its name
    _check_pairs(draft.rules)
    _add_embeddings(model, draft.rules)
    _add_head_norms(model, draft.rules)
    _add_head_numbers(model, draft.rules)
    sequence = resolve_patterns(tp_plan.sequence_parallel, module_names(model), key=f"{KEY}.sequence_parallel")
    _check_sequence(sequence, draft.rules)
    rules = {name: draft.rules[name] for name in module_names(model) if name in draft.rules}
    return TensorPlan(rules, tuple(sequence), tuple(draft.whole))


def is_linear_or_adapted(module: nn.Module) -> bool:
    """Whether it is a linear layer, under an adapter or not."""
    return isinstance(base_layer_of(module), nn.Linear)


def _given(model: nn.Module, tp_plan: TpPlan, linear: Mapping[str, nn.Module]) -> dict[str, SplitRule]:
    columns = resolve_patterns(tp_plan.colwise_parallel, module_names(model), key=f"{KEY}.colwise_parallel")
    rows = resolve_patterns(tp_plan.rowwise_parallel, module_names(model), key=f"{KEY}.rowwise_parallel")
    # An embedding has no output features to be cut by: it may only be named among the rows.
    embeddings = {name for name in rows if isinstance(model.get_submodule(name), nn.Embedding)}
    problems = []
    for name in columns:
        if name in rows:
            problems.append(Problem("is in colwise_parallel and in rowwise_parallel", key=name))
    for name in (*columns, *rows):
        if name not in linear and name not in embeddings:
            kind = type(model.get_submodule(name)).__name__
            problems.append(Problem(f"is a {kind}, not a linear layer", key=name))
    if problems:
        raise ConfigError(f"{KEY}: {len(problems)} module(s) cannot be split as asked", problems=problems)
    head = output_head(model)
    rules: dict[str, SplitRule] = {}
    for name in columns:
        style = Style.HEAD if name == head else Style.COLUMN
        rules[name] = SplitRule(style, _fused(model, name))
    for name in rows:
        if name in embeddings:
            rules[name] = SplitRule(Style.EMBEDDING)
        else:
            rules[name] = SplitRule(Style.ROW, _packed_blocks(linear[name], "row"))
    return rules


def _own(model: nn.Module, linear: Mapping[str, nn.Module]) -> _Draft:
    """What the model's class says; its patterns may match nothing, as classes share configurations."""
    draft, names = _Draft(), module_names(model)
    for pattern, style in own_plan(model).items():
        expression = compile_pattern(re.sub(r"(?<![^.])\*(?![^.])", "{*}", pattern), key=KEY)
        found = [name for name in names if expression.fullmatch(name)]
        # Experts are bare parameters, or styles of their own; what remains of them is not a linear layer.
        if style in _OF_EXPERTS or (not found and ".experts" in pattern):
            draft.whole.append(pattern)
            continue
        for name in found:
            draft.rules[name] = _own_rule(model, name, style, linear)
    return draft


def own_plan(model: nn.Module) -> dict[str, object]:
    """The plan that comes with the model's class, pattern → style: its name, or an object of diffusers."""
    return dict(attribute_at(model, "_tp_plan", {}))


def _own_rule(model: nn.Module, name: str, style: object, linear: Mapping[str, nn.Module]) -> SplitRule:
    module = model.get_submodule(name)
    if type(style).__name__ == "PackedRowwiseParallel":  # diffusers marks a style that has settings by an object
        return SplitRule(Style.ROW, _packed_blocks(module, "row"))
    if type(style).__name__ == "PackedColwiseParallel":
        stated = tuple(attribute_at(style, "blocks", ()))
        return SplitRule(Style.COLUMN, stated or _packed_blocks(module, "col"))
    known = _STYLES.get(style) if isinstance(style, str) else None
    if known is Style.EMBEDDING:
        is_taken = isinstance(module, nn.Embedding)
    else:
        is_taken = known is Style.OWN_PART or name in linear
    if known is None or not is_taken:
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
    """Pairs of layers known by name, in blocks, towers and mergers. Not inside experts or layers with a state, whose
    convolutions and gates go over all channels, nor what the family keeps whole."""
    rules: dict[str, SplitRule] = {}
    for name, module in model.named_modules():
        if "experts" in name.split("."):
            continue
        for inner_columns, inner_row in _PAIRS:
            columns, row = [_join(name, inner) for inner in inner_columns], _join(name, inner_row)
            # Outside of stacks the two may be far apart: what stands there alone stays whole.
            if linear.keys() >= {*columns, row} and not _without_partner(columns, [row]):
                rules |= dict.fromkeys(columns, SplitRule(Style.COLUMN, _fused(model, columns[0])))
                rules[row] = SplitRule(Style.ROW)
        # The block around an attention was visited before it, so that the rules have the attention's `to_q` by now.
        added = [_join(name, inner) for inner in _OF_CAPTIONS]
        if _join(name, "to_q") in rules and linear.keys() >= set(added):
            rules |= dict.fromkeys(added, SplitRule(Style.COLUMN))
            added_row = _join(name, "to_add_out")
            if added_row in linear:  # a last block goes on without the captions
                rules[added_row] = SplitRule(Style.ROW)
        if is_fused_attention(module):
            rules[f"{name}.qkv"] = SplitRule(Style.COLUMN, (1, 1, 1))
            rules[f"{name}.proj"] = SplitRule(Style.ROW)
    for pattern in _stated_whole(model):
        for name in filter(compile_pattern(pattern, key=KEY).fullmatch, list(rules)):
            del rules[name]
    with_state = [name_of(model, mixer) for mixer in find_mixers(model)]
    return {name: rule for name, rule in rules.items() if not is_inside(name, with_state)}


def is_fused_attention(module: nn.Module) -> bool:
    """Whether it is an attention with `qkv` for queries, keys and values, in this order, and `proj`."""
    if not has_all(module, "qkv", "proj"):
        return False
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):  # no source: a class made at run time
        return False
    return _FUSED_ATTENTION.search(source) is not None


def _fused(model: nn.Module, name: str) -> tuple[int, ...]:
    """Relative sizes of what a layer's output features are made of; empty when they are of one kind."""
    parent, _, last = name.rpartition(".")
    if type(model.get_submodule(parent)).__name__ in _GATED:
        return (1, 1)
    if last == "qkv" and is_fused_attention(model.get_submodule(parent)):
        return (1, 1, 1)
    return ()


def _packed_blocks(module: nn.Module, side: Literal["row", "col"]) -> tuple[int, ...]:
    """Widths of what diffusers says is concatenated in a layer's input (`row`) or output (`col`)."""
    return tuple(attribute_at(base_layer_of(module), f"_tp_packed_{side}_blocks", ()))


def _check_pairs(rules: Mapping[str, SplitRule]) -> None:
    """Features that leave a layer cut must enter one that expects them, in the same attention, MLP or block."""
    if not rules:
        raise ConfigError(
            "tensor parallelism knows no plan for this model",
            key=KEY,
            way_out="Name the layers: colwise_parallel (q, k, v, gate, up) and rowwise_parallel (o, down).",
        )
    plan = TensorPlan(dict(rules))
    rows, columns = plan.names(Style.ROW), plan.names(Style.COLUMN)
    problems = []
    for name in _without_partner(columns, rows):
        problems.append(Problem("is split by output features, and no layer near it by input features", key=name))
    for name in _without_partner(rows, columns):
        problems.append(Problem("is split by input features, and no layer near it by output features", key=name))
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
    parents = []
    for _ in range(_levels_to_block(name.split("."))):
        name = name.rpartition(".")[0]
        if name:
            parents.append(name)
    return parents


def _levels_to_block(parts: Sequence[str]) -> int:
    """How far above a layer its block is: the first numbered part of the name that numbers a stack."""
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return max(1, len(parts) - 1 - place)
    return 1


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
            found.append((attention, name, weight_of(model.get_submodule(name)).shape[0]))
    return found


def _add_head_norms(model: nn.Module, rules: dict[str, SplitRule]) -> None:
    """Norms of queries and keys see this rank's heads only, whether a plan lists them or not."""
    for attention_name, layer, width in _head_layers(model, rules):
        attention = model.get_submodule(attention_name)
        for child_name, child in attention.named_children():
            weight = attribute_at(child, "weight")
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


def head_width(attention: nn.Module) -> int | None:
    """Features of a head, as transformers' attentions say, or diffusers'."""
    width = attribute_at(attention, "head_dim")
    if isinstance(width, int):
        return width
    heads, features = attribute_at(attention, "heads"), attribute_at(attention, "inner_dim")
    if isinstance(heads, int) and isinstance(features, int):
        return features // heads
    return None


def _add_head_numbers(model: nn.Module, rules: dict[str, SplitRule]) -> None:
    """Sinks and the like: an attention whose heads are split reads its heads' part."""
    widths: dict[str, int] = {}
    for attention_name, _, width in _head_layers(model, rules):
        # With grouped queries there are fewer heads of keys; the numbers are those of queries.
        widths[attention_name] = max(widths.get(attention_name, 0), width)
    for name, width in widths.items():
        attention = model.get_submodule(name)
        own = dict(attention.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            continue
        head_dim = attribute_at(attention, "head_dim")
        heads = width // head_dim if isinstance(head_dim, int) else 0
        strange = []
        for key, parameter in own.items():
            if parameter.shape != (heads,):
                strange.append(f"{key} {tuple(parameter.shape)}")
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
    if size == width and type(norm) is nn.RMSNorm:
        return Style.WIDE_NORM
    return None


def _check_sequence(sequence: Iterable[str], rules: Mapping[str, SplitRule]) -> None:
    problems = []
    for name in sequence:
        if name in rules:
            style = rules[name].style.value
            problems.append(Problem(f"is split as {style} and cannot run on a slice of the sequence", key=name))
    if problems:
        raise ConfigError(f"{KEY}.sequence_parallel names split layers", problems=problems)


def gathers_features(name: str, rule: SplitRule, head: str, *, gather_logits: bool) -> bool:
    """Whether a layer that is cut by output features returns those of all ranks.

    Args:
        name: Of the layer.
        rule: Its part.
        head: Name of the model's `output_head`, of whose features the loss takes this rank's part.
        gather_logits: The loss takes all of them.
    """
    return rule.style is Style.HEAD and (gather_logits or not is_inside(name, (head,)))


def output_head(model: nn.Module) -> str:
    """Name of the module that makes logits; empty when there is none."""
    return name_of(model, head_of(model))


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
