"""What of a plugin is imported, and what is said when it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.utils.register import import_plugin

pytestmark = pytest.mark.edge("R11")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package `outside_parts` that can be imported during a test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "outside_parts"
    folder.mkdir()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside_parts"]:
        del sys.modules[name]


def imported() -> set[str]:
    return {name.removeprefix("outside_parts.") for name in sys.modules if name.startswith("outside_parts.")}


@pytest.mark.parametrize("name", ["outside_parts", "outside_parts/", "./outside_parts"])
@pytest.mark.parametrize("has_init", [True, False])
def test_each_module_of_a_package_is_imported(package: Path, name: str, has_init: bool) -> None:
    if has_init:
        (package / "__init__.py").write_text("")
    for part in ("modeling_x.py", "x_dataset.py", "npu_patch.py"):
        (package / part).write_text("")
    import_plugin([name])
    assert imported() == {"modeling_x", "x_dataset", "npu_patch"}


def test_what_is_no_part_of_a_plugin_is_left_alone(package: Path) -> None:
    fails = "raise RuntimeError('imported')"
    for part in ("test_x.py", "x_test.py", "conftest.py", "setup.py", "__main__.py", "run-me.py", "notes.txt"):
        (package / part).write_text(fails)
    for folder in ("tests", "tools"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").write_text(fails)
    (package / "modeling_x.py").write_text("")
    import_plugin(["outside_parts"])
    assert imported() == {"modeling_x"}


def test_a_module_named_alone_is_imported_alone(package: Path) -> None:
    (package / "one.py").write_text("")
    (package / "other.py").write_text("")
    import_plugin(["outside_parts/one.py"])
    assert imported() == {"one"}


@pytest.mark.parametrize("end", ["", "/", "/one.py"])
def test_an_absolute_path_is_imported_from_where_it_says(tmp_path: Path, end: str) -> None:
    folder = tmp_path / "elsewhere" / "outside_parts"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("made = 1\n")
    before = list(sys.path)
    try:
        import_plugin([f"{folder}{end}"])
        made = sys.modules["one" if end.endswith(".py") else "outside_parts.one"]
        assert made.__file__ == str(folder / "one.py")
        (tmp_path / "json.py").write_text("made = 2\n")
        with pytest.raises(ConfigError, match=r"'json' is that of another module \(.*Give the file or the folder"):
            import_plugin([str(tmp_path / "json.py")])
    finally:
        sys.path[:] = before
        for name in ("one", "outside_parts", "outside_parts.one"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("json.py", r"'json' is that of another module \(.*Give the file or the folder"),
        ("./json/scenes", r"'json' is also the name of .*__init__\.py, which comes first: give the folder 'json'"),
    ],
)
def test_a_path_that_a_library_hides_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, said: str
) -> None:
    """Else the library is imported, which registers nothing, and what is registered is said to be missing."""
    file = tmp_path / plugin
    file.parent.mkdir(exist_ok=True)
    file.with_suffix(".py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        import_plugin([plugin])


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("x = 1\nimport nothing_of_that_name\n", 2, "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("def f(:\n", 1, "SyntaxError"),
        ("\n\nraise KeyError('odd')\n", 3, "KeyError: 'odd'"),
        ("from outside_parts import helpers\n", 2, "ZeroDivisionError"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line_and_the_error(
    package: Path, text: str, line: int, said: str
) -> None:
    (package / "modeling_x.py").write_text(text)
    helpers = package / "helpers.py"
    file = package / "modeling_x.py"
    if "helpers" in text:
        helpers.write_text("\n1 / 0\n")
        file = helpers
    with pytest.raises(ConfigError) as caught:
        import_plugin(["outside_parts"])
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == (f"{file}:{line}", "training.plugin")
    assert said in problem.what


def test_patches_for_npus_may_miss_their_libraries_where_there_is_none(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "npu_patch.py").write_text("import libraries_of_npus\n")
    import_plugin(["outside_parts"])
    monkeypatch.setattr("mindspeed_mm.fsdp.utils.plugins.get_device_type", lambda: "npu")
    with pytest.raises(ConfigError, match="No module named 'libraries_of_npus'"):
        import_plugin(["outside_parts"])
