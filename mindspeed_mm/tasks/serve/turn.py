"""The answers of one request, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request

from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.serve.failing import failure_of
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.metrics import Metrics
from mindspeed_mm.tasks.serve.shapes import Choice, Shape
from mindspeed_mm.tasks.serve.waiting import result_of, within_limit

_HEARTBEAT_S = 15.0
"""A stream says something at least this often, so that nobody in between takes it for dead."""
_HEARTBEAT = (-1, "")
"""Stands among the pieces of answers, which are never empty."""
Told = tuple[int, str | None]
"""Of which answer, and a piece of it; None: it is over."""


@dataclass(frozen=True)
class Desk:
    """What answers, and what counts it."""

    engine: AnswerEngine
    limits: Limits
    metrics: Metrics

    def submit(self, row: LiveAnswer) -> Future[Answer]:
        """The answer to come.

        Raises:
            RefusedError: The server is ending.
        """
        try:
            return self.engine.submit(row)
        except RuntimeError as error:
            raise RefusedError(503, "the server is ending.", code="ending") from error

    def told(self, question: EncodedQuestion, answer: Answer) -> None:
        """Count the tokens of a question and of its answer in the server's metrics."""
        told = "Tokens read and written."
        self.metrics.count("tokens", told, len(question.input_ids), kind="prompt")
        self.metrics.count("tokens", told, len(answer.token_ids), kind="answer")


@dataclass
class Turn:
    """What one request is answered."""

    desk: Desk
    shape: Shape
    model: str
    questions: Sequence[EncodedQuestion]
    """That are counted as read, once each."""
    rows: Callable[[Callable[[int, str], None] | None], Sequence[LiveAnswer]]
    """The answers to come, each of which tells its pieces with its number; None: nobody listens."""
    tells_usage: bool
    begun_s: float = field(default_factory=time.monotonic)
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _has_told: bool = False

    async def whole(self, request: Request) -> dict[str, Any]:
        """All answers as one object."""
        rows = self.rows(None)
        futures: list[Future[Answer]] = []
        try:
            for row in rows:
                futures.append(self.desk.submit(row))
            answers = []
            for row, future in zip(rows, futures, strict=True):
                answers.append(await result_of(future, request, row.give_up))
                self.desk.told(row.question, answers[-1])
        finally:
            for row, future in zip(rows, futures, strict=False):
                row.give_up()
                future.cancel()
        choices = []
        for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            choices.append(self.shape.whole(index, row, answer))
        return {**self._head(self.shape.whole_kind), "choices": choices, "usage": self._usage(answers)}

    async def pieces(self) -> AsyncIterator[str]:
        """The answers as server-sent events. They are taken out of the queue, or ended, when nobody reads on."""
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Told]()

        def tell(index: int, piece: str | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told.put_nowait, (index, piece))

        rows = self.rows(tell)
        futures: list[Future[Answer]] = []
        heart = asyncio.create_task(_beat(told))
        try:
            for index, row in enumerate(rows):
                futures.append(self.desk.submit(row))
                futures[-1].add_done_callback(lambda _, index=index: tell(index, None))  # type: ignore[misc]
            async with within_limit(self.desk.limits):
                async for event in self._events(rows, futures, told):
                    yield event
            last = [] if not self.tells_usage else [self._event([], self._usage([each.result() for each in futures]))]
            yield "".join([*last, "data: [DONE]\n\n"])
        except RefusedError as error:
            yield _data(error.body())
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001 - the head of the answer is sent: an event says what went wrong
            yield _data(failure_of(error).body())
        finally:
            heart.cancel()
            for row, future in zip(rows, futures, strict=False):
                row.give_up()
                future.cancel()

    async def _events(
        self, rows: Sequence[LiveAnswer], futures: Sequence[Future[Answer]], told: asyncio.Queue[Told]
    ) -> AsyncIterator[str]:
        # Each send costs as much as a token of a small model: what is told together is sent together.
        begin = {index: "".join(self._event([each]) for each in self.shape.begin(index)) for index in range(len(rows))}
        left = set(begin)
        while left:
            index, piece = await told.get()
            if index < 0:
                yield ": waiting\n\n"
                continue
            if piece is not None:
                said = self.shape.pieces(index, piece)
            else:
                answer = futures[index].result()
                self.desk.told(rows[index].question, answer)
                said = self.shape.end(index, rows[index])
                left.discard(index)
            if said:
                if piece is not None:
                    self._note_first()
                yield begin.pop(index, "") + "".join(self._event([each]) for each in said)

    def _note_first(self) -> None:
        if not self._has_told:
            self._has_told = True
            seconds = time.monotonic() - self.begun_s
            self.desk.metrics.observe("first_token_seconds", "Time to the first piece of a stream.", seconds)

    def _event(self, choices: list[Choice], usage: dict[str, int] | None = None) -> str:
        value = {**self._head(self.shape.piece_kind), "choices": choices}
        return _data(value if usage is None else {**value, "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        head_id = f"{self.shape.id_prefix}-{self._id}"
        return {"id": head_id, "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        read = sum(len(question.input_ids) for question in self.questions)
        written = sum(len(answer.token_ids) for answer in answers)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


async def _beat(told: asyncio.Queue[Told]) -> None:
    """Heartbeats. A timer for a stream is free; a limit on the wait for each piece costs as much as sending."""
    while True:
        await asyncio.sleep(_HEARTBEAT_S)
        told.put_nowait(_HEARTBEAT)


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
