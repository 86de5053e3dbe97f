"""A model behind a server of OpenAI's interface, to talk to: `mm serve`, vLLM, SGLang and others."""

from __future__ import annotations

import base64
import http.client
import json
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mindspeed_mm.core.errors import MachineError, MMError, UsageError, first_names
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.spoken import BEGIN_THOUGHT, END_THOUGHT

TIMEOUT_S = 600.0
"""Of silence."""
_LONGEST_MESSAGE = 300
_NOT_OFFERED = (http.client.NOT_FOUND, http.client.METHOD_NOT_ALLOWED, http.client.NOT_IMPLEMENTED)
_KINDS = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
"""What a file is where its name does not say."""


@dataclass(frozen=True)
class RemoteModel:
    """A model that a server answers for."""

    address: str
    """With `/v1`."""
    name: str
    key: str | None = None
    says_length: bool = True
    """Whether it is told how long an answer may be; else that is its own choice."""

    @classmethod
    def at(cls, address: str, name: str = "", key: str | None = None) -> RemoteModel:
        """The model of a server: the one of this name, or the first that it lists.

        Args:
            address: Its base address; without a path, `/v1` is meant.
            name: What it calls the model; empty: that of its list.
            key: What it asks for, if anything.

        Raises:
            MMError: There is no such server, it does not answer, or lists no model, or none of this name.
        """
        base = address.rstrip("/")
        try:
            has_path = bool(urlsplit(base).path)
        except ValueError as error:
            way_out = "Give it as http://127.0.0.1:8000/v1."
            raise UsageError(f"is no address: {error}", where=address, way_out=way_out) from error
        server = cls(base if has_path else f"{base}/v1", name, key)
        listed = server._listed()
        if not listed and not name:
            raise MachineError("the server lists no model", where=address, way_out="Name one: --name NAME.")
        # SGLang lists models, and is asked for one with adapters as `model:adapters`.
        if listed and name and name not in listed and name.partition(":")[0] not in listed:
            way_out = f"It has: {first_names(listed)}."
            raise UsageError(f"the server has no model '{name}'", where=address, key="--name", way_out=way_out)
        return cls(server.address, name or listed[0], key)

    def _listed(self) -> list[str]:
        """The models that the server names; none where it has no such list."""
        with closing(self._sent("GET", "/models")) as answer:
            content = _json(answer.read())
            if answer.status in _NOT_OFFERED:
                return []
            if answer.status != http.client.OK:
                raise self._error(answer.status, content)
        return [str(model["id"]) for model in content.get("data") or []]

    def answer(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[MediaItem],
        sampling: Sampling,
        tell: Callable[[str], None],
    ) -> Answer:
        """As `LoadedModel.answer`; thoughts that the server tells apart stand in `<think>…</think>`."""
        body: dict[str, Any] = {"model": self.name, "messages": _with_media(messages, media), "stream": True}
        if self.says_length:
            body["max_tokens"] = sampling.max_new_tokens
        settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        for name, value in settings.items():
            if value is not None:
                body[name] = value
        said, ending, thinks = "", "", False
        with closing(self._asked("POST", "/chat/completions", json.dumps(body).encode())) as answer:
            for choice in self._choices(answer):
                delta = choice["delta"]
                thought, words = delta.get("reasoning_content") or "", delta.get("content") or ""
                piece = ""
                if thought and not thinks:
                    piece, thinks = BEGIN_THOUGHT, True
                piece += thought
                if words and thinks:
                    piece, thinks = f"{piece}{END_THOUGHT}\n", False
                piece += words
                if piece:
                    tell(piece)
                said += piece
                ending = choice.get("finish_reason") or ending
        return Answer((), said, finished=ending not in ("", "length"))

    def _choices(self, answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The choices of a stream of events."""
        try:
            for line in answer:
                if not line.startswith(b"data:") or line[5:].strip() in (b"", b"[DONE]"):
                    continue
                event = _json(line[5:])
                if "error" in event:
                    raise self._error(answer.status, event)
                yield from event.get("choices") or ()
        except (OSError, http.client.HTTPException) as error:
            way_out = "Ask again, or see the server's log."
            raise MachineError(f"the answer broke off: {error}", where=self.address, way_out=way_out) from error

    def _asked(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        """The server's answer, whose head has arrived.

        Raises:
            MMError: It does not answer, or refuses.
        """
        answer = self._sent(method, path, body)
        if answer.status != http.client.OK:
            with closing(answer):
                raise self._error(answer.status, _json(answer.read()))
        return answer

    def _sent(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        """The same, whatever its status.

        Raises:
            MMError: It does not answer.
        """
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
            connection.request(method, parts.path + path, body, headers)
            answer = connection.getresponse()
        except (OSError, ValueError, http.client.HTTPException) as error:
            way_out = "Start it with mm serve, or correct the address."
            raise MachineError(f"the server does not answer: {error}", where=self.address, way_out=way_out) from error
        return answer

    def _error(self, status: int, body: dict[str, Any]) -> MMError:
        """What the server says is wrong, as an error of ours."""
        told = body.get("error", body.get("detail", ""))
        message = str(told.get("message", "") if isinstance(told, dict) else told)
        line = " ".join(message.split())[:_LONGEST_MESSAGE] or "it does not say why"
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            way_out = "Give the file with its key."
            return UsageError(f"the server refuses: {line}", where=self.address, key="--key-file", way_out=way_out)
        way_out = "Change what it names, or see the server's log."
        return MachineError(f"the server refuses ({status}): {line}", where=self.address, way_out=way_out)


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _with_media(messages: Sequence[dict[str, Any]], media: Sequence[MediaItem]) -> list[dict[str, Any]]:
    """Messages as servers take them: files in place of the marks that stand for them, in order."""
    sources = iter(media)
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            found.append(message)
            continue
        parts = []
        for part in content:
            parts.append(part if part["type"] == "text" else _as_part(next(sources)))
        found.append({**message, "content": parts})
    return found


def _as_part(item: MediaItem) -> dict[str, Any]:
    """A file as data."""
    path = Path(str(item.source))
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        way_out = "Show another file, or begin anew: /reset."
        raise MachineError(f"cannot be read: {error.strerror}", where=str(path), way_out=way_out) from error
    if item.kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix[1:].lower() or "wav"}}
    kind = mimetypes.guess_type(path.name)[0] or _KINDS[item.kind]
    return {"type": f"{item.kind}_url", f"{item.kind}_url": {"url": f"data:{kind};base64,{data}"}}
