"""Rules that the sources keep: nothing that runs foreign code, one door to the device, files and functions of a size
that can be read, and names that exist. `make check` runs this file."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import architecture

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindspeed_mm"
SOURCES = sorted(
    path for folder in ("mindspeed_mm", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FILE_LINES = 600
FUNCTION_LINES = 80

FORBIDDEN = {
    "torch.load": "checkpoint/pt_files.py is the door",
    "torch.serialization.load": "weights come from safetensors",
    "yaml.load": "one parser reads YAML",
    "os.system": "commands are lists of words",
    "os.popen": "commands are lists of words",
    "subprocess.getoutput": "commands are lists of words",
    "torch.cuda": "fsdp/utils/device.py is the door",
    "torch.npu": "fsdp/utils/device.py is the door",
    "torch.xpu": "fsdp/utils/device.py is the door",
    "torch_npu": "fsdp/utils/device.py is the door",
    "pickle": "it runs what it reads",
    "dill": "it runs what it reads",
    "marshal": "it runs what it reads",
    "shelve": "it runs what it reads",
    **dict.fromkeys(
        ("urllib.request", "http.client", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "aiohttp", "urllib3"),
        "core/outbound.py is the door",
    ),
    "socket.create_connection": "core/outbound.py is the door",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}
"""Built-in functions; methods of these names are others."""

SANCTIONED = {
    ("checkpoint/conversion/pt_writing.py", "pickle"),  # it writes
    ("checkpoint/dcp_folder/metadata_unpickler.py", "pickle"),
    ("checkpoint/megatron/pt_index.py", "pickle"),
    ("checkpoint/pt_files.py", "torch.load"),
    ("core/outbound.py", "httpcore2"),
    ("core/timed_connection.py", "httpcore2"),  # of that door
    ("core/outbound.py", "urllib.request"),  # which proxies the environment names
    ("fsdp/data/data_utils/decoding/remote_media.py", "http.client"),  # it connects to addresses that it has checked
    ("fsdp/data/data_utils/decoding/remote_media.py", "socket.create_connection"),
    ("fsdp/params/cards.py", "yaml.load"),  # cards of the package itself: plain values alone
    ("fsdp/distributed/job/watchdog.py", "socket.create_connection"),  # whether a rank's port is open
    ("tasks/serve/backend.py", "http.client"),  # the engine that `mm serve` has started, on this machine
    ("tasks/serve/passing_on.py", "http.client"),
}
"""(file, what): the door to the device asks torch for the module of its type and names none."""


def _ways_to_name(dotted: str) -> str:
    """An expression for texts that may name a module, or what is in it."""
    inside, dot, name = dotted.rpartition(".")
    written = re.escape(dotted).replace(r"\.", r"\s*\.\s*")
    if not dot:
        return rf"\b(?<!\.){written}\b"
    return rf"\b{written}\b|\bfrom\s+{re.escape(inside)}\s+import\s*(?:\([^)]*?|[^\n(]*?)\b{name}\b"


_SUSPECTS = [
    re.compile("|".join(map(_ways_to_name, FORBIDDEN))),
    re.compile(r"\b(?:extractall|unpack_archive)\b|\bshell\s*="),
    re.compile(rf"(?<![\w.])(?:{'|'.join(sorted(FORBIDDEN_CALLS))})\s*\("),
]
"""Parsing all files would take seconds: expressions find the few that may have something, here and below."""


def violations(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything forbidden in a source text."""
    if not any(suspect.search(source) for suspect in _SUSPECTS):
        return
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            for forbidden in FORBIDDEN:
                if name == forbidden or name.startswith(f"{forbidden}."):
                    yield node.lineno, forbidden
        if isinstance(node, ast.Attribute) and node.attr in ("extractall", "unpack_archive"):
            yield node.lineno, node.attr
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield node.lineno, node.func.id
            if any(k.arg == "shell" and not _is_false(k.value) for k in node.keywords):
                yield node.lineno, "shell"


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [ast.unparse(node)]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.edge("BS4")
def test_sources_run_no_foreign_code_and_have_one_door_to_other_programs() -> None:
    found = {}
    for path in SOURCES:
        inside = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""
        forbidden = {(line, what) for line, what in violations(path.read_text()) if (inside, what) not in SANCTIONED}
        found |= {f"{path.relative_to(ROOT)}:{line}": what for line, what in forbidden}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "import torch\nload = torch.load",
        "from torch import load",
        "from torch import cuda",
        "import torch_npu",
        "torch.cuda.synchronize()",
        "import pickle",
        "from pickle import loads",
        "import urllib.request",
        "from http import client",
        "from requests import get",
        "import httpx",
        "socket.create_connection(address)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "os.system(text)",
        "from os import system",
        "archive.extractall()",
        "def f():\n    import pickle",
    ],
)
def test_forbidden_is_found(source: str) -> None:
    assert list(violations(source))


@pytest.mark.parametrize(
    "source", ["model.eval()", "subprocess.run(words, shell=False)", "loader.load()", "torch.accelerator.synchronize()"]
)
def test_allowed_is_allowed(source: str) -> None:
    assert not list(violations(source))


def test_the_door_to_pickled_weights_is_restricted() -> None:
    """Every `torch.load` there says `weights_only=True`."""
    source = ast.parse((PACKAGE / "checkpoint/pt_files.py").read_text())
    calls = [n for n in ast.walk(source) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"]
    assert calls
    for call in calls:
        assert "weights_only=True" in [ast.unparse(keyword) for keyword in call.keywords]


@pytest.mark.parametrize(("inside", "what"), sorted(SANCTIONED))
def test_exception_is_needed(inside: str, what: str) -> None:
    assert what in {found for _, found in violations((PACKAGE / inside).read_text())}


# --- one reader ------------------------------------------------------------------------------------------------------


ONE_READER = {
    "core/json_file.py": "the reader of JSON",
    "fsdp/data/data_utils/rows/json_reader.py": "the reader of rows, which refuses equal keys too",
    "fsdp/params/yaml/parser.py": "the reader of YAML",
    "fsdp/tools/trace_columns.py": "reads traces of gigabytes piece by piece",
    "fsdp/checkpoint/resume.py": "reads what it has written itself, as the next three do",
    "fsdp/data/sample_cache/codec.py": "and compared with its checksum",
    "fsdp/train/run/launched.py": "between processes of one job",
    "tasks/launch/rank_start.py": "before anything can be imported",
}
_READERS = {"json.loads", "json.load", "json.JSONDecoder"}


def readings(source: str) -> list[str]:
    """Where a text reads JSON or YAML by itself."""
    found: list[str] = []
    if not re.search(r"\bjson\s*\.\s*(?:loads?|JSONDecoder)\b|\bfrom\s+json\s+import\b|\bYAML\(", source):
        return found
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            is_yaml = re.fullmatch(r"YAML\(.*\)\.(load|load_all|parse|compose)", name) is not None
            if is_yaml or name in _READERS:
                found.append(name)
    return found


@pytest.mark.edge("BS13")
def test_json_and_yaml_of_others_have_one_reader() -> None:
    """Depth, numbers too large for anything and half characters are errors of the file, wherever it is read."""
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in PACKAGE.rglob("*.py")
        if (names := readings(path.read_text(encoding="utf-8")))
    }
    assert set(found) - set(ONE_READER) == set(), {name: found[name] for name in set(found) - set(ONE_READER)}


@pytest.mark.parametrize(
    "source",
    ["json.loads(text)", "from json import load", "YAML(typ='safe').load(text)", "decode = json.JSONDecoder()"],
)
def test_a_reading_is_found(source: str) -> None:
    assert readings(source)


# --- commands that people copy ---------------------------------------------------------------------------------------

_COMMAND = re.compile(r"(?:^|\W)(?:mm [a-z]+|bash|source)(?: [a-z]+)?(?: --[\w-]+(?: [\w-]+)*)? $")
_PATH = re.compile(r"path|folder|file|place|source|script|config|model|out|save|run|dir|name")


def unquoted_words(source: str) -> list[str]:
    """Paths that follow the words of a command in a formatted text, and do not come from `quoted`."""
    tree = ast.parse(source)
    named = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("quoted(")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        for before, word in zip(text.values, text.values[1:], strict=False):
            if isinstance(before, ast.Constant) and isinstance(word, ast.FormattedValue):
                shown = ast.unparse(word.value)
                is_safe = shown.startswith("quoted(") or shown in named or shown == "card.name"
                if _COMMAND.search(before.value) and _PATH.search(shown) and not is_safe:
                    found.append(shown)
    return found


def test_a_command_that_is_told_can_be_copied() -> None:
    """A path with a blank or a quote in it is one word for the shell that people paste the command into."""
    found = {path.name: words for path in SOURCES if (words := unquoted_words(path.read_text(encoding="utf-8")))}
    assert not found


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("f'next: mm chat {folder}'", True),
        ("f'next: mm chat {quoted(folder)}'", False),
        ("f'Write it: mm export {self.path} OUT'", True),
        ("run = quoted(save)\nf'mm report {run}'", False),
        ("f'mm infer found {count} rows'", False),
    ],
)
def test_a_word_that_is_not_quoted_is_found(source: str, is_found: bool) -> None:
    assert bool(unquoted_words(source)) == is_found


# --- size ------------------------------------------------------------------------------------------------------------


_FUNCTION = re.compile(r"^([ \t]*)(?:async[ \t]+)?def\b", re.MULTILINE)
_NEXT = re.compile(r"^([ \t]*)(?:async[ \t]+def|def|class|@)", re.MULTILINE)


def may_be_long(source: str) -> bool:
    """Whether a function may have too many lines: up to the next one that is not within it, there are as many."""
    if source.count("\n") <= FUNCTION_LINES:
        return False
    if any(_NEXT.search(text) for quotes in ('"' * 3, "'" * 3) for text in source.split(quotes)[1::2]):
        return True  # in the middle of a program in a string a function seems to end
    nexts = [(match.start(), len(match[1])) for match in _NEXT.finditer(source)]
    for match in _FUNCTION.finditer(source):
        ends = (start for start, indent in nexts if start > match.start() and indent <= len(match[1]))
        if source.count("\n", match.start(), next(ends, len(source))) > FUNCTION_LINES:
            return True
    return False


def long_functions(source: str) -> list[str]:
    if not may_be_long(source):
        return []
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > FUNCTION_LINES]


def test_files_and_functions_can_be_read() -> None:
    for path in (*SOURCES, *TESTS):
        source = path.read_text()
        assert source.count("\n") <= FILE_LINES, path
        assert not long_functions(source), path


def test_a_long_function_is_found() -> None:
    body = "    pass\n" * FUNCTION_LINES
    assert long_functions(f"def long():\n{body}") == ["long"]
    assert long_functions(f"def short():\n{body}".removesuffix("    pass\n")) == []


# --- names that are imported -----------------------------------------------------------------------------------------


_NAMES = r"(\([^)]*\)|[^\n]+)"
_IMPORT = re.compile(rf"^\s*from ((?:mindspeed_mm|benchmarks|examples|tests)\b[\w.]*) import {_NAMES}", re.MULTILINE)
_DEFINED = re.compile(
    rf"^(?:async def|def|class|type) (\w+)|^([\w, ]+?)(?::[^=\n]+)?=|^\s*(?:from [\w.]+ )?import {_NAMES}", re.MULTILINE
)


def unknown_imports(source: str) -> list[str]:
    """Imports from this repository that name what is not there, programs in strings among them."""
    suspects = [
        (module, name)
        for module, listed in _IMPORT.findall(source)
        for name in re.findall(r"(\w+)(?: as \w+)?\s*(?:[,)]|$)", re.sub(r"#.*", "", listed).strip())
        if name not in _importable(module)
    ]
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)] if suspects else []
    return [
        f"{node.module}.{alias.name}" for node in nodes for alias in node.names if (node.module, alias.name) in suspects
    ]


@functools.cache
def _importable(module: str) -> set[str]:
    """What can be imported from a module or package of this repository; nothing of one that is not there."""
    path = ROOT / module.replace(".", "/")
    inner = {entry.stem for entry in path.iterdir()} if path.is_dir() else set[str]()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return inner
    defined = _DEFINED.findall(file.read_text(encoding="utf-8"))
    return inner | {name for parts in defined for part in parts for name in re.findall(r"\w+", part)}


def test_what_is_imported_is_there() -> None:
    """Benchmarks, and tests that are seldom run, would tell only when they run."""
    found = {str(path.relative_to(ROOT)): unknown_imports(path.read_text(encoding="utf-8")) for path in SOURCES + TESTS}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from mindspeed_mm.core.errors import NoSuchError",
        "from mindspeed_mm.no_such_room import anything",
        "from mindspeed_mm.core import no_such_file",
        "def test():\n    from tests.helpers.no_such_helper import anything",
    ],
)
def test_an_import_of_nothing_is_found(source: str) -> None:
    assert unknown_imports(source)


# --- objects ---------------------------------------------------------------------------------------------------------

WHOLE_ROOMS = ("train", "checkpoint", "optimizer", "sampling")
BEGIN_LATER = {"fsdp/train/run/trackers.py"}
"""A tracker is built by its name alone, and has what it needs once its run begins."""


def late_attributes(source: str) -> list[str]:
    """Attributes that appear after construction: methods that use them would have an unwritten precondition."""
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    found = []
    for name, node in classes.items():
        own = [node, *(classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes)]
        whole = {attribute for each in own for attribute in _born(each, whole=True)}
        found += [f"{name}.{attribute}" for attribute in sorted(_born(node, whole=False) - whole)]
    return found


def _born(node: ast.ClassDef, *, whole: bool) -> set[str]:
    """Names that a class assigns: in its body and in `__init__`, or in its other methods."""
    fields = {target.id for part in node.body for target in _targets(part) if isinstance(target, ast.Name)}
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    stores = {
        part.attr
        for method in methods
        if (method.name in ("__init__", "__post_init__")) == whole
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    }
    return stores | fields if whole else stores


def _targets(part: ast.stmt) -> list[ast.expr]:
    if isinstance(part, ast.AnnAssign):
        return [part.target]
    return part.targets if isinstance(part, ast.Assign) else []


def test_objects_are_whole_after_construction() -> None:
    assert late_attributes("class A:\n    def begin(self):\n        self.b = 1") == ["A.b"]
    assert not late_attributes("class A:\n    b: int = 0\n    def begin(self):\n        self.b = 1")
    files = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for room in WHOLE_ROOMS
        for path in (PACKAGE / "fsdp" / room).rglob("*.py")
    }
    found = {inside: late_attributes(source) for inside, source in files.items() if inside not in BEGIN_LATER}
    assert {inside: names for inside, names in found.items() if names} == {}


ENGINE = ("train", "loss", "optimizer", "distributed", "features", "checkpoint", "ops", "utils", "data/dataloader")
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "fsdp" / "models").glob("*/card.yaml"))
WAYS_TO_ROUND = "fsdp/features/speed/fused_operators.py"
"""Liger Kernel calls ways to round after the families that have them."""
KINDS_OF_LAYERS = "fsdp/features/memory/recompute.py"
"""Kimi delta attention is a kind of layer."""


def families_named(source: str) -> list[str]:
    """Model families that a source text names; a step is an ordinary word."""
    stems = {family: re.match("step3|[a-z]+", family)[0] for family in FAMILIES}  # type: ignore[index]
    found = re.findall(rf"(?<![a-z])({'|'.join(sorted({*stems.values()}))})(?![a-z])", source, re.IGNORECASE)
    named = {stem.lower() for stem in found}
    return [family for family, stem in stems.items() if stem in named]


def test_the_engine_names_no_model_family() -> None:
    assert {"flux", "wan", "qwen3vl"} <= set(FAMILIES)
    assert families_named("the Wan transformer") == ["wan", "wan_vace"]
    assert families_named("what is wanted") == []
    files = [path for folder in ENGINE for path in sorted((PACKAGE / "fsdp" / folder).rglob("*.py"))]
    for named_after_families in (WAYS_TO_ROUND, KINDS_OF_LAYERS):
        files.remove(PACKAGE / named_after_families)
    assert len(files) > 50
    found = {str(path.relative_to(PACKAGE)): families_named(path.read_text(encoding="utf-8")) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_picture_of_the_architecture_is_the_one_that_is_drawn() -> None:
    """`python -m tests.architecture` draws it again."""
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.draw()


_PATCHED = re.compile(r"""(?:patch\.object|setattr|swapped)\(\s*([\w.]+),\s*"(\w+)\"""")
_PATCHED_BY_PATH = re.compile(r"""(?:mock\.patch|setattr)\(\s*f?"((?:mindspeed_mm|tests)\.[\w.]+)\.(\w+)\"""")
_AS = r"^\s*from ((?:mindspeed_mm|benchmarks|tests)\b[\w.]*) import (?:\([^)]*?|[^\n]*?)\b{name}\b"


def unknown_patches(source: str) -> list[str]:
    """Names that a test replaces, in a module or a class of this repository, and that are not there."""
    found = [f"{owner}.{name}" for owner, name in _PATCHED_BY_PATH.findall(source) if not _is_defined(owner, name)]
    for owner, name in _PATCHED.findall(source):
        bound, *inner = owner.split(".")
        aliased = re.search(rf"\b(\w+) as {bound}\b", source)
        original = aliased[1] if aliased else bound
        imported = re.search(_AS.format(name=original), source, re.MULTILINE)
        if imported and not _is_defined(".".join([imported[1], original, *inner]), name):
            found.append(f"{owner}.{name}")
    return found


def _is_defined(owner: str, name: str) -> bool:
    """Whether a module has this name, or a class, of which it is enough that the file that defines it speaks of it."""
    path = ROOT / owner.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return name in _importable(owner)
    text = _texts_of_classes().get(owner.rpartition(".")[2], name)
    return re.search(rf"\b{name}\b", text) is not None


@functools.cache
def _texts_of_classes() -> dict[str, str]:
    """Class → the file that defines it; one name stands for one class."""
    return {name: _text(path) for path in SOURCES for name in re.findall(r"^class (\w+)", _text(path), re.MULTILINE)}


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_what_is_replaced_is_there() -> None:
    """A planted fault that replaces nothing is told where it is planted: in tests that are seldom run."""
    found = {str(path.relative_to(ROOT)): unknown_patches(_text(path)) for path in TESTS if path != Path(__file__)}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "patch",
    [
        'mock.patch.object(rules, "gone", None)',
        'monkeypatch.setattr(rules, "gone", None)',
        'mock.patch("tests.architecture.gone")',
        'mock.patch.object(Share, "gone")',
    ],
)
def test_a_replaced_name_that_is_gone_is_found(patch: str) -> None:
    imports = "from tests import architecture as rules\nfrom mindspeed_mm.core.batch import Share\n"
    assert len(unknown_patches(imports + patch)) == 1


def test_what_is_always_read_together_is_one_file() -> None:
    """A module that only its neighbour imports is part of that one, or `architecture.KEPT_APART` has the reason."""
    found = architecture.lone_siblings(architecture.sources())
    kept = [module for modules in architecture.KEPT_APART.values() for module in modules]
    assert len(kept) == len(set(kept))
    assert {module: by for module, by in found.items() if module not in kept} == {}
    assert [module for module in kept if module not in found] == [], "these need no reason any more"


@pytest.mark.parametrize(
    ("importers", "expected"),
    [
        ({"room.b": "from mindspeed_mm.room.a import A\n"}, {"room.a": "room.b"}),
        ({"room.b": "def late():\n    from mindspeed_mm.room import (\n        a,\n    )\n"}, {"room.a": "room.b"}),
        ({"room.b": "import mindspeed_mm.room.a\n" + "\n" * architecture.SITTING_LINES}, {}),
        ({"room.b": "from mindspeed_mm.room.a import A\n", "room.c": "from mindspeed_mm.room.a import A\n"}, {}),
        ({"other.b": "from mindspeed_mm.room.a import A\n"}, {}),
        ({"room.b": "from mindspeed_mm.room.abc import A\n"}, {}),
    ],
)
def test_a_lone_sibling_is_found(importers: dict[str, str], expected: dict[str, str]) -> None:
    assert architecture.lone_siblings({"room.a": "class A: ...\n", **importers}) == expected
