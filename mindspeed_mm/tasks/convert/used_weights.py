"""Which of a model's weights a computation uses: what it leaves alone, it says nothing about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SHOWN = 3


class UsedWeights(TorchFunctionMode):
    """Notes which parameters torch's functions are given inside of the `with` block.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._used: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        reads_attribute = getattr(func, "__name__", "") == "__get__"
        if isinstance(result, torch.Tensor | tuple | list) and not reads_attribute:
            self._note((*args, *kwargs.values()))
        return result

    def _note(self, values: Sequence[object]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                self._used.add(id(value))
            elif isinstance(value, tuple | list):
                self._note(value)

    def told(self) -> str:
        """The parts of the model that were not used, as `audio_tower (69 tensors)`; empty where all were."""
        parts = self._unused("", self._model)
        words = []
        for name, tensors in parts[:_SHOWN]:
            count = "1 tensor" if tensors == 1 else f"{tensors} tensors"
            words.append(f"{name} ({count})")
        if len(parts) > _SHOWN:
            words.append(f"{len(parts) - _SHOWN:,} more")
        return ", ".join(words)

    def _unused(self, name: str, module: nn.Module) -> list[tuple[str, int]]:
        """The largest parts of which nothing was used, each with its number of tensors."""
        parameters = {id(parameter) for parameter in module.parameters()}
        if not parameters & self._used:
            return [(name, len(parameters))] if parameters else []
        dot = f"{name}." if name else ""
        unused = []
        for key, tensor in module.named_parameters(recurse=False):
            if id(tensor) not in self._used:
                unused.append((dot + key, 1))
        for key, child in module.named_children():
            unused += self._unused(dot + key, child)
        return unused
