"""A model behind a server of OpenAI's interface, to talk to: `mm serve`, vLLM, SGLang and others."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mindspeed_mm.core.errors import MachineError, MMError, UsageError, first_names
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.outbound import OutboundError, Reply, RequestLimits, Server, StreamedReply
from mindspeed_mm.core.outbound_words import is_not_offered
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.spoken import BEGIN_THOUGHT, END_THOUGHT

LIMITS = RequestLimits(total_s=3600.0, silence_s=600.0)
"""Of one answer."""
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
            raise OutboundError("the server lists no model", where=address, way_out="Name one: --name NAME.")
        # SGLang lists models, and is asked for one with adapters as `model:adapters`.
        if listed and name and name not in listed and name.partition(":")[0] not in listed:
            way_out = f"It has: {first_names(listed)}."
            raise UsageError(f"the server has no model '{name}'", where=address, key="--name", way_out=way_out)
        return cls(server.address, name or listed[0], key)

    @property
    def _server(self) -> Server:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        way_out = "Start it with mm serve, correct the address, or see its log."
        return Server(self.address, LIMITS, headers, way_out=way_out)

    def _listed(self) -> list[str]:
        """The models that the server names; none where it has no such list, or one of another form and the name of the
        model is known anyway."""
        reply = self._server.ask("GET", "/models")
        if is_not_offered(reply.status):
            return []
        if not reply.is_ok:
            raise self._refusal(reply)
        try:
            return self._server.read(reply, _names_of)
        except OutboundError as error:
            if self.name:
                return []
            what = error.problems[0].what
            raise OutboundError(what, where=self._server.shown, way_out="Name the model: --name NAME.") from error

    def answer(
        self,
        messages: Sequence[JsonObject],
        media: Sequence[MediaItem],
        sampling: Sampling,
        tell: Callable[[str], None],
    ) -> Answer:
        """As `LoadedModel.answer`; thoughts that the server sends separately are put into `<think>…</think>`."""
        body: JsonObject = {"model": self.name, "messages": _with_media(messages, media), "stream": True}
        if self.says_length:
            body["max_tokens"] = sampling.max_new_tokens
        settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        for name, value in settings.items():
            if value is not None:
                body[name] = value
        said, ending, thinks = "", "", False
        with self._server.stream("POST", "/chat/completions", body) as reply:
            if reply.status != HTTPStatus.OK:
                raise self._refusal(Reply(reply.status, b"".join(reply.blocks)))
            for delta in self._deltas(reply):
                piece = ""
                if delta.thought and not thinks:
                    piece, thinks = BEGIN_THOUGHT, True
                piece += delta.thought
                if delta.words and thinks:
                    piece, thinks = f"{piece}{END_THOUGHT}\n", False
                piece += delta.words
                if piece:
                    tell(piece)
                said += piece
                ending = ending or delta.ending
        if not ending:
            raise self._server.failed("broke off: its answer has no end")
        return Answer((), said, finished=ending != "length")

    def _deltas(self, reply: StreamedReply) -> Iterator[_Delta]:
        """What a stream of events adds to an answer, piece by piece; or the whole answer of a server that streams
        none."""
        others: list[bytes] = []
        has_events = False
        for line in reply.lines():
            name, _, data = line.partition(b":")
            if name != b"data":
                if not has_events:
                    others.append(line)
                continue
            has_events = True
            if data.strip() == b"[DONE]":
                yield _Delta(ending="done")
                return
            if data.strip():
                yield from self._read(Reply(reply.status, data), "delta")
        if not has_events:
            yield from self._read(Reply(reply.status, b"\n".join(others)), "message")

    def _read(self, reply: Reply, part: str) -> list[_Delta]:
        def read(event: object) -> list[_Delta]:
            if not isinstance(event, dict):
                raise TypeError("it is no object")
            if event.get("error"):
                raise self._server.failed(self._server.refusal(reply))
            choices = event.get("choices") or []
            if not isinstance(choices, list):
                raise TypeError("choices are no list")
            return [_Delta.of(choice, part) for choice in choices]

        return self._server.read(reply, read)

    def _refusal(self, reply: Reply) -> MMError:
        """What the server says is wrong, as an error of ours."""
        what = self._server.refusal(reply)
        if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            shown = self._server.failed(what).problems[0]
            way_out = "Give the file with its key."
            return UsageError(shown.what, where=shown.where, key="--key-file", way_out=way_out)
        return self._server.failed(what)


@dataclass(frozen=True)
class _Delta:
    """What one event adds to an answer."""

    thought: str = ""
    words: str = ""
    ending: str = ""
    """Why the answer ends here; empty: it does not."""

    @classmethod
    def of(cls, choice: object, part: str) -> _Delta:
        """Of a choice in an event. What is null or missing adds nothing.

        Raises:
            TypeError: It is of another form.
        """
        if not isinstance(choice, dict):
            raise TypeError("a choice is no object")
        delta = choice.get(part) or {}
        if not isinstance(delta, dict):
            raise TypeError(f"the {part} is no object")
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        found = {"thought": thought, "words": delta.get("content"), "ending": choice.get("finish_reason")}
        for name, text in found.items():
            if not isinstance(text, str | None):
                raise TypeError(f"{name} of type {type(text).__name__} instead of text")
        return cls(**{name: text or "" for name, text in found.items()})


def _names_of(content: Any) -> list[str]:
    """The models of a list, in the form of OpenAI's interface, or the bare list that some servers send."""
    listed = content if isinstance(content, list) else content.get("data") or []
    names = [model["id"] for model in listed]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a model's id is no text")
    return names


def _with_media(messages: Sequence[JsonObject], media: Sequence[MediaItem]) -> list[dict[str, object]]:
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


def _as_part(item: MediaItem) -> JsonObject:
    """Encode a media file in base64, as a content part of OpenAI's interface. Raises `MachineError` where the file
    cannot be read."""
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
