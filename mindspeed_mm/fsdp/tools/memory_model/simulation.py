"""Runs code on tensors that have shapes and no memory, and books what it would take.

Parameters, and all that is computed from them, are torch's fake tensors; what no parameter has touched yet (token
numbers, positions, sizes of images) is small and computed for real, so that models may look at it. Where a model looks
at numbers that were computed from parameters, it finds plausible ones: routers spread tokens over experts evenly.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mindspeed_mm.fsdp.tools.memory_model.ledger import ACTIVATIONS, BATCH, RECOMPUTED, TEMPORARY, Label, MemoryLedger

_REAL_NUMEL = 1 << 20
"""What is larger is never computed for real."""
_DEVICE = torch.ops.prim.device.default


class Simulation(TorchDispatchMode):
    """While inside, nothing large is computed, and `ledger` is written.

    Args:
        ledger: The books.
    """

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__()
        self.ledger = ledger
        self.modules: list[str] = []
        """Patterns of the modules whose forward is running, the innermost last."""
        self.category = ACTIVATIONS
        """Of what is taken now."""
        self.share_of: Callable[[str], float] = lambda module: 1.0
        """Pattern of a module → share of what it takes in the simulation that a rank takes."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._entries: dict[int, tuple[weakref.ref[Any], int | None]] = {}

    def __enter__(self) -> Simulation:
        super().__enter__()
        torch.Tensor.as_subclass = _as_subclass  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        del torch.Tensor.as_subclass  # the one that it inherits
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and book the memory of its results."""
        if function is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        outputs = self._run(function, args, kwargs or {})
        for output in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
            if isinstance(output, torch.Tensor):
                self._book(output)
        return outputs

    # --- what is fake and what is real ------------------------------------------------------------------------------

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if not _may_be_large(function, args, kwargs, tensors):
                return function(*args, **kwargs)
        elif function in _LOOKS_AT_NUMBERS:
            return _LOOKS_AT_NUMBERS[function](args)
        if function in _REWRITTEN:
            function, args, kwargs = *_REWRITTEN[function](function, (*args, *kwargs.values())), {}
        with self._fake:
            outputs = function(*args, **kwargs)
        return _with_plausible_numbers(function, args, outputs)

    def fake_parameters(
        self, model: nn.Module, as_computed: Callable[[str, nn.Parameter], tuple[Sequence[int], torch.dtype]]
    ) -> None:
        """Give a model fake parameters, tied ones still tied; what they take is counted elsewhere.

        Args:
            model: Changed in place.
            as_computed: Name and parameter → shape and dtype that this rank computes with.
        """
        made: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    full_name = f"{prefix}.{name}" if prefix else name
                    new = nn.Parameter(self._empty(*as_computed(full_name, parameter)), parameter.requires_grad)
                    self.ignore(new)
                    made[id(parameter)] = new
                module._parameters[name] = made[id(parameter)]
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.ignore(buffer)

    @contextmanager
    def writing(self, ledger: MemoryLedger) -> Iterator[None]:
        """What is taken inside stands in these books."""
        before, self.ledger = self.ledger, ledger
        try:
            yield
        finally:
            self.ledger = before

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without memory; booked."""
        made = self._empty(shape, dtype)
        self._book(made)
        return made

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._fake:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def fake_batch(self, batch: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
        """The batch as a model gets it: numbers of tokens and sizes as they are, floats without memory; booked.

        Args:
            batch: Prepared by the objective.
            dtype: What floating-point inputs are cast to; None: they stay.
        """

        def stand_in(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            is_float = value.is_floating_point()
            small = not is_float and value.numel() <= _REAL_NUMEL
            made = value.clone() if small else self._empty(value.shape, (dtype if is_float else None) or value.dtype)
            self._book(made, Label(BATCH))
            return made

        return {key: tree_map(stand_in, value) for key, value in batch.items()}

    # --- the books --------------------------------------------------------------------------------------------------

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never book the memory of a tensor that is there already."""
        self._remember(tensor.untyped_storage(), None)

    def entry_of(self, tensor: torch.Tensor) -> int | None:
        """The ledger's entry of a tensor's memory."""
        return self._entries.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def _book(self, tensor: torch.Tensor, label: Label | None = None) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._entries:
            module = self.modules[-1] if self.modules else ""
            # A module whose forward runs in the backward pass is computed again.
            category = RECOMPUTED if module and self.category == TEMPORARY else self.category
            size = round(storage.nbytes() * self.share_of(module))
            self._remember(storage, self.ledger.take(label or Label(category, module), size))

    def _remember(self, storage: torch.UntypedStorage, entry: int | None) -> None:
        key, ledger = storage._cdata, self.ledger

        def freed(_: Any) -> None:
            if self._entries.pop(key)[1] is not None:
                ledger.give_back(entry)  # type: ignore[arg-type]

        self._entries[key] = (weakref.ref(storage, freed), entry)

    @contextmanager
    def phase(self, name: str, category: str = ACTIVATIONS) -> Iterator[None]:
        """What is taken inside is of this category."""
        before, self.category = self.category, category
        self.ledger.begin(name)
        try:
            yield
        finally:
            self.category = before


def _as_subclass(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """A fake tensor cannot be dressed as another kind of tensor: it stays what it is."""
    return tensor if isinstance(tensor, FakeTensor) else torch._C.TensorBase.as_subclass(tensor, kind)


def watch_modules(model: nn.Module, simulation: Simulation) -> None:
    """Let the simulation know which module runs. A module whose forward runs in the backward pass is recomputed."""
    for name, module in model.named_modules():
        if name:
            pattern = pattern_of(name)
            module.register_forward_pre_hook(_Enter(simulation, pattern))
            module.register_forward_hook(_Leave(simulation), always_call=True)


def pattern_of(name: str) -> str:
    """A module's name with its numbers left open: `model.layers.3.mlp` → `model.layers.{*}.mlp`."""
    return ".".join("{*}" if part.isdigit() else part for part in name.split("."))


class _Enter:
    def __init__(self, simulation: Simulation, pattern: str) -> None:
        self._simulation, self._pattern = simulation, pattern

    def __call__(self, *_: Any) -> None:
        self._simulation.modules.append(self._pattern)


class _Leave:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __call__(self, *_: Any) -> None:
        if self._simulation.modules:
            self._simulation.modules.pop()


# --- numbers that a model looks at ----------------------------------------------------------------------------------


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments of an operator: lists are nested at most once."""
    found: list[Any] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, (list, tuple)):
            found.extend(arg)
        else:
            found.append(arg)
    return found


def _may_be_large(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
    """Whether an operator on real tensors makes something large."""
    if any(tensor.numel() > _REAL_NUMEL for tensor in tensors):
        return True
    if not tensors:
        sizes = next((arg for arg in args if isinstance(arg, (list, tuple))), ())
        return all(isinstance(size, int) for size in sizes) and math.prod(sizes) > _REAL_NUMEL
    if len(tensors) > 1:
        try:
            return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors))) > _REAL_NUMEL
        except RuntimeError:  # no pointwise operator
            return False
    return False


def _with_plausible_numbers(function: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    """Whole numbers and answers that were computed from fake numbers, made up."""
    if isinstance(outputs, torch.Tensor):
        return _made_up(function, args, outputs)
    if isinstance(outputs, (list, tuple)) and any(_is_number(output) for output in outputs):
        return type(outputs)(_made_up(function, args, output) for output in outputs)
    return outputs


def _is_number(output: Any) -> bool:
    return (
        isinstance(output, FakeTensor)
        and not output.is_floating_point()
        and not output.is_complex()
        and 0 < output.numel() <= _REAL_NUMEL
    )


def _made_up(function: Any, args: tuple[Any, ...], output: Any) -> Any:
    if not _is_number(output) or function in _VIEWS_AND_COPIES:
        return output
    if output.dtype == torch.bool:
        return torch.ones(output.shape, dtype=torch.bool)
    if function is torch.ops.aten.topk.default:
        return _even_choice(args[0].shape, args[2] if len(args) > 2 else -1, output)
    if function in (torch.ops.aten.sort.default, torch.ops.aten.sort.stable, torch.ops.aten.argsort.default):
        return torch.arange(output.shape[-1], dtype=output.dtype).expand(output.shape).contiguous()
    return torch.zeros(output.shape, dtype=output.dtype)


def _even_choice(shape: torch.Size, dim: int, output: torch.Tensor) -> torch.Tensor:
    """Choices of `topk` among shape[dim] that fall on all of them alike."""
    moved = list(output.shape)
    count = moved.pop(dim)
    rows = torch.arange(math.prod(moved) * count, dtype=output.dtype) % shape[dim]
    return rows.reshape(*moved, count).movedim(-1, dim).contiguous()


def _numbered_index(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Masks among indices become numbers: how many they are is known only of real ones."""
    tensor, indices, *rest = args
    numbers: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        numbers += index.nonzero().unbind(1) if is_mask else [index]
    return function, (tensor, numbers, *rest)


def _first_ones(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """`masked_select` keeps as many as its real mask says; which, makes no difference."""
    tensor, mask = args
    if isinstance(mask, FakeTensor):
        return function, args
    count = int(mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    return torch.ops.aten.new_empty.default, (tensor, [count])


def _grouped_shape(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """`grouped_mm` in every type: torch's own rule for fake tensors knows bf16 alone."""
    left, right, *rest = args
    if left.dim() == right.dim() == 2:
        shape = [rest[0].shape[0], left.shape[0], right.shape[1]]
    else:
        shape = [*left.shape[:-1], right.shape[-1]]
    return torch.ops.aten.new_empty.default, (left, shape)


_REWRITTEN: dict[Any, Callable[[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]] = {
    torch.ops.aten.index.Tensor: _numbered_index,
    torch.ops.aten.index_put.default: _numbered_index,
    torch.ops.aten.index_put_.default: _numbered_index,
    torch.ops.aten.masked_select.default: _first_ones,
    torch.ops.aten._grouped_mm.default: _grouped_shape,
}
_VIEWS_AND_COPIES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("view", "_unsafe_view", "t", "detach", "unsqueeze", "expand", "permute", "alias", "clone")
)
_LOOKS_AT_NUMBERS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    torch.ops.aten._local_scalar_dense.default: lambda args: 1.0 if args[0].is_floating_point() else 1,
    torch.ops.aten.nonzero.default: lambda args: torch.ones(args[0].shape, dtype=torch.bool).nonzero(),
    torch.ops.aten.equal.default: lambda args: True,
    torch.ops.aten.is_nonzero.default: lambda args: True,
}
