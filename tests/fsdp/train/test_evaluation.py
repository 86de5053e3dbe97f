"""Evaluation while training: the answers are those of the checkpoint, nothing that is trained changes, the best
checkpoint stays, and a run that no longer gets better ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ruamel.yaml import YAML
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_mm.fsdp.sampling.answers import scored
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.best import BestSoFar
from mindspeed_mm.fsdp.train.hooks.evaluation import EvaluationHook
from mindspeed_mm.fsdp.train.run.random_state import capture_rng
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.check import check
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.report.charts import draw_charts
from mindspeed_mm.tasks.report.data import read_run
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from tests.helpers.distributed import run_ranks
from tests.helpers.plan_matrix import DECODER, TP
from tests.helpers.runs import differing, lines, losses, tensors
from tests.helpers.tiny_models import make_tiny_qwen3_vl_moe

ASKED = (
    "training.train_iters=3",
    "training.lr_decay_style=constant",
    "training.evaluate.interval=1",
    "training.evaluate.metric=cer",
    "training.evaluate.max_new_tokens=6",
    "training.evaluate.batch_size=3",
)


@pytest.fixture(scope="module")
def questions(yaml: Path) -> Path:
    """The last eight rows, of two tasks: with two pictures, one and none."""
    rows = [json.loads(line) for line in (yaml.parent / "rows.jsonl").read_text().splitlines()][-8:]
    for number, row in enumerate(rows):
        row["task"] = "look" if number % 3 else "read"
    path = yaml.parent / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(yaml: Path | str, save: Path | str | None, *overrides: str, **options: Any) -> Trainer:
    words = [*ASKED, f"training.evaluate.data={Path(yaml).parent / 'questions.jsonl'}"]
    words += [f"training.save={save}"] if save else []
    trainer = Trainer(load_with_plugins(Path(yaml), [*words, *overrides]), TrainOptions(**options))
    trainer.train()
    return trainer


def given(save: Path, step: int) -> dict[str, str]:
    samples = lines(save / "eval" / "while_training" / f"iter_{step:07}" / scored.SAMPLES)
    return {sample["id"]: sample["given"] for sample in samples}


def measured(save: Path, name: str = "eval_cer") -> dict[int, float]:
    return {record["step"]: record[name] for record in lines(save / "metrics.jsonl") if name in record}


def best(save: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((save / "best.json").read_text())
    return found


def by_characters(model: Path, questions: Path, batch_size: int) -> EvaluateRequest:
    return EvaluateRequest(str(model), data=questions, max_new_tokens=6, batch_size=batch_size, metric="cer")


def test_answers_are_those_of_the_checkpoint_and_nothing_changes(yaml: Path, questions: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path / "with")
    state = torch.cat([part.flatten().double() for part in capture_rng().values()])
    train(yaml, tmp_path / "without", "training.evaluate.interval=0")
    assert torch.equal(torch.cat([part.flatten().double() for part in capture_rng().values()]), state)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert differing(tensors(tmp_path / "with"), tensors(tmp_path / "without")) == []

    found = evaluate.run(by_characters(tmp_path / "with", questions, 1))
    assert {sample["id"]: sample["given"] for sample in found.samples} == given(tmp_path / "with", 3)
    scores = measured(tmp_path / "with")
    assert list(scores) == [1, 2, 3]
    assert len(set(scores.values())) > 1
    assert scores[3] == found.overall.to_dict()["rate"]
    assert measured(tmp_path / "with", "eval_cer/read")[3] == found.tasks["read"].to_dict()["rate"]
    (_, _, event) = (event for event in lines(tmp_path / "with" / "events.jsonl") if event["kind"] == "evaluate")
    assert (event["step"], event["eval_cer"]) == (3, scores[3])
    scored.check_evaluation_folder(tmp_path / "with" / "eval" / "while_training" / "iter_0000003")
    log = next((tmp_path / "with" / "log").iterdir()).read_text()
    assert f"step 3: held-out character error rate {found.overall} (" in log
    events = EventAccumulator(str(tmp_path / "with" / "tb")).Reload()
    drawn = {event.step: event.value for event in events.Scalars("eval_cer/read")}
    assert drawn == pytest.approx(measured(tmp_path / "with", "eval_cer/read"))
    titles = [title for title, _ in draw_charts([read_run(tmp_path / "with")])]
    assert "Held-out character error rate, %" in titles


def test_random_numbers_are_put_back(yaml: Path, questions: Path) -> None:
    real = EvaluationHook._answer_own

    def wasteful(self: EvaluationHook, engine: Any) -> Any:
        torch.rand(3)
        return real(self, engine)

    def state() -> torch.Tensor:
        train(yaml, None, "training.train_iters=1", "training.evaluate.max_samples=2")
        return torch.cat([part.flatten().double() for part in capture_rng().values()])

    expected = state()
    with mock.patch.object(EvaluationHook, "_answer_own", wasteful):
        assert torch.equal(state(), expected)
        with mock.patch("mindspeed_mm.fsdp.train.hooks.evaluation.restore_rng", lambda _: None):  # the planted fault
            assert not torch.equal(state(), expected)


def test_the_best_checkpoint_is_kept_and_patience_ends_the_run(yaml: Path, questions: Path, tmp_path: Path) -> None:
    """The rates are made up, so that the second is the best."""
    rates = iter([0.9, 0.5, 0.7, 0.6, 0.5, 0.1])
    asked = (
        "training.train_iters=9",
        "training.evaluate.interval=1",
        "training.evaluate.best_metric=eval_cer",
        "training.evaluate.patience=3",
        "training.evaluate.max_samples=1",
        "training.save_total_limit=2",
        "training.save_interval=1",
    )
    with mock.patch("mindspeed_mm.fsdp.train.hooks.evaluation.metrics_of", lambda *_: {"eval_cer": next(rates)}):
        train(yaml, tmp_path / "run", *asked)
        found = best(tmp_path / "run")
        assert found == {
            "metric": "eval_cer",
            "step": 2,
            "value": 0.5,
            "checkpoint": "iter_0000002",
            "history": [[1, 0.9], [2, 0.5], [3, 0.7], [4, 0.6], [5, 0.5]],
        }
        kept = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
        assert kept == ["iter_0000002", "iter_0000004", "iter_0000005"]
        train(yaml, tmp_path / "run", *asked)  # the same command again
    assert len(losses(tmp_path / "run")) == 5
    stops = [event for event in lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "early_stop"]
    assert [event["step"] for event in stops] == [5, 5]
    assert found == best(tmp_path / "run")


def test_check_looks_at_the_questions(yaml: Path, questions: Path, tmp_path: Path) -> None:
    given_words = [*ASKED, f"training.evaluate.data={questions}"]
    assert "first held-out question" in check.run(yaml, given_words).passed
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "What?"}]}\n')
    found = check.run(yaml, [*ASKED, f"training.evaluate.data={tmp_path / 'rows.jsonl'}"])
    assert [finding.stage for finding in found.findings] == ["first held-out question"]
    asked = [f"training.save={tmp_path / 'run'}", "training.evaluate.best_metric=eval_cer/write"]
    (finding,) = check.run(yaml, [*given_words, *asked]).findings
    assert finding.problem.way_out == "Choose eval_cer, eval_cer/read, eval_cer/look."


def test_the_documented_section_is_a_section() -> None:
    text = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    block = text.split("## While training")[1].split("```yaml")[1].split("```")[0]
    section = YAML(typ="safe").load(block)["training"]
    rows = {"dataset_param": {"basic_parameters": {"dataset": "a.jsonl", "val_dataset": "b.jsonl"}}}
    config = {"model": {"model_name_or_path": "m"}, "data": rows, "training": section | {"save": "runs/mine"}}
    assert load_with_plugins(config).arguments.training.evaluate.patience == 5


@pytest.mark.parametrize(
    ("metric", "values", "best_step", "worse"),
    [
        ("eval_accuracy/read", [0.1, 0.5, 0.5, 0.4], 2, 2),
        ("val_loss", [3.0, 2.0, 1.95, 2.5], 2, 2),  # 1.95 does not beat 2.0 by 0.1
        ("eval_wer", [None, 0.9, None], 2, 1),
        ("eval_cer", [None, None], None, 2),
    ],
)
def test_the_best_of_measurements(metric: str, values: list[float | None], best_step: int | None, worse: int) -> None:
    known = BestSoFar(metric, 0.1, list(enumerate(values, 1)))
    assert (known.best[0] if known.best else None, known.worse_in_a_row) == (best_step, worse)
    assert known.until(1).history == [(1, values[0])]


@pytest.mark.slow
def test_a_best_step_between_saves_is_saved(yaml: Path, questions: Path, tmp_path: Path) -> None:
    asked = ("training.evaluate.best_metric=val_loss", "training.val_interval=1", "training.save_interval=3")
    rows = f"data.dataset_param.basic_parameters.val_dataset={questions}"
    train(yaml, tmp_path / "run", *asked, rows, "training.evaluate.interval=0", "training.train_iters=5")
    found, validated = best(tmp_path / "run"), measured(tmp_path / "run", "val_loss")
    assert found["history"] == [[step, value] for step, value in validated.items()]
    assert found["value"] == min(validated.values())
    assert (tmp_path / "run" / found["checkpoint"]).is_dir()
    assert {path.name for path in (tmp_path / "run").glob("iter_*")} > {"iter_0000003", "iter_0000005"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no fault", "before evaluation", "before best.json"])
def test_a_run_that_is_killed_ends_as_one_that_was_not(yaml: Path, questions: Path, tmp_path: Path, fault: str) -> None:
    asked = (
        "training.evaluate.best_metric=eval_cer",
        "training.evaluate.patience=2",
        "training.evaluate.interval=2",
        "training.save_interval=2",
        "training.train_iters=6",
    )
    train(yaml, tmp_path / "whole", *asked)
    target = {"before evaluation": (EvaluationHook, "measure"), "before best.json": (BestSoFar, "to_dict")}.get(fault)
    if target is None:
        train(yaml, tmp_path / "two", *asked, steps=2)
    else:
        with mock.patch.object(*target, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            train(yaml, tmp_path / "two", *asked)
    train(yaml, tmp_path / "two", *asked)
    assert best(tmp_path / "two") == best(tmp_path / "whole")
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")
    assert measured(tmp_path / "two") == measured(tmp_path / "whole")
    assert differing(tensors(tmp_path / "two"), tensors(tmp_path / "whole")) == []


def train_with_and_without(yaml: str, folder: str, *overrides: str) -> int:
    """Returns how many units all evaluations gathered."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    gathers, inside = 0, False
    unshard, measure = FSDPParamGroup.unshard, EvaluationHook.measure

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal gathers
        before = self._all_gather_result
        result = unshard(self, *args, **kwargs)
        gathers += inside and self._all_gather_result is not before
        return result

    def marked(self: Any, *args: Any) -> None:
        nonlocal inside
        inside = True
        measure(self, *args)
        inside = False

    with mock.patch.object(FSDPParamGroup, "unshard", counted), mock.patch.object(EvaluationHook, "measure", marked):
        train(yaml, f"{folder}/with", *overrides)
    train(yaml, f"{folder}/without", "training.evaluate.interval=0", *overrides)
    return gathers


PLANS = {
    "sharded": ([], 7),
    "ZeRO-2": (["parallel.fsdp_plan.reshard_after_forward=false"], 7),
    "resharded to groups": (["parallel.fsdp_plan.reshard_after_forward=2"], 7),
    "pregathered": (["parallel.fsdp_plan.pregather=true"], 7),
    "bf16": (["parallel.fsdp_plan.param_dtype=bf16"], 7),
    "copies": (["parallel.fully_shard_parallel_size=1"], None),
    "average": (["training.ema.enable=true", "training.ema.decay=0.5"], 7),
    "adapters": (["training.lora.enable=true", "training.lr=0.1"], None),
    "one by one": (["training.evaluate.batch_size=1"], 7),
    "context": (["parallel.context_parallel_size=2"], None),
    "tensor": ([TP], None),
    "tensor, loss in slices": ([TP, "features.enable_chunk_loss=true"], None),
    "tensor, sequence": ([TP, f"parallel.tp_plan.sequence_parallel=[{DECODER}]"], None),
    "tensor, adapters": ([TP, "training.lora.enable=true", "training.lr=0.1"], None),
    "experts": (["parallel.expert_parallel_size=2"], None),
}


@pytest.mark.slow
def test_pairs_of_ranks_share_the_questions(yaml: Path, questions: Path, tmp_path: Path) -> None:
    """Two ranks hold parts of each layer; four are two such pairs, which answer different questions."""
    run_ranks(4, train_with_and_without, str(yaml), str(tmp_path), "training.micro_batch_size=2", TP)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    found = evaluate.run(by_characters(tmp_path / "with", questions, 4))
    assert {sample["id"]: sample["given"] for sample in found.samples} == given(tmp_path / "with", 3)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_answer_as_one_and_go_on_as_without(yaml: Path, questions: Path, tmp_path: Path, plan: str) -> None:
    overrides, gathers = PLANS[plan]
    words = ["training.micro_batch_size=2", *overrides]
    if plan == "experts":  # sums of other order round otherwise: scores must not be close to one another
        model = make_tiny_qwen3_vl_moe(tmp_path / "model", initializer_range=0.4)
        words.append(f"model.model_name_or_path={model}")
    counted = run_ranks(2, train_with_and_without, str(yaml), str(tmp_path), *words)
    assert gathers is None or counted == [3 * gathers] * 2  # three evaluations, each unit once
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert differing(tensors(tmp_path / "with"), tensors(tmp_path / "without")) == []
    assert given(tmp_path / "with", 2) != given(tmp_path / "with", 3)
    if plan != "bf16":  # what was trained so is exported in fp32
        found = evaluate.run(by_characters(tmp_path / "with", questions, 4))
        assert {sample["id"]: sample["given"] for sample in found.samples} == given(tmp_path / "with", 3)
