"""Runs code on tensors that have shapes and no memory, and books what it would take.

Parameters, and all that is computed from them, are torch's fake tensors; what no parameter has touched yet (token
numbers, positions, sizes of images) is small and computed for real, so that models may look at it. Where a model looks
at numbers that were computed from parameters, it finds plausible ones: routers spread tokens over experts evenly. Where
it asks which pixels are 0 (those of tiles that only fill up), the real ones answer.
Models whose code cannot run without numbers have their activations counted the rough way, by the linear layers alone.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.tools.memory_model.ledger import ACTIVATIONS, BATCH, RECOMPUTED, TEMPORARY, Label, MemoryLedger

_REAL_NUMEL = 1 << 20
"""What is larger is never computed for real."""
_TORCHS_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_DEVICE = torch.ops.prim.device.default
_SLICE = torch.ops.aten.slice.Tensor

Values = tuple[Any, ...]
"""Arguments of an operator: tensors, numbers, types, and lists of them."""


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
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], int | None]] = {}
        """Address of a storage → the storage, and its entry in the books; None for what is not booked."""
        self._values: dict[int, torch.Tensor] = {}
        """Address of the storage of a fake input → its real values: models ask which pixels are 0."""
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Simulation:
        super().__enter__()
        _TORCHS_LOG.disabled = True  # it prints the traceback of every shape that does not fit
        torch.Tensor.as_subclass = _as_subclass  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        del torch.Tensor.as_subclass  # the one that it inherits
        _TORCHS_LOG.disabled = False
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> None:
        """Call `hook` with the parameter when a gradient was added to it, until the simulation ends. A parameter holds
        its hooks outside Python, where cycles are not looked for: one that knows the simulation would keep both."""
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run one operator and book the memory of its results."""
        if function is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        outputs = self._run(function, args, kwargs or {})
        if function is torch.ops.aten._to_copy.default and isinstance(outputs, FakeTensor):
            self._keep_values(outputs, self._values_of(args[0]))
        for output in _passed_one_by_one(outputs):
            if isinstance(output, torch.Tensor):
                self._book(output)
        return outputs

    # --- what is fake and what is real ------------------------------------------------------------------------------

    def _run(self, function: OpOverload, args: Values, kwargs: dict[str, Any]) -> object:
        tensors = [leaf for leaf in _passed_one_by_one(*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if function is torch.ops.aten.sum.dim_IntList or not _may_be_large(function, args, tensors):
                return function(*args, **kwargs)
        elif function in _COMPARED_WITH_NUMBERS and (values := self._values_of(args[0])) is not None:
            return function(values, *args[1:])
        elif function in _LOOKS_AT_NUMBERS:
            return _LOOKS_AT_NUMBERS[function](args)
        if function is _SLICE and args[0].untyped_storage()._cdata not in self._values:
            args = _from_the_start(*args, **kwargs)
            kwargs = {}
        elif function in _REWRITTEN:
            function, args = _REWRITTEN[function](function, (*args, *kwargs.values()))
            kwargs = {}
        with self._fake:
            stays = _written_or_viewed(function)
            read = {name: arg if name in stays else _without_numbers(arg) for name, arg in kwargs.items()}
            args = tuple(arg if place in stays else _without_numbers(arg) for place, arg in enumerate(args))
            outputs = function(*args, **read)
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
                    new = self._empty(*as_computed(full_name, parameter)).requires_grad_(parameter.requires_grad)
                    new._is_param = True  # type: ignore[attr-defined]  # as `nn.Parameter` does
                    self.ignore(new)
                    made[id(parameter)] = new  # type: ignore[assignment]
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

    def fake_batch(self, batch: Batch, dtype: torch.dtype | None) -> Batch:
        """The batch as a model gets it: numbers of tokens and sizes as they are, floats without memory; booked.

        Args:
            batch: Prepared by the objective.
            dtype: What floating-point inputs are cast to; None: they stay.
        """

        def stand_in(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_floating_point():
                made = self._empty(value.shape, dtype or value.dtype)
                self._keep_values(made, None if isinstance(value, FakeTensor) else value)
            elif value.numel() > _REAL_NUMEL:
                made = self._empty(value.shape, value.dtype)
            else:
                made = value.clone()
            self._book(made, Label(BATCH))
            return made

        return {key: tree_map(stand_in, value) for key, value in batch.items()}

    def _keep_values(self, fake: torch.Tensor, values: torch.Tensor | None) -> None:
        """Remember the real values of a fake tensor that is laid out like them."""
        if values is not None and fake.is_contiguous():
            self._values[fake.untyped_storage()._cdata] = values.contiguous()

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real values of a fake tensor, or of a view of one; None: they are not known."""
        values = self._values.get(tensor.untyped_storage()._cdata)
        return None if values is None else values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    # --- the books --------------------------------------------------------------------------------------------------

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never book the memory of a tensor that is there already."""
        self._remember(tensor.untyped_storage(), None)

    def entry_of(self, tensor: torch.Tensor) -> int | None:
        """The ledger's entry of a tensor's memory."""
        _, entry = self._entries.get(tensor.untyped_storage()._cdata, (None, None))
        return entry

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

        def freed(_: object) -> None:
            del self._entries[key]
            self._values.pop(key, None)
            if entry is not None:
                ledger.give_back(entry)

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


@cache
def _written_or_viewed(function: OpOverload) -> frozenset[int | str]:
    """Places and names of the arguments that an operator writes into, or returns a view of."""
    found = set[int | str]()
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None:
            found |= {place, argument.name}
    return frozenset(found)


def _without_numbers(value: object) -> object:
    """Real tensors, also in a list, as fake ones. Among fake tensors alone torch knows an operator's result from the
    last time; a real one it would describe anew, and find the result anew."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_numbers, value))
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


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

    def __call__(self, *_: object) -> None:
        self._simulation.modules.append(self._pattern)


class _Leave:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __call__(self, *_: object) -> None:
        if self._simulation.modules:
            self._simulation.modules.pop()


# --- numbers that a model looks at ----------------------------------------------------------------------------------


def _passed_one_by_one(*values: object) -> list[object]:
    """What an operator takes or makes, one by one: lists are nested at most once."""
    found: list[object] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found.extend(value)
        else:
            found.append(value)
    return found


def _may_be_large(function: OpOverload, args: Values, tensors: list[torch.Tensor]) -> bool:
    """Whether an operator on real tensors makes something large."""
    if any(tensor.numel() > _REAL_NUMEL for tensor in tensors):
        return True
    if function is torch.ops.aten.repeat.default:  # such as the row of a mask, a line for each token
        return math.prod(args[1]) * args[0].numel() > _REAL_NUMEL
    if not tensors:  # it makes something new, of the shape that is its first list
        for arg in args:
            if isinstance(arg, (list, tuple)):
                return all(isinstance(size, int) for size in arg) and math.prod(arg) > _REAL_NUMEL
    if len(tensors) > 1:
        try:
            return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors))) > _REAL_NUMEL
        except RuntimeError:  # no pointwise operator
            return False
    return False


def _with_plausible_numbers(function: OpOverload, args: Values, outputs: object) -> object:
    """Whole numbers and answers that were computed from fake numbers, made up."""
    if isinstance(outputs, torch.Tensor):
        return _made_up(function, args, outputs)
    if isinstance(outputs, (list, tuple)) and any(_is_whole_or_valueless(output) for output in outputs):
        return type(outputs)(_made_up(function, args, output) for output in outputs)
    return outputs


def _is_whole_or_valueless(output: object) -> TypeGuard[torch.Tensor]:
    """Whether an output is whole numbers or answers that have no values, and are few enough to be made up."""
    return (
        isinstance(output, FakeTensor)
        and not output.is_floating_point()
        and not output.is_complex()
        and 0 < output.numel() <= _REAL_NUMEL
    )


def _made_up(function: OpOverload, args: Values, output: object) -> object:
    if not _is_whole_or_valueless(output) or function in _VIEWS_AND_COPIES:
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


def _from_the_start(
    tensor: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Values:
    """Arguments of the slice of the same shape that begins at 0. Without numbers it is as good, and torch knows it, and
    what is computed from it, from the slice before: a loss takes hundreds, which differ in their starts alone."""
    return tensor, dim, 0, len(range(*slice(start, end, step).indices(tensor.shape[dim]))) * step, step


def _numbered_index(function: OpOverload, args: Values) -> tuple[OpOverload, Values]:
    """Masks among indices become numbers: how many they are is known only of real ones."""
    tensor, indices, *rest = args
    numbers: list[torch.Tensor | None] = []
    for index in indices:
        is_real = isinstance(index, torch.Tensor) and not isinstance(index, FakeTensor)
        if is_real and index.dtype == torch.bool:
            numbers += index.nonzero().unbind(1)
        else:
            numbers.append(index)
    return function, (tensor, numbers, *rest)


def _first_ones(function: OpOverload, args: Values) -> tuple[OpOverload, Values]:
    """`masked_select` keeps as many as its real mask says; which, makes no difference."""
    tensor, mask = args
    if isinstance(mask, FakeTensor):
        return function, args
    count = int(mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    return torch.ops.aten.new_empty.default, (tensor, [count])


def _grouped_shape(function: OpOverload, args: Values) -> tuple[OpOverload, Values]:
    """`grouped_mm` in every type: torch's own rule for fake tensors knows bf16 alone."""
    left, right, *rest = args
    if left.dim() == right.dim() == 2:
        shape = [rest[0].shape[0], left.shape[0], right.shape[1]]
    else:
        shape = [*left.shape[:-1], right.shape[-1]]
    return torch.ops.aten.new_empty.default, (left, shape)


_REWRITTEN: dict[OpOverload, Callable[[OpOverload, Values], tuple[OpOverload, Values]]] = {
    torch.ops.aten.index.Tensor: _numbered_index,
    torch.ops.aten.index_put.default: _numbered_index,
    torch.ops.aten.index_put_.default: _numbered_index,
    torch.ops.aten.masked_select.default: _first_ones,
    torch.ops.aten._grouped_mm.default: _grouped_shape,
}
_VIEWS_AND_COPIES = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.t.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.clone.default,
    }
)
_COMPARED_WITH_NUMBERS = frozenset({torch.ops.aten.eq.Scalar, torch.ops.aten.ne.Scalar})
_LOOKS_AT_NUMBERS: dict[OpOverload, Callable[[Values], object]] = {
    torch.ops.aten._local_scalar_dense.default: lambda args: 1.0 if args[0].is_floating_point() else 1,
    torch.ops.aten.nonzero.default: lambda args: torch.ones(args[0].shape, dtype=torch.bool).nonzero(),
    torch.ops.aten.equal.default: lambda args: True,
    torch.ops.aten.is_nonzero.default: lambda args: True,
}


# --- the rough way, where code cannot be simulated --------------------------------------------------------------------


NOTE = "all but the inputs and outputs of linear layers: this model's code could not be simulated"


def linear_activations(model: nn.Module, batch: Mapping[str, object], dtype: torch.dtype) -> dict[str, int]:
    """Bytes that linear layers keep, by module pattern: each token's inputs and outputs.

    Args:
        model: Parameters on meta or real.
        batch: A prepared micro-batch.
        dtype: What is computed in.
    """
    tokens, sizes = _token_count(batch), Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            sizes[pattern_of(name)] += tokens * (module.in_features + module.out_features) * dtype.itemsize
    return dict(sizes.most_common())


def _token_count(batch: Mapping[str, object]) -> int:
    """Tokens of text, or else positions of latents, which are at least as many as their tokens."""
    if isinstance(text := batch.get("input_ids"), torch.Tensor):
        return text.numel()
    latents = batch.get("latents")
    return latents[:, 0].numel() if isinstance(latents, torch.Tensor) else 1
