"""Applies the `parallel` section of a configuration to a model, in place.

The order is that of `fsdp/train/assemble.py`: pipeline split → tensor → expert → context, then sharding (units, then
the root), then prefetch order. No step renames a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.fsdp.distributed.context.apply import ContextParallel, apply_context_parallel
from mindspeed_mm.fsdp.distributed.expert.apply import apply_expert_parallel, shard_experts
from mindspeed_mm.fsdp.distributed.expert.plan import (
    ExpertPlan,
    check_inside,
    is_spread,
    padding_warnings,
    undivided,
)
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.distributed.pipeline.apply import Pipeline, check_units
from mindspeed_mm.fsdp.distributed.pipeline.stage import StageModule
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import (
    Unit,
    build_expert_options,
    holds_wrapped,
    plan_units,
    replicate_modules,
    set_gradient_sync,
    set_prefetch,
    shard_units,
    sum_gradients,
)
from mindspeed_mm.fsdp.distributed.tensor.apply import apply_tensor_parallel
from mindspeed_mm.fsdp.distributed.tensor.plan import TensorPlan
from mindspeed_mm.fsdp.distributed.towers.groups import on_tower_mesh, unsummed_towers
from mindspeed_mm.fsdp.distributed.towers.media import MediaSharing, share_media
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import check_sharded_bytes
from mindspeed_mm.fsdp.models.structure.share import own_names, whole_of
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan, ParallelArguments
from mindspeed_mm.fsdp.params.sizes.encoder import EncoderSizes, resolve_encoder_sizes

__all__ = ["ParallelApplier", "set_gradient_sync"]


class ParallelApplier:
    """Applies a parallel plan to a model; `applier(model)` takes its own steps in order.

    Args:
        parallel_args: The `parallel` section.
        shard_modules: The model's own list of modules to wrap one by one, in execution order. Patterns in
            `fsdp_plan.apply_modules` win over it.
        tie_groups: Names of modules that share a parameter.
        towers: Names of towers, whose patches context parallelism spreads as well.
        gather_logits: Under tensor parallelism, let the output head return the whole vocabulary on every rank.
        expert_copies: Under expert parallelism, copies of busy experts that a rank may hold.
        pipeline: Of `split_into_stages`, when the model is this rank's part of a pipeline: its stages are sharded.
    """

    def __init__(
        self,
        parallel_args: ParallelArguments,
        *,
        shard_modules: Sequence[str] = (),
        tie_groups: Sequence[Sequence[str]] = (),
        towers: Collection[str] = (),
        gather_logits: bool = False,
        expert_copies: int = 0,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._parallel = parallel_args
        self._plan = parallel_args.fsdp_plan
        self._shard_modules = shard_modules
        self._tie_groups = tie_groups
        self._towers, self._gather_logits, self._expert_copies = sorted(towers), gather_logits, expert_copies
        self.tensor_plan: TensorPlan | None = None
        """How layers were split over ranks, if they were."""
        self.experts: ExpertPlan | None = None
        """How experts were spread over ranks, if they were."""
        self.warnings: list[str] = []
        """Sentences for the user about what the plan costs."""
        self.context: ContextParallel | None = None
        """What the training step must know of sequences spread over ranks, if they are."""
        self.media: MediaSharing | None = None
        """Towers that encode the media of other ranks, if they do."""
        self._encoder: EncoderSizes | None = None
        self._pipeline = pipeline
        self._units: list[Unit] = []
        self._sharded: list[tuple[nn.Module, list[Unit]]] = []
        self._model_shards_itself = False

    def __call__(self, model: nn.Module) -> nn.Module:
        """All steps of this applier. The parallel state exists; parameters are on meta or real."""
        self.pre_fully_shard_apply(model)
        self.fully_shard_apply(model)
        self.post_fully_shard_apply(model)
        return model

    def pre_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps before sharding, each on one-device modules: tensor, expert, then context parallelism, then towers
        that are laid out otherwise.

        Raises:
            ConfigError: The plan does not fit the model, or asks for what this version does not have: sharding alone
                would train another model than the plan says.
        """
        parallel = self._parallel
        if (stages := parallel.pipeline_parallel_size) > 1 and self._pipeline is None:
            raise ConfigError(
                f"{stages}, and the model was not split into stages before",
                key="parallel.pipeline_parallel_size",
                way_out="Train with the trainer, or call split_into_stages first.",
            )
        state = get_parallel_state()
        self._encoder = resolve_encoder_sizes(parallel, state.sizes.dp)
        if parallel.tensor_parallel_size > 1:
            mesh = state.get_tp_device_mesh()
            self.tensor_plan = apply_tensor_parallel(
                model, parallel.tp_plan, mesh, gather_logits=self._gather_logits, whole=self._whole_towers()
            )
        if is_spread(parallel):
            self.experts = apply_expert_parallel(model, parallel, state, copies=self._expert_copies)
        if parallel.ring_attention_size * parallel.ulysses_parallel_size > 1:
            follow = self._encoder is None or self._encoder.parts == 1
            self.context = apply_context_parallel(model, state, own_names(model, self._towers if follow else ()))
        if self._encoder is not None:
            self.media = share_media(model, self._towers, self._encoder, state)

    def fully_shard_apply(self, model: nn.Module) -> None:
        """Shard parameters, gradients and optimizer state; gradients are summed.

        A model's own `fully_shard(fsdp_plan) -> bool` is asked first; True means that it has done the work.
        """
        own_hook = getattr(model, "fully_shard", None)
        self._model_shards_itself = own_hook is not None and own_hook(self._plan)
        if self._model_shards_itself and self._whole_towers():
            raise unsummed_towers(f"{type(model).__name__} shards itself")
        roots = [model] if self._pipeline is None else self._pipeline.stages
        for root in roots:
            if not self._model_shards_itself:
                self._shard(root, model)
            sum_gradients(root)

    def post_fully_shard_apply(self, model: nn.Module) -> None:
        """Set the order of prefetching.

        A model's own `set_modules_to_prefetch(fsdp_plan, ep_plan) -> bool` is asked first.
        """
        own_hook = getattr(model, "set_modules_to_prefetch", None)
        if own_hook is not None and own_hook(self._plan, self._parallel.ep_plan):
            return
        if not self._model_shards_itself:
            forward, backward = self._plan.num_to_forward_prefetch, self._plan.num_to_backward_prefetch
            hooked = self._hook_modules(model)
            for root, units in self._sharded:
                set_prefetch(root, units, forward, backward, _names_in(root, hooked))

    def _shard(self, root: nn.Module, model: nn.Module) -> None:
        """Shard `root`: the model, or a stage, which holds some of the model's modules."""
        state = get_parallel_state()
        # Patterns are judged on one rank, too: the configuration is the same one.
        ignored, modules = _names_in(root, self._ignored_modules(model)), self._module_names(model)
        if state.sizes.world == 1 and changes_nothing_on_one_rank(self._plan):
            return
        check_sharded_bytes(model)
        mesh = state.get_hsdp_device_mesh() if state.is_hsdp_enable() else state.get_fsdp_device_mesh()
        trained_whole = [
            name for name in ignored if any(p.requires_grad for p in root.get_submodule(name).parameters())
        ]
        if trained_whole and state.sizes.world > 1:
            replicate_modules(map(root.get_submodule, trained_whole), state.build_copies_device_mesh())
        groups = [names for group in self._tie_groups if (names := _names_in(root, group))]
        self._units = plan_units(_names_in(root, modules), groups, ignored)
        if whole_towers := self._whole_towers():
            self._units = on_tower_mesh(root, self._units, whole_towers, ignored, state)
        ignored_params = {p for name in ignored for p in root.get_submodule(name).parameters()}
        cut_dims = self._shard_experts(root, ignored, mesh.size(mesh.ndim - 1))
        shard_units(root, self._units, self._plan, mesh, ignored_params, cut_dims)
        self._sharded.append((root, self._units))

    def _shard_experts(self, model: nn.Module, ignored: Sequence[str], shards: int) -> dict[nn.Parameter, int]:
        """Experts that are spread are wrapped here, inside of what is wrapped later. Returned is, of the others, which
        dimension to cut where the first would be padded."""
        if self.experts is None:
            self.warnings += padding_warnings(model, shards)
            return {parameter: dim for _, parameter, dim in undivided(model, shards) if dim is not None}
        wrapped = [name for unit in self._units for name in unit.names]
        check_inside(self.experts.modules, lambda name: is_inside(name, wrapped) and not is_inside(name, ignored))
        self._units = [unit for unit in self._units if not set(unit.names) & set(self.experts.modules)]
        shard_experts(model, self.experts, get_parallel_state(), **build_expert_options(self._plan))
        return {}

    def _whole_towers(self) -> Sequence[str]:
        """Towers that are not split although the decoder is: ranks that split it encode different media."""
        return self._towers if self._encoder is not None and self._encoder.copies > 1 else ()

    def _module_names(self, model: nn.Module) -> Sequence[str]:
        if not self._plan.apply_modules:
            return self._shard_modules
        key = "parallel.fsdp_plan.apply_modules"
        names = resolve_patterns(self._plan.apply_modules, _names(whole_of(model)), key=key)
        if self._pipeline is not None:
            check_units(names, self._pipeline.plan, key)
        return names

    def _hook_modules(self, model: nn.Module) -> list[str]:
        """Wrapped modules with wrapped modules inside, which `hook_modules` gathers together."""
        if not self._plan.hook_modules:
            return []
        key = "parallel.fsdp_plan.hook_modules"
        names = resolve_patterns(self._plan.hook_modules, _names(whole_of(model)), key=key)
        for root, units in self._sharded:
            wrapped = [unit.names[0] for unit in units if len(unit.names) == 1]
            for name in _names_in(root, names):
                if name not in wrapped:
                    raise ConfigError(
                        f"'{name}' is not wrapped itself",
                        key=key,
                        way_out=f"Name modules of fsdp_plan.apply_modules, e.g. '{wrapped[0]}'." if wrapped else "",
                    )
                if not holds_wrapped(root.get_submodule(name)):
                    raise ConfigError(
                        f"'{name}' holds no module that is wrapped on its own",
                        key=key,
                        way_out="It is for blocks with experts that are spread (expert_parallel_size above 1), or with "
                        "modules of fsdp_plan.apply_modules inside.",
                    )
        return names

    def _ignored_modules(self, model: nn.Module) -> list[str]:
        """The outermost of the modules that `ignored_modules` names."""
        if not self._plan.ignored_modules:
            return []
        names = resolve_patterns(self._plan.ignored_modules, _names(model), key="parallel.fsdp_plan.ignored_modules")
        return [name for name in names if not is_inside(name, set(names) - {name})]


def changes_nothing_on_one_rank(plan: FsdpPlan) -> bool:
    """Whether sharding over one rank would only cost time: for gathering what is there already it takes a third of the
    step of a small model (`python -m benchmarks step_time`). Precision and offload are its work on one rank too."""
    return not plan.cpu_offload and {plan.param_dtype, plan.reduce_dtype, plan.output_dtype} == {None}


def _names_in(root: nn.Module, names: Sequence[str]) -> list[str]:
    """Names of a model's modules as they are below `root`: all of them below the model itself, below a stage those
    that it holds."""
    return root.names_of(names) if isinstance(root, StageModule) else list(names)


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]
