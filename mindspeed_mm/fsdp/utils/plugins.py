"""Plugins: imports what `training.plugin` names, a module, or a package and the modules in it; and calls what a plugin
registered with what its signature takes."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.params.cards import is_of_suite, plugin_module
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, setting_of
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

# --- importing --------------------------------------------------------------------------------------------------------


KEY = "training.plugin"
_NO_PARTS = frozenset({"__init__", "__main__", "setup", "conftest"})
"""Files of a package that are run by tools, not imported."""


_OUTSIDE: set[Path] = set()
"""Files and folders of the plugins that were imported, the suite's own left out."""


def import_plugin(plugins: Iterable[str], key: str = KEY) -> None:
    """Import what `training.plugin` names, so that its registrations run.

    Of a package also each of its modules is imported, in the order of their names: registrations stand in
    `modeling_<name>.py` and `<name>_dataset.py`, and its `__init__.py` may be empty or missing. Left alone are
    sub-packages, tests, `setup.py`, `conftest.py`, `__main__.py`, and files whose names are not Python names. An
    `npu_patch.py` may miss the libraries of an NPU where there is none.

    Args:
        plugins: Dotted names (`a.b`) or paths (`a/b`), which are looked for on `sys.path` and in the working directory;
            or absolute paths.
        key: What names them, for messages.

    Raises:
        ConfigError: A module cannot be imported; its file, its line and the cause are in the message.
    """
    prepare_for_transformers()  # before a plugin imports transformers
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.append(working_directory)  # last: a file there must not stand in for a library's
    for plugin in plugins:
        name = plugin_module(plugin)
        package = _import_from(Path(plugin.strip()), name, plugin, key)
        if package is not None and not is_of_suite(name):
            _OUTSIDE.update(Path(place) for place in (*getattr(package, "__path__", ()), package.__file__) if place)
        for path in _modules(package):
            _import(f"{name}.{path.stem}", plugin, key, path)


def _import_from(path: Path, name: str, plugin: str, key: str) -> ModuleType | None:
    """A path to what is there is imported from where it says, or not at all."""
    if path.is_absolute():
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
    elif is_of_suite(name) or not (path.suffix == ".py" or len(path.parts) > 1) or not _is_here(path):
        return _import(name, plugin, key)
    module = _import(name, plugin, key)
    found = {*getattr(module, "__path__", ()), str(getattr(module, "__file__", ""))}
    if not {path.resolve(), path.with_suffix(".py").resolve()} & set(map(_resolved, found)):
        raise ConfigError(
            f"plugin '{plugin}' cannot be imported: its name '{name}' is that of another module ({min(found)})",
            key=key,
            way_out="Give the file or the folder another name.",
        )
    return module


def _resolved(place: str) -> Path:
    return Path(place).resolve()


def _is_here(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def _modules(package: ModuleType | None) -> Iterator[Path]:
    for folder in getattr(package, "__path__", ()):
        for path in sorted(Path(folder).glob("*.py")):
            is_test = path.stem.startswith("test_") or path.stem.endswith("_test")
            if path.stem.isidentifier() and path.stem not in _NO_PARTS and not is_test:
                yield path


def _import(name: str, plugin: str, key: str, path: Path | None = None) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ConfigError:
        raise
    except Exception as error:  # a plugin is foreign code: whatever it raises is its cause
        is_for_npus = path is not None and path.stem == "npu_patch" and isinstance(error, ModuleNotFoundError)
        if is_for_npus and get_device_type() != "npu":
            return None
        if isinstance(error, ModuleNotFoundError) and error.name == name and is_of_suite(name):
            raise ConfigError(
                f"plugin '{plugin}' is not in this version",
                key=key,
                way_out="Check the path if it is yours. `mm models` lists the families that are built or planned.",
            ) from error
        way_out = "Fix the error in that file."
        if isinstance(error, ImportError):
            way_out = _hidden_by(name, error) or "Check the path, and that everything it imports is installed."
        raise ConfigError(
            f"plugin '{plugin}' cannot be imported: {type(error).__name__}: {error}",
            where=place_of_error(error) or str(path or ""),
            key=key,
            way_out=way_out,
        ) from error


def _hidden_by(name: str, error: ImportError) -> str:
    """The way out where the working directory has the plugin, but its first folder is called as a library is, which
    comes first; else empty."""
    first = name.partition(".")[0]
    library = setting_of(sys.modules.get(first), str, "__file__")
    is_missing = error.name is not None and f"{name}.".startswith(f"{error.name}.")
    if not is_missing or library is None or not _is_here(Path(name.replace(".", "/"))):
        return ""
    if _resolved(library).is_relative_to(Path(first).resolve()):
        return ""
    return f"'{first}' is also the name of {library}, which comes first: give the folder '{first}' another name."


def place_of_error(error: BaseException) -> str:
    """`file.py:12`: the last line of a plugin's own folder that an exception went through; empty when it met none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    callers = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen importlib")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(callers)]
    if not frames:
        return ""
    plugin = Path(frames[0].filename).parent
    last = [frame for frame in frames if Path(frame.filename).is_relative_to(plugin)][-1]
    return f"{last.filename}:{last.lineno}"


def place_in_plugin(error: BaseException) -> str:
    """`file.py:12`: the last line of a plugin's files that an exception went through, else the class of a plugin that
    lacks what a library asked it for; empty when a plugin has no part in it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if any(Path(frame.filename).is_relative_to(place) for place in _OUTSIDE):
            return f"{frame.filename}:{frame.lineno}"
    if isinstance(error, AttributeError):
        asked = type(error.obj)
        file = attribute_at(sys.modules.get(asked.__module__), "__file__")
        if file is not None and any(Path(file).is_relative_to(place) for place in _OUTSIDE):
            return f"{file}, class {asked.__name__}"
    return ""


def place_within(owner: type, error: BaseException) -> str:
    """`file.py:12`: the last line that an exception went through of the files of a class and of those it derives from,
    torch's left out; its very last line where it met none of them."""
    classes = [each for each in owner.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    frames = traceback.extract_tb(error.__traceback__)
    files = {getattr(sys.modules.get(each.__module__), "__file__", None) for each in classes}  # none in a notebook
    last = next((frame for frame in reversed(frames) if frame.filename in files), frames[-1])
    return f"{Path(last.filename).name}:{last.lineno}"


def plugin_hashes(plugins: Iterable[str]) -> dict[str, str]:
    """SHA-256 over the Python files of each plugin that was imported, for a run's record of the code that it ran."""
    found = {}
    for plugin in plugins:
        module = sys.modules.get(plugin_module(plugin))
        files: list[Path] = []
        for folder in getattr(module, "__path__", ()):  # of a package
            files += sorted(Path(folder).rglob("*.py"))
        file = setting_of(module, str, "__file__")
        if not hasattr(module, "__path__") and file is not None:
            files = [Path(file)]
        found[plugin] = hash_of_files(files)
    return found


def files_beside(file: Path) -> list[Path]:
    """The Python files of the imported plugin that a file is of: those of its folder, or of a plugin of one file that
    file and the modules beside it that are imported; of any other file that one alone."""
    if file in _OUTSIDE:
        loaded = [vars(module).get("__file__") for module in sys.modules.values() if isinstance(module, ModuleType)]
        return sorted(path for path in map(Path, filter(None, loaded)) if path.parent == file.parent)
    for place in _OUTSIDE:
        if file.is_relative_to(place):
            return sorted(place.rglob("*.py"))
    return [file]


def hash_of_files(files: Iterable[Path]) -> str:
    """SHA-256 over names and contents of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# --- calling ----------------------------------------------------------------------------------------------------------


def call_plugin(
    function: Callable[..., object],
    offered: Mapping[str, object],
    *,
    order: Sequence[str],
    spread: Sequence[str] = (),
    key: str,
    name: str,
) -> Any:
    """Call `function` with those of the offered values that it asks for.

    A parameter gets the value of its name; one that must be given and has a name of its own gets the value that `order`
    has at its place.

    Args:
        function: A function, a class, or a class method of a plugin.
        offered: Name → value; several names may stand for one value.
        order: Names of the values, in the order in which they are given to parameters by place, and to `*args`.
        spread: Names of the values that `**kwargs` gets, unless they were given already.
        key: The configuration key that names the plugin's entry, for messages.
        name: What the entry is called there.

    Raises:
        ConfigError: A parameter cannot be given, or the function failed; the line of the plugin is named.
    """
    bound = _bind(function, offered, order, spread, key, name)
    try:
        return function(*bound.args, **bound.kwargs)
    except MMError:
        raise
    except Exception as error:  # a plugin is foreign code: whatever it raises is its cause
        raise ConfigError(
            f"'{name}' cannot be built: {type(error).__name__}: {error}", where=place_of_error(error), key=key
        ) from error


def _bind(
    function: Callable[..., object],
    offered: Mapping[str, object],
    order: Sequence[str],
    spread: Sequence[str],
    key: str,
    name: str,
) -> inspect.BoundArguments:
    signature = inspect.signature(function)
    bound = signature.bind_partial()
    given = set(signature.parameters)
    for place, parameter in enumerate(signature.parameters.values()):
        is_by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if parameter.kind is parameter.VAR_POSITIONAL:
            bound.arguments[parameter.name] = tuple(offered[each] for each in order[place:])
            given.update(order[place:])
        elif parameter.kind is parameter.VAR_KEYWORD:
            bound.arguments[parameter.name] = {each: offered[each] for each in spread if each not in given}
        elif parameter.name in offered:
            bound.arguments[parameter.name] = offered[parameter.name]
        elif parameter.default is parameter.empty and is_by_place and place < len(order):
            bound.arguments[parameter.name] = offered[order[place]]
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"'{name}' has a parameter '{parameter.name}', which is not passed to it",
                where=getattr(function, "__qualname__", ""),
                key=key,
                way_out=f"It can have the parameters {', '.join(offered)}; give others a default.",
            )
    return bound
