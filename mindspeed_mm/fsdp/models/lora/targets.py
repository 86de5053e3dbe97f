"""Which linear layers and fused parameters of experts get an adapter by `training.lora`, and what is trained whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem, told_as
from mindspeed_mm.core.patterns import compile_pattern, is_inside, resolve_patterns
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.all_linear import (
    ALL_LINEAR,
    all_linear,
    asked_patterns,
    takes_adapter,
    told_linear_layers,
)
from mindspeed_mm.fsdp.models.lora.names import Strength
from mindspeed_mm.fsdp.ops.experts import fused_experts
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.utils.model_parts import module_names, shared_parameters

TARGETS = "training.lora.target_modules"
WHOLE = "training.lora.modules_to_save"
_SINGLE = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "down_proj": "down_proj",
    "w2": "down_proj",
}
"""Layer of a single expert, as it is released → the fused parameter that holds it."""
_OTHER_HALF = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
"""The two of them that one fused parameter holds."""


@dataclass
class LoraTargets:
    """What gets an adapter, by names of the model without adapters, in its order."""

    layers: list[str] = field(default_factory=list)
    """Linear layers."""
    parameters: list[str] = field(default_factory=list)
    """Fused parameters of experts."""
    strengths: dict[str, Strength] = field(default_factory=dict)
    """Last name of a fused parameter whose adapters have another strength."""
    whole: list[str] = field(default_factory=list)
    """Modules that are trained whole."""
    token_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Weight of an embedding or output head → rows of new tokens, which are trained in full."""


def resolve_targets(model: nn.Module, lora: LoraArguments) -> LoraTargets:
    """What the patterns of the section mean in a model. Nothing is changed.

    Raises:
        ConfigError: A pattern matches nothing, or nothing that can have an adapter and may be trained; or a layer
            shares its weight with another one, or has rows of new tokens.
    """
    whole = _modules_to_save(model, lora.modules_to_save)
    asked = asked_patterns(model, lora)
    layers, parameters = _Layers(model), _FusedParameters(model, single=not lora.disable_peft_moe_conversion)
    problems: list[Problem] = []
    chosen = _by_word(model, layers, asked, whole)
    patterns = [pattern for pattern in asked if pattern not in ALL_LINEAR]
    _check_match(patterns, layers, parameters)
    if not chosen and len(patterns) < len(asked):
        problems.append(_nothing_by_word(model, layers))
    found = LoraTargets(whole=whole)
    for pattern in patterns:
        named = layers.named(pattern) | parameters.named(pattern)
        free = named - layers.frozen - parameters.frozen
        chosen |= free
        if not named:
            problems.append(layers.none_there(pattern, parameters))
        elif not free:
            problems.append(_problem_of_frozen(pattern, sorted(named)))
    problems += parameters.half_named()
    problems += [_in_both(name) for name in sorted(chosen) if is_inside(name, whole)]
    if problems:
        raise ConfigError(f"{TARGETS}: {len(problems)} problem(s)", problems=problems)
    found.layers = [name for name in layers.linear if name in chosen]
    found.parameters = [name for name in parameters.all if name in chosen]
    found.strengths = parameters.strengths(lora)
    _check_ties(model, found.layers, whole)
    found.token_rows = _token_rows(model, found)
    return found


def _by_word(model: nn.Module, layers: _Layers, asked: Sequence[str], whole: Sequence[str]) -> set[str]:
    """What `all-linear` stands for, where it is asked for: of the layers that are free and not trained whole."""
    if ALL_LINEAR.isdisjoint(asked):
        return set()
    return {name for name in all_linear(model) if name not in layers.frozen and not is_inside(name, whole)}


def _nothing_by_word(model: nn.Module, layers: _Layers) -> Problem:
    if not layers.linear:
        return Problem(f"{type(model).__name__} has no linear layer", key=TARGETS, way_out="Train it without adapters.")
    return _problem_of_frozen("all-linear", all_linear(model) or layers.linear)


def _check_match(patterns: Sequence[str], layers: _Layers, parameters: _FusedParameters) -> None:
    """Raise `ConfigError` for patterns that match nothing; it lists the names that linear layers have."""
    listed = f"Linear layers: {told_linear_layers(layers.linear)}; all-linear means those of the language model."
    with told_as(lambda problem: replace(problem, way_out=f"{problem.way_out} {listed}".strip())):
        resolve_patterns(patterns, [*layers.modules, *parameters.names], key=TARGETS, allow_suffix=True)


def _token_rows(model: nn.Module, found: LoraTargets) -> dict[str, tuple[int, ...]]:
    """Raises `ConfigError` where rows of new tokens would be trained in a layer that has an adapter, or a bias with a
    number for each token: PEFT has neither (`trainable_token_indices`)."""
    added = facts_of(model).added_tokens
    if added is None or not added.ids:
        return {}
    rows = {}
    for name in added.parameters:
        module = name.rpartition(".")[0]
        if is_inside(name, found.whole):
            continue
        if module in found.layers:
            raise ConfigError(
                f"'{module}' gets an adapter, and its rows of new tokens (model.add_tokens) are trained in full",
                key=TARGETS,
                way_out=f"Leave it out, or name '{module}' in {WHOLE}.",
            )
        if not name.endswith(".weight"):
            raise ConfigError(
                f"'{name}' has a number for each token, which adapter files cannot hold",
                key="model.add_tokens",
                way_out=f"Name '{module}' in {WHOLE}.",
            )
        rows[name] = tuple(sorted(added.ids.values()))
    return rows


class _Layers:
    """The linear layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.modules.pop("")
        self.linear: list[str] = []
        self.frozen: set[str] = set()
        for name, module in self.modules.items():
            if takes_adapter(module):
                self.linear.append(name)
                if not module.weight.requires_grad:  # type: ignore[union-attr]
                    self.frozen.add(name)

    def named(self, pattern: str) -> set[str]:
        return set(self.linear).intersection(_matched(pattern, self.modules))

    def none_there(self, pattern: str, parameters: _FusedParameters) -> Problem:
        """The pattern names modules, and none that can have an adapter."""
        matched = _matched(pattern, [*self.modules, *parameters.names])
        near = [name for name in self.linear if is_inside(name, matched, strict=True)]
        if not near:
            near = nearest(matched[0], self.linear, most=3)
        way_out = f"Linear layers there: {', '.join(near[:3])}." if near else ""
        what = f"'{pattern}' matches {len(matched)} module(s), none of them a linear layer ({matched[0]} …)"
        return Problem(what, key=TARGETS, way_out=way_out)


class _FusedParameters:
    """The fused parameters (E, …) of a model's experts. A bare last name means linear layers only: a fused parameter
    is named with its module (`experts.down_proj`), or by its module (`experts`).

    Args:
        model: Without adapters.
        single: Names of the layers of single experts stand for the fused parameters too.
    """

    def __init__(self, model: nn.Module, *, single: bool) -> None:
        self.all: list[str] = []
        self.frozen: set[str] = set()
        self._modules: dict[str, list[str]] = {}
        self._single: dict[str, str] = {}
        self._asked: dict[str, set[str]] = {}
        for module_name, module in fused_experts(model).items():
            own = []
            for name, parameter in module.named_parameters(module_name, recurse=False):
                if parameter.dim() == 3:
                    own.append(name)
                    if not parameter.requires_grad:
                        self.frozen.add(name)
            self.all += own
            self._modules[module_name] = own
            if single:
                self._single |= _names_of_single(module_name, own)

    @property
    def names(self) -> list[str]:
        """All that a pattern may match."""
        return [*self.all, *self._single]

    def named(self, pattern: str) -> set[str]:
        found = set()
        if "." in pattern:
            found.update(_matched(pattern, self.all))
        for module_name in _matched(pattern, self._modules):
            found.update(self._modules[module_name])
        for name in _matched(pattern, self._single):
            self._asked.setdefault(self._single[name], set()).add(name.rpartition(".")[2])
            found.add(self._single[name])
        return found

    def half_named(self) -> Iterator[Problem]:
        """Gate and up are one parameter: they can only be adapted together."""
        for parameter, asked in self._asked.items():
            if parameter.endswith("gate_up_proj") and len(asked) == 1:
                named = next(iter(asked))
                yield Problem(
                    f"'{named}' alone cannot be adapted: {parameter} holds gate and up",
                    key=TARGETS,
                    way_out=f"Name '{_OTHER_HALF[named]}' too.",
                )
                return

    def strengths(self, lora: LoraArguments) -> dict[str, Strength]:
        """Two layers in one parameter: PEFT gives it twice the rank at the same scale."""
        if any(parameter.endswith("gate_up_proj") for parameter in self._asked):
            return {"gate_up_proj": Strength(2 * lora.rank, 2 * lora.alpha)}
        return {}


def _names_of_single(module_name: str, parameters: Collection[str]) -> dict[str, str]:
    """Name that a layer of a single expert of this module would have → the fused parameter that holds it."""
    names = {}
    for single, fused in _SINGLE.items():
        parameter = f"{module_name}.{fused}"
        if parameter in parameters:
            names[f"{module_name}.{single}"] = parameter
    return names


def _matched(pattern: str, names: Collection[str] | Mapping[str, object]) -> list[str]:
    expression = compile_pattern(pattern, key=TARGETS, allow_suffix=True)
    return [name for name in names if expression.fullmatch(name)]


def _modules_to_save(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The outermost of the modules that the patterns name."""
    if not patterns:
        return []
    names = resolve_patterns(patterns, module_names(model), key=WHOLE, allow_suffix=True)
    whole = [name for name in names if not is_inside(name, names, strict=True)]
    if facts_of(model).kind.library == "diffusers":
        raise ConfigError(
            f"{', '.join(whole)}: diffusers' pipelines load adapters only",
            key=WHOLE,
            way_out="Name linear layers of it in target_modules instead.",
        )
    return whole


def _problem_of_frozen(pattern: str, frozen: Sequence[str]) -> Problem:
    return Problem(
        f"'{pattern}' matches only layers that model.freeze freezes ({frozen[0]} …)",
        key=TARGETS,
        way_out="Take it out, or free them in model.freeze.",
    )


def _in_both(name: str) -> Problem:
    return Problem(f"'{name}' is trained whole, as {WHOLE} says", key=TARGETS, way_out="Name it in one of them only.")


def _check_ties(model: nn.Module, targets: Sequence[str], whole: Sequence[str]) -> None:
    """A shared weight with an adapter at one of its places could not be merged; one that is trained whole at one place
    only would be another one there in the files."""
    for group in shared_parameters(model):
        homes = [name.rpartition(".")[0] for name in group]
        adapted = [home for home in homes if home in targets]
        trained = [home for home in homes if is_inside(home, whole)]
        if adapted:
            way_out = "Leave it out: its adapter could not be merged."
            raise _shares_its_weight(adapted[0], set(homes) - {adapted[0]}, TARGETS, way_out)
        if trained and len(trained) < len(homes):
            raise _shares_its_weight(trained[0], set(homes) - set(trained), WHOLE, "Name all of them, or none.")


def _shares_its_weight(home: str, others: Collection[str], key: str, way_out: str) -> ConfigError:
    quoted = ", ".join(f"'{other}'" for other in sorted(others))
    return ConfigError(f"'{home}' shares its weight with {quoted}", key=key, way_out=way_out)
