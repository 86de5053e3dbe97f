"""The notebook: valid nbformat 4, and every cell runs, in this process and without Jupyter."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebook"
NOTEBOOK = FOLDER / "first_run.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """What a cell shows: the value of its last line, where that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def test_it_is_valid_nbformat() -> None:
    """The schema of nbformat 4.5, in what this notebook uses of it."""
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert book.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert book["metadata"]["kernelspec"].keys() == {"display_name", "language", "name"}
    ids = [cell["id"] for cell in book["cells"]]
    assert len(ids) == len(set(ids)) > 10 and all(re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", each) for each in ids)
    for cell in book["cells"]:
        usual = {"cell_type", "id", "metadata", "source"}
        assert cell.keys() == usual | ({"execution_count", "outputs"} if cell["cell_type"] == "code" else set())
        assert cell["cell_type"] in ("code", "markdown") and all(isinstance(line, str) for line in cell["source"])
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


def test_its_links_lead_somewhere() -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((FOLDER / link).is_file() for link in links)


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [run_cell("".join(cell["source"]), names) for cell in cells() if cell["cell_type"] == "code"]
    _, picture, _, problems, run, metrics, answer, scores, exported = shown
    assert picture.size == (32, 32) and problems == []
    assert run.status == "finished" and "best" in run._repr_html_() and len(metrics) == 3
    assert answer == "blue"
    assert scores["overall"].accuracy >= 0.9
    assert {"config.json", "model.safetensors"} <= set(exported)
