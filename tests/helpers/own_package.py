"""Folders of models and data sets that count as the package's own for as long as a test runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from mindspeed_mm.fsdp.data.data_utils.template import TEMPLATES
from mindspeed_mm.fsdp.utils.register import data_register, model_register

ROOMS = ("fsdp.models", "fsdp.data.datasets")


@contextmanager
def counted_as_the_package(tree: Path, registered: Collection[str]) -> Iterator[None]:
    """Import what lies in the rooms of `tree/mindspeed_mm` as if it lay in those of the package.

    Args:
        tree: A working directory that looks like a clone.
        registered: Names of models, data sets and templates that are registered there, and forgotten afterwards.
    """
    packages = [(room, importlib.import_module(f"mindspeed_mm.{room}")) for room in ROOMS]
    before, paths = set(sys.modules), [list(package.__path__) for _, package in packages]
    with mock.patch.object(sys, "path", [str(tree), *sys.path]):
        try:
            for room, package in packages:
                package.__path__ = [*package.__path__, str(tree / "mindspeed_mm" / room.replace(".", "/"))]
            yield
        finally:
            for (_, package), path in zip(packages, paths, strict=True):
                package.__path__ = path
            # What the package itself has registered meanwhile stays: its modules do so once.
            for name in registered:
                for registry in (data_register, model_register, TEMPLATES):
                    registry._entries.pop(name, None)
                    registry._config_keys.pop(name, None)
            for name in set(sys.modules) - before:
                if str(tree) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
