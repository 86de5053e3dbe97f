"""Which module of a model is at work at a moment, in forward and in backward: what profilers put a name to.

Forward: hooks keep a stack of the modules that run. Backward: a node of the autograd graph belongs to the innermost
module that made it. A module's outputs are labelled with its name, and what it was given with the name of whoever
called it, unless an inner module has labelled it before; gradients that reach a labelled node enter that module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

ROOT = "(model)"
"""Name of the model itself."""
OUTSIDE = "(outside)"
"""Name of what runs in no module: the loss, the reading of numbers, what hooks do."""
_LABEL = "mm_module"


class ModuleWalk:
    """Follows a model's modules while it is entered.

    Args:
        model: The assembled model; hooks are put on all of its modules, and taken off at the end.
        on_switch: Called just before another module becomes the one at work.
    """

    def __init__(self, model: nn.Module, on_switch: Callable[[], None] = lambda: None) -> None:
        self._modules = {name or ROOT: module for name, module in model.named_modules()}
        self._on_switch = on_switch
        self._stack: list[str] = []
        self._backward = OUTSIDE
        self._pass = -1
        self.backward_passes = 0
        """Backward passes begun so far; one inside another counts."""
        self.has_run = False
        """Whether a module has run since the last backward pass began."""

    def __enter__(self) -> ModuleWalk:
        self._handles = []
        for name, module in self._modules.items():
            before, after = self._entering(name), self._leaving(name)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._on_switch()
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    @property
    def module(self) -> str:
        """The innermost module at work."""
        if self._stack:
            return self._stack[-1]
        if self.in_backward:
            return self._backward
        return OUTSIDE

    @property
    def in_forward(self) -> bool:
        """Whether a module runs forward: also in the middle of a backward pass, where it is computed again."""
        return bool(self._stack)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running. Asking also counts a pass that has begun since the last question."""
        running = torch._C._current_graph_task_id()
        if running > self._pass:  # the numbers only rise; a pass that goes on after an inner one has the smaller
            self._pass = running
            self._backward, self.has_run = OUTSIDE, False
            self.backward_passes += 1
        return running != -1

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: object, kwargs: object) -> None:
            self._label((args, kwargs), self._stack[-1] if self._stack else OUTSIDE)
            self._on_switch()
            self._stack.append(name)
            self.has_run = True

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
            self._on_switch()
            while self._stack and self._stack.pop() != name:  # an error has left more than one
                continue
            self._label(output, name)

        return hook

    def _label(self, tensors: object, name: str) -> None:
        """Gradients that reach these tensors enter the module, unless one inside of it has said so before."""
        for tensor in tree_leaves(tensors):
            node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if node is not None and _LABEL not in node.metadata:
                node.metadata[_LABEL] = name
                node.register_prehook(self._arrival(name))

    def _arrival(self, name: str) -> Callable[[object], None]:
        def prehook(_gradients: object) -> None:
            if self.in_backward and name != self._backward:
                self._on_switch()
                self._backward = name

        return prehook
