"""Built-in entries can be asked for in any order, the first of a process too."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.utils import register
from mindspeed_mm.fsdp.utils.register import Registry, data_register, model_register
from tests.helpers.registered import forgetting

_ASK_EACH = """
import os, sys, traceback
from mindspeed_mm.fsdp.utils.register import data_register, model_register
failed = []
for word in sys.argv[1:]:
    kind, name = word.split(":")
    child = os.fork()  # each is the first that its process asks for; torch is imported, transformers is not
    if not child:
        code = 1
        try:
            assert "transformers" not in sys.modules
            {"model": model_register, "data": data_register}[kind].get(name)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    failed += [word] if os.waitpid(child, 0)[1] else []
sys.exit(", ".join(failed) or 0)
"""


def _ask_each(words: list[str]) -> None:
    command = [sys.executable, "-c", _ASK_EACH, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * len(words), check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_entry_can_be_the_first() -> None:
    builtin = {"model": model_register._builtin, "data": data_register._builtin}  # without other tests' plugins
    _ask_each([f"{kind}:{name}" for kind, names in builtin.items() for name in names])


def test_what_transformers_needs_stands_before_an_entry_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torchvision is installed here."""
    calls: list[str] = []
    monkeypatch.setattr(register, "prepare_for_transformers", lambda: calls.append("prepared"))
    (tmp_path / "an_entry_of_this_test.py").write_text("from builtins import registry\nregistry.register('x')(int)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry("kind", builtin=lambda: {"x": "an_entry_of_this_test"})
    monkeypatch.setattr("builtins.registry", _Recording(registry, calls), raising=False)
    assert registry.get("x") is int
    assert calls == ["prepared", "imported"]


class _Recording:
    def __init__(self, registry: Registry, calls: list[str]) -> None:
        self._registry, self._calls = registry, calls

    def register(self, name: str):  # type: ignore[no-untyped-def]
        self._calls.append("imported")
        return self._registry.register(name)


def test_what_a_file_of_tests_registers_is_forgotten_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_register.register("kept of tests")(object())
    (tmp_path / "rows_of_tests.py").write_text(
        "from mindspeed_mm.fsdp.utils.register import data_register\n"
        "@data_register.register('left of tests', keys={'sort': 1})\nclass Rows: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with forgetting():
            importlib.import_module("rows_of_tests")
            assert "left of tests" in data_register
        assert "left of tests" not in data_register and not data_register.config_keys("left of tests")
    assert "kept of tests" in data_register
