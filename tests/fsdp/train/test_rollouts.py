"""Training on the model's own answers, in one process: what is drawn, learnt, and replayed by a resume."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.core.errors import CheckpointError, ConfigError, DataError, MachineError
from mindspeed_mm.core.outbound import OutboundError
from mindspeed_mm.fsdp.models.behaviour import shared_media
from mindspeed_mm.fsdp.posttrain_rewards import reward_register
from mindspeed_mm.fsdp.posttrain_rewards.http import HttpReward
from mindspeed_mm.fsdp.posttrain_rewards.registry import solution_of
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.rollouts import files, loader
from mindspeed_mm.fsdp.train.rollouts.text import TextRollouts, in_turns
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.check import check
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.counted_patches import counted_patches
from tests.helpers.hostile import hostile
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_run import make_rows, make_tiny_run

POSTTRAIN = {
    "method": "grpo",
    "grpo": {"num_generations": 4},
    "rollout": {"max_completion_length": 6},
    "rewards": [{"name": "of_words"}],
}
TRAINING = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "train_iters": 4, "lr": 1e-2}


@pytest.fixture(autouse=True)
def of_words() -> Any:
    """How many different letters an answer has: nearly every group has spread."""

    def judge(prompts: Any, completions: Any, rows: Any) -> list[float]:
        assert all(row["solution"] and row["images"] is not None for row in rows)
        return [float(len(set(text))) for text in completions]

    reward_register.register("of_words")(judge)
    yield
    reward_register._entries.pop("of_words")


def configured(folder: Path, training: dict[str, Any] | None = None, **posttrain: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sections = {key: {**value, **posttrain.pop(key, {})} if isinstance(value, dict) else value
                for key, value in POSTTRAIN.items()}  # fmt: skip
    return make_tiny_run(folder, training=TRAINING | (training or {}), posttrain=sections | posttrain)


def trained(path: Path, steps: int | None = None) -> StepRecorder:
    recorder = StepRecorder()
    Trainer(str(path), TrainOptions(steps=steps), hooks=[recorder]).train()
    return recorder


def lines(folder: Path, number: int) -> list[dict[str, Any]]:
    text = (folder / "rollouts" / f"rollout_{number:07}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line][1:]


def test_a_run_that_was_killed_within_a_rollout_goes_on_with_it(tmp_path: Path) -> None:
    """Two steps and two iterations of each rollout; the checkpoint is behind the second of four."""
    grpo = {"num_generations": 4, "steps_per_generation": 2, "num_iterations": 2}
    save = tmp_path / "run"
    path = configured(tmp_path, {"save": str(save), "save_interval": 1, "train_iters": 5}, grpo=grpo)
    whole = trained(path)
    first = lines(save, 0)
    assert [line["step"] for line in first] == [0] * 8 + [1] * 8
    assert len({tuple(line["token_ids"]) for line in first}) > 4
    groups = [first[i : i + 4] for i in range(0, 16, 4)]
    for group in groups:
        assert len({line["id"] for line in group}) == 1
        rewards = torch.tensor([line["reward"] for line in group], dtype=torch.float64)
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        assert torch.allclose(torch.tensor([line["advantage"] for line in group]).double(), expected, atol=1e-12)
    metrics = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    drawn = next(each for each in metrics if "reward" in each)
    assert drawn["log_prob_gap"] < 1e-5 and drawn["clip_share"] == 0 and drawn["rollout_s"] > 0
    steps = {each["step"]: each for each in metrics if "reward" in each}
    for number in (3, 4, 5):
        name = f"iter_{number:07}"
        for file in sorted((save / name).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        (save / name).rmdir()
    (save / "latest_checkpointed_iteration.txt").write_text("2\n")
    again = trained(path)
    assert len(again.steps) == 3
    for name, weight in whole.steps[-1]["weights"].items():
        assert torch.equal(weight, again.steps[-1]["weights"][name]), name
    assert lines(save, 0) == first
    # The fifth step's rollout was read again: the log has all that it had, but for times.
    (read,) = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()][-1:]
    of_rollouts = {"reward", "reward_std", "groups_without_spread", "entropy", "completion_tokens", "truncated_share"}
    assert {name: read[name] for name in of_rollouts} == {name: steps[5][name] for name in of_rollouts}
    assert "rollout_s" not in read and "rollout_s" in steps[5]


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_divergence_from_the_reference_and_entropy_are_trained(tmp_path: Path, lora: bool) -> None:
    """The policy starts as its reference, so that the divergence is 0 and then grows; a large β holds it back. The
    entropy in the loss is that of the answers' tokens."""
    adapters = {"lora": {"enable": True, "rank": 4}} if lora else {}

    def logged(name: str, **grpo: float) -> list[dict[str, Any]]:
        save = tmp_path / name
        training = {"save": str(save), "save_interval": 1000, "train_iters": 3, **adapters}
        trained(configured(tmp_path, training, grpo={"num_generations": 4, **grpo}))
        return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]

    free, held = logged("free", beta=1e-6), logged("held", beta=10.0, entropy_coef=0.5)
    assert abs(free[0]["kl"]) < 1e-9 and abs(held[0]["loss/kl"]) < 1e-8
    assert free[-1]["kl"] > 1e-7 and held[-1]["kl"] < free[-1]["kl"]
    answers = lines(tmp_path / "held", 0)
    lengths = [len(answer["token_ids"]) for answer in answers]
    mean = sum(answer["entropy"] * length for answer, length in zip(answers, lengths, strict=True)) / sum(lengths)
    assert held[0]["loss/entropy"] == pytest.approx(-0.5 * mean, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_picture_is_encoded_once_for_the_answers_to_it(tmp_path: Path, beta: float) -> None:
    """While they are drawn, and while they are trained: 16 rows of groups of 4, of 8 and 8 rows of a micro-batch; with
    the same losses, gradients and weights as with a picture for each row."""
    make_rows(tmp_path, images=(1, 0, 2))
    posttrain = {**POSTTRAIN, "grpo": {"num_generations": 4, "beta": beta}}
    training = {**FP64["training"], "micro_batch_size": 8, "gradient_accumulation_steps": 2}
    yaml = str(make_tiny_run(tmp_path, training=training, parallel=FP64["parallel"], posttrain=posttrain))
    with keeping_double(), counted_patches() as once:
        first = train_steps(yaml, [])
    with mock.patch.object(shared_media, "_takes_grids", lambda _: False), keeping_double(), counted_patches() as often:
        second = train_steps(yaml, [])
    assert once and [4 * patches for patches in once] == often
    compare_steps(second, first, 1e-12)


@pytest.mark.parametrize(
    ("groups", "has_media", "turns", "blocks"),
    [
        ("aaaabbbb", True, [0, 4, 1, 5, 2, 6, 3, 7], 4),
        ("aaaabb", True, [0, 1, 4, 2, 3, 5], 2),
        ("aaab", True, [0, 1, 2, 3], 1),
        ("aabb", False, [0, 1, 2, 3], 1),
    ],
)
def test_blocks_of_rows_show_the_same(groups: str, has_media: bool, turns: list[int], blocks: int) -> None:
    prompts: Any = {name: {"media": [name] if has_media else []} for name in groups}
    assert in_turns([prompts[name] for name in groups]) == (turns, blocks)


def test_a_rollout_that_is_gone_or_another_is_named(tmp_path: Path) -> None:
    grpo = {"num_generations": 4, "num_iterations": 2}
    save = tmp_path / "run"
    path = configured(tmp_path, {"save": str(save), "save_interval": 1, "train_iters": 2}, grpo=grpo)
    trained(path, steps=1)
    file = save / "rollouts" / "rollout_0000000.jsonl"
    stored = files.read_rollout(save, 0)
    assert stored is not None
    files.write_rollout(save, 0, files.text_of(stored.header, stored.samples[::-1]))
    with pytest.raises(CheckpointError, match="rollout 0, and its file is not the one"):
        trained(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing or broken"):
        trained(path)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "atomic_write_text", full)
    with pytest.raises(MachineError, match="cannot be written: No space left on device") as caught:
        trained(configured(tmp_path, {"save": str(tmp_path / "run"), "train_iters": 1}))
    assert "drawn_0000000_0.jsonl" in str(caught.value) and "posttrain.rollout.keep" in str(caught.value)


@pytest.mark.edge("BS4")
def test_a_reward_that_fails_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rollout's server breaks off in mid-answer; another one judges the very answers that were drawn."""
    drawn: list[int] = []
    draw = TextRollouts.draw

    def counted(source: TextRollouts, prompts: Any, keys: Any) -> Any:
        drawn.append(len(prompts))
        return draw(source, prompts, keys)

    monkeypatch.setattr(TextRollouts, "draw", counted)
    monkeypatch.setattr(HttpReward, "check_server", lambda _: None)
    save, training = tmp_path / "run", {"save": str(tmp_path / "run"), "train_iters": 1}
    with hostile("half a body") as broken:
        rewards = [{"name": "http", "settings": {"url": broken.url, "retries": 0}}]
        with pytest.raises(OutboundError, match="did not answer in full"):
            trained(configured(tmp_path, training, rewards=rewards))
    kept = [json.loads(line) for line in (save / "rollouts" / "drawn_0000000_0.jsonl").open()][1:]
    again = trained(configured(tmp_path, training)).steps[-1]
    assert drawn == [8] and [line["token_ids"] for line in lines(save, 0)] == [line["token_ids"] for line in kept]
    assert not list((save / "rollouts").glob("drawn_*"))
    shutil.rmtree(save)
    fresh = trained(configured(tmp_path, training)).steps[-1]
    assert all(torch.equal(again["weights"][name], weight) for name, weight in fresh["weights"].items())


@pytest.mark.parametrize("change", ["seed", pytest.param("rewards", marks=pytest.mark.slow)])
def test_a_run_that_starts_again_with_other_settings_draws_again(tmp_path: Path, change: str) -> None:
    """The file of a first rollout is there, and no checkpoint yet."""
    save = tmp_path / "run"
    training: dict[str, Any] = {"save": str(save), "train_iters": 1}
    trained(configured(tmp_path, training))
    shutil.rmtree(save / "iter_0000001")
    (save / "latest_checkpointed_iteration.txt").unlink()
    own = training | ({"seed": 8} if change == "seed" else {})
    rewards = [{"name": "of_words", "weight": 1 if change == "seed" else -1}]
    again = trained(configured(tmp_path, own, rewards=rewards)).steps[-1]
    drawn = lines(save, 0)
    shutil.rmtree(save)
    fresh = trained(configured(tmp_path, own, rewards=rewards)).steps[-1]
    assert drawn == lines(save, 0)
    assert all(torch.equal(again["weights"][name], weight) for name, weight in fresh["weights"].items())


def test_what_cannot_be_answered_or_built_is_named(tmp_path: Path) -> None:
    path = configured(tmp_path, rollout={"max_completion_length": 100_000})
    with pytest.raises(DataError, match="and the model takes"):
        trained(path, steps=1)
    path = configured(tmp_path, rewards=[{"name": "of_word"}])
    with pytest.raises(ConfigError, match="Did you mean 'of_words'"):
        trained(path, steps=1)


def test_prompts_without_an_answer_and_those_of_verl(tmp_path: Path) -> None:
    """Rows end with the user's turn; the right answer is a column."""
    path = configured(tmp_path, {"save": str(tmp_path / "run"), "train_iters": 1})
    rows = [
        {"prompt": [{"role": "user", "content": f"Say {n}."}], "reward_model": {"ground_truth": str(n)}, "images": []}
        for n in range(8)
    ]
    rows[1::2] = [
        {"messages": row["prompt"], "answer": row["reward_model"]["ground_truth"], "images": []} for row in rows[1::2]
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []

    def judge(prompts: Any, completions: Any, rows: Any) -> list[float]:
        seen.extend((prompt, solution_of(row)) for prompt, row in zip(prompts, rows, strict=True))
        return [float(number) for number, _ in enumerate(completions)]

    reward_register._entries["of_words"] = judge
    trained(path)
    assert len(seen) == 8 and all(prompt == f"Say {truth}." for prompt, truth in seen)


def test_rewards_without_spread_are_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "FLAT_ROLLOUTS", 2)
    reward_register._entries["of_words"] = lambda prompts, completions, rows: [0.25] * len(prompts)
    save = tmp_path / "run"
    trained(configured(tmp_path, {"save": str(save), "save_interval": 1000, "train_iters": 4}))
    events = [json.loads(line) for line in (save / "events.jsonl").read_text().splitlines()]
    warned = [event for event in events if "worth different rewards" in json.dumps(event)]
    assert len(warned) == 1 and "(mean 0.25)" in json.dumps(warned)


def test_mm_check_reads_prompts_and_rewards_as_training_does(tmp_path: Path) -> None:
    """Rows that end with the user's turn are prompts; a run is found again; what training refuses at once is told."""
    save = tmp_path / "run"
    path = configured(tmp_path, {"save": str(save), "train_iters": 1})
    turns = [[{"role": "user", "content": f"Say {n}."}] for n in range(8)]
    rows = [{"messages": messages, "solution": str(n), "images": []} for n, messages in enumerate(turns)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trained(path)
    assert check.run(path, nproc=1).problems == []
    for words, told in {
        "posttrain.rewards=[{name: of_wirds}]": "'of_wirds' is not registered",
        "posttrain.rewards=[{name: length}]": "missing a required argument: 'max_tokens'",
        "posttrain.rollout.max_completion_length=100000": "and the model takes",
    }.items():
        (problem,) = check.run(path, [words, f"training.save={tmp_path / 'other'}"]).problems
        assert told in str(problem.what)


@pytest.mark.slow
def test_what_is_rewarded_is_learnt(tmp_path: Path) -> None:
    """Tokens of even number are rewarded: half of them are even at first."""

    def judge(prompts: Any, completions: Any, rows: Any, *, completion_ids: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    reward_register._entries["of_words"] = judge
    save = tmp_path / "run"
    path = configured(tmp_path, {"save": str(save), "save_interval": 1000, "train_iters": 25})
    trained(path)
    metrics = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    rewards = [each["reward"] for each in metrics]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.15, rewards
