"""Finds the names of Megatron-LM and MindSpeed that scripts import, where those libraries are not installed.

`pip install ./megatron_shim` puts it beside mindspeed-mm. It costs nothing until a script imports one of the names, and
is asked after everything else that finds modules, so that an installed library always wins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

LIBRARIES = ("megatron", "mindspeed", "mindspeed_llm")
"""Libraries whose names are stood for."""


class FoundModule:
    """A loader of a module that is there already.

    Args:
        module: The module.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has been run."""


class NamesFinder:
    """Puts the names in place when one of them is first looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a library's module, or None for modules of other libraries."""
        if name.partition(".")[0] not in LIBRARIES:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]  # once: the names are found without it from now on
        from mindspeed_mm.megatron_names import install  # torch: only scripts that import the names wait for it

        install()
        module = sys.modules.get(name)
        return None if module is None else ModuleSpec(name, FoundModule(module), is_package=True)  # type: ignore[arg-type]


sys.meta_path.append(NamesFinder())  # type: ignore[arg-type]
