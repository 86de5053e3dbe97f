"""`/v1/chat/completions` and `/v1/audio/transcriptions`, answered by the engine of a model that understands."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, Sample
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import QuestionTooLongError
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.sampling.answers.spoken import SpokenPieces, take_apart
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.serve.chat_request import ChatCall, read_chat
from mindspeed_mm.tasks.serve.failing import failure_of
from mindspeed_mm.tasks.serve.form import read_form
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.media_gate import MediaGate
from mindspeed_mm.tasks.serve.metrics import Metrics
from mindspeed_mm.tasks.serve.names import Names
from mindspeed_mm.tasks.serve.waiting import result_of, within_limit

PIECES_EVERY_S = 0.05
"""The first piece of a stream is sent at once, the next ones as people can read them."""
_SMALL_BYTES = 2**14
"""Smaller requests are read in less time than another thread needs to begin."""
_HEARTBEAT_S = 15.0
"""A stream says something at least this often, so that nobody in between takes it for dead."""
_HEARTBEAT = ""
"""Stands among the pieces of an answer, which are never empty."""
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class ChatRoutes:
    """What answers conversations."""

    engine: AnswerEngine
    gate: MediaGate
    limits: Limits
    names: Names
    metrics: Metrics

    async def complete(self, request: Request) -> Response:
        """A chat completion, whole or in pieces."""
        async with within_limit(self.limits):
            body = await request.body()
            if len(body) <= _SMALL_BYTES:
                call = read_chat(body, self.limits)
            else:
                call = await to_thread.run_sync(read_chat, body, self.limits)
            adapter = self.names.chosen(call.model)
            begun_s = time.monotonic()
            question = await self._encoded(call.sample)
            turn = _Turn(self, call, question, begun_s, adapter)
            if not call.is_streamed:
                return JSONResponse(await turn.whole(request))
            return StreamingResponse(turn.pieces(request), 200, _STREAM_HEADERS, "text/event-stream")

    async def transcribe(self, request: Request) -> Response:
        """The text of a sound."""
        async with within_limit(self.limits):
            form, files = read_form(request.headers.get("content-type", ""), await request.body())
            self.names.check(form.get("model", ""))
            if "file" not in files:
                raise RefusedError(400, "there is no 'file'.", param="file", code="invalid_value")
            kind = form.get("response_format", "json")
            if kind not in ("json", "text"):
                message = f"'{kind[:40]}' is not a format of this server: json or text."
                raise RefusedError(400, message, param="response_format", code="unsupported_value")
            question = await self._encoded(ask(form.get("prompt", ""), [MediaItem("audio", files["file"])]).sample)
            row = LiveAnswer(question, Sampling(self.limits.max_new_tokens, temperature=0))
            answer = await result_of(self.submitted(row), request, row.give_up)
        self.told(question, answer)
        return PlainTextResponse(answer.text) if kind == "text" else JSONResponse({"text": answer.text})

    async def _encoded(self, sample: Sample) -> EncodedQuestion:
        try:
            checked = sample
            if sample.media:
                checked = replace(sample, media=await to_thread.run_sync(self.gate.admit, sample.media))
            question = await asyncio.wrap_future(self.engine.encode(checked, self.gate.loader))
        except QuestionTooLongError as error:
            message = error.problems[0].what.rstrip(".") + "."
            raise RefusedError(413, message, param="messages", code="context_length_exceeded") from error
        except MMError as error:
            raise RefusedError.of(error) from error
        except RecursionError as error:
            raise RefusedError(400, "the request is nested too deeply.", code="invalid_json") from error
        tokens = len(question.input_ids)
        self.limits.check("max_prompt_tokens", tokens, f"the question has {tokens:,} tokens")
        return question

    def submitted(self, row: LiveAnswer) -> Future[Answer]:
        """The answer to come."""
        try:
            return self.engine.submit(row)
        except RuntimeError as error:
            raise RefusedError(503, "the server is ending.", code="ending") from error

    def told(self, question: EncodedQuestion, answer: Answer) -> None:
        """Count an answer."""
        told = "Tokens read and written."
        self.metrics.count("tokens", told, len(question.input_ids), kind="prompt")
        self.metrics.count("tokens", told, len(answer.token_ids), kind="answer")


@dataclass
class _Turn:
    """One completion."""

    routes: ChatRoutes
    call: ChatCall
    question: EncodedQuestion
    begun_s: float
    adapter: str | None
    has_told: bool = False

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer as one object."""
        row = LiveAnswer(self.question, self.call.sampling, stop=self.call.stop, adapter=self.adapter)
        answer = await result_of(self.routes.submitted(row), request, row.give_up)
        self.routes.told(self.question, answer)
        spoken = take_apart(answer.text, thinks=self._thinks(), calls=bool(self.call.sample.tools))
        message: dict[str, Any] = {"role": "assistant", "content": spoken.words}
        if spoken.thoughts:
            message["reasoning_content"] = spoken.thoughts
        if spoken.calls:
            message |= {"tool_calls": _calls(spoken.calls), "content": spoken.words or None}
        choice = {"index": 0, "message": message, "finish_reason": _reason(row, spoken.calls), "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage(answer)}

    async def pieces(self, request: Request) -> AsyncIterator[str]:
        """The answer as server-sent events. It is taken out of the queue, or ended, when nobody reads on."""
        loop, told = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def tell(piece: str | None) -> None:
            loop.call_soon_threadsafe(told.put_nowait, piece)

        row = LiveAnswer(self.question, self.call.sampling, tell, self.call.stop, PIECES_EVERY_S, self.adapter)
        parts = SpokenPieces(thinks=self._thinks(), calls=bool(self.call.sample.tools))
        head = self._head("chat.completion.chunk")
        try:
            future = self.routes.submitted(row)
        except RefusedError as error:
            yield _event(error.body())
            return
        future.add_done_callback(lambda _: None if loop.is_closed() else tell(None))
        # Each send costs as much as a token of a small model: what is told together is sent together.
        begin = _event({**head, "choices": [_delta(role="assistant", content="")]})
        heart = asyncio.create_task(_beat(told))
        try:
            async with within_limit(self.routes.limits):
                while (piece := await told.get()) is not None:
                    if piece == _HEARTBEAT:
                        yield ": waiting\n\n"
                    elif said := _deltas(parts.take(piece)):
                        self._note_first()
                        yield begin + "".join(_event({**head, "choices": [delta]}) for delta in said)
                        begin = ""
            answer = future.result()
            self.routes.told(self.question, answer)
            yield begin + "".join(self._end(head, row, parts, answer))
        except RefusedError as error:
            yield _event(error.body())
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001 - the head of the answer is sent: an event says what went wrong
            yield _event(failure_of(error).body())
        finally:
            heart.cancel()
            row.give_up()
            future.cancel()

    def _end(self, head: dict[str, Any], row: LiveAnswer, parts: SpokenPieces, answer: Answer) -> list[str]:
        last = _deltas(parts.close())
        if parts.calls:
            last.append(_delta(tool_calls=[{"index": i, **call} for i, call in enumerate(_calls(parts.calls))]))
        last.append(_delta() | {"finish_reason": _reason(row, parts.calls)})
        events = [_event({**head, "choices": [delta]}) for delta in last]
        if self.call.tells_usage:
            events.append(_event({**head, "choices": [], "usage": self._usage(answer)}))
        return [*events, "data: [DONE]\n\n"]

    def _note_first(self) -> None:
        if not self.has_told:
            self.has_told = True
            seconds = time.monotonic() - self.begun_s
            self.routes.metrics.observe("first_token_seconds", "Time to the first piece of a stream.", seconds)

    def _thinks(self) -> bool:
        """Whether the prompt ends within a thought."""
        return self.routes.engine.generator.thinks(self.question)

    def _head(self, kind: str) -> dict[str, Any]:
        head_id = f"chatcmpl-{uuid.uuid4().hex}"
        return {
            "id": head_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.adapter or self.routes.names.shown,
        }

    def _usage(self, answer: Answer) -> dict[str, int]:
        read, written = len(self.question.input_ids), len(answer.token_ids)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


async def _beat(told: asyncio.Queue[str | None]) -> None:
    """Heartbeats. A timer for a stream is free; a limit on the wait for each piece costs as much as sending."""
    while True:
        await asyncio.sleep(_HEARTBEAT_S)
        told.put_nowait(_HEARTBEAT)


def _deltas(said: list[tuple[Any, str]]) -> list[dict[str, Any]]:
    fields = {"thoughts": "reasoning_content", "words": "content"}
    return [_delta(**{fields[kind]: text}) for kind, text in said]


def _delta(**delta: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}


def _calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As OpenAI has them: with an id, arguments as JSON text."""
    found = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        found.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return found


def _reason(row: LiveAnswer, calls: list[dict[str, Any]]) -> str:
    if calls:
        return "tool_calls"
    return "stop" if row.ending == "stop" else "length"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
