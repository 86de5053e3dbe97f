"""Takes a model apart: what this rank holds of it, and one runnable model for each of its stages.

The model's own forward stays as it is. Lists of layers keep their length, so indices and names stay those of the whole;
what another stage has is replaced by a placeholder. A stage is entered by a hook that puts what was received in the
place of its first layer's input, and left by an exception from the placeholder behind its last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.models.structure.cut_points import KEY
from mindspeed_mm.fsdp.models.structure.share import PlaceholderModule
from mindspeed_mm.fsdp.models.structure.ties import shared_parameters
from mindspeed_mm.fsdp.ops.stages import StageExit

_TABLES = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_TABLES_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class PlaceholderExit(PlaceholderModule):
    """Stands for the first module of the next stage."""

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Raise `StageExit`."""
        raise StageExit(hidden if hidden is not None else kwargs["hidden_states"])


class PlaceholderEmbedding(PlaceholderModule):
    """Stands for the token embedding: hidden states of the right shape, of zeros, for the code in front of the layers.

    Args:
        embedding: What it stands for.
        dtype: Of hidden states.
    """

    def __init__(self, embedding: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(embedding)
        weight = getattr(embedding, "base_layer", embedding).weight
        self.width, self.dtype = int(weight.shape[1]), dtype  # type: ignore[union-attr, arg-type]

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """(…, width) zeros for (…) token numbers."""
        return torch.zeros(*hidden.shape, self.width, dtype=self.dtype, device=hidden.device)


class ReceivedOutputs(PlaceholderModule):
    """Stands for a module whose outputs came along with the hidden states.

    Args:
        module: What it stands for.
        outputs: Gives them.
    """

    def __init__(self, module: nn.Module, outputs: Callable[[], Any]) -> None:
        super().__init__(module)
        self._outputs = outputs

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What was received."""
        return self._outputs()


def cut_to_rank(model: nn.Module, plan: StagePlan, rank: int, dtype: torch.dtype) -> dict[str, str]:
    """Leave of a model what a rank's stages have, in place; names stay. Shared weights whose ends stand on different
    stages become a copy on the later one.

    Args:
        model: Built and with adapters, parameters on meta; not sharded.
        plan: Of the whole model.
        rank: In the pipeline.
        dtype: Of hidden states.

    Returns:
        Own copy → name of the weight in the whole model.

    Raises:
        ConfigError: More than two modules on different stages share a weight.
    """
    own = set(plan.stages_of(rank))
    copies = untie(model, plan)
    for name, module in _parts(model, plan):
        if plan.owner(name) not in own:
            replace_module(model, name, _placeholder(name, module, plan.points.embedding, dtype))
    for name in _path_parameters(model, plan):
        if plan.owner(name) not in own:
            _drop_parameter(model, name)
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {copy: first for copy, first in copies.items() if copy in held}


def untie(model: nn.Module, plan: StagePlan) -> dict[str, str]:
    """Make weights that stages share a copy of its own on the later one, in place.

    Returns:
        Copy → name of the weight in the whole model.

    Raises:
        ConfigError: More than two modules on different stages share a weight.
    """
    copies: dict[str, str] = {}
    for first, *others in shared_parameters(model):
        apart = [name for name in others if plan.owner(name) != plan.owner(first)]
        if len(apart) > 1 or (apart and len(others) > 1):
            raise ConfigError(
                f"{first}, {', '.join(others)} are one weight on several stages: two ends can be tied, not more",
                key=KEY,
                way_out="Set it to 1.",
            )
        for name in apart:
            module_name, _, parameter_name = name.rpartition(".")
            weight = model.get_parameter(first)
            own = nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
            model.get_submodule(module_name)._parameters[parameter_name] = own
            copies[name] = first
    return copies


def _parts(model: nn.Module, plan: StagePlan) -> list[tuple[str, nn.Module]]:
    """The modules that belong to one stage as a whole: layers, those behind them, and all else that has parameters or
    lies beside what leads to the layers."""
    found: list[tuple[str, nn.Module]] = []
    for name in _path(plan):
        for child_name, child in model.get_submodule(name).named_children():
            full = f"{name}.{child_name}" if name else child_name
            is_single = full not in _path(plan) and full not in plan.points.behind
            is_whole = name == plan.points.layers or isinstance(child, PlaceholderModule)
            if is_single and (is_whole or next(child.parameters(), None) is not None):
                found.append((full, child))
    return found + [(name, model.get_submodule(name)) for name in plan.points.behind]


def _path(plan: StagePlan) -> list[str]:
    """Names of the modules around the layers, the root first, the list last."""
    parts = plan.points.layers.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def _path_parameters(model: nn.Module, plan: StagePlan) -> list[str]:
    """Names of the parameters that the modules around the layers hold themselves: marks of a model's own, tables."""
    return [
        f"{name}.{own}" if name else own
        for name in _path(plan)
        for own, parameter in model.get_submodule(name)._parameters.items()
        if parameter is not None
    ]


def _drop_parameter(model: nn.Module, name: str) -> None:
    """A parameter of a module that all stages have stays, where it is not owned, as a constant: forward code may read
    it."""
    module_name, _, parameter_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    parameter = module._parameters.pop(parameter_name)
    assert parameter is not None, name
    module.register_buffer(parameter_name, torch.zeros(parameter.shape, dtype=parameter.dtype), persistent=False)


def stage_of(part: nn.Module, plan: StagePlan, stage: int, dtype: torch.dtype) -> nn.Module:
    """One stage of a rank's part as a model of its own: modules around the layers are copies, with their hooks; layers
    and all other modules are shared with the part.

    Args:
        part: From `cut_to_rank`, with everything applied to it but sharding.
        plan: Of the whole model.
        stage: One that the part holds.
        dtype: Of hidden states.
    """
    model = _copied_path(part, plan)
    points, last = plan.points, plan.stages - 1
    for name, module in _parts(model, plan):
        if plan.owner(name) != stage:
            replace_module(model, name, _placeholder(name, module, points.embedding, dtype))
    for name in _path_parameters(model, plan):
        if plan.owner(name) != stage:
            _drop_parameter(model, name)
    if stage != last:
        end = plan.layers_of(stage).stop
        name = f"{points.layers}.{end}" if end < plan.layers else points.behind[0]
        replace_module(model, name, PlaceholderExit(model.get_submodule(name)))
    return model


def entry_of(model: nn.Module, plan: StagePlan, stage: int) -> nn.Module:
    """The module of a stage that takes what was received."""
    layers = plan.layers_of(stage)
    return model.get_submodule(f"{plan.points.layers}.{layers.start}" if layers else plan.points.behind[0])


def _placeholder(name: str, module: nn.Module, embedding: str, dtype: torch.dtype) -> nn.Module:
    if name == embedding:
        return module if isinstance(module, PlaceholderEmbedding) else PlaceholderEmbedding(module, dtype)
    return module if isinstance(module, PlaceholderModule) else PlaceholderModule(module)


def _copied_path(part: nn.Module, plan: StagePlan) -> nn.Module:
    copies: dict[str, nn.Module] = {name: _shallow(part.get_submodule(name)) for name in _path(plan)}
    for name, module in copies.items():
        parent, _, last = name.rpartition(".")
        if name:
            copies[parent]._modules[last] = module
    return copies[""]


def _shallow(module: nn.Module) -> nn.Module:
    """A module with the same children, parameters and hooks, in tables of its own."""
    copied = module.__new__(type(module))
    copied.__dict__ = dict(vars(module))
    for table in (*_TABLES, *_TABLES_OF_HOOKS):
        copied.__dict__[table] = copied.__dict__[table].copy()
    copied.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    return copied


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one that has the name."""
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = module


def stage_owners(whole: nn.Module, plan: StagePlan) -> Mapping[str, int]:
    """Parameter or persistent buffer of the whole model → the pipeline rank that keeps it in checkpoints."""
    return {name: plan.rank_of(plan.owner(name)) for name in whole.state_dict(keep_vars=True)}
