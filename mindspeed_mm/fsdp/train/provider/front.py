"""A model as the user's forward step sees it, around the library's module that is planned, sharded and saved."""

from __future__ import annotations

from typing import Any, Self

from torch import nn


class ModelFront(nn.Module):
    """Calls go to the module inside. A forward step is given the front, everybody else the module.

    Args:
        model: The library's module; in a pipeline the stage that runs takes its place.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def present(self, model: nn.Module) -> nn.Module:
        """Return the front, with `model` as the module inside from now on."""
        if self._modules["model"] is not model:
            self._modules["model"] = model
        return self

    @property
    def module(self) -> Self:
        """The front itself, which code that reaches through wrappers (`model.module.module`) finds."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module inside returns."""
        return self.model(*args, **kwargs)
