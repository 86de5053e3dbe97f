"""Which tests prove what was changed: `python -m tests.changed [COMMIT]` prints their files, `make test-changed` runs
them.

A test file proves a module when it imports it, or a module that imports it, or lies in the folder of the same name
(`tests/fsdp/loss` for `mindspeed_mm/fsdp/loss`). Where no test is so near, it is one that names the module or its
folder, else those of all families or, of an entry, those that lie in `tests`. Helpers, pages and examples are proved by
the test files that import or name them. `python -m tests.changed --table` prints each module and how many test files
prove it.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mindspeed_mm"
EVERYTHING = ("pyproject.toml", "constraints.txt", "Makefile", "tests/conftest.py")
"""Files whose change asks for all tests."""


def changed_files(since: str) -> list[str]:
    """Files that differ from a commit, and new ones that git does not ignore; paths from the root."""
    commands = (("git", "diff", "--name-only", since), ("git", "ls-files", "--others", "--exclude-standard"))
    found = [subprocess.run(each, cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in commands]
    return sorted({line for text in found for line in text.splitlines()})


class TestFile(NamedTuple):
    """What a test file has to do with."""

    folder: str
    imports: frozenset[str]
    """Modules that it imports, in functions and in programs in strings too."""
    text: str
    words: frozenset[str]


@functools.cache
def test_files() -> dict[str, TestFile]:
    """All test files by their path."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.name == "test_changed.py":  # it names what it has nothing to do with
            continue
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        words = frozenset(re.findall(r"\w+", text))
        found[str(name)] = TestFile(str(name.parent), frozenset(_imports(text)), text, words)
    return found


_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]+)|import[ \t]+([^\n]+))", re.MULTILINE
)


def _imports(source: str) -> Iterable[str]:
    """Modules, and names in them. Parsing all files would take seconds."""
    for module, names, modules in _IMPORT.findall(re.sub(r"#.*", "", source)):
        if module:
            yield module
        for name in re.findall(r"([\w.]+)(?:[ \t]+as[ \t]+\w+)?\s*(?:[,;)]|$)", names or modules):
            yield f"{module}.{name}" if module else name


@functools.cache
def importers() -> dict[str, set[str]]:
    """Module of the package → modules of the package that import it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        module = module_of(str(path.relative_to(ROOT)))
        for name in _imports(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(module)
    return found


def module_of(path: str) -> str:
    """`a/b.py` → `a.b`, and `a/__init__.py` → `a`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


CATALOGUE = "tests/tasks/test_models.py"
"""It names every family, and proves none."""


def tests_of_module(path: str) -> set[str]:
    """Test files that prove a module of the package."""
    module, folder = module_of(path), Path(path).parent
    near = {module, *importers().get(module, ())}
    mirror = f"tests{str(folder).removeprefix(PACKAGE)}"
    names = {Path(path).stem, folder.name} - {PACKAGE, "__init__"}
    widest = "tests/families" if "models" in folder.parts else "tests"
    files = test_files().items()
    return (
        {name for name, file in files if near & file.imports or file.folder == mirror != "tests"}
        or {name for name, file in files if names & file.words and name != CATALOGUE}
        or {name for name, file in files if file.folder == widest}
    )


def tests_of_file(path: str) -> set[str]:
    """Test files that prove a file."""
    if path in EVERYTHING:
        return set(test_files())
    if Path(path).name.startswith("test_"):
        return {path}
    if path.startswith(f"{PACKAGE}/") and path.endswith(".py"):
        return tests_of_module(path)
    module, name = module_of(path), Path(path).name
    return {test for test, file in test_files().items() if module in file.imports or name in file.text}


def modules() -> list[str]:
    """Files of the package that hold code."""
    found = (path for path in (ROOT / PACKAGE).rglob("*.py") if path.stat().st_size)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def main(words: list[str]) -> int:
    """Print what was asked for."""
    if words == ["--table"]:
        for path in modules():
            print(f"{path:80} {len(tests_of_module(path))}")
        return 0
    (since,) = words or ["HEAD"]
    print(*sorted({test for path in changed_files(since) for test in tests_of_file(path)}), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
