"""Repeated blocks compiled one by one by torch.compile, in place.

The hooks of sharding run outside of the graph, as plain Python. Blocks of one class share their graphs.

Within recomputation, offloading and slicing, whatever they do to a block: their own code is not traced. Only selective
recomputation, which asks of each operation whether to keep it, is compiled together with what it recomputes.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.compiled_calls import CompiledForward, CompiledKind, CountedBackend
from mindspeed_mm.fsdp.ops.forward_stack import Forward, ForwardKind, replace_forward
from mindspeed_mm.fsdp.ops.host_values import draw_graph_borders
from mindspeed_mm.fsdp.params.feature_args import CompilePlan
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, module_names

BACKEND_KEY = "features.compile_plan.backend"
MODE_KEY = "features.compile_plan.mode"
MODULES_KEY = "features.compile_plan.apply_modules"
_READS_THE_DEVICE = frozenset({"tolist", "item", "nonzero"})


@dataclass(frozen=True)
class CompiledBlocks:
    """The kinds of blocks of a model that are compiled: a fact of the model, for those who count."""

    kinds: tuple[CompiledKind, ...]

    def counts(self) -> dict[str, int]:
        """Most compilations of a block, calls that graphs were to compute, and those in which one ran."""
        return {
            "compilations": max((kind.compilations for kind in self.kinds), default=0),
            "calls": sum(kind.calls for kind in self.kinds),
            "compiled_calls": sum(kind.compiled_calls for kind in self.kinds),
        }

    def describe(self) -> str:
        """Return a phrase for the log: blocks by kind, compilations of one, and how many calls graphs computed."""
        blocks, counts = ", ".join(f"{kind.blocks} {kind.name}" for kind in self.kinds), self.counts()
        return (
            f"{blocks}: at most {counts['compilations']} compilations of a block, {counts['compiled_calls']:,} of "
            f"{counts['calls']:,} calls ran compiled"
        )

    def given_up(self) -> dict[str, str]:
        """Name of a kind → why calls of it compute by plain operations; kinds of which none does are absent."""
        return {kind.name: kind.reason for kind in self.kinds if kind.reason}


def compile_modules(
    model: nn.Module,
    plan: CompilePlan,
    names: Sequence[str],
    kind: ForwardKind = ForwardKind.COMPILE,
    *,
    most: int | None = None,
) -> CompiledBlocks:
    """Compile modules' forward passes at their first call; call it before sharding. `facts_of(model)` keeps what is
    returned.

    Args:
        model: Parameters on meta or real; of a pipeline, this rank's part.
        plan: Compiler and its settings, checked by `check_backend`.
        names: Of the modules, from `modules_to_compile`.
        kind: `COMPILE_RECOMPUTED` around what computes modules again.
        most: Compilations of a block after which calls that fit no graph compute by plain operations, as do calls
            without gradients and graphs that the backend fails on; None: everything is compiled or fails.
    """
    draw_graph_borders()
    kinds: dict[object, CompiledKind] = {}
    for name in names:
        module = model.get_submodule(name)
        alike = what_it_computes(module)
        if alike not in kinds:
            backend = CountedBackend(plan.backend, plan.mode, forgives=most is not None)
            kinds[alike] = CompiledKind(type(module).__name__, backend, plan.dynamic, most)
        kinds[alike].blocks += 1
        for inner in readers_of_the_device(module):
            replace_forward(inner, kind, RemadeForward(inner.forward, torch.compiler.disable))
        replace_forward(module, kind, CompiledForward(module.forward, kinds[alike]))
    compiled = CompiledBlocks(tuple(kinds.values()))
    facts_of(model).note(compiled)
    return compiled


def what_it_computes(block: nn.Module) -> object:
    """What blocks have in common that can share graphs: classes and settings of all that they are made of, shapes and
    types of their parameters, and which of these are trained. Numbers are left out: the place of a block is one."""
    found: list[object] = []
    for name, module in block.named_modules():
        settings = tuple(sorted((key, value) for key, value in vars(module).items() if isinstance(value, str | bool)))
        absent = tuple(key for key, value in vars(module).items() if value is None)
        found.append((name, type(module), settings, absent))
    for name, parameter in block.named_parameters():
        found.append((name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
    return tuple(found)


def modules_to_compile(model: nn.Module, plan: CompilePlan, blocks: Sequence[str]) -> list[str]:
    """Names of the modules that a plan compiles, in the order of the model.

    Args:
        model: Whole.
        plan: Patterns of modules.
        blocks: The model's repeated blocks, which are taken where the plan has no patterns.

    Raises:
        ConfigError: A pattern matches nothing or what is never called, or the model has no blocks of its own.
    """
    names = module_names(model)
    found = list(blocks)
    if plan.apply_modules:
        found = resolve_patterns(plan.apply_modules, names, key=MODULES_KEY)
    problem = "" if found else f"{type(model).__name__} declares no repeated blocks to compile"
    for name in found:
        kind = type(model.get_submodule(name))
        if kind.forward is nn.Module.forward:
            problem = f"'{name}' is a {kind.__name__}, which is never called itself"
            break
    if problem:
        way_out = "Name modules that are repeated, e.g. 'model.layers.{*}'."
        raise ConfigError(problem, key=MODULES_KEY, way_out=way_out)
    return [name for name in found if not is_inside(name, found, strict=True)]


class RemadeForward:
    """A module's `forward`, handed through a function of the compiler. A deep copy of the module takes its own along.

    Args:
        forward: Bound to the module.
        remake: What it is handed through.
    """

    def __init__(self, forward: Forward, remake: Callable[[Forward], Forward]) -> None:
        self._forward, self._remake = forward, remake
        self._remade = remake(forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return what the forward, handed through the compiler, returns for these arguments."""
        return self._remade(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemadeForward:
        return RemadeForward(copy.deepcopy(self._forward, memo), self._remake)


def readers_of_the_device(block: nn.Module) -> Iterator[nn.Module]:
    """Modules inside a block whose own forward reads numbers from the device, such as the borders of images: traced,
    they would be compiled again for every set of numbers."""
    for module in block.modules():
        code = attribute_at(type(module).forward, "__code__")
        if module is not block and code is not None and _READS_THE_DEVICE & set(_names_of_code(code)):
            yield module


def _names_of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of_code(inner)


# --- what is refused --------------------------------------------------------------------------------------------------


def check_backend(plan: CompilePlan) -> None:
    """Raise when the backend is unknown, does not take a setting, or cannot make kernels here."""
    known = _backends()
    if plan.backend not in known:
        raise ConfigError(
            f"torch.compile has no backend '{plan.backend}'",
            key=BACKEND_KEY,
            way_out=f"{did_you_mean(plan.backend, known)}It has {', '.join(known)}.",
        )
    if plan.backend != "inductor":
        if plan.mode is not None:
            raise ConfigError(f"'{plan.backend}' takes no modes, inductor does", key=MODE_KEY, way_out="Leave it out.")
        return
    missing = _missing_tool(get_device_type())
    if missing:
        raise MachineError(
            f"inductor makes kernels with {missing}, which is not here",
            key=BACKEND_KEY,
            way_out="Install it, or set features.compile to false.",
        )


def _backends() -> Sequence[str]:
    from torch._dynamo import list_backends  # a second to import, and compiling is asked for here

    return [str(name) for name in list_backends(exclude_tags=()) if not str(name).endswith("ONLY")]


def _missing_tool(device_type: str) -> str:
    """What inductor lacks to make kernels for a device; nothing where it has it."""
    if device_type != "cpu":
        if importlib.util.find_spec("triton"):
            return ""
        return "the package triton"
    for compiler in (os.environ.get("CXX", ""), "g++", "clang++"):
        if compiler and shutil.which(compiler):
            return ""
    return "a C++ compiler (g++)"


# --- what became of it ------------------------------------------------------------------------------------------------


class GraphCount:
    """Graphs that this process compiled since the count began, and where they were cut."""

    def __init__(self) -> None:
        self._graphs, self._breaks = _graphs(), _breaks()

    @property
    def graphs(self) -> int:
        """Number of graphs compiled since the count began."""
        return _graphs() - self._graphs

    @property
    def breaks(self) -> Counter[str]:
        """First line of the reason → how often a graph was cut for it."""
        return _breaks() - self._breaks

    def describe(self) -> str:
        """Return a phrase for the log: graphs, cuts, and the three most frequent reasons of cuts."""
        breaks = self.breaks
        described = f"{self.graphs} graphs, {breaks.total()} cuts"
        if breaks:
            reasons = [f"{reason}: {times}" for reason, times in breaks.most_common(3)]
            described += f" ({'; '.join(reasons)})"
        return described


def _graphs() -> int:
    from torch._dynamo.utils import counters  # see `_backends`

    return int(counters["stats"]["unique_graphs"])


def _breaks() -> Counter[str]:
    from torch._dynamo.utils import counters  # see `_backends`

    found: Counter[str] = Counter()
    for reason, times in counters["graph_break"].items():
        found[reason.partition("\n")[0]] += times
    return found
