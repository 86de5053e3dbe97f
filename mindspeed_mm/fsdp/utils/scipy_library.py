"""scipy is loaded when it is called. Its import takes 36 MB and 0.4 s of a processor, that of its statistics twice as
long.

transformers and diffusers import it wherever it is installed: the former with its table of losses, of which those for
models that find objects in pictures take one function; the latter with its schedulers, for steps along a beta
distribution.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_OPTIMIZE, _STATS = "scipy.optimize", "scipy.stats"
_TAKEN = {"transformers.loss.loss_utils": _OPTIMIZE, "diffusers.schedulers.scheduling_": _STATS}
"""What names of modules begin with → the part of scipy that they take."""


def load_scipy_when_called() -> None:
    """Let modules of transformers and diffusers that are imported from here on load scipy when they call it.

    Who imports scipy by itself has it at once, as ever; nothing is done where that part is imported already.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def linear_sum_assignment(*arguments: object, **options: object) -> object:
    """As `scipy.optimize.linear_sum_assignment`, which it calls."""
    return importlib.import_module(_OPTIMIZE).linear_sum_assignment(*arguments, **options)


class _Finder:
    """Finds the modules that take a part of scipy, and nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Such a module with a loader of ours, unless its part of scipy is there already; None for all else."""
        part = next((part for module, part in _TAKEN.items() if name.startswith(module)), None)
        if part is None or part in sys.modules:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or not isinstance(found.loader, SourceFileLoader):  # out of a zip file, for one
            return None
        found.loader = _Loader(found.loader.name, found.loader.path, part)
        return found


class _Loader(SourceFileLoader):
    """Runs the module, and those that it imports, with a stand-in for the part of scipy that they take."""

    def __init__(self, fullname: str, path: str, part: str) -> None:
        super().__init__(fullname, path)
        self._part = part

    def exec_module(self, module: ModuleType) -> None:
        """As Python's own; the stand-in is gone afterwards, and scipy itself loads what is asked of it by name."""
        stand_in = ModuleType(self._part)
        if self._part == _OPTIMIZE:
            vars(stand_in)["linear_sum_assignment"] = linear_sum_assignment
        sys.modules[self._part] = stand_in
        try:
            super().exec_module(module)
        finally:
            del sys.modules[self._part]
