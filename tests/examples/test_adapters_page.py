"""docs/adapters.md as a new user follows it: every YAML trains, every command runs, with tiny models at its paths."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.cli.main import run
from tests.examples.test_strangers_folders import merged
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
SHORT = "The short way"


def blocks(heading: str, language: str) -> list[str]:
    """Of a section of the page."""
    section = re.split(r"^## ", PAGE.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


SECTIONS = [heading for heading in re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE) if blocks(heading, "yaml")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's relative paths are."""
    make_tiny_qwen3_vl(tmp_path / "models" / "Qwen3-VL-2B-Instruct")
    make_rows(tmp_path / "my_data", count=8).rename(tmp_path / "my_data" / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(place: Path, heading: str) -> None:
    """Two steps with the section's YAML over the short way's."""
    base, plain = (YAML(typ="safe").load(text) for text in blocks(SHORT, "yaml"))
    given: Any = plain if heading == SHORT else YAML(typ="safe").load(blocks(heading, "yaml")[0])
    if "A3B" in given.get("model", {}).get("model_name_or_path", ""):
        make_tiny_qwen3_moe(place / "models" / "Qwen3-30B-A3B")
        make_rows(place / "my_data", count=8, images=(0,)).replace(place / "my_data" / "train.jsonl")
    config = merged(base, given)
    config["data"]["dataloader_param"] = {"num_workers": 0}
    with (place / "run.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    save = config["training"]["save"]
    words = ["training.train_iters=2", "training.save_interval=2", f"training.save={save}"]
    assert run(["train", "run.yaml", *words]) == 0


def commands(heading: str) -> None:
    for line in "".join(blocks(heading, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words and words[:2] != ["mm", "train"]:
            assert words[0] == "mm" and run(words[1:]) == 0, line


def test_the_page_is_followed(place: Path) -> None:
    train(place, SHORT)
    commands(SHORT)
    train(place, "Several adapters")
    commands("Several adapters")
    assert {"digits", "digits-too", "both", "first-again"} <= {path.name for path in (place / "models").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("heading", [name for name in SECTIONS if name not in (SHORT, "Several adapters")])
def test_every_yaml_trains(heading: str, place: Path) -> None:
    train(place, heading)
