"""How answers look to clients: as OpenAI's chat completions, or as its completions of text; whole and in pieces."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.spoken import SpokenPieces, take_apart
from mindspeed_mm.fsdp.sampling.answers.steering import TokenLogProb

Choice = dict[str, Any]


class TokenTexts(Protocol):
    """What knows the tokens of a model."""

    end_ids: list[int]
    """They end answers, and are no part of what is said."""

    def text_of(self, token: int) -> str:
        """The text of one token."""


class Shape(Protocol):
    """Makes the choices of an answer of one kind."""

    whole_kind: str
    piece_kind: str
    id_prefix: str

    def whole(self, index: int, row: LiveAnswer, answer: Answer) -> Choice:
        """Return the choice of a complete answer, with the reason for its end and its log-probabilities."""

    def begin(self, index: int) -> list[Choice]:
        """What is sent before the first piece."""

    def pieces(self, index: int, piece: str) -> list[Choice]:
        """A piece of text, which may be held back."""

    def end(self, index: int, row: LiveAnswer) -> list[Choice]:
        """What is sent once an answer is over."""


class ChatShape:
    """Chat completions: thoughts and calls of tools have fields of their own.

    Args:
        thinks: Whether the prompt ends within a thought.
        calls: Whether the model was offered tools.
        tokens: Of the model.
    """

    whole_kind, piece_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *, thinks: bool, calls: bool, tokens: TokenTexts) -> None:
        self._thinks, self._calls, self._tokens = thinks, calls, tokens
        self._parts: dict[int, SpokenPieces] = {}

    def whole(self, index: int, row: LiveAnswer, answer: Answer) -> Choice:
        """Return the choice of a complete answer, with thoughts and tool calls in fields of their own."""
        spoken = take_apart(answer.text, thinks=self._thinks, calls=self._calls)
        message: JsonObject = {"role": "assistant", "content": spoken.words}
        if spoken.thoughts:
            message["reasoning_content"] = spoken.thoughts
        if spoken.calls:
            message |= {"tool_calls": _calls(spoken.calls), "content": spoken.words or None}
        reason = "tool_calls" if spoken.calls else _reason(row)
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": self._log_probs(row.log_probs)}

    def begin(self, index: int) -> list[Choice]:
        """Prepare to read the answer's pieces, and return a delta that names the assistant's role."""
        self._parts[index] = SpokenPieces(thinks=self._thinks, calls=self._calls)
        return [_delta(index, role="assistant", content="")]

    def pieces(self, index: int, piece: str) -> list[Choice]:
        """Return deltas of the thoughts and words that a piece makes certain; the rest is held back."""
        return _deltas(index, self._parts[index].take(piece))

    def end(self, index: int, row: LiveAnswer) -> list[Choice]:
        """Return deltas of the text held back and of tool calls, and the reason for the end."""
        parts = self._parts[index]
        last = _deltas(index, parts.close())
        if parts.calls:
            calls = [{"index": number, **call} for number, call in enumerate(_calls(parts.calls))]
            last.append(_delta(index, tool_calls=calls))
        reason = "tool_calls" if parts.calls else _reason(row)
        return [*last, _delta(index) | {"finish_reason": reason}]

    def _log_probs(self, said: Sequence[TokenLogProb]) -> JsonObject | None:
        if not said:
            return None
        content = []
        for each in said:
            if each.token not in self._tokens.end_ids:
                others = [self._token(token, log_prob) for token, log_prob in each.likeliest]
                content.append({**self._token(each.token, each.log_prob), "top_logprobs": others})
        return {"content": content, "refusal": None}

    def _token(self, token: int, log_prob: float) -> JsonObject:
        text = self._tokens.text_of(token)
        return {"token": text, "logprob": max(log_prob, LEAST_LOG_PROB), "bytes": list(text.encode("utf-8", "replace"))}


LEAST_LOG_PROB = -9999.0
"""JSON has no infinity; OpenAI's interface has this in its place."""


class TextShape:
    """Completions of text, which are told as the model writes them.

    Args:
        tokens: Of the model.
    """

    whole_kind, piece_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, tokens: TokenTexts) -> None:
        self._tokens = tokens

    def whole(self, index: int, row: LiveAnswer, answer: Answer) -> Choice:
        """Return the choice of a complete answer, with log-probabilities where the row has them."""
        choice = _text(index, answer.text) | {"finish_reason": _reason(row)}
        said = [each for each in row.log_probs if each.token not in self._tokens.end_ids]
        return choice | {"logprobs": self._log_probs(said) if row.log_probs else None}

    def begin(self, index: int) -> list[Choice]:
        """Return no choice, because a stream of text begins with its first piece."""
        return []

    def pieces(self, index: int, piece: str) -> list[Choice]:
        """Return the piece as one choice; nothing is held back."""
        return [_text(index, piece)]

    def end(self, index: int, row: LiveAnswer) -> list[Choice]:
        """Return one choice with empty text and the reason for the end."""
        return [_text(index, "") | {"finish_reason": _reason(row)}]

    def _log_probs(self, said: Sequence[TokenLogProb]) -> JsonObject:
        tokens = [self._tokens.text_of(each.token) for each in said]
        offsets, place = [], 0
        for token in tokens:
            offsets.append(place)
            place += len(token)
        top = [
            {self._tokens.text_of(token): max(log_prob, LEAST_LOG_PROB) for token, log_prob in reversed(each.likeliest)}
            for each in said
        ]
        log_probs = [max(each.log_prob, LEAST_LOG_PROB) for each in said]
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": top, "text_offset": offsets}


def _text(index: int, text: str) -> Choice:
    return {"index": index, "text": text, "finish_reason": None, "logprobs": None}


def _deltas(index: int, said: list[tuple[Any, str]]) -> list[Choice]:
    fields = {"thoughts": "reasoning_content", "words": "content"}
    return [_delta(index, **{fields[kind]: text}) for kind, text in said]


def _delta(index: int, **delta: object) -> Choice:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _calls(calls: list[JsonObject]) -> list[JsonObject]:
    """As OpenAI has them: with an id, arguments as JSON text."""
    found = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        found.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return found


def _reason(row: LiveAnswer) -> str:
    if row.ending == "stop":
        return "stop"
    return "length"
