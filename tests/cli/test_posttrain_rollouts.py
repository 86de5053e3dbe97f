"""`mm posttrain rollouts`: the samples of a run, the best of each prompt first."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed_mm.cli.posttrain import command
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.train.rollouts.files import read_rollout, rollout_file, text_of, write_rollout
from mindspeed_mm.tasks.posttrain import rollouts
from tests.helpers.runs import mm


def sample(prompt: str, number: int, advantage: float, reward: float | None = 1.0) -> dict[str, object]:
    return {
        "step": 0, "key": f"0/{prompt}/{number}", "prompt": prompt, "text": f"{prompt} is {number}\nor not",
        "reward": reward, "advantage": advantage, "scores": [reward], "truncated": number == 1,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number in (0, 3):
        samples = [sample("a", 0, -1.0, 0.0), sample("a", 1, 1.0), sample("b", 0, 0.0, None), sample("b", 1, 0.0)]
        header = {"rollout": number, "weights": 1, "samples": len(samples)}
        write_rollout(tmp_path, number, text_of(header, samples))
    return tmp_path


def test_the_best_answer_of_a_prompt_comes_first(run: Path) -> None:
    told = CliRunner().invoke(command, ["rollouts", str(run), "--prompts", "1"], standalone_mode=False)
    assert told.output.splitlines() == [
        "rollout 3",
        "a",
        "         1   +1.00  a is 1 or not (cut)",
        "         0   -1.00  a is 0 or not",
    ]
    told = CliRunner().invoke(command, ["rollouts", str(run), "--number", "0", "--json"], standalone_mode=False)
    found = json.loads(told.output)
    assert found["number"] == 0 and len(found["groups"]) == 2 and found["groups"][1][0]["reward"] is None


def test_a_rollout_that_is_not_there_is_named(run: Path) -> None:
    with pytest.raises(UsageError, match="no rollout 1: it has 0 to 3"):
        rollouts.run(run, 1)
    with pytest.raises(UsageError, match="it has none"):
        rollouts.run(run / "rollouts")
    with pytest.raises(UsageError, match=r"nowhere.*there is no such folder"):
        rollouts.run(run / "nowhere")


def test_a_file_that_was_cut_short_or_changed_is_no_rollout(run: Path) -> None:
    path = rollout_file(run, 0)
    assert read_rollout(run, 0) is not None
    path.write_text(path.read_text(encoding="utf-8").replace('"reward": 1.0', '"reward": 1.5', 1))
    assert read_rollout(run, 0) is None
    with pytest.raises(UsageError, match=r"rollout_0000000\.jsonl.*cut short or changed"):
        rollouts.run(run, 0)
    path = rollout_file(run, 3)
    path.write_text("\n".join(path.read_text(encoding="utf-8").splitlines()[:-1]))
    assert read_rollout(run, 3) is None


def test_the_help_of_verbs_that_train_has_a_short_option() -> None:
    said = mm("posttrain", "dpo", "-h")
    assert said.code == 0 and "-h, --help" in said.out and "--dry-run" in said.out
