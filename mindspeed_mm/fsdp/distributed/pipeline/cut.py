"""Takes a model apart: what this rank holds of it, and one runnable model for each of its stages.

The model's own forward stays as it is. Lists of layers keep their length, so indices and names stay those of the whole;
what another stage has is replaced by a placeholder. A stage is entered by a hook that puts what was received in the
place of its first layer's input, and left by an exception from the placeholder behind its last layer.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.models.structure.stages import PlaceholderModule, StageExit
from mindspeed_mm.fsdp.ops.forward_stack import Args, Kwargs
from mindspeed_mm.fsdp.utils.model_parts import shared_parameters

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers", *_HOOKS)
_TABLES_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class PlaceholderLayer(PlaceholderModule):
    """Stands for a layer of another stage: returns what it is given, as the layer returns it.

    Args:
        layer: What it stands for.
        streams: The arguments that the layer returns changed, in the order in which it returns them.
    """

    def __init__(self, layer: nn.Module, streams: tuple[str, ...]) -> None:
        super().__init__(layer)
        self.streams = streams
        self.arguments = arguments_of(layer)

    def given(self, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
        """The hidden states among the arguments of a call."""
        return hidden_among(self.arguments, self.streams, args, kwargs)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        streams = self.given(args, kwargs)
        if len(self.streams) > 1:
            return streams
        return streams[0]


class PlaceholderExit(PlaceholderLayer):
    """Stands for the first module of the next stage."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `StageExit` with the hidden states among the arguments, which leaves the stage."""
        raise StageExit(*self.given(args, kwargs))


class PlaceholderFront(PlaceholderModule):
    """Stands for a module in front of the layers, on the later stages: returns zeros in the shapes of its outputs, for
    the code between it and the layers. Shapes are found by a copy of the module without memory.

    Args:
        module: What it stands for, not sharded.
        dtype: Of hidden states.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._of = (_without_memory(module, dtype),)  # in a tuple: it is no part of the stage
        self._dtype = dtype

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = tensors_among((args, kwargs))[0].device
        meta_args, meta_kwargs = tree_map_only(Tensor, partial(_on_meta, dtype=self._dtype), (args, kwargs))
        with torch.device("meta"):
            shaped = self._of[0](*meta_args, **meta_kwargs)
        return tree_map_only(Tensor, lambda each: self._filled(each, device), shaped)

    def _filled(self, shaped: Tensor, device: torch.device) -> Tensor:
        return torch.zeros(shaped.shape, dtype=shaped.dtype, device=device)


class ReceivedOutputs(PlaceholderFront):
    """Stands for a module whose outputs came along with the hidden states.

    Args:
        front: What stands for it until now.
        received: Gives the tensors that came along, one after the other.
    """

    def __init__(self, front: PlaceholderFront, received: Callable[[], Tensor]) -> None:
        super(PlaceholderFront, self).__init__(front)
        self._of, self._dtype = front._of, front._dtype
        self._received = received

    def _filled(self, shaped: Tensor, device: torch.device) -> Tensor:
        return self._received()


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's forward, as its class has it."""
    if isinstance(module, PlaceholderLayer):
        return module.arguments
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def hidden_among(arguments: Sequence[str], streams: Sequence[str], args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    """The hidden states of a call: its arguments of these names; without names its first one.

    Args:
        arguments: Of the forward that is called.
        streams: Names of the hidden states; one that is no argument stands for the first.
        args: Of the call.
        kwargs: Of the call.
    """
    found = []
    for name in streams or ("hidden_states",):
        place = arguments.index(name) if name in arguments else 0
        found.append(args[place] if place < len(args) else kwargs[name])
    return tuple(found)


def _without_memory(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on meta, its floating-point weights in `dtype`, without hooks."""
    memo: dict[int, object] = {}  # what `deepcopy` takes in the place of the object with this id
    for each in module.modules():
        for table in (*_HOOKS, *_TABLES_OF_HOOKS):
            memo[id(vars(each)[table])] = OrderedDict()
    for parameter in module.parameters():
        own = torch.empty_like(parameter, dtype=_dtype_of(parameter, dtype), device="meta")  # a DTensor stays one
        memo[id(parameter)] = nn.Parameter(own, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = _on_meta(buffer, dtype)
    return copy.deepcopy(module, memo)


def _on_meta(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor's shape without memory; `dtype` for floating-point numbers."""
    return torch.empty(tensor.shape, dtype=_dtype_of(tensor, dtype), device="meta")


def _dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    if tensor.is_floating_point():
        return dtype
    return tensor.dtype


def tensors_among(values: object) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


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
            replace_module(model, name, _placeholder(name, module, plan, dtype))
    for name in _path_parameters(model, plan):
        if plan.owner(name) not in own:
            _drop_parameter(model, name)
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {copy: first for copy, first in copies.items() if copy in held}


def untie(model: nn.Module, plan: StagePlan) -> dict[str, str]:
    """Make weights that stages share a copy of its own on the later one, in place.

    Returns:
        Copy → name of the weight in the whole model.
    """
    copies: dict[str, str] = {}
    for first, *others in shared_parameters(model):
        for name in plan.apart(first, others):
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
            is_whole = name in plan.points.layers or isinstance(child, PlaceholderModule)
            if is_single and (is_whole or next(child.parameters(), None) is not None):
                found += _called(full, child)
    return found + [(name, model.get_submodule(name)) for name in plan.points.behind]


def all_in_front(model: nn.Module, plan: StagePlan, dtype: torch.dtype) -> nn.Module:
    """A whole model without layers, without memory: what is called in front of the layers returns zeros, layers return
    what they are given, and behind them `StageExit` is raised.

    Args:
        model: Whole; it stays as it is.
        plan: Its stages.
        dtype: Of hidden states.
    """
    skeleton = _copied_path(model, plan)
    for name, module in _parts(skeleton, plan):
        replace_module(skeleton, name, _placeholder(name, module, plan, dtype))
    for name in _path_parameters(skeleton, plan):
        _drop_parameter(skeleton, name)
    end = plan.points.behind[0]
    replace_module(skeleton, end, PlaceholderExit(model.get_submodule(end), ()))
    return skeleton


def _called(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What is called of a module: of a list or a table of modules each of them."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [(name, module)]
    found = []
    for inner, child in module.named_children():
        found += _called(f"{name}.{inner}", child)
    return found


def _path(plan: StagePlan) -> list[str]:
    """Names of the modules around the layers, the root first, the lists last."""
    around: dict[str, None] = {}
    for name in plan.points.layers:
        parts = name.split(".")
        for end in range(len(parts) + 1):
            around[".".join(parts[:end])] = None
    return list(around)


def _path_parameters(model: nn.Module, plan: StagePlan) -> list[str]:
    """Names of the parameters that the modules around the layers hold themselves: marks of a model's own, tables."""
    found = []
    for name in _path(plan):
        own = model.get_submodule(name).named_parameters(name, recurse=False, remove_duplicate=False)
        found += [parameter_name for parameter_name, _ in own]
    return found


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
    last = plan.stages - 1
    for name, module in _parts(model, plan):
        if plan.owner(name) != stage:
            replace_module(model, name, _placeholder(name, module, plan, dtype))
    for name in _path_parameters(model, plan):
        if plan.owner(name) != stage:
            _drop_parameter(model, name)
    if stage != last:
        name = _entry_name(plan, stage + 1)
        replace_module(model, name, PlaceholderExit(model.get_submodule(name), plan.streams_into(stage + 1)))
    return model


def entry_of(model: nn.Module, plan: StagePlan, stage: int) -> nn.Module:
    """The module of a stage that takes what was received."""
    return model.get_submodule(_entry_name(plan, stage))


def _entry_name(plan: StagePlan, stage: int) -> str:
    layers = plan.layers_of(stage)
    if layers:
        return plan.layers[layers.start]
    return plan.points.behind[0]


def _placeholder(name: str, module: nn.Module, plan: StagePlan, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, PlaceholderModule):
        return module
    if name in plan.layers:
        return PlaceholderLayer(module, plan.points.layers[name.rpartition(".")[0]])
    is_behind = is_inside(name, plan.points.behind)
    # Towers of a language model, its only other modules, are not called on later stages: their media are not there.
    is_called = name == plan.points.embedding or not plan.points.embedding
    if is_called and not is_behind:
        return PlaceholderFront(module, dtype)
    return PlaceholderModule(module)


def _copied_path(part: nn.Module, plan: StagePlan) -> nn.Module:
    """The modules around the layers as copies, and so the lists and tables of modules beside them, in which single
    modules are replaced."""
    copies: dict[str, nn.Module] = {}
    for name in _path(plan):
        _copy_into(copies, name, part.get_submodule(name))
        for child_name, child in part.get_submodule(name).named_children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                _copy_into(copies, f"{name}.{child_name}" if name else child_name, child)
    return copies[""]


def _copy_into(copies: dict[str, nn.Module], name: str, module: nn.Module) -> None:
    if name in copies:
        return
    copies[name] = _shallow(module)
    parent, _, last = name.rpartition(".")
    if name:
        copies[parent]._modules[last] = copies[name]


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
