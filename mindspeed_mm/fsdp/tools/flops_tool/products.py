"""Reads the matrix products of a built model off its modules: what each costs for a row, or for a pair of rows.

A linear layer or convolution costs 2 · weights a row. Attention costs 2 · (width of queries + width of values) a pair,
with widths read off the layers around it, so that grouped heads and latent attention need no case of their own. Experts
cost 2 · weights / experts · (experts a token).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from mindspeed_mm.fsdp.models.behaviour.multi_token import NAME as FURTHER_TOKENS
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.tools.flops_tool.sequences import Sequences, blocks_of
from mindspeed_mm.fsdp.tools.flops_tool.units import Mask, WorkUnit

CHUNK = 64
"""Tokens of a chunk of linear attention, in transformers and in flash-linear-attention."""
_ADAPTER = re.compile(r"\.(base_layer|lora_(A|B)\.[^.]+)(?=\.|$)|(?<=_proj)\.linear(?=\.|$)")
_ROLE = re.compile(
    r"(?:to_|add_|in_proj_|c_)?(w?qkvz?|kv|q|k|v|query|key|value|wq|wk|wv)(?:_(a|b))?(?:_|$)", re.IGNORECASE
)
_OUT = ("o_proj", "out_proj", "proj", "to_out", "projection_layer", "dense", "wo", "out")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
_NO_PRODUCTS = (nn.Embedding, nn.MultiheadAttention)
_HARMLESS = re.compile(
    r"pos|embed|probe|query|token|table|A_log|bias|sinks|conv|freq|scale|norm|newline", re.IGNORECASE
)


@dataclass
class Product:
    """One product and whatever decides which of its gradients are formed."""

    module: str
    """Name of the module, without what PEFT appends to it."""
    kind: str
    unit: WorkUnit
    flops: float
    """A unit."""
    trained: bool = False
    """Whether its weight has a gradient."""
    adapter: str = ""
    """A or B of a low-rank adapter."""
    attends: tuple[tuple[str, ...], ...] = ()
    """Names of the layers that make the queries, keys and values of an attention."""
    value_share: float = 0.5
    """Share of an attention's FLOPs that takes the weighted mean of values."""


class Reader:
    """Finds the products of a model.

    Args:
        model: Built; parameters may be on the meta device.
        sequences: What each module goes over.
    """

    def __init__(self, model: nn.Module, sequences: Sequences) -> None:
        self._model, self._sequences = model, sequences
        self._modules = dict(model.named_modules())
        self.uncounted: list[str] = []
        self.attentions: set[str] = set()
        """Names of modules that are attention."""
        self._adapted = {(owner(n), m.parameter_name) for n, m in self._modules.items() if _adapts_experts(m)}
        """(experts, parameter) that have an adapter."""
        self._depths = len(getattr(self._modules.get(FURTHER_TOKENS), "layers", ()))
        self._skipped = tuple(f"{n}." for n, m in self._modules.items() if isinstance(m, nn.MultiheadAttention))

    def read(self) -> Iterator[Product]:
        """Products in the order of the modules; attention stands behind its layers' own."""
        waiting: list[tuple[str, Product]] = []
        for name, module in self._modules.items():
            while waiting and not name.startswith(waiting[-1][0]):
                yield waiting.pop()[1]
            if name.startswith(self._skipped) or isinstance(module, _NO_PRODUCTS):
                continue
            if not self._sequence(name):
                self._note_unknown(name, module)
                continue
            waiting += [(f"{name}.", product) for product in self._mixing(name, module)]
            yield from self._of_weights(name, module)
        while waiting:
            yield waiting.pop()[1]

    # --- layers with weights ------------------------------------------------------------------------------------------

    def _of_weights(self, name: str, module: Any) -> Iterator[Product]:
        own = dict(module.named_parameters(recurse=False))
        if _adapts_experts(self._modules.get(_around(name))):
            yield from self._adapter_of_experts(name, module)
            return
        if isinstance(module, nn.Linear) or (hasattr(module, "in_features") and "weight" in own):
            yield self._linear(name, module.in_features * module.out_features, own["weight"].requires_grad)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            yield self._convolution(name, module)
        elif stacks := {n: p for n, p in own.items() if p.dim() == 3 and _is_expert_weight(n, module)}:
            for each, weight in stacks.items():
                trained = weight.requires_grad or (owner(name), each) in self._adapted
                yield Product(
                    f"{owner(name)}.{each}", "experts", WorkUnit(self._sequence(name)),
                    2.0 * weight.numel() / weight.shape[0] * self._experts_a_token(name, module), trained,
                )  # fmt: skip
        else:
            for each, weight in own.items():
                if "Norm" in type(module).__name__:
                    continue
                if weight.dim() == 2 and each.endswith("weight"):
                    yield self._linear(name, weight.numel(), weight.requires_grad)
                elif weight.dim() > 1 and not _HARMLESS.search(each):
                    self.uncounted.append(f"{name}.{each}")

    def _adapter_of_experts(self, name: str, module: Any) -> Iterator[Product]:
        """B · A is added to the experts' weights once a pass, however many tokens there are."""
        if ".lora_B." in name:
            rank_of_all = module.in_features
            inputs = self._modules[name.replace(".lora_B.", ".lora_A.")].in_features  # type: ignore[union-attr]
            flops = 2.0 * rank_of_all * inputs * module.out_features
            yield Product(owner(name), "adapter", WorkUnit(units.PASSES), flops, module.weight.requires_grad, "B")

    def _note_unknown(self, name: str, module: nn.Module) -> None:
        """Remember a part of the model that nobody here knows, once, by the beginning of its name."""
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            part = ".".join(name.split(".")[:2])
            self.uncounted += [] if part in self.uncounted else [part]

    def _linear(self, name: str, weights: int, trained: bool) -> Product:
        adapter = re.search(r"\.lora_(A|B)\.", f"{name}.")
        kind = "linear" if adapter is None else "adapter"
        rows = WorkUnit(self._sequence(name))
        share = self._share_of_tokens(name)
        return Product(owner(name), kind, rows, 2.0 * weights * share, trained, adapter[1] if adapter else "")

    def _convolution(self, name: str, conv: Any) -> Product:
        places = 1.0
        side, sound = self._sequences.side_of(name), self._sequences.sound
        if sound is not None and name.removeprefix(f"{side}.") in sound.names:
            places = sound.positions_of(name.removeprefix(f"{side}."))
        flops, sequence = 2.0 * conv.weight.numel() * places, self._sequence(name)
        rows = WorkUnit(units.CUTS if sequence == units.PATCHES else sequence)
        return Product(name, "convolution", rows, flops, conv.weight.requires_grad)

    def _sequence(self, name: str) -> str:
        return self._sequences.of(owner(name))

    def _share_of_tokens(self, name: str) -> float:
        """Of the tokens, how many a layer sees: those of a list of experts divide them among themselves; what further
        tokens are predicted with sees them several times."""
        if self._depths and name == f"{FURTHER_TOKENS}.fc":
            return self._depths
        if self._depths and self._sequence(name) == units.LABELS:
            return 1 + self._depths
        parts = name.split(".")
        for place, part in enumerate(parts[:-1]):
            experts = self._modules[".".join(parts[: place + 1])]
            if part == "experts" and isinstance(experts, nn.ModuleList):
                return self._experts_a_token(".".join(parts[: place + 1]), experts) / len(experts)
        return 1.0

    def _experts_a_token(self, name: str, experts: nn.Module) -> int:
        parent: Any = self._modules[name.rpartition(".")[0]]
        router = next((getattr(parent, each) for each in ("gate", "router") if hasattr(parent, each)), None)
        config = self._config(name)
        for place in (experts, parent, router):
            if isinstance(number := getattr(place, "top_k", None), int):
                return number
        return next((getattr(config, each) for each in _TOP_K if isinstance(getattr(config, each, None), int)), 1)

    def _config(self, name: str) -> Any:
        """The configuration that a module was built from: its own or that of a module around it."""
        while name:
            if (config := getattr(self._modules.get(name), "config", None)) is not None:
                return config
            name = name.rpartition(".")[0]
        whole: Any = getattr(self._model, "config", None)
        return whole.get_text_config() if hasattr(whole, "get_text_config") else whole

    # --- mixing over a sequence ---------------------------------------------------------------------------------------

    def _mixing(self, name: str, module: Any) -> Iterator[Product]:
        children = {child: each for child, each in module.named_children() if owner(child) == child}
        roles = {child: role for child in children if (role := role_of(child)) and _last_linear(children[child])}
        letters = set("".join(roles.values()))
        if (sizes := delta_sizes(module, children)) is not None:
            self.attentions.add(name)
            yield from self._delta_rule(name, sizes, tuple(f"{name}.{each}" for each in roles))
        elif {"q", "k", "v"} <= letters:
            self.attentions.add(name)
            yield from self._attention(name, module, children, roles)
        elif hasattr(module, "ssm_state_size"):
            self.uncounted.append(f"{name} (its scan)")

    def _attention(self, name: str, module: Any, children: dict[str, Any], roles: dict[str, str]) -> Iterator[Product]:
        out = next((_last_linear(children[each]) for each in _OUT if each in children), None)
        makers = [n for n, role in roles.items() if "q" in role and not n.startswith("add_")]
        value_width = out.in_features if out is not None else _width(_last_linear(children[makers[-1]]))
        # diffusers says what a layer takes beside the values.
        value_width = next(iter(getattr(out, "_tp_packed_row_blocks", ())), value_width)
        width = value_width
        if (head := getattr(module, "qk_head_dim", None)) or hasattr(module, "v_head_dim"):
            width = value_width // module.v_head_dim * (head or module.head_dim)
        added = [n for n in roles if n.startswith("add_")]
        if not added or any("q" in roles[n] for n in added):
            yield self._pairs(name, module, roles, tuple(roles), width, value_width)
        else:  # keys of a second sequence: attention of its own, to which the same queries go
            main = tuple(n for n in roles if n not in added)
            yield self._pairs(name, module, roles, main, width, value_width)
            yield self._pairs(name, module, roles, (*makers, *added), width, value_width)

    def _pairs(
        self, name: str, module: Any, roles: dict[str, str], names: tuple[str, ...], width: int, value_width: int
    ) -> Product:
        made = {letter: tuple(f"{name}.{n}" for n in names if letter in roles[n]) for letter in "qkv"}
        rows = "+".join(sorted({self._sequences.of(n) for n in made["q"]}, reverse=True))
        keys = "+".join(sorted({self._sequences.of(n) for n in made["k"]}, reverse=True))
        is_windowed = rows == units.PATCHES and self._is_windowed(name)
        unit = (
            WorkUnit(units.WINDOWS, units.WINDOWS)
            if is_windowed
            else WorkUnit(rows, keys, *self._mask(name, module, rows, keys))
        )
        flops = 2.0 * (width + value_width)
        return Product(
            name,
            "attention",
            unit,
            flops,
            attends=(made["q"], made["k"], made["v"]),
            value_share=2 * value_width / flops,
        )

    def _mask(self, name: str, module: Any, rows: str, keys: str) -> tuple[Mask, int]:
        if rows not in units.CAUSAL or keys != rows or getattr(module, "is_causal", True) is False:
            return "none", 0
        config = self._config(name)
        layer = getattr(module, "layer_idx", None)
        kinds = getattr(config, "layer_types", None)
        if kinds and isinstance(layer, int):
            kind = kinds[layer]
            if "chunked" in kind:
                return "chunked", int(config.attention_chunk_size)
            return ("sliding", int(config.sliding_window)) if "sliding" in kind else ("causal", 0)
        window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
        if isinstance(window, int) and getattr(config, "use_sliding_window", True):
            return "sliding", window
        return "causal", 0

    def _is_windowed(self, name: str) -> bool:
        """Whether a layer of a vision tower sees one window at a time."""
        config = getattr(self._modules.get(self._sequences.side_of(name)), "config", None)
        whole = getattr(config, "fullatt_block_indexes", None)
        return whole is not None and next(blocks_of(name), -1) not in whole

    def _delta_rule(self, name: str, sizes: DeltaSizes, makers: tuple[str, ...]) -> Iterator[Product]:
        """Chunked gated delta rule (Yang et al. 2024, section 3.3; Kimi Delta Attention alike), C tokens a chunk, for
        each head and token: C · (3 d_k + 2 d_v) multiplications in a chunk (K·Kᵀ, Q·Kᵀ, the triangular system for V and
        K, scores · V), of which a triangular mask leaves half, and 3 · d_k · d_v with the state (what it predicts, what
        queries read, its update)."""
        heads, key, value = sizes
        for mask, each in (("causal", CHUNK * (3 * key + 2 * value)), ("none", 3 * key * value)):
            unit = WorkUnit(self._sequences.of(name), mask=mask)  # type: ignore[arg-type]
            yield Product(name, "linear attention", unit, 2.0 * heads * each, attends=(makers, makers, makers))


def owner(name: str) -> str:
    """A layer's name without what PEFT, or a layer that clips its values, puts behind it."""
    return _ADAPTER.sub("", f".{name}")[1:]


def role_of(child: str) -> str:
    """Which of q, k, v a layer makes, by its name; empty for other layers."""
    found = _ROLE.match(child)
    if found is None:
        return ""
    word = found[1].lower()
    return {"query": "q", "key": "k", "value": "v", "wq": "q", "wk": "k", "wv": "v", "qkvz": "qkv", "wqkv": "qkv"}.get(
        word, word
    )


class DeltaSizes(NamedTuple):
    """Of a gated delta net."""

    heads: int
    key: int
    value: int


def delta_sizes(module: Any, children: dict[str, Any]) -> DeltaSizes | None:
    """The sizes of a gated delta net or of Kimi Delta Attention; None for other layers."""
    if not any("conv" in child for child in children):
        return None
    if all(hasattr(module, each) for each in ("num_v_heads", "head_k_dim", "head_v_dim")):
        return DeltaSizes(module.num_v_heads, module.head_k_dim, module.head_v_dim)
    if all(hasattr(module, each) for each in ("num_heads", "head_dim", "qkv_dim")):
        return DeltaSizes(module.num_heads, module.head_dim, module.head_dim)
    return None


def _is_expert_weight(name: str, module: nn.Module) -> bool:
    return (
        "bias" not in name
        and not isinstance(module, nn.LayerNorm)
        and name.endswith(("proj", "weight", "w1", "w2", "w3"))
    )


def _width(module: nn.Module) -> int:
    """Outputs of a linear layer, of PEFT's too; 0 for other modules."""
    return int(getattr(module, "out_features", 0)) if hasattr(module, "in_features") else 0


def _adapts_experts(module: Any) -> bool:
    """Whether a module is PEFT's level around fused experts."""
    return hasattr(module, "parameter_name") and hasattr(module, "lora_A")


def _around(name: str) -> str:
    """The level of PEFT that a layer of an adapter is of."""
    return re.split(r"\.lora_[AB]\.", name)[0] if ".lora_" in name else ""


def _last_linear(module: nn.Module) -> Any:
    """The linear layer of a module that may be a list with dropout behind it."""
    return module if _width(module) else next((each for each in module.modules() if _width(each)), None)
