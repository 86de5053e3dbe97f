"""scipy is loaded when it is called. Its import takes 36 MB and 0.4 s of a processor.

transformers imports it wherever it is installed, with its table of losses. What it takes is one function, for models
that find objects in pictures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_LOSSES = "transformers.loss.loss_utils"
_OPTIMIZE = "scipy.optimize"


def load_scipy_when_called() -> None:
    """Let transformers, when it is imported from here on, load scipy at the first call of a loss that needs it.

    Who imports scipy by itself has it at once, as ever; nothing is done where one of the two is imported already.
    """
    if not any(isinstance(finder, _LossFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LossFinder())


def linear_sum_assignment(*arguments: object, **options: object) -> object:
    """As `scipy.optimize.linear_sum_assignment`, which it calls."""
    return importlib.import_module(_OPTIMIZE).linear_sum_assignment(*arguments, **options)


class _LossFinder:
    """Finds the losses of transformers, and nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The losses with a loader of ours, unless scipy is there already; None for all else."""
        if name != _LOSSES or _OPTIMIZE in sys.modules:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or not isinstance(found.loader, SourceFileLoader):  # out of a zip file, for one
            return None
        found.loader = _LossLoader(found.loader.name, found.loader.path)
        return found


class _LossLoader(SourceFileLoader):
    """Runs the module, and those that it imports, with a stand-in for the part of scipy that they take."""

    def exec_module(self, module: ModuleType) -> None:
        """As Python's own; the stand-in is gone afterwards."""
        stand_in = ModuleType(_OPTIMIZE)
        vars(stand_in)["linear_sum_assignment"] = linear_sum_assignment
        sys.modules[_OPTIMIZE] = stand_in
        try:
            super().exec_module(module)
        finally:
            del sys.modules[_OPTIMIZE]
