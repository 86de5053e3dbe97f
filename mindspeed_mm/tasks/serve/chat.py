"""`/v1/chat/completions`, `/v1/completions` and `/v1/audio/transcriptions`, answered by a model that understands."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, Sample
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import QuestionTooLongError
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer, Speech
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.serve.answer_fields import AnswerCall
from mindspeed_mm.tasks.serve.fields import Names, read_form
from mindspeed_mm.tasks.serve.guard import failure_of
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.media_gate import MediaGate
from mindspeed_mm.tasks.serve.metrics import Metrics
from mindspeed_mm.tasks.serve.shapes import ChatShape, Choice, Shape, TextShape
from mindspeed_mm.tasks.serve.text_requests import TranscriptionCall, read_chat, read_completion, read_transcription
from mindspeed_mm.tasks.serve.waiting import result_of, within_limit

PIECES_EVERY_S = 0.05
"""The first piece of a stream is sent at once, the next ones as people can read them."""
_SMALL_BYTES = 2**14
"""Smaller requests are read in less time than another thread needs to begin."""
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Call = TypeVar("Call")


@dataclass(frozen=True)
class ChatRoutes:
    """Answers requests for chat completions, text completions and transcripts with the model of an engine."""

    engine: AnswerEngine
    gate: MediaGate
    limits: Limits
    names: Names
    metrics: Metrics

    async def complete(self, request: Request) -> Response:
        """A chat completion, whole or in pieces."""
        async with within_limit(self.limits):
            call = await self._read(read_chat, request)
            await self._check(call)
            question = await self._encoded(call.sample, call.template)
            generator = self.engine.generator
            shape = ChatShape(
                thinks=generator.thinks(question),
                calls=bool(call.sample.tools),
                tokens=generator,
            )
            return await self._answered(request, call, shape, [question])

    async def complete_text(self, request: Request) -> Response:
        """What a text goes on with, whole or in pieces."""
        if self.engine.transcribes:
            raise RefusedError(400, "this model answers /v1/audio/transcriptions.", code="unsupported_route")
        async with within_limit(self.limits):
            call = await self._read(read_completion, request)
            await self._check(call)
            questions = []
            for prompt in call.prompts:
                encode = self.engine.encode_text(prompt)
                questions.append(await self._question(lambda encode=encode: asyncio.wrap_future(encode), "prompt"))  # type: ignore[misc]
            shape = TextShape(self.engine.generator)
            return await self._answered(request, call, shape, questions)

    async def transcribe(self, request: Request) -> Response:
        """The text of a sound."""
        async with within_limit(self.limits):
            call = read_transcription(*read_form(request.headers.get("content-type", ""), await request.body()))
            self.names.check(call.model)
            row = await self._heard(call)
            desk = self._desk()
            answer = await result_of(desk.submit(row), request, row.give_up)
        desk.told(row.question, answer)
        if call.is_plain:
            return PlainTextResponse(answer.text)
        return JSONResponse({"text": answer.text})

    async def _heard(self, call: TranscriptionCall) -> LiveAnswer:
        """The answer to a sound, that is to come."""
        speech, words, temperature = None, call.prompt, call.temperature or 0.0
        try:
            sampling = Sampling(self.limits.max_new_tokens, temperature=temperature)
            if self.engine.transcribes:
                speech, words = Speech(call.language, call.prompt, temperature), ""
                self.engine.generator.check_speech(speech)
        except MMError as error:
            raise RefusedError.of(error, param=error.problems[0].key.removeprefix("--")) from error
        if speech is None and call.language is not None:
            message = "this model finds out the language by itself; leave 'language' out, or name it in 'prompt'."
            raise RefusedError(400, message, param="language", code="unsupported_value")
        question = await self._encoded(ask(words, [MediaItem("audio", call.file)]).sample, {})
        return LiveAnswer(question, sampling, speech=speech)

    async def _read(self, read: Callable[[bytes, Limits], Call], request: Request) -> Call:
        body = await request.body()
        if len(body) <= _SMALL_BYTES:
            return read(body, self.limits)
        return await to_thread.run_sync(read, body, self.limits)

    async def _check(self, call: AnswerCall) -> None:
        """Refuse what the model cannot do."""
        self.names.chosen(call.model)
        if call.is_streamed and call.sampling.steering.log_probs is not None:
            message = "'logprobs' come with whole answers alone: leave 'stream' out."
            raise RefusedError(400, message, param="logprobs", code="unsupported_value")
        if call.steered_by and (why := self.engine.takes_the_likeliest_because) is not None:
            message = f"'{call.steered_by[0]}' has no effect on this model, which {why}; leave it out."
            raise RefusedError(400, message, param=call.steered_by[0], code="unsupported_value")
        if call.sampling.steering.logit_bias or call.sampling.steering.grammar:
            param = "logit_bias" if call.sampling.steering.logit_bias else "response_format"
            try:
                await asyncio.wrap_future(self.engine.check(call.sampling.steering))
            except MMError as error:
                raise RefusedError.of(error, param=error.problems[0].key or param) from error

    async def _answered(
        self, request: Request, call: AnswerCall, shape: Shape, questions: Sequence[EncodedQuestion]
    ) -> Response:
        adapter = self.names.chosen(call.model)

        def rows(tell: Callable[[int, str], None] | None) -> list[LiveAnswer]:
            found = []
            for index in range(len(questions) * call.count):
                question, own = questions[index // call.count], index % call.count
                found.append(
                    LiveAnswer(
                        question,
                        call.sampling_of(own),
                        None if tell is None else (lambda piece, index=index: tell(index, piece)),  # type: ignore[misc]
                        call.stop,
                        PIECES_EVERY_S if tell is not None else 0.0,
                        adapter,
                        keeps_blanks=isinstance(shape, TextShape),
                    )
                )
            return found

        turn = Turn(self._desk(), shape, adapter or self.names.shown, questions, rows, call.tells_usage)
        if call.is_streamed:
            return StreamingResponse(turn.pieces(), 200, _STREAM_HEADERS, "text/event-stream")
        return JSONResponse(await turn.whole(request))

    async def _encoded(self, sample: Sample, variables: Mapping[str, object]) -> EncodedQuestion:
        async def encode() -> EncodedQuestion:
            checked = sample
            if sample.media:
                checked = replace(sample, media=await to_thread.run_sync(self.gate.admit, sample.media))
            return await asyncio.wrap_future(self.engine.encode(checked, self.gate.loader, variables))

        return await self._question(encode, "messages")

    async def _question(self, encode: Callable[[], Any], field: str) -> EncodedQuestion:
        """What a field of the request is encoded to, within limits."""
        try:
            question: EncodedQuestion = await encode()
        except QuestionTooLongError as error:
            message = error.problems[0].what.rstrip(".") + "."
            raise RefusedError(413, message, param=field, code="context_length_exceeded") from error
        except MMError as error:
            raise RefusedError.of(error) from error
        except RecursionError as error:
            raise RefusedError(400, "the request is nested too deeply.", code="invalid_json") from error
        tokens = len(question.input_ids)
        self.limits.check("max_prompt_tokens", tokens, f"the question has {tokens:,} tokens")
        return question

    def _desk(self) -> Desk:
        return Desk(self.engine, self.limits, self.metrics)


# --- a turn -----------------------------------------------------------------------------------------------------------

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

    async def whole(self, request: Request) -> JsonObject:
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
                if piece is not None and not self._has_told:
                    self._has_told = True
                    seconds = time.monotonic() - self.begun_s
                    self.desk.metrics.observe("first_token_seconds", "Time to the first piece of a stream.", seconds)
                yield begin.pop(index, "") + "".join(self._event([each]) for each in said)

    def _event(self, choices: list[Choice], usage: dict[str, int] | None = None) -> str:
        value = {**self._head(self.shape.piece_kind), "choices": choices}
        return _data(value if usage is None else {**value, "usage": usage})

    def _head(self, kind: str) -> JsonObject:
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


def _data(value: Mapping[str, object]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
