"""Lets a package be imported under a second name without a second copy of its modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from typing_extensions import override


class AliasFinder(MetaPathFinder):
    """Answers for `alias.x` with the module `package.x`."""

    def __init__(self, alias: str, package: str) -> None:
        self.alias, self.package = alias, package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A specification that leads to the one module, or None for a name that is not below the alias."""
        if not fullname.startswith(f"{self.alias}."):
            return None
        real = importlib.util.find_spec(self.package + fullname.removeprefix(self.alias))
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, AliasLoader(real), origin=real.origin, is_package=is_package)


class AliasLoader(InspectLoader):
    """Gives the module of `real`, importing it under its own name when nobody has yet."""

    def __init__(self, real: ModuleSpec) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name and return it: the alias gets no copy."""
        return importlib.import_module(self.real.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run; but the import system has put the alias's specification on the module by now."""
        module.__spec__ = self.real

    @override
    def get_source(self, fullname: str) -> str | None:
        if isinstance(self.real.loader, InspectLoader):
            return self.real.loader.get_source(self.real.name)
        return None

    def get_code(self, fullname: str) -> CodeType | None:
        """Code, for `python -m alias.x`."""
        if isinstance(self.real.loader, InspectLoader):
            return self.real.loader.get_code(self.real.name)
        return None


def install_alias(alias: str, package: str) -> None:
    """From now on `import alias` and `import alias.x` give the modules of `package`."""
    sys.modules[alias] = importlib.import_module(package)
    sys.meta_path.insert(0, AliasFinder(alias, package))
