"""What the script that a launch starts brings of its own, told by reading it: nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA = "train_valid_test_dataset_provider"
_FUNCTIONS = {
    _DATA: 0,
    "model_provider": 1,
    "forward_step_func": 3,
}
"""Parameter of `pretrain` that takes a function → its place."""
_TRAIN_BY_PRETRAIN = ("pretrain_", "posttrain_", "finetune_")
"""How entries of the suite begin whose rows are those of data.json."""
_OTHERS = ("megatron", "mindspeed")
_RUNNER = "-m mindspeed_mm.megatron_names"


def notes_on_entry(path: Path, *, has_runner: bool = False) -> list[str]:
    """What a person should know of a script whose flags are read without it.

    Args:
        path: Of the script; nothing is said of one that is not here, cannot be read, or is the suite's own.
        has_runner: It is started by the runner that stands in for libraries.
    """
    if path.suffix != ".py" or not path.is_file() or path.resolve().is_relative_to(_PACKAGE):
        return []
    tree = _read(path)
    notes = []
    if own := list(dict.fromkeys(_own_functions(tree).values())):
        notes.append(
            f"{path} passes its own functions to pretrain ({', '.join(own)}): they are not used. mm train builds the "
            "model, reads the data and computes the loss as the YAML says."
        )
    others = sorted(_imported(tree) & set(_OTHERS))
    if others and not has_runner:
        notes.append(
            f"{path} imports {' and '.join(others)}. Where they are not installed, start it by {_RUNNER} {path}."
        )
    return notes


def reads_mm_data(path: Path) -> bool:
    """Whether a script is an entry of the suite's, by its name, and hands `pretrain` no data of its own."""
    is_entry = path.name.startswith(_TRAIN_BY_PRETRAIN) and (_PACKAGE / path.name).is_file()
    return is_entry and _DATA not in _own_functions(_read(path))


def _read(path: Path) -> ast.Module:
    """The script's tree; an empty one of a file that cannot be read."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ast.Module([], [])


def _own_functions(tree: ast.Module) -> dict[str, str]:
    """Parameter of `pretrain` → the function that the script defines and hands to it."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {parameter: name for parameter, name in _handed(tree) if name in defined}


def _handed(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        if _called(call.func) != "pretrain":
            continue
        by_name = {word.arg: word.value for word in call.keywords}
        for name, place in _FUNCTIONS.items():
            given = by_name.get(name)
            # by position, as most scripts call `pretrain`
            if given is None and place < len(call.args):
                given = call.args[place]
            if given is None:
                continue
            for node in ast.walk(given):
                if isinstance(node, ast.Name):
                    yield name, node.id


def _called(function: ast.expr) -> str:
    """The name of what is called: `name(…)` or `module.name(…)`."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _imported(tree: ast.Module) -> set[str]:
    """Packages that the script imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found
