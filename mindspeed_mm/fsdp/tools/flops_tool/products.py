"""Reads the matrix products of a built model off its modules: what each costs for a row, or for a pair of rows.

A linear layer or convolution costs 2 · weights a row. Attention costs 2 · (width of queries + width of values) a pair,
with widths read off the layers around it, so that grouped heads and latent attention need no case of their own. Experts
cost 2 · weights / experts · (experts a token).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from mindspeed_mm.fsdp.models.behaviour.multi_token import NAME as FURTHER_TOKENS
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.tools.flops_tool.sequences import Sequences, blocks_of
from mindspeed_mm.fsdp.tools.flops_tool.units import Mask, WorkUnit
from mindspeed_mm.fsdp.utils.model_parts import setting_of

CHUNK = 64
"""Tokens of a chunk of linear attention, in transformers and in flash-linear-attention."""
_ADAPTER = re.compile(r"\.(base_layer|lora_(A|B)\.[^.]+)(?=\.|$)|(?<=_proj)\.linear(?=\.|$)")
_ROLE = re.compile(
    r"(?:to_|add_|in_proj_|c_)?(w?qkvz?|kv|q|k|v|query|key|value|wq|wk|wv)(?:_(a|b))?(?:_|$)", re.IGNORECASE
)
_ROLES = {"query": "q", "key": "k", "value": "v", "wq": "q", "wk": "k", "wv": "v", "qkvz": "qkv", "wqkv": "qkv"}
"""Words in names of layers → which of q, k and v they make; other words of `_ROLE` say it themselves."""
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
        self._adapted: set[tuple[str, str]] = set()
        """(experts, parameter) that have an adapter."""
        skipped: list[str] = []
        for name, module in self._modules.items():
            if parameter := _adapted_parameter(module):
                self._adapted.add((owner(name), parameter))
            if isinstance(module, nn.MultiheadAttention):
                skipped.append(f"{name}.")
        self._skipped = tuple(skipped)
        further_layers = setting_of(self._modules.get(FURTHER_TOKENS), nn.ModuleList, "layers")
        self._depths = 0 if further_layers is None else len(further_layers)

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
            for product in self._mixing(name, module):
                waiting.append((f"{name}.", product))
            yield from self._of_weights(name, module)
        while waiting:
            yield waiting.pop()[1]

    # --- layers with weights ------------------------------------------------------------------------------------------

    def _of_weights(self, name: str, module: nn.Module) -> Iterator[Product]:
        own = dict(module.named_parameters(recurse=False))
        sizes = linear_sizes(module)
        if _adapted_parameter(self._modules.get(_around(name))):
            yield from self._adapter_of_experts(name, sizes, own)
        elif sizes is not None and "weight" in own:
            yield self._linear(name, sizes.inputs * sizes.outputs, own["weight"].requires_grad)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            yield self._convolution(name, module)
        elif stacks := _stacked_experts(module, own):
            for each, weight in stacks.items():
                trained = weight.requires_grad or (owner(name), each) in self._adapted
                of_one_expert = 2.0 * weight.numel() / weight.shape[0]
                flops = of_one_expert * self._experts_a_token(name, module)
                yield Product(f"{owner(name)}.{each}", "experts", WorkUnit(self._sequence(name)), flops, trained)
        elif "Norm" not in type(module).__name__:
            yield from self._of_other_weights(name, own)

    def _of_other_weights(self, name: str, own: Mapping[str, nn.Parameter]) -> Iterator[Product]:
        """Matrices of a module that is not a layer of torch, such as a router; what is not known is noted."""
        for each, weight in own.items():
            if weight.dim() == 2 and each.endswith("weight"):
                yield self._linear(name, weight.numel(), weight.requires_grad)
            elif weight.dim() > 1 and not _HARMLESS.search(each):
                self.uncounted.append(f"{name}.{each}")

    def _adapter_of_experts(
        self, name: str, sizes: LinearSizes | None, own: Mapping[str, nn.Parameter]
    ) -> Iterator[Product]:
        """B · A is added to the experts' weights once a pass, however many tokens there are."""
        if ".lora_B." not in name or sizes is None:
            return
        inner = linear_sizes(self._modules[name.replace(".lora_B.", ".lora_A.")])
        assert inner is not None  # PEFT makes both in the same way
        flops = 2.0 * sizes.inputs * inner.inputs * sizes.outputs
        yield Product(owner(name), "adapter", WorkUnit(units.PASSES), flops, own["weight"].requires_grad, "B")

    def _note_unknown(self, name: str, module: nn.Module) -> None:
        """Remember a part of the model that is not known here, once, by the beginning of its name."""
        part = ".".join(name.split(".")[:2])
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1 and part not in self.uncounted:
                self.uncounted.append(part)

    def _linear(self, name: str, weights: int, trained: bool) -> Product:
        rows = WorkUnit(self._sequence(name))
        flops = 2.0 * weights * self._share_of_tokens(name)
        adapter = re.search(r"\.lora_(A|B)\.", f"{name}.")
        if adapter is None:
            return Product(owner(name), "linear", rows, flops, trained)
        return Product(owner(name), "adapter", rows, flops, trained, adapter[1])

    def _convolution(self, name: str, conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Product:
        places = 1.0
        sound = self._sequences.sound
        own_name = name.removeprefix(f"{self._sequences.side_of(name)}.")
        if sound is not None and own_name in sound.names:
            places = sound.positions_of(own_name)
        sequence = self._sequence(name)
        if sequence == units.PATCHES:
            sequence = units.CUTS
        flops = 2.0 * conv.weight.numel() * places
        return Product(name, "convolution", WorkUnit(sequence), flops, conv.weight.requires_grad)

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
        for end in range(1, len(parts)):
            around = ".".join(parts[:end])
            experts = self._modules[around]
            if parts[end - 1] == "experts" and isinstance(experts, nn.ModuleList):
                return self._experts_a_token(around, experts) / len(experts)
        return 1.0

    def _experts_a_token(self, name: str, experts: nn.Module) -> int:
        parent = self._modules[name.rpartition(".")[0]]
        router = setting_of(parent, nn.Module, "gate", "router")
        for place in (experts, parent, router):
            number = setting_of(place, int, "top_k")
            if number is not None:
                return number
        number = setting_of(self._config(name), int, *_TOP_K)
        if number is None:
            return 1
        return number

    def _config(self, name: str) -> object | None:
        """The configuration that a module was built from: its own or that of a module around it."""
        while name:
            config = setting_of(self._modules.get(name), object, "config")
            if config is not None:
                return config
            name = name.rpartition(".")[0]
        whole = setting_of(self._model, object, "config")
        if hasattr(whole, "get_text_config"):
            return whole.get_text_config()
        return whole

    # --- mixing over a sequence ---------------------------------------------------------------------------------------

    def _mixing(self, name: str, module: nn.Module) -> Iterator[Product]:
        children = {child: each for child, each in module.named_children() if owner(child) == child}
        roles: dict[str, str] = {}
        for child, layer in children.items():
            role = role_of(child)
            if role and _last_linear(layer) is not None:
                roles[child] = role
        made_letters = set("".join(roles.values()))
        sizes = delta_sizes(module, children)
        if sizes is not None:
            self.attentions.add(name)
            yield from self._delta_rule(name, sizes, tuple(f"{name}.{each}" for each in roles))
        elif {"q", "k", "v"} <= made_letters:
            self.attentions.add(name)
            yield from self._attention(name, module, children, roles)
        elif hasattr(module, "ssm_state_size"):
            self.uncounted.append(f"{name} (its scan)")

    def _attention(
        self, name: str, module: nn.Module, children: Mapping[str, nn.Module], roles: Mapping[str, str]
    ) -> Iterator[Product]:
        added: list[str] = []
        main: list[str] = []
        makers: list[str] = []
        """Layers that make queries of the main sequence."""
        for child, role in roles.items():
            if child.startswith("add_"):
                added.append(child)
                continue
            main.append(child)
            if "q" in role:
                makers.append(child)
        value_width = _value_width(children, makers)
        width = value_width
        value_head = setting_of(module, int, "v_head_dim")
        if value_head is not None:  # latent attention: heads of queries and keys are wider than those of values
            query_head = setting_of(module, int, "qk_head_dim", "head_dim")
            assert query_head is not None
            width = value_width // value_head * query_head
        if not added or any("q" in roles[child] for child in added):
            yield self._pairs(name, module, roles, list(roles), width, value_width)
        else:  # keys of a second sequence: attention of its own, to which the same queries go
            yield self._pairs(name, module, roles, main, width, value_width)
            yield self._pairs(name, module, roles, [*makers, *added], width, value_width)

    def _pairs(
        self,
        name: str,
        module: nn.Module,
        roles: Mapping[str, str],
        makers: Sequence[str],
        width: int,
        value_width: int,
    ) -> Product:
        """Attention between what some of an attention's layers make.

        Args:
            name: Of the attention.
            module: The attention.
            roles: Layer → which of q, k and v it makes.
            makers: The layers.
            width: Of the queries of all heads.
            value_width: Of the values of all heads.
        """
        layers: dict[str, list[str]] = {"q": [], "k": [], "v": []}
        for letter, of_letter in layers.items():
            of_letter += [f"{name}.{maker}" for maker in makers if letter in roles[maker]]
        unit = self._unit_of_pairs(name, module, self._joined(layers["q"]), self._joined(layers["k"]))
        flops = 2.0 * (width + value_width)
        share = 2 * value_width / flops
        attends = tuple(map(tuple, layers.values()))
        return Product(name, "attention", unit, flops, attends=attends, value_share=share)

    def _joined(self, layers: Iterable[str]) -> str:
        """The sequences that layers go over, one behind the other."""
        return "+".join(sorted(set(map(self._sequences.of, layers)), reverse=True))

    def _unit_of_pairs(self, name: str, module: nn.Module, rows: str, keys: str) -> WorkUnit:
        if rows == units.PATCHES and self._is_windowed(name):
            return WorkUnit(units.WINDOWS, units.WINDOWS)
        if rows not in units.CAUSAL or keys != rows or setting_of(module, bool, "is_causal") is False:
            return WorkUnit(rows, keys)
        mask, window = self._causal_mask(name, module)
        return WorkUnit(rows, keys, mask, window)

    def _causal_mask(self, name: str, module: nn.Module) -> tuple[Mask, int]:
        config = self._config(name)
        layer = setting_of(module, int, "layer_idx")
        kinds = setting_of(config, Sequence, "layer_types")
        if kinds and layer is not None:
            if "chunked" in kinds[layer]:
                return "chunked", setting_of(config, int, "attention_chunk_size") or 0
            if "sliding" in kinds[layer]:
                return "sliding", setting_of(config, int, "sliding_window") or 0
            return "causal", 0
        window = setting_of(module, int, "sliding_window") or setting_of(config, int, "sliding_window")
        if window is not None and setting_of(config, bool, "use_sliding_window") is not False:
            return "sliding", window
        return "causal", 0

    def _is_windowed(self, name: str) -> bool:
        """Whether a layer of a vision tower sees one window at a time."""
        config = setting_of(self._modules.get(self._sequences.side_of(name)), object, "config")
        whole = setting_of(config, Sequence, "fullatt_block_indexes")
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
    return _ROLES.get(word, word)


class LinearSizes(NamedTuple):
    """Of a layer that is a matrix."""

    inputs: int
    outputs: int


def linear_sizes(module: nn.Module) -> LinearSizes | None:
    """The sizes of a linear layer, of PEFT's or a quantised one too; None for other modules."""
    inputs, outputs = setting_of(module, int, "in_features"), setting_of(module, int, "out_features")
    if inputs is None or outputs is None:
        return None
    return LinearSizes(inputs, outputs)


class DeltaSizes(NamedTuple):
    """Of a gated delta net."""

    heads: int
    key: int
    value: int


def delta_sizes(module: nn.Module, children: Iterable[str]) -> DeltaSizes | None:
    """The sizes of a gated delta net or of Kimi Delta Attention; None for other layers."""
    if not any("conv" in child for child in children):
        return None
    heads = setting_of(module, int, "num_v_heads")
    key, value = setting_of(module, int, "head_k_dim"), setting_of(module, int, "head_v_dim")
    if heads is not None and key is not None and value is not None:
        return DeltaSizes(heads, key, value)
    heads, width = setting_of(module, int, "num_heads"), setting_of(module, int, "head_dim")
    if heads is not None and width is not None and hasattr(module, "qkv_dim"):
        return DeltaSizes(heads, width, width)
    return None


def _stacked_experts(module: nn.Module, own: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Weights of all experts in one tensor each, among a module's own parameters."""
    if isinstance(module, nn.LayerNorm):
        return {}
    stacks: dict[str, nn.Parameter] = {}
    for name, parameter in own.items():
        is_weight = "bias" not in name and name.endswith(("proj", "weight", "w1", "w2", "w3"))
        if parameter.dim() == 3 and is_weight:
            stacks[name] = parameter
    return stacks


def _adapted_parameter(module: nn.Module | None) -> str | None:
    """The weight that a level of PEFT around fused experts adapts; None for other modules."""
    if hasattr(module, "lora_A"):
        return setting_of(module, str, "parameter_name")
    return None


def _around(name: str) -> str:
    """The level of PEFT that a layer of an adapter is of."""
    if ".lora_" in name:
        return re.split(r"\.lora_[AB]\.", name)[0]
    return ""


def _last_linear(module: nn.Module) -> nn.Module | None:
    """The linear layer of a module that may be a list with dropout behind it."""
    for each in module.modules():  # the module itself comes first
        if linear_sizes(each) is not None:
            return each
    return None


def _value_width(children: Mapping[str, nn.Module], makers: Sequence[str]) -> int:
    """The values of all heads together: what an attention's last layer takes, else what its queries are.

    Args:
        children: The attention's layers.
        makers: Those that make its queries.
    """
    named = [each for each in _OUT if each in children]
    out = _last_linear(children[named[0]]) if named else None
    if out is None:
        last = _last_linear(children[makers[-1]])
        sizes = linear_sizes(last) if last is not None else None
        if sizes is None:
            return 0
        return sizes.outputs
    blocks = setting_of(out, list, "_tp_packed_row_blocks")
    if blocks:  # diffusers says what a layer takes beside the values
        return int(blocks[0])
    sizes = linear_sizes(out)
    assert sizes is not None
    return sizes.inputs
