"""Training on the model's own answers over several ranks: the same answers and the same weights as in one process."""

import json
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.params.loader import Given
from mindspeed_mm.fsdp.posttrain_rewards import reward_register
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.rollouts.text import TextRollouts
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.tiny_run import make_tiny_run

GROUP = 4
STEPS = 3
PLANS: dict[str, tuple[int, int, list[str]]] = {
    "FSDP2": (2, 2, []),
    "TP2": (2, 1, ["parallel.tensor_parallel_size=2"]),
    "CP2": (2, 1, ["parallel.ulysses_parallel_size=2"]),
    "HSDP": (2, 2, ["parallel.fully_shard_parallel_size=1"]),
    "FSDP2 TP2": (4, 2, ["parallel.tensor_parallel_size=2"]),
}
"""Name → ranks, ranks that hold different answers, overrides."""


def trained(path: str, words: list[str]) -> dict[str, Any]:
    """The steps of a rank."""

    def judge(prompts: Any, completions: Any, rows: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    reward_register.register("of_words")(judge)
    try:
        recorder = StepRecorder()
        Trainer(load_with_plugins(Path(path), words), hooks=[recorder]).train()
    finally:
        reward_register._entries.pop("of_words")
    last = recorder.steps[-1]
    return {"weights": last["weights"], "losses": [float(step["loss"]) for step in recorder.steps]}


def run_of(folder: Path, name: str, data_ranks: int, words: list[str]) -> tuple[str, list[str]]:
    posttrain: Given = {
        "method": "grpo",
        "grpo": {
            "num_generations": GROUP,
            "steps_per_generation": 2,
            "scale_rewards": "batch",
            "beta": 0.05,
            "entropy_coef": 0.01,
        },
        "rollout": {"max_completion_length": 6},
        "rewards": [{"name": "of_words"}],
    }
    path = make_tiny_run(
        folder, posttrain=posttrain, training={"train_iters": STEPS, "lr": 1e-3, "lr_decay_style": "constant"}
    )
    accumulation = 4 // data_ranks
    own = [f"training.micro_batch_size={GROUP}", f"training.gradient_accumulation_steps={accumulation}"]
    return str(path), [*own, f"training.save={folder / name}", "training.save_interval=100", *words]


def drawn(folder: Path) -> list[Any]:
    found = []
    for file in sorted((folder / "rollouts").glob("rollout_*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines()[1:]:
            record = json.loads(line)
            found.append((record["key"], record["token_ids"], round(record["advantage"], 6)))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any]]:
    """What one process draws and learns."""
    return drawn_and_learnt(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def alone_with_iterations(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any]]:
    """The same where each rollout is trained on twice."""
    return drawn_and_learnt(tmp_path_factory.mktemp("iterations"), "posttrain.grpo.num_iterations=2")


def drawn_and_learnt(folder: Path, *words: str) -> tuple[list[Any], dict[str, Any]]:
    found = trained(*run_of(folder, "run", 1, list(words)))
    return drawn(folder / "run"), found


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_draws_and_learns_as_one_process(name: str, tmp_path: Path, alone: Any) -> None:
    ranks, data_ranks, words = PLANS[name]
    answers, expected = alone
    found = run_ranks(ranks, trained, *run_of(tmp_path, "ranks", data_ranks, words))
    assert drawn(tmp_path / "ranks") == answers
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    for weight_name, weight in expected["weights"].items():
        assert torch.allclose(found[0]["weights"][weight_name], weight, rtol=0, atol=3e-5), weight_name


def killed(path: str, words: list[str], where: str, call: int) -> None:
    """Training that is ended by SIGKILL: while the answers of a rollout are judged, or before one of its steps."""
    calls = count()

    def fatal(*_: Any, **__: Any) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    name = "judge" if where == "in a rollout" else "batches"
    real = getattr(TextRollouts, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        fatal()
        return real(*args, **kwargs)

    with mock.patch.object(TextRollouts, name, counted):
        trained(path, [*words, "training.save_interval=1"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=["1 to 1", "2 to 1", "1 to 2", "2 to 2"])
@pytest.mark.parametrize(
    ("where", "call"), [("in a rollout", 3), ("between the steps of one", 1), ("between the iterations of one", 2)]
)
def test_a_run_that_was_killed_draws_and_learns_the_same(
    where: str, call: int, ranks: tuple[int, int], tmp_path: Path, alone: Any, alone_with_iterations: Any
) -> None:
    """Killed under one number of ranks and gone on with under another; with one process to the bit. Two iterations of
    the two steps of a rollout are more than the run has."""
    has_iterations = where == "between the iterations of one"
    answers, expected = alone_with_iterations if has_iterations else alone
    own = ["posttrain.grpo.num_iterations=2"] if has_iterations else []
    before, after = ranks
    with pytest.raises(RanksFailed):
        run_ranks(before, killed, *run_of(tmp_path, "run", before, own), where, call)
    assert (drawn(tmp_path / "run") == answers) is has_iterations
    path, words = run_of(tmp_path, "run", after, own)
    found = run_ranks(after, trained, path, words)[0]
    assert drawn(tmp_path / "run") == answers
    assert len(found["losses"]) < STEPS  # it went on, and did not begin anew
    atol = 0 if ranks == (1, 1) else 3e-5
    for weight_name, weight in expected["weights"].items():
        assert torch.allclose(found["weights"][weight_name], weight, rtol=0, atol=atol), weight_name


def stopped(path: str, words: list[str]) -> None:
    """The first step of two of a rollout."""
    trained(path, [*words, "training.train_iters=1"])


@pytest.mark.slow
def test_a_rollout_of_two_ranks_is_gone_on_with_by_one(tmp_path: Path, alone: Any) -> None:
    answers, expected = alone
    path, words = run_of(tmp_path, "run", 2, [])
    run_ranks(2, stopped, path, words)
    path, words = run_of(tmp_path, "run", 1, [])
    found = trained(path, words)
    assert drawn(tmp_path / "run") == answers
    for weight_name, weight in expected["weights"].items():
        assert torch.allclose(found["weights"][weight_name], weight, rtol=0, atol=3e-5), weight_name
