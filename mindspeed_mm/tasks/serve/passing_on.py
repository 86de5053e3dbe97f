"""The routes of a server that has another behind it: requests are checked and rewritten, answers passed on."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.media_parts import read_parts
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, RowLocation, Sample
from mindspeed_mm.tasks.serve.backend import Backend, as_fields
from mindspeed_mm.tasks.serve.fields import Names, read_fields, read_form
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.media_gate import MediaGate
from mindspeed_mm.tasks.serve.text_requests import (
    ChatFields,
    CompletionFields,
    check_fields,
    len_of_text,
    read_completion,
)
from mindspeed_mm.tasks.serve.waiting import within_limit

_BLOCK_BYTES = 2**16
_PLACE = RowLocation("request", 1)
_URL_KINDS = {"image": "image/png", "video": "video/mp4"}


@dataclass(frozen=True)
class PassingRoutes:
    """Checks and rewrites requests, and passes them on to the server behind this one."""

    backend: Backend
    gate: MediaGate
    limits: Limits
    names: Names

    async def complete(self, request: Request) -> Response:
        """Check a request for a chat completion, pass it on, and stream the backend's answer."""
        fields = await to_thread.run_sync(self._checked, await request.body())
        return await self._passed("/v1/chat/completions", json.dumps(fields).encode(), "application/json")

    async def complete_text(self, request: Request) -> Response:
        """Check a request for a completion of text, pass it on, and stream the backend's answer."""
        body = await request.body()
        call, fields = read_completion(body, self.limits), read_fields(body, CompletionFields)
        self.names.check(call.model)
        known = {**as_fields(fields), "model": self.backend.model, "max_tokens": call.sampling.max_new_tokens}
        return await self._passed("/v1/completions", json.dumps(known).encode(), "application/json")

    async def transcribe(self, request: Request) -> Response:
        """The text of a sound."""
        body, kind = await request.body(), request.headers.get("content-type", "")
        form, files = read_form(kind, body)
        check_fields(form, files)
        self.names.check(form.get("model", ""))
        await to_thread.run_sync(self.gate.admit, [MediaItem("audio", files["file"])])
        # the form as it came: the sound in it has passed the gate
        return await self._passed("/v1/audio/transcriptions", body, kind)

    def _checked(self, body: bytes) -> JsonObject:
        """A request with the fields that are known, its media as data."""
        fields = read_fields(body, ChatFields)
        self.names.check(fields.model)
        characters = len_of_text([fields.messages, fields.tools])
        self.limits.check("max_characters", characters, f"the request has {characters:,} characters of text")
        self.limits.check("max_samples", fields.n or 1, f"{fields.n} answers are asked for")
        asked = fields.max_completion_tokens or fields.max_tokens or self.limits.max_new_tokens
        self.limits.check("max_new_tokens", asked, f"an answer of {asked:,} tokens is asked for")
        counted: list[MediaItem] = []
        try:
            messages = [self._message(message, number, counted) for number, message in enumerate(fields.messages)]
        except DataError as error:
            raise RefusedError.of(error) from error
        known = {name: value for name, value in as_fields(fields).items() if name != "max_tokens"}
        return {**known, "messages": messages, "model": self.backend.model, "max_completion_tokens": asked}

    def _message(self, message: Any, number: int, counted: list[MediaItem]) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            return message
        parts = read_parts(content, Sample(_PLACE), f"messages[{number}].content")
        if isinstance(parts, str):
            return {**message, "content": parts}
        media = [MediaItem(part["type"], part.get("source")) for part in parts if part["type"] != "text"]
        counted += media
        self.limits.check("max_media", len(counted), f"the request has {len(counted)} pictures, videos and sounds")
        admitted = iter(self.gate.admit(media))
        # text and media keep their order
        shown = [part if part["type"] == "text" else self._as_data(next(admitted)) for part in parts]
        return {**message, "content": shown}

    def _as_data(self, item: MediaItem) -> JsonObject:
        if isinstance(item.source, list):
            raise RefusedError(400, "a video as a list of pictures is not passed on.", code="unsupported_value")
        text = base64.b64encode(self.gate.loader.read(item.source)[0]).decode()
        if item.kind == "audio":
            return {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
        name = f"{item.kind}_url"
        return {"type": name, name: {"url": f"data:{_URL_KINDS[item.kind]};base64,{text}"}}

    async def _passed(self, path: str, body: bytes, content_type: str) -> Response:
        async with within_limit(self.limits):
            arguments = (path, body, content_type, self.limits.max_seconds)
            try:
                answer = await to_thread.run_sync(self.backend.ask, *arguments, abandon_on_cancel=True)
            except (OSError, http.client.HTTPException) as error:
                raise RefusedError(502, "the engine does not answer.", code="engine_gone") from error
        kind = answer.getheader("Content-Type", "application/json")
        return StreamingResponse(self._blocks(answer), answer.status, {"Cache-Control": "no-cache"}, kind)

    async def _blocks(self, answer: http.client.HTTPResponse) -> AsyncIterator[bytes]:
        """What comes, as it comes; a client that goes away closes the answer, which tells the engine."""
        with closing(answer):
            while block := await to_thread.run_sync(answer.read1, _BLOCK_BYTES, abandon_on_cancel=True):
                yield block
