"""Editors know the keys of every example: its first line names the schema, which is that of `mm schema --json`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.cli.main import run
from mindspeed_mm.tasks.schema import SCHEMA_FILE, editor_line

ROOT = Path(__file__).parents[1]
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*/*.yaml")) if "fsdp2_config" not in path.name]
"""Files named by launch scripts' flags (fsdp2_config) have keys of their own."""
FIRST_LINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")


def test_the_committed_schema_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise: mm schema --json > mindspeed_mm/run.schema.json."""
    assert run(["schema", "--json"]) == 0
    assert capsys.readouterr().out == SCHEMA_FILE.read_text(encoding="utf-8")


def test_every_example_names_the_schema_first() -> None:
    assert len(EXAMPLES) > 80
    for path in EXAMPLES:
        found = FIRST_LINE.match(path.read_text(encoding="utf-8"))
        assert found is not None, path
        assert (path.parent / found[1]).resolve() == SCHEMA_FILE, path


def test_the_schema_takes_every_example_and_no_wrong_key() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    for path in EXAMPLES:
        assert unknown_keys(read_yaml(path), schema, schema) == [], path
    wrong = {"training": {"lr": 1e-5, "learning_rate": 1e-5}, "optimizers_": {}}
    assert unknown_keys(wrong, schema, schema) == ["training.learning_rate", "optimizers_"]


def read_yaml(path: Path) -> object:
    return YAML(typ="safe").load(path)


def unknown_keys(value: object, rule: dict, schema: dict, place: str = "") -> list[str]:
    """Keys of a configuration that the schema has not, where it allows no others."""
    while "$ref" in rule:
        rule = schema["$defs"][rule["$ref"].rpartition("/")[2]]
    choices = [each for each in rule.get("anyOf", ()) if "$ref" in each]
    if choices and isinstance(value, dict):
        return min((unknown_keys(value, each, schema, place) for each in choices), key=len)
    if not isinstance(value, dict):
        return []
    found = []
    for name, inner in value.items():
        here = f"{place}.{name}" if place else name
        if name in rule.get("properties", {}):
            found += unknown_keys(inner, rule["properties"][name], schema, here)
        elif rule.get("additionalProperties") is False:
            found.append(here)
    return found


def test_the_line_of_an_installed_package_is_a_uri() -> None:
    found = FIRST_LINE.match(editor_line() + "\n")
    assert found is not None and found[1].startswith("file:///") and json.loads(SCHEMA_FILE.read_text())["properties"]
