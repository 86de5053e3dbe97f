"""docs/posttrain.md: its commands run as they stand, on runs made of the YAML that it shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.cli.main import run
from mindspeed_mm.fsdp.posttrain_rewards import reward_register
from tests.helpers.tiny_pairs import make_tiny_pairs
from tests.helpers.tiny_run import make_tiny_run

PAGE = (Path(__file__).parents[1] / "docs" / "posttrain.md").read_text(encoding="utf-8")
PAIRS, _, ANSWERS = PAGE.partition("\n## Answers and rewards")
TRAINING = {"train_iters": 2, "save": "out"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def shown(text: str) -> dict[str, Any]:
    """The first YAML of a part of the page."""
    return dict(YAML(typ="safe").load(blocks(text, "yaml")[0]))


def run_all(commands: list[str]) -> None:
    assert commands
    for line in commands:
        assert run(shlex.split(line, comments=True)[1:]) == 0, line


@pytest.mark.slow
def test_the_commands_for_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = shown(PAIRS)
    make_tiny_pairs(tmp_path, training=TRAINING, posttrain=section["posttrain"])
    monkeypatch.chdir(tmp_path)
    first, *others = blocks(PAIRS, "sh")
    run_all(first.splitlines())
    spoken = re.findall(r"`(mm (?:posttrain|schema) [^`]*)`", PAIRS)
    assert any("dpo run.yaml" in command for command in spoken)
    shutil.rmtree("out")  # a reader who stores the reference does so before the run
    for block in [*others, *(f"{command} training.save=said" for command in spoken if "run.yaml" in command)]:
        run_all(block.splitlines())
    run_all([command for command in spoken if "schema" in command])


@pytest.mark.slow
def test_the_commands_for_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = shown(ANSWERS)["posttrain"]
    section["rollout"]["max_completion_length"] = 4
    make_tiny_run(tmp_path, training=TRAINING | {"micro_batch_size": 8}, posttrain=section)
    monkeypatch.chdir(tmp_path)
    run_all(["mm check run.yaml", *(command for command in re.findall(r"`(mm train run.yaml)`", ANSWERS))])
    run_all([command.replace("RUN", "out") for command in re.findall(r"`(mm posttrain rollouts [^`]*)`", ANSWERS)])
    assert (tmp_path / "out" / "rollouts" / "rollout_0000001.jsonl").is_file()


def test_the_reward_of_ones_own_and_the_settings_that_are_shown() -> None:
    (code,) = blocks(ANSWERS, "python")
    try:
        exec(compile(code, "docs/posttrain.md", "exec"), {})
        judge = reward_register.get("short")
        assert judge(["a", "b"], ["word", "word " * 40], [{}, {}]) == [1.0, 0.0]
    finally:
        reward_register._entries.pop("short", None)
    reward = YAML(typ="safe").load(blocks(ANSWERS, "yaml")[1])["rewards"][0]
    assert reward["name"] == "http" and reward["settings"]["on_failure"] == "skip"
