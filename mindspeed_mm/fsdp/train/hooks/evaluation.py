"""Evaluation while training: the model answers held-out questions, every so many steps, and the answers are scored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.checkpoint.layout import checkpoint_folder
from mindspeed_mm.core.artifacts import RunFolder, make_writable_folder
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import resident
from mindspeed_mm.fsdp.distributed.tensor.collectives import whole_logits
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.evaluate_args import METRIC_NAMES, EvaluateArguments
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question, read_questions
from mindspeed_mm.fsdp.sampling.answers.scored import Evaluation, evaluate_answers, write_evaluation
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison, ErrorRate, Score
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.random_state import capture_rng, restore_rng
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "training.evaluate"
FOLDER = "while_training"
"""Inside the evaluations of a run."""


@dataclass(frozen=True)
class HeldOutQuestions:
    """What the model is asked, and how it is shown."""

    questions: Sequence[Question]
    """All of them."""
    folder: Path
    """With processor and chat template."""
    view: RowsView
    """How the run looks at its rows."""
    media_dir: Path

    @classmethod
    def of(cls, arguments: Arguments) -> HeldOutQuestions:
        """What `training.evaluate` names.

        Raises:
            ConfigError: There is no processor, or the best metric is that of a task that no question belongs to.
            DataError: The file is missing, or rows are bad.
        """
        asked, param = arguments.training.evaluate, arguments.data.dataset_param
        folder = param.preprocess_parameters.model_name_or_path or arguments.model.model_name_or_path
        if folder is None:
            raise ConfigError(
                "questions are shown by a model folder's processor, and there is none",
                key=f"{KEY}.interval",
                way_out="Set model.model_name_or_path.",
            )
        data, view = Path(asked.data or ""), RowsView(param)
        media_dir = Path(asked.media_dir) if asked.media_dir else data.parent
        questions = read_questions(
            data,
            needs_answers=True,
            media_dir=media_dir,
            row_format=view.row_format(data),
            media_key=f"{KEY}.media_dir",
            draws=view.draws,
        )
        if not questions:
            raise DataError("holds no questions", where=str(data), key=f"{KEY}.data")
        found = cls(questions[: asked.max_samples], Path(folder), view, media_dir)
        found._check_task(asked)
        return found

    def _check_task(self, asked: EvaluateArguments) -> None:
        metric, slash, task = (asked.best_metric or "").partition("/")
        tasks = dict.fromkeys(question.task for question in self.questions)
        if slash and metric.startswith("eval_") and (task not in tasks or len(tasks) == 1):
            choices = [metric]
            if len(tasks) > 1:
                choices += [f"{metric}/{each}" for each in tasks]
            raise ConfigError(
                f"'{asked.best_metric}' is not measured: there is no task '{task}' beside others",
                key=f"{KEY}.best_metric",
                way_out=f"Choose {', '.join(choices)}.",
            )

    @cached_property
    def encoder(self) -> QuestionEncoder:
        """Encoder that shows questions by the folder's processor and chat template; made on first use."""
        return QuestionEncoder(self.folder, self.view)

    def media(self) -> MediaLoader:
        """What opens their pictures and sounds."""
        return self.encoder.media(self.media_dir, [self.media_dir])


def evaluation_hook(parts: RunParts) -> EvaluationHook:
    """The hook that `training.evaluate` asks for.

    Raises:
        ConfigError: The model does not generate text.
        MMError: As `HeldOutQuestions.of`.
    """
    asked, state = parts.arguments.training.evaluate, parts.job.state
    check_generates(parts.assembled.model)
    save = parts.arguments.training.save
    rank, world_size, of_layers = state.data_rank, state.data_size, None
    if state.sizes.ep > 1:  # all ranks hold experts of every layer, so that all answer the same questions
        rank, world_size, of_layers = 0, 1, dist.group.WORLD
    elif state.sizes.tp > 1:
        of_layers = state.axis_group("tp")
    return EvaluationHook(
        HeldOutQuestions.of(parts.arguments),
        asked,
        parts.record,
        RunFolder(save).evaluation / FOLDER if save else None,
        rank=rank,
        world_size=world_size,
        group=of_layers,
        keeps=state.is_first_of_its_samples,
        timeout_s=parts.arguments.training.step_timeout_s,
    )


def check_generates(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that does not answer by generating text."""
    if facts_of(model).kind.has_tokens and callable(getattr(model, "generate", None)):
        return
    raise ConfigError(
        f"{type(model).__name__.removeprefix('FSDP')} does not answer questions by generating text",
        key=f"{KEY}.interval",
        way_out="Leave it out. Generators are sampled while training by training.sampling.",
    )


class EvaluationHook(Hook):
    """Every `interval` steps, and after the last one, all ranks answer a share of the questions each, with the model as
    it is, gathered once. Weights, modes and random numbers are afterwards what they were.

    Args:
        held_out: The questions.
        asked: The `training.evaluate` section.
        record: Where scores are told and written down.
        folder: Gets `iter_0000123/` with `results.json` and `samples.jsonl`; None keeps none.
        rank: Among the ranks that share the questions.
        world_size: Of these.
        group: Ranks that hold parts of the same layers (tensor parallelism; expert parallelism: all of the job). They
            answer the same questions, since they must call those layers equally often.
        keeps: False on ranks that compute the answers of another one with it (tensor and context parallelism).
        timeout_s: Longest wait for the slowest of them.
    """

    def __init__(
        self,
        held_out: HeldOutQuestions,
        asked: EvaluateArguments,
        record: RunRecord,
        folder: Path | None,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        keeps: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self._held_out, self._asked, self._record, self._folder = held_out, asked, record, folder
        self._own = held_out.questions[rank::world_size]
        self._group, self._keeps, self._ranks = group, keeps, Ranks(timeout_s)
        self._comparison = Comparison(asked.metric, asked.ignore_case, asked.ignore_punctuation)

    def is_due(self, engine: TrainEngine, step: int) -> bool:
        """Whether an evaluation follows this step."""
        is_last = step == engine.schedule.total_steps
        return is_last or (step % self._asked.interval == 0 and not engine.stopping)

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Show every question once: what cannot be read is said now and not after many steps."""
        with engine.phase("reading the held-out questions", engine.training.setup_timeout_s):
            self._ranks.together("reading the held-out questions", self._read_all)

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        """What is measured are the weights after a step."""
        return self.is_due(engine, step)

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Evaluate when it is time."""
        if self.is_due(engine, result.step):
            self.measure(engine)

    def measure(self, engine: TrainEngine) -> None:
        """Answer the held-out questions, score the answers and record the scores. Called by all ranks."""
        began = time.monotonic()
        random_state = capture_rng()
        with engine.evaluating(), resident(engine.model), whole_logits(engine.model):
            answers = self._ranks.each("answering the held-out questions", lambda: self._answer_own(engine))
        restore_rng(random_state)
        by_row: dict[int, Answer] = {}
        for share in answers:
            by_row |= share
        evaluation = self._scored(by_row, began, engine.iteration)
        metrics = metrics_of(evaluation, self._asked.metric)
        engine.note_validation(metrics)
        self._tell(evaluation, metrics, engine.iteration)

    def _read_all(self) -> None:
        media = self._held_out.media()
        for question in self._own:
            self._held_out.encoder.encode(question.sample, media)

    def _answer_own(self, engine: TrainEngine) -> dict[int, Answer]:
        """Row → answer, of this rank's questions."""
        answers: dict[int, Answer] = {}
        greedy = Sampling(self._asked.max_new_tokens, temperature=0)
        with _configured(engine.model, self._held_out.folder), torch.no_grad():
            generator = Generator(engine.model, self._held_out.encoder, group=self._group, trains=True)
            batches = generator.answer(
                self._own, self._held_out.media(), sampling=greedy, batch_size=self._asked.batch_size
            )
            while True:
                with engine.phase("evaluation", engine.training.step_timeout_s):
                    batch = next(batches, None)
                if batch is None:
                    if self._keeps:
                        return answers
                    return {}
                answers |= {question.row: answer for question, answer in batch}

    def _scored(self, answers: dict[int, Answer], began: float, step: int) -> Evaluation:
        asked = self._asked
        facts = {
            "step": step,
            "model": str(self._held_out.folder.absolute()),
            "data": str(Path(asked.data or "").absolute()),
            "media_dir": str(self._held_out.media_dir.absolute()),
            "max_new_tokens": asked.max_new_tokens,
            "cut_off": sum(not answer.finished for answer in answers.values()),
            "seconds": round(time.monotonic() - began, 3),
        }
        answered = [(question, answers[question.row]) for question in self._held_out.questions]
        return evaluate_answers(answered, facts, self._comparison)

    def _tell(self, evaluation: Evaluation, metrics: dict[str, float], step: int) -> None:
        self._record.metrics({"step": step, **metrics})
        seconds = evaluation.facts["seconds"]
        line = f"step {step}: held-out {evaluation.comparison.title} {evaluation.overall} ({seconds:.1f} s)"
        self._record.event("evaluate", step, line, seconds=seconds, cut_off=evaluation.facts["cut_off"], **metrics)
        if self._folder is None or not self._ranks.is_first:
            return
        folder = checkpoint_folder(self._folder, step)
        try:
            make_writable_folder(folder)
            write_evaluation(evaluation, folder)
        except OSError as error:
            self._record.note(f"warning: evaluation: {error}", step)


def metrics_of(evaluation: Evaluation, metric: str) -> dict[str, float]:
    """The scores by the names of the log; of tasks where there are several."""
    name = METRIC_NAMES[metric]
    metrics = {name: _score_value(evaluation.overall)}
    if len(evaluation.tasks) > 1:
        for task, score in evaluation.tasks.items():
            metrics[f"{name}/{task}"] = _score_value(score)
    return metrics


def _score_value(score: Score | ErrorRate) -> float:
    if isinstance(score, Score):
        return score.accuracy
    return score.rate


@contextmanager
def _configured(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Inside, the model generates as its folder says; one that is built on meta has not read that."""
    from transformers import GenerationConfig  # seconds

    before = model.generation_config
    if (folder / "generation_config.json").is_file():
        with suppress(OSError, ValueError):  # what loads the folder to answer says so
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    try:
        yield
    finally:
        model.generation_config = before
