"""What a user's model derives from to be sharded by FSDP2: `FSDP2Mixin`, and the functions that its overrides call.

A model that overrides nothing is sharded by the engine, as `fsdp2_config.yaml` says. One that overrides `_fully_shard`
shards itself; gradients, clipping, checkpoints and the rest are the engine's all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import (
    ShardOptions,
    replicate_modules,
    root_options,
    unit_options,
)
from mindspeed_mm.fsdp.distributed.sharding.visible_outputs import RootOutput, check_outputs
from mindspeed_mm.fsdp.features.memory.recompute import recompute_modules
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, forwards_of
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan
from mindspeed_mm.fsdp.train.provider.live import LIVE

UserConfig: TypeAlias = Any
"""A configuration of the user's code: whatever object has the attributes that are read of it."""

_SHARDED: ContextVar[FSDP2Mixin | None] = ContextVar("model that shards itself", default=None)
"""The model whose `_fully_shard` runs: the functions below work on it where they are given none."""


class FSDP2Mixin:
    """Lets a module shard itself. It has no `__init__` of its own, so bases may be listed in any order."""

    fsdp2_config: UserConfig = None
    """The keys of `fsdp2_config.yaml` as attributes, while the model is sharded and afterwards."""
    fsdp2_kwargs: dict[str, Any] | None = None
    """Arguments of torch's `fully_shard`."""

    def freeze(self, config: UserConfig) -> None:
        """Freeze modules; called before sharding. What `freeze` of the configuration names is frozen already."""

    def post_meta_init(self) -> None:
        """Called when a model that was built on the meta device has memory and values."""

    def shards_itself(self) -> bool:
        """Whether `_fully_shard` is overridden. The engine shards all other models."""
        return type(self)._fully_shard is not FSDP2Mixin._fully_shard

    def fully_shard(self, process_group: object = None, fsdp2_config_path: object = None, **kwargs: object) -> bool:
        """Shard the model: `_pre_fully_shard`, `_fully_shard`, `_post_fully_shard`.

        Args:
            process_group: The plan of the engine, which calls this; a process group is not read.
            fsdp2_config_path: Not read: the file has become the plan.
            kwargs: Handed on to `_pre_fully_shard`.

        Returns:
            True: it is done.
        """
        model = cast(nn.Module, self)
        self._pre_fully_shard(process_group, fsdp2_config_path, **kwargs)
        assert self.fsdp2_kwargs is not None
        output = RootOutput(model)
        with _at_hand(self):
            self._fully_shard(self.fsdp2_kwargs, self.fsdp2_config)
        if not isinstance(model, FSDPModule):  # what no module below it holds is gathered by the root
            options = cast(ShardOptions, self.fsdp2_kwargs)
            fully_shard(model, **root_options(options, _plan_of(process_group)))
        output.give_back()
        self._post_fully_shard()
        return True

    def _pre_fully_shard(self, process_group: object, fsdp2_config_path: object, **kwargs: object) -> None:
        """Set `fsdp2_kwargs`, the arguments of torch's `fully_shard`, and `fsdp2_config` from the engine's plan;
        `kwargs` override single arguments."""
        plan, state = _plan_of(process_group), get_parallel_state()
        several = state.axis_size("dp_replicate") > 1
        mesh = state.get_hsdp_device_mesh() if several else state.axis_mesh("fsdp")
        self.fsdp2_kwargs = {**unit_options(plan, mesh), **kwargs}
        self.fsdp2_config = _as_config(plan, state.axis_size("fsdp"))

    def _fully_shard(self, fsdp2_kwargs: Mapping[str, object] | None = None, fsdp2_config: UserConfig = None) -> None:
        """Override it to shard the model in a way that the configuration cannot say."""
        set_recompute_modules_to_wrap()
        set_fullyshard_modules_to_wrap()
        config = fsdp2_config or self.fsdp2_config
        set_modules_to_prefetch(config.num_to_forward_prefetch, config.num_to_backward_prefetch)

    def _post_fully_shard(self) -> None:
        """Called when the model is sharded."""

    def to_empty_if_needed(self, *, device: torch.device | str, recurse: bool = True) -> nn.Module:
        """Give parameters memory, without values, where they are on the meta device."""
        model = cast(nn.Module, self)
        if any(parameter.is_meta for parameter in model.parameters(recurse=recurse)):
            model.to_empty(device=device, recurse=recurse)
        return model


class NormalInitMixin:
    """Weights from scratch, module by module, as transformers' models have it: `_init_weights(module)` sets what a
    module itself holds."""

    def _init_weights(self, module: nn.Module, std: float = 0.02) -> None:
        """Weights are normal with deviation `std`, those of norms 1, biases 0; a parameter of another name by its
        shape: a matrix is a weight, a vector a bias.

        Args:
            module: Its own parameters are set, not those of modules below it.
            std: Of weights.
        """
        is_norm = "norm" in type(module).__name__.lower()
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                if is_norm and "bias" not in name:
                    parameter.fill_(1.0)
                elif "bias" in name or (parameter.ndim < 2 and "weight" not in name):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, std)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()

    def init_weights(self) -> None:
        """Call `_init_weights` for every module of the model, the model itself included."""
        for module in cast(nn.Module, self).modules():
            self._init_weights(module)


WeightInitMixin = NormalInitMixin
"""The name that users' code imports; the engine's own base of that name sets what torch sets."""


def set_recompute_modules_to_wrap(
    module: nn.Module | None = None, config: UserConfig = None, use_reentrant: bool | None = None
) -> None:
    """Recompute what `recompute_modules` names; the engine has done so already for what the configuration names.

    Args:
        module: The model; the one that is being sharded when None.
        config: Has `recompute_modules`; the model's own when None.
        use_reentrant: As of torch's checkpoint; as the configuration says when None.
    """
    model = _model(module)
    config = config or model.fsdp2_config
    if use_reentrant is None:
        use_reentrant = bool(_setting(config, "use_reentrant"))
    names = _named_by(model, config, "recompute_modules")
    waiting = [name for name in names if not _is_recomputed(model, name)]
    recompute_modules(model, waiting, use_reentrant=use_reentrant)


def set_fullyshard_modules_to_wrap(
    module: nn.Module | None = None, config: UserConfig = None, **fsdp2_kwargs: Any
) -> None:
    """Shard what `sub_modules_to_wrap` names, the innermost first.

    Args:
        module: The model; the one that is being sharded when None.
        config: Has `sub_modules_to_wrap` and `ignored_modules`; the model's own when None.
        fsdp2_kwargs: Of torch's `fully_shard`; the model's own when there are none.
    """
    model = _model(module)
    config = config or model.fsdp2_config
    options = fsdp2_kwargs or dict(model.fsdp2_kwargs or {})
    ignored: set[nn.Parameter] = set()
    for name in _named_by(model, config, "ignored_modules"):
        left_out = model.get_submodule(name)
        is_trained = any(parameter.requires_grad for parameter in left_out.parameters())
        if is_trained and not isinstance(left_out, FSDPModule):  # whole on every rank, and in the same precision
            replicate_modules([left_out], get_parallel_state().build_copies_device_mesh(), _plan_of(None))
        ignored.update(left_out.parameters())
    if ignored:
        options["ignored_params"] = ignored | set(options.get("ignored_params") or ())
        root = _SHARDED.get()
        if root is not None and root.fsdp2_kwargs is not None:  # the root must leave them alone, too
            root.fsdp2_kwargs["ignored_params"] = options["ignored_params"]
    names = _named_by(model, config, "sub_modules_to_wrap")
    waiting: dict[str, nn.Module] = {}
    for name in sorted(names, key=lambda name: name.count("."), reverse=True):
        inner = model.get_submodule(name)
        if not isinstance(inner, FSDPModule):
            waiting[name] = inner
    check_outputs(waiting.items())
    for inner in waiting.values():
        fully_shard(inner, **options)


def set_modules_to_prefetch(*given: object, n_forward: int | None = None, n_backward: int | None = None) -> None:
    """Gather modules ahead of their turn, in the order in which the model holds them.

    Args:
        given: `(model, config, forward, backward)`, or `(forward, backward)` while a model is being sharded: how many
            modules are gathered ahead in the forward and in the backward pass.
        n_forward: The first number, by name.
        n_backward: The second.
    """
    numbers: list[int] = []
    objects: list[Any] = []
    for each in (*given, n_forward, n_backward):
        if isinstance(each, int):
            numbers.append(each)
        elif each is not None:
            objects.append(each)
    model = _model(objects[0] if objects else None)
    config = objects[1] if len(objects) > 1 else model.fsdp2_config
    forward, backward = [*numbers, 0, 0][:2]
    wrapped = [inner for inner in get_submodules_by_path(model, config) if isinstance(inner, FSDPModule)]
    for position, inner in enumerate(wrapped):
        if ahead := wrapped[position + 1 : position + 1 + forward]:
            inner.set_modules_to_forward_prefetch(ahead)
        # The backward pass goes the other way: the nearest of those before it comes first.
        if behind := wrapped[max(position - backward, 0) : position][::-1]:
            inner.set_modules_to_backward_prefetch(behind)


def get_submodules_by_path(module: nn.Module | None, config: UserConfig) -> list[nn.Module]:
    """The modules that `sub_modules_to_wrap` names, in the order of the model; of a list of patterns, those.

    Args:
        module: The model; the one that is being sharded when None.
        config: Has `sub_modules_to_wrap`, or is a list of patterns.
    """
    model = _model(module)
    if isinstance(config, list | tuple):
        patterns = config
    else:
        patterns = _setting(config, "sub_modules_to_wrap") or ()
    return [model.get_submodule(name) for name in _matching(model, patterns, "sub_modules_to_wrap")]


@contextmanager
def _at_hand(model: FSDP2Mixin) -> Iterator[None]:
    token = _SHARDED.set(model)
    try:
        yield
    finally:
        _SHARDED.reset(token)


def _model(given: nn.Module | None) -> Any:
    """The model of the user, which is a module and has the attributes of `FSDP2Mixin`."""
    model = given if given is not None else _SHARDED.get()
    if model is None:
        raise ConfigError(
            "no model is being sharded", key="fsdp2", way_out="Call it in _fully_shard, or hand the model over."
        )
    return model


def _setting(config: UserConfig, key: str) -> Any:
    """What a user's configuration says, or None: it need not have every attribute that is read."""
    return getattr(config, key, None)


def _named_by(model: nn.Module, config: UserConfig, key: str) -> list[str]:
    """The modules that a key of the configuration names by patterns, in the model's order."""
    return _matching(model, _setting(config, key) or (), key)


def _matching(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    if not patterns:
        return []
    names = [name for name, _ in model.named_modules() if name]
    chosen = set(resolve_patterns(tuple(patterns), names, key=key))
    return [name for name in names if name in chosen]


def _is_recomputed(model: nn.Module, name: str) -> bool:
    return any(each.kind is ForwardKind.RECOMPUTE for each in forwards_of(model.get_submodule(name)))


def _plan_of(given: object) -> FsdpPlan:
    """The engine's plan: what it handed over, or else that of the run."""
    if isinstance(given, FsdpPlan):
        return given
    if LIVE.trainer is not None:
        return LIVE.trainer.arguments.parallel.fsdp_plan
    return FsdpPlan()


def _as_config(plan: FsdpPlan, shards: int) -> SimpleNamespace:
    """The engine's plan under the names of `fsdp2_config.yaml`."""
    features = FeatureArguments()
    if LIVE.trainer is not None:
        features = LIVE.trainer.arguments.features
    recompute = features.recompute_plan
    return SimpleNamespace(
        sharding_size=shards,
        sub_modules_to_wrap=list(plan.apply_modules),
        ignored_modules=list(plan.ignored_modules),
        recompute_modules=list(recompute.apply_modules) if features.recompute else [],
        use_reentrant=recompute.use_reentrant,
        param_dtype=plan.param_dtype,
        reduce_dtype=plan.reduce_dtype,
        output_dtype=plan.output_dtype,
        cast_forward_inputs=plan.cast_forward_inputs,
        reshard_after_forward=plan.reshard_after_forward,
        offload_to_cpu=plan.cpu_offload,
        pin_memory=plan.pin_memory,
        num_to_forward_prefetch=plan.num_to_forward_prefetch,
        num_to_backward_prefetch=plan.num_to_backward_prefetch,
    )
