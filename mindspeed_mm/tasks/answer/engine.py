"""Answers to questions that arrive one by one: what waits is joined into batches of `generate`, or as a worker that is
given joins them.

What an answer says does not depend on who shares its batch. A question that arrives while a batch is answered joins the
next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.joint_work import JointWorker, WorkCounts
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.data_utils.transcript_language import is_whisper
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.steering import Steering
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine


class AnswerWorker(Protocol):
    """What answers questions together, as `JointWorker` does jobs."""

    @property
    def counts(self) -> WorkCounts:
        """What was done so far."""

    @property
    def waiting(self) -> int:
        """Questions whose answers have not begun."""

    def submit(self, job: LiveAnswer, /) -> Future[Answer]:
        """Have a question answered; `RuntimeError` once the worker is closed."""

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, and finish what is there."""


class AnswerEngine:
    """A model that answers many at a time.

    Args:
        generator: The model.
        most_rows: Questions of a batch.
        most_tokens: Tokens of a batch, prompts and answers, padding included; one question is always taken.
        answer: Answers a batch in the model's stead, where other ranks take part in it.
        worker: Answers in another way than by batches.
        speech: Speaks with the same model.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        most_rows: int = 32,
        most_tokens: int = 2**17,
        answer: Callable[[Sequence[LiveAnswer]], Sequence[Answer]] | None = None,
        worker: AnswerWorker | None = None,
        speech: SpeechEngine | None = None,
    ) -> None:
        self.generator, self.speech = generator, speech
        self._most_tokens = most_tokens
        self.transcribes = is_whisper(generator.encoder.processor)
        configured = getattr(getattr(generator, "model", None), "generation_config", None)
        self._beams = getattr(configured, "num_beams", None) or 1
        self._ends_alike = self.transcribes or self._beams > 1
        self._answer = answer or generator.answer_live
        self._worker: AnswerWorker = worker or JointWorker(self._answer_each, self._fits, most_rows, "answers")
        # Tokenizers are not made for several threads.
        self._encoder = ThreadPoolExecutor(1, "encoder")

    @property
    def counts(self) -> WorkCounts:
        """What was done so far."""
        return self._worker.counts

    @property
    def waiting(self) -> int:
        """Questions whose answers have not begun."""
        return self._worker.waiting

    @property
    def takes_the_likeliest_because(self) -> str | None:
        """Why the tokens of answers are not chosen as a request says; None: they are."""
        if self.transcribes:
            return "writes the likeliest transcript (/v1/audio/transcriptions takes a temperature)"
        if self._beams > 1:
            return f"searches {self._beams} beams, as its generation configuration says"
        return None

    def encode(
        self, sample: Sample, media: MediaLoader, variables: Mapping[str, object] | None = None
    ) -> Future[EncodedQuestion]:
        """A question as the model takes it, on a thread of its own. The future raises `DataError`.

        Args:
            sample: The conversation.
            media: Opens what it shows.
            variables: Of the chat template, beside those of training.
        """
        return self._encoder.submit(self.generator.encode, sample, media, variables)

    def encode_text(self, prompt: str | Sequence[int]) -> Future[EncodedQuestion]:
        """A text, or its tokens, that the model goes on with. The future raises `DataError`."""
        return self._encoder.submit(self.generator.encode_text, prompt)

    def check(self, steering: Steering) -> Future[None]:
        """Whether the model can be steered so. The future raises `UsageError`."""
        return self._encoder.submit(self.generator.check_steering, steering)

    def submit(self, row: LiveAnswer) -> Future[Answer]:
        """Have a question answered. Cancelling the future takes it out of the queue; `give_up` of the row ends it."""
        return self._worker.submit(row)

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, and finish what is there."""
        self._encoder.shutdown()
        self._worker.close(timeout_s)
        if self.speech is not None:
            self.speech.close(timeout_s)

    def _answer_each(self, rows: Sequence[LiveAnswer]) -> Sequence[Answer | Exception]:
        """The answer of each row, or why it has none."""
        try:
            return self._answer(rows)
        except (NotFiniteError, UsageError) as error:
            return [row.answer or row.failure or error for row in rows]

    def _fits(self, batch: Sequence[LiveAnswer], row: LiveAnswer) -> bool:
        rows = [*batch, row]
        lengths = [len(each.question.input_ids) for each in rows]
        new = [each.sampling.max_new_tokens for each in rows]
        return (
            len({each.adapter for each in rows}) == 1
            and len(rows) * (max(lengths) + max(new)) <= self._most_tokens
            and (not self.transcribes or len({(len(each.question.input_ids), each.speech) for each in rows}) == 1)
            and (not self._ends_alike or len(set(new)) == 1)
        )
