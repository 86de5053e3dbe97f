"""`mm evaluate --judge`: a model behind a server decides on answers that are not the expected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mindspeed_mm.cli.evaluate import command
from mindspeed_mm.core.errors import ConfigError, MachineError, UsageError
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.evaluate import judge as judging_answers
from mindspeed_mm.tasks.evaluate.judge import Judge
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from tests.helpers.hostile import hostile
from tests.helpers.judging import JudgingServer, judging
from tests.helpers.tiny_models import make_tiny_qwen3

ROWS = {  # what is asked → expected, given
    "capital?": ("Paris", " Paris "),
    "river?": ("the {given} Seine", "It is the Seine."),
    "tower?": ("Eiffel", "<think>Paris</think>the Louvre"),
    "sea?": ("none", "the Channel"),
    "hill?": ("Montmartre", "a hill"),
}
SAID = {"spider": "Yes.", "river?": "**Yes**, it does", "tower?": "no", "sea?": "", "hill?": "It may be."}


def judge_at(server: JudgingServer, **options: Any) -> Judge:
    return Judge(f"http://127.0.0.1:{server.server_port}/v1/", "large", **options)


def request_of(model: Path, data: Path, out: Path, judge: Judge) -> EvaluateRequest:
    return EvaluateRequest(
        str(model), data=data, out=out, judge=judge.url, judge_model=judge.model, judge_key_env=judge.key_variable
    )


def fixed(questions: list[Question], *_: Any, **__: Any) -> dict[int, Answer]:
    return {question.row: Answer((), ROWS[question.text][1], finished=True) for question in questions}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": expected}]
        for asked, (expected, _) in ROWS.items()
    ]
    path.write_text("".join(json.dumps({"id": one[0]["content"], "messages": one}) + "\n" for one in turns))
    return path


def test_its_word_counts_and_is_kept(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are made up; the rest is what the command does."""
    monkeypatch.setattr(evaluate, "answer_on_ranks", lambda _generator, questions, *_, **__: fixed(questions))
    monkeypatch.setattr(judging_answers, "RETRIES", 0)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    model = make_tiny_qwen3(tmp_path / "model")
    with judging(SAID) as server:
        judge = judge_at(server, key_variable="JUDGE_KEY")
        found = evaluate.run(request_of(model, data, tmp_path / "out", judge))
        evaluate.run(request_of(model, data, tmp_path / "out", judge))  # over its own results
    samples = {one["id"]: one for one in map(json.loads, (tmp_path / "out" / "samples.jsonl").open())}
    assert [name for name, sample in samples.items() if sample["correct"]] == ["capital?", "river?"]
    assert samples["capital?"]["judge"] is None
    assert samples["river?"]["judge"] == {"correct": True, "said": "**Yes**, it does", "failure": None}
    assert "KeyError: 'choices'" in samples["sea?"]["judge"]["failure"] and samples["sea?"]["judge"]["said"] is None
    assert samples["hill?"]["judge"]["said"] == "It may be."
    assert found.overall.to_dict()["correct"] == 2 and found.facts["judge"]["model"] == "large"
    (told,) = [line for line in found.lines() if "judge failed" in line]
    assert told.startswith("2 answers count as wrong") and "sea?" in told
    asked = [request["messages"][0]["content"][0]["text"] for _, request in server.asked]
    assert len(asked) == 2 * (1 + 4)  # and once before all of them
    (river,) = {text for text in asked if "river?" in text}
    assert "the {given} Seine\n" in river and "It is the Seine.\n" in river
    (tower,) = {text for text in asked if "tower?" in text}
    assert "think" not in tower
    assert {path for path, _ in server.asked} == {"/v1/chat/completions Bearer secret"}


@pytest.mark.edge("BS4")
@pytest.mark.parametrize("ending", ["half a body", "KeyboardInterrupt"])
def test_answers_are_stored_before_they_are_judged_and_a_rerun_judges_alone(
    ending: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = []

    def answer(_generator: object, questions: list[Question], *_: Any, **__: Any) -> dict[int, Answer]:
        answered.append(len(questions))
        return fixed(questions)

    monkeypatch.setattr(evaluate, "answer_on_ranks", answer)
    monkeypatch.setattr(judging_answers, "RETRIES", 0)
    monkeypatch.setattr(Judge, "check", lambda _: None)
    model, out = make_tiny_qwen3(tmp_path / "model"), tmp_path / "out"
    said = {**SAID, "sea?": "no"}
    with judging(said) as server, hostile("half a body") as broken, monkeypatch.context() as interrupted:
        if ending == "KeyboardInterrupt":
            interrupted.setattr(Judge, "verdicts", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                evaluate.run(request_of(model, data, out, judge_at(server)))
            interrupted.undo()
        else:
            found = evaluate.run(request_of(model, data, out, Judge(broken.url, "large")))
            assert (
                found.lines()[-1] == f"The answers are kept in {out}/answers.jsonl: the same command judges them again."
            )
        found = evaluate.run(request_of(model, data, out, judge_at(server)))
        assert answered == [5] and found.overall.to_dict()["correct"] == 2
        assert not (out / "answers.jsonl").exists() and "judges them again" not in "".join(found.lines())
        evaluate.run(request_of(model, data, out, Judge(broken.url, "large")))
        data.write_text(data.read_text().replace("Paris", "Lyons"))
        evaluate.run(request_of(model, data, out, judge_at(server)))
    assert answered == [5, 5, 5]  # of other rows


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_long_judging_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.utils.work_progress._QUIET_S", 0.0)
    with judging({"sky?": "blue"}) as server:
        replies = judge_at(server).replies("{question}", [{"{question}": "sky?"}] * 3)
    assert replies == [("blue", None)] * 3
    assert "1/3 judged answers" in capsys.readouterr().err


def test_a_judge_that_cannot_judge_is_told_before_the_work() -> None:
    with judging({"spider": "Eight legs!"}) as server:
        with pytest.raises(MachineError, match="said 'Eight legs!'"):
            judge_at(server).check()
        server.answers = {"spider": ""}
        with pytest.raises(MachineError, match="the judge gives another answer than expected: KeyError"):
            judge_at(server).check()
        with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
            judge_at(server, key_variable="NO_SUCH_KEY").check()
    with pytest.raises(ConfigError, match="not an http address") as caught:
        Judge("localhost:8000", "large").check()
    assert caught.value.problems[0].key == "--judge"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--judge-model", "large"], "there is no judge"),
        (["--judge", "http://x/v1"], "has no name"),
        (["--judge", "http://x/v1", "--judge-model", "large", "--metric", "wer"], "counts no words"),
        (["--judge", "http://x/v1", "--judge-model", "large", "--loss"], "--loss"),
    ],
)
def test_options_that_do_not_fit(data: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(command, ["model", "--data", str(data), *words], catch_exceptions=False)
